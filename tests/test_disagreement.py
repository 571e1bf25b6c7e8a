"""Ranks that disagree: every field of the header, wrong on every single rank in turn, forward and backward.

All ranks get the same RingError, which names the field, the values and the ranks that have them; no process dies, no
tensor is written, and the group then makes a correct call.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_call import HKV, HQ, INPUTS, TOKENS, B, D, attempt, buffers, inputs, prove, prove_at

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(90)

RANKS_TIMEOUT = 25.0
SIZES = [2, 3, 4]

Spec = dict[str, Any]


class Case(NamedTuple):
    id: str
    change: Spec  # of the odd rank; keys as in arguments()
    field: str  # as the error names it
    usual: str  # regular expressions for the values of the usual and of the odd rank
    odd: str
    base: Spec = {}  # of all ranks


def _number(value: float) -> str:
    return re.escape(f"{value:.17g}")


NONE = "none"
HASH = "0x[0-9a-f]{16}"
CASES = [
    Case("batch", {"shape": (B + 1, HQ, HKV, D)}, "the batch size", str(B), str(B + 1)),
    Case("empty batch", {"shape": (0, HQ, HKV, D)}, "the batch size", str(B), "0"),
    Case("query heads", {"shape": (B, 2 * HQ, HKV, D)}, "the number of query heads", str(HQ), str(2 * HQ)),
    Case("key heads", {"shape": (B, HQ, 1, D)}, "the number of key/value heads", str(HKV), "1"),
    # As many bytes in every message.
    Case(
        "key heads and head_dim",
        {"shape": (B, HQ, HKV * 2, D // 2)},
        "the number of key/value heads",
        str(HKV),
        str(2 * HKV),
    ),
    Case("head_dim", {"shape": (B, HQ, HKV, D * 2)}, "head_dim", str(D), str(D * 2)),
    Case("float64", {"dtype": torch.float64}, "dtype", "float32", "float64"),
    Case("float16 for bfloat16", {"dtype": torch.float16}, "dtype", "bfloat16", "float16", {"dtype": torch.bfloat16}),
    Case("contiguous", {"layout": "contiguous"}, "layout", "zigzag", "contiguous"),
    Case("striped", {"layout": "striped"}, "layout", "zigzag", "striped"),
    Case("zigzag", {"layout": "zigzag"}, "layout", "striped", "zigzag", {"layout": "striped"}),
    Case("seq_len", {"seq_len": 25}, "seq_len", "24", "25", {"seq_len": 24}),
    Case(
        "seq_len of the same local lengths",
        {"seq_len": 25, "layout": "striped"},
        "seq_len",
        "26",
        "25",
        {"seq_len": 26, "layout": "striped"},
    ),
    Case("seq_len 0", {"seq_len": 0}, "seq_len", "24", "0", {"seq_len": 24}),
    Case("key_seq_len", {"key_seq_len": 40}, "key_seq_len", "36", "40", {"seq_len": 24, "key_seq_len": 36}),
    Case("is_causal", {"is_causal": True}, "is_causal", "False", "True"),
    Case("not is_causal", {"is_causal": False}, "is_causal", "True", "False", {"is_causal": True}),
    Case("window left", {"window": (4, 2)}, r"window \(left\)", "3", "4", {"window": (3, 2)}),
    Case("window left unbounded", {"window": (-1, 2)}, r"window \(left\)", "3", "unbounded", {"window": (3, 2)}),
    Case("window right", {"window": (3, 1)}, r"window \(right\)", "2", "1", {"window": (3, 2)}),
    Case("window right 0", {"window": (3, 0)}, r"window \(right\)", "2", "0", {"window": (3, 2)}),
    Case("window missing", {"window": None}, r"window \(left\)", "3", "unbounded", {"window": (3, 2)}),
    Case(
        "documents missing",
        {"documents": None},
        "the number of documents in cu_seqlens",
        "2",
        NONE,
        {"documents": (0, 5, -1)},
    ),
    Case("documents on one rank", {"documents": (0, 5, -1)}, "the number of documents in cu_seqlens", NONE, "2"),
    Case(
        "document count",
        {"documents": (0, 5, 7, -1)},
        "the number of documents in cu_seqlens",
        "2",
        "3",
        {"documents": (0, 5, -1)},
    ),
    Case("document bounds", {"documents": (0, 6, -1)}, "the hash of cu_seqlens", HASH, HASH, {"documents": (0, 5, -1)}),
    Case("scale", {"scale": 0.25}, "scale", _number(1 / math.sqrt(D)), _number(0.25)),
    Case("scale by one bit", {"scale": 0.1 + 2**-56}, "scale", _number(0.1), _number(0.1 + 2**-56), {"scale": 0.1}),
    Case("deterministic", {"deterministic": False}, "deterministic", "True", "False"),
    *[
        Case(
            f"gradient of {name}",
            {"needs_grad": tuple(x for x in INPUTS if x != name)},
            "which inputs need gradients",
            "query, key, value",
            ", ".join(x for x in INPUTS if x != name),
        )
        for name in INPUTS
    ],
    Case("no gradients", {"needs_grad": ()}, "which inputs need gradients", "query, key, value", NONE),
    Case("no_grad", {"no_grad": True}, "which inputs need gradients", "query, key, value", NONE),
    Case(
        "gradient on one rank",
        {"needs_grad": ("value",)},
        "which inputs need gradients",
        NONE,
        "value",
        {"needs_grad": ()},
    ),
    Case("unshard", {"op": "unshard"}, "the operator", "ring_forward", "gather"),
    Case("unshard, dtype", {"dtype": torch.int32}, "dtype", "int64", "int32", {"op": "unshard", "dtype": torch.int64}),
    Case("unshard, layout", {"layout": "striped"}, "layout", "zigzag", "striped", {"op": "unshard"}),
    Case("unshard, seq_len", {"seq_len": 23}, "seq_len", "24", "23", {"op": "unshard", "seq_len": 24}),
    Case("unshard, dim", {"dim": 0}, "dim", "2", "0", {"op": "unshard", "shape": (TOKENS, HQ, HKV, D)}),
    Case(
        "unshard, before dim",
        {"shape": (B, HQ + 1, HKV, D)},
        "the number of elements before dim",
        "8",
        "10",
        {"op": "unshard"},
    ),
    Case(
        "unshard, after dim",
        {"shape": (B, HQ, HKV, D + 1)},
        "the number of elements after dim",
        "8",
        "9",
        {"op": "unshard"},
    ),
]
BY_ID = {case.id: case for case in CASES}
assert len(BY_ID) == len(CASES)
each_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.id.replace(" ", "_")) for case in CASES])
each_size = pytest.mark.parametrize("world_size", SIZES)


def arguments(spec: Spec) -> Spec:
    """Keyword arguments for ring_attention or unshard, for this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    spec = {
        "seq_len": TOKENS * world_size,
        "key_seq_len": None,
        "layout": "zigzag",
        "shape": (B, HQ, HKV, D),
        "dtype": torch.float32,
        "needs_grad": INPUTS,
        "documents": None,
    } | spec
    seq_len, dtype, needs_grad, documents = (spec.pop(name) for name in ("seq_len", "dtype", "needs_grad", "documents"))
    key_seq_len, shape = spec.pop("key_seq_len"), spec.pop("shape")
    _, parts = inputs(
        rank,
        world_size,
        seq_len=seq_len,
        key_seq_len=key_seq_len,
        layout=spec["layout"],
        shape=shape,
        dtype=dtype if dtype.is_floating_point else torch.float32,
    )
    for name, part in zip(INPUTS, parts, strict=True):
        part.requires_grad_(name in needs_grad)
    if spec.pop("op", "") == "unshard":
        x = parts[0].detach().to(dtype)
        return {"x": x, "dim": 2, "seq_len": x.shape[spec["dim"]] * world_size if "dim" in spec else seq_len} | spec
    cu_seqlens = None if documents is None else torch.tensor([seq_len if b == -1 else b for b in documents])
    return (
        dict(zip(INPUTS, parts, strict=True))
        | {"seq_len": seq_len, "key_seq_len": key_seq_len, "cu_seqlens": cu_seqlens, "enable_gqa": True}
        | spec
    )


def disagree(id: str, odd: int) -> tuple[str, str]:
    case = BY_ID[id]
    call = arguments(dict(case.base) | (case.change if dist.get_rank() == odd else {}))
    function = ra.unshard if "x" in call else ra.ring_attention
    before = buffers(call)
    with torch.set_grad_enabled(not call.pop("no_grad", False)):
        answer = attempt(function, **call)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers(call), strict=True)), "an input was written"
    prove()
    return answer


def check_verdict(answers: list[tuple[str, str]], field: str, usual: str, other: str, odd: int) -> None:
    """usual, other: regular expressions for the values of most ranks and of the odd one."""
    assert {name for name, _ in answers} == {"RingError"}, answers
    assert len(set(answers)) == 1, answers
    usual_ranks = [rank for rank in range(len(answers)) if rank != odd]
    values = [(have(usual_ranks), usual), (have([odd]), other)]
    first, second = reversed(values) if odd == 0 else values
    found = re.fullmatch(
        f"ring: ranks disagree on {field}: {first[0]} ({first[1]}), {second[0]} ({second[1]})", answers[0][1]
    )
    assert found, (answers[0][1], field, values)
    assert found[1] != found[2]


def have(ranks: list[int]) -> str:
    """As in "ranks 0, 1 and 3 have"; of at most three ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    if len(ranks) == 3 and ranks[2] - ranks[0] == 2:
        return f"ranks {ranks[0]}-{ranks[2]} have"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"


@each_size
@each_case
def test_forward(case: Case, world_size: int) -> None:
    for odd in range(world_size):
        answers = run_ranks(world_size, disagree, case.id, odd, timeout=RANKS_TIMEOUT)
        check_verdict(answers, case.field, case.usual, case.odd, odd)


def disagree_in_operators(odd: int) -> tuple[str, str]:
    call = arguments({"is_causal": dist.get_rank() == odd})
    tensors = [call[name].detach() for name in INPUTS]
    answer = attempt(
        torch.ops.ringattn.ring_forward,
        *tensors,
        torch.zeros(1, dtype=torch.int64),
        dist.group.WORLD.group_name,
        "zigzag",
        call["seq_len"],
        None,
        call["is_causal"],
        None,
        None,
        None,
        True,
        True,
        [False] * 3,
    )
    prove()
    return answer


@each_size
def test_operators(world_size: int) -> None:
    """Direct callers of the operators get the same error."""
    answers = run_ranks(world_size, disagree_in_operators, 0, timeout=RANKS_TIMEOUT)
    check_verdict(answers, "is_causal", "False", "True", 0)


def three_opinions() -> tuple[str, str]:
    answer = attempt(ra.ring_attention, **arguments({"scale": [0.5, 0.25, 0.125][dist.get_rank()]}))
    prove()
    return answer


def test_all_differ() -> None:
    answers = run_ranks(3, three_opinions, timeout=RANKS_TIMEOUT)
    assert set(answers) == {
        ("RingError", "ring: ranks disagree on scale: rank 0 has 0.5, rank 1 has 0.25, rank 2 has 0.125")
    }


def many_disagreements(rounds: int) -> None:
    rank = dist.get_rank()
    for i in range(rounds):
        name, _ = attempt(ra.ring_attention, **arguments({"scale": 1.0 + (rank == i % dist.get_world_size())}))
        assert name == "RingError"
    prove()


@each_size
def test_fifty_in_a_row(world_size: int) -> None:
    run_ranks(world_size, many_disagreements, 50, timeout=60)


def out_of_step(odd: int) -> tuple[str, str]:
    """One rank makes its first call under another name of the group, where that call is not counted."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(range(world_size))
    alias = f"alias of {group.group_name}"
    torch._C._distributed_c10d._register_process_group(alias, group)
    prove_at(rank, world_size, alias if rank == odd else group)
    answer = attempt(ra.ring_attention, **arguments({}), group=group)
    prove(group)
    torch._C._distributed_c10d._unregister_process_group(alias)
    dist.destroy_process_group(group)
    return answer


@each_size
def test_call_number(world_size: int) -> None:
    for odd in range(world_size):
        answers = run_ranks(world_size, out_of_step, odd, timeout=RANKS_TIMEOUT)
        # prove makes two calls: forward and backward.
        check_verdict(answers, "the call number on this group", "3", "1", odd)


# --- backward ---


def graphs_in_other_order(odd: int) -> list[tuple[str, str]]:
    """Two graphs of different shapes; one rank goes back through them in the other order, then all do it right."""
    graphs = []
    for shape in ((B, HQ, HKV, D), (B, HQ, HKV, 2 * D)):
        call = arguments({"shape": shape})
        graphs.append((ra.ring_attention(**call).sum(), [call[name] for name in INPUTS]))
    order = [1, 0] if dist.get_rank() == odd else [0, 1]
    answers = [attempt(torch.autograd.grad, *graphs[i], retain_graph=True) for i in order]
    assert all(leaf.grad is None for _, leaves in graphs for leaf in leaves)
    answers.append(attempt(torch.autograd.grad, *graphs[0]))
    prove()
    return answers


@each_size
def test_backward_of_unequal_graphs_in_other_order(world_size: int) -> None:
    for odd in range(world_size):
        answers = run_ranks(world_size, graphs_in_other_order, odd, timeout=RANKS_TIMEOUT)
        first, second, third = zip(*answers, strict=True)
        check_verdict(list(first), "head_dim", str(D), str(2 * D), odd)
        check_verdict(list(second), "head_dim", str(2 * D), str(D), odd)
        assert set(third) == {("", "")}


def equal_graphs_in_other_order(odd: int) -> list[tuple[str, str]]:
    """As two layers of one model: nothing but the call tells the graphs apart."""
    graphs = []
    for _ in range(2):
        call = arguments({"is_causal": True})
        graphs.append((ra.ring_attention(**call).sum(), [call[name] for name in INPUTS]))
    order = [1, 0] if dist.get_rank() == odd else [0, 1]
    answers = [attempt(torch.autograd.grad, *graphs[i], retain_graph=True) for i in order]
    answers.append(attempt(torch.autograd.grad, *graphs[0]))
    prove()
    return answers


@each_size
def test_backward_of_equal_graphs_in_other_order(world_size: int) -> None:
    """Without an error here, gradients of one layer would be made of keys and values of another."""
    answers = run_ranks(world_size, equal_graphs_in_other_order, world_size - 1, timeout=RANKS_TIMEOUT)
    first, second, third = zip(*answers, strict=True)
    for answer in (first, second):
        assert {name for name, _ in answer} == {"RingError"} and len(set(answer)) == 1, answer
    assert set(third) == {("", "")}


def backward_against_forward(odd: int) -> tuple[str, str]:
    call = arguments({})
    loss = ra.ring_attention(**call).sum()
    if dist.get_rank() == odd:
        answer = attempt(ra.ring_attention, **call)
    else:
        answer = attempt(loss.backward)
        assert all(call[name].grad is None for name in INPUTS)
    prove()
    return answer


@each_size
def test_backward_against_forward(world_size: int) -> None:
    for odd in range(world_size):
        answers = run_ranks(world_size, backward_against_forward, odd, timeout=RANKS_TIMEOUT)
        check_verdict(answers, "the operator", "ring_backward", "ring_forward", odd)


def shard_backward(odd: int) -> tuple[str, str]:
    """The backward pass of shard gathers; its ranks can disagree too."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(2, 2 * world_size, requires_grad=True)
    other = torch.ones(3, 2 * world_size, requires_grad=True)
    parts = [ra.shard(t, 1) for t in (x, other)]
    answer = attempt(parts[rank == odd].sum().backward)
    assert x.grad is None and other.grad is None
    parts[0].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    prove()
    return answer


@each_size
def test_shard_backward(world_size: int) -> None:
    for odd in range(world_size):
        answers = run_ranks(world_size, shard_backward, odd, timeout=RANKS_TIMEOUT)
        check_verdict(answers, "the number of elements before dim", "2", "3", odd)


def refused_backward(odd: int) -> tuple[str, str]:
    """One rank's saved tensors are spoiled between forward and backward, so its backward pass refuses."""
    call = arguments({})

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if dist.get_rank() == odd and tensor.shape == call["query"].shape[:3] else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = ra.ring_attention(**call).sum()
    answer = attempt(loss.backward)
    prove()
    return answer


@each_size
def test_refused_backward(world_size: int) -> None:
    for odd in range(world_size):
        answers = run_ranks(world_size, refused_backward, odd, timeout=RANKS_TIMEOUT)
        assert answers[odd] == ("TypeError", "lse: expected dtype float32, got float64")
        others = {answer for rank, answer in enumerate(answers) if rank != odd}
        assert others == {("RingError", f"ring: rank {odd} refused: lse: expected dtype float32, got float64")}


# --- bad luck ---


def big_disagreement(odd: int) -> tuple[str, str]:
    """Messages of megabytes of unequal size: over gloo alone this ends the receiving process."""
    call = arguments(
        {"seq_len": 4096 * dist.get_world_size(), "shape": (1, 4, 4, 64 if dist.get_rank() == odd else 32)}
    )
    answer = attempt(ra.ring_attention, **call)
    prove()
    return answer


@pytest.mark.parametrize("odd", [0, 1])
def test_large_messages(odd: int) -> None:
    answers = run_ranks(2, big_disagreement, odd, timeout=RANKS_TIMEOUT)
    check_verdict(answers, "head_dim", "32", "64", odd)
