"""Reports 8, 10, 14 and 24: what is sent, and in which order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from cases import LAYOUTS, MASKS, STRIDES, Call, Case, assemble, by_group, leaves, run_on_rank
from ranks import run_ranks
from reference import Result, assert_exact, same_bits
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import ringattn_ext as ra

from .common import RANKS_TIMEOUT, SIZES, small_case
from .message_log import Note, check_hops, check_pairs, noted

pytestmark = pytest.mark.timeout(120)

# --- 8 and 10: how messages are posted ---


def over_noted_group(case: Case, seed: int, layout: str) -> tuple[Result, list[Note]]:
    """The case's results over a group that notes its messages, and the notes."""
    own, own_keys = (ra.positions(n, layout=layout) for n in (case.S, case.key_len))
    q, k, v, do, dlse = case.tensors(seed)
    inputs = leaves((q[:, :, own], k[:, :, own_keys], v[:, :, own_keys]))
    with noted() as (name, log):
        results = ra.ring_attention(
            *inputs, group=name, layout=layout, seq_len=case.S, key_seq_len=case.key_len, return_lse=True,
            **case.options(),
        )  # fmt: skip
        gradients = torch.autograd.grad(results, inputs, (do[:, :, own], dlse[:, :, own]))
        whole = ra.unshard(inputs[1], 2, group=name, layout=layout, seq_len=case.key_len)
        ra.init(name)
    assert same_bits(whole, k)
    return Result(results[0].detach(), results[1].detach(), *gradients), list(log)


def check_noted(P: int, case: Case, layout: str, whole_hops: bool = True) -> list[list[Note]]:
    seed = random.randrange(2**30)
    answers = run_ranks(P, over_noted_group, case, seed, layout, timeout=RANKS_TIMEOUT)
    result = assemble(case, layout, [part for part, _ in answers])
    assert_exact(result, case.tensors(seed), case.mask, case.scale, (case, P, layout))
    logs = [log for _, log in answers]
    assert all(logs) and all(sum(note.what == "wait" for note in log) * 2 == len(log) for log in logs)
    check_pairs(logs)
    for log in logs if whole_hops else ():
        check_hops(log)
    return logs


@pytest.mark.parametrize("P", [2, 3])
def test_08_messages_that_no_buffer_holds(P: int) -> None:
    """Few queries and many keys: messages of 8 MiB, for which every send waits until its receive is posted."""
    case = Case(B=1, Hq=4, Hkv=4, S=2 * P, Skv=1024 * P, D=256, dtype=torch.float32)
    for log in check_noted(P, case, random.choice(LAYOUTS)):
        sizes = [note.bytes for note in log if note.what == "send"]
        # Forward and backward pass on a block in P-1 hops each, of which backward's first needs no block; P-1 hops
        # bring the gradients home. unshard: half a block, since keys alone.
        assert sizes.count(8 * 2**20) == (P - 1) + (P - 2) + (P - 1), sizes
        assert sizes.count(4 * 2**20) == P - 1, sizes


@pytest.mark.parametrize("P", [2, 3, 4])
def test_10_sends_and_receives_pair_up(P: int) -> None:
    """Also between two ranks, where both directions of a hop have the same two ends, and with parts without tokens."""
    for layout in LAYOUTS:
        check_noted(P, small_case(random.choice(MASKS), S=2 * P * random.randint(1, 9)), layout)
        check_noted(P, small_case(random.choice(MASKS), S=random.choice((1, P - 1, 2 * P + 1))), layout, False)


def test_10_the_check_finds_hops_that_are_not_whole() -> None:
    send, receive, wait = (Note(what, 1, 0, 4) for what in ("send", "receive", "wait"))
    check_hops([send, receive, wait, wait] * 3)
    check_hops([receive, send, send, receive, *[wait] * 4])
    for log in (
        [send, wait, receive, wait],
        [receive, wait, send, wait],
        [send, send, receive, *[wait] * 3],
        [send, receive, wait],
        [wait],
    ):
        with pytest.raises(AssertionError):
            check_hops(log)
    other = [note._replace(peer=0) for note in (receive, send)]
    check_pairs([[send, receive], other])
    for wrong in ([other[0]], [other[0]._replace(bytes=8), other[1]], [other[0]._replace(tag=1), other[1]]):
        with pytest.raises(AssertionError):
            check_pairs([[send, receive], wrong])


# --- 14: views ---


def sent_views(S: int, layout: str, seed: int) -> None:
    """unshard, shard and the parts of one projection: the bits of copies."""
    own = ra.positions(S, layout=layout)
    whole = torch.randn(2, S, 4, 12, generator=torch.Generator().manual_seed(seed))
    part = whole[:, own]
    for view, dim in ((part.transpose(1, 2), 2), (part.permute(3, 1, 0, 2), 1), (part.chunk(3, -1)[2], 1)):
        got = ra.unshard(view, dim, layout=layout, seq_len=S)
        assert same_bits(got, ra.unshard(view.contiguous(), dim, layout=layout, seq_len=S))
        assert same_bits(ra.shard(got.transpose(0, 3), dim if dim else 3, layout=layout).transpose(0, 3), view)
    views = [x.transpose(1, 2) for x in part.chunk(3, -1)]  # [B, H, S, D]
    results = []
    for tensors in (views, [x.contiguous() for x in views]):
        inputs = leaves(tuple(tensors))
        out = ra.ring_attention(*inputs, layout=layout, seq_len=S, is_causal=True)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))  # a gradient of stride 0
    assert all(same_bits(a.contiguous(), b.contiguous()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("P", SIZES)
def test_14_views_give_the_bits_of_copies(P: int) -> None:
    dtype, seed, layout = (
        random.choice((torch.float32, torch.bfloat16)),
        random.randrange(2**30),
        random.choice(LAYOUTS),
    )
    case = small_case(random.choice(MASKS), dtype=dtype, Hkv=2)
    results = [
        by_group(case, layout, run_ranks(P, run_on_rank, case, seed, Call(layout, strides=how), timeout=RANKS_TIMEOUT))
        for how in ("contiguous", *STRIDES)
    ]
    expected = next(iter(results[0].values()))
    for how, found in zip(STRIDES, results[1:], strict=True):
        for got, wanted in zip(next(iter(found.values())), expected, strict=True):
            assert same_bits(got, wanted), (how, case)
    run_ranks(P, sent_views, random.randint(1, 50), layout, random.randrange(2**30), timeout=RANKS_TIMEOUT)


# --- 24: compiled code ---


def calls_of(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[list[str], Tensor]:
    """What communicates in it, in the order in which it ran, and its result."""
    with profile(activities=[ProfilerActivity.CPU]) as run, torch.no_grad():
        result = function(*inputs)
    names = {"ringattn::ring_forward": "ring", "_c10d_functional::all_reduce": "sum"}
    found = [event for event in run.events() if event.name.rstrip("_") in names]
    found.sort(key=lambda event: event.time_range.start)
    return [names[event.name.rstrip("_")] for event in found], result


def order_of_calls(seed: int, dependent: bool) -> tuple[list[str], list[str]]:
    """The order of the calls of a step with ring calls and all-reduces: eager, compiled."""
    torch.manual_seed(seed + dist.get_rank())
    inputs = [torch.randn(1, 2, 8, 8) for _ in range(3)]

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = ra.ring_attention(query, key, value, is_causal=True)
        total = collectives.all_reduce(first.square().mean() if dependent else value.mean(), "sum", dist.group.WORLD)
        second = ra.ring_attention(query * total if dependent else query, key, value, layout="striped")
        loss = second.square().sum() + total
        # The ranks do different things with what they have, and still exchange the same.
        return loss + first.cos().sum() if dependent and dist.get_rank() == 0 else loss

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    with torch.no_grad():
        compiled(*inputs)
    (plain, expected), (order, loss) = calls_of(step, inputs), calls_of(compiled, inputs)
    torch.testing.assert_close(loss, expected)
    return plain, order


@pytest.mark.timeout(240)
def test_24_compiled_calls_keep_their_order() -> None:
    """An all-reduce between two ring calls, on the way from one to the other: also if the ranks' graphs differ."""
    for plain, order in run_ranks(2, order_of_calls, random.randrange(2**30), True, timeout=200):
        assert plain == order == ["ring", "sum", "ring"]


@pytest.mark.timeout(240)
def test_24_compiled_calls_have_one_order_on_all_ranks() -> None:
    """An all-reduce that depends on no ring call may move, which nobody outside of the compiler can forbid; from equal
    programs, to the same place on every rank."""
    answers = run_ranks(2, order_of_calls, random.randrange(2**30), False, timeout=200)
    assert [plain for plain, _ in answers] == [["ring", "sum", "ring"]] * 2
    assert answers[0] == answers[1] and sorted(answers[0][1]) == ["ring", "ring", "sum"]
