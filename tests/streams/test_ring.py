"""ring_attention on devices with streams: right, and in order whatever the streams do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from cases import LAYOUTS, MASKS
from torch.utils.checkpoint import checkpoint

import ringattn_ext as ra

from .case_runs import RingRun, check_result, run_virtual, small_case
from .machine import Rank, connect, device, fresh, history, make_groups, native, run_ring, using
from .properties import check_pass, planned
from .worker import on_the_machine

SIZES = tuple(range(1, 9))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
@on_the_machine
def test_every_size_of_ring(layout: str, kind: str) -> None:
    for P in SIZES:
        fresh()
        one = RingRun(small_case(kind), P, layout, has_cpu=random.random() < 0.5)
        one.check(one.run())
        found = history()
        assert not found.problems, (one, found.problems[:5])
        for rank in range(P):
            for direction in ("forward", "backward"):
                check_pass(found, rank, direction, planned(one.case, layout, P, rank, direction))


@pytest.mark.parametrize("layout", LAYOUTS)
@on_the_machine
def test_virtual_ranks_on_one_device(layout: str) -> None:
    for P in SIZES:
        fresh()
        case = small_case()
        tensors = case.tensors(random.randrange(2**31))
        check_result(case, tensors, run_virtual(case, P, layout, tensors, calls=2), (case, P))
        assert not history().problems, (case, P, history().problems[:5])


@on_the_machine
def test_virtual_ranks_copy_while_they_compute() -> None:
    for P in (2, 3, 5):
        fresh()
        case = small_case("full", S=8 * P)
        tensors = [t.to(device()) for t in case.tensors(random.randrange(2**31))[:3]]
        native.reset()
        ra.virtual_ring_attention(*tensors, world_size=P, **case.options())
        found = history()
        work = [(i, e) for i, e in enumerate(found.entries) if e.kind == "operation"]
        kernels = [i for i, e in work if e.name == "forward"]
        computing = {found.entries[i].stream for i in kernels} | {native.default_stream(0).number}
        copies = [i for i, e in work if e.stream not in computing]
        assert len(copies) == P * (P - 1)
        for copy in copies:
            beside = [k for k in kernels if not found.comes_before(k, copy) and not found.comes_before(copy, k)]
            assert len(beside) >= 2, (P, copy)  # those of its sender and of its receiver
        assert not any(e.kind in ("host_wait", "query") for e in found.entries)


@on_the_machine
def test_calls_that_change_between_streams_share_a_workspace() -> None:
    """The workspace of a group is used by calls on two streams of each device, in turn."""

    def around(rank: Rank, call: Callable[[], None]) -> None:
        streams = [native.pool_stream(rank.rank) for _ in range(2)]
        for stream in streams * 2:
            native.wait_for(stream, native.current_stream(rank.rank))
            with using(stream):
                call()
        for stream in streams:
            native.wait_for(native.current_stream(rank.rank), stream)

    for P in (2, 3):
        fresh()
        one = RingRun(small_case("causal"), P, "zigzag", around=around)
        one.check(one.run())
        assert not history().problems, history().problems[:5]


@on_the_machine
def test_calls_of_growing_and_shrinking_shapes() -> None:
    fresh()
    cases = [RingRun(small_case("causal", S=S), 3, "zigzag") for S in (20, 50, 30, 60)]

    def body(rank: Rank) -> list:
        results = []
        for one in cases:
            results.append(one.body(rank))
            if rank.rank == 0:
                ra.release_workspace(rank.group)
        return results

    run_ring(3, body)
    assert not history().problems, history().problems[:5]


@on_the_machine
def test_two_groups_in_one_process() -> None:
    """The same devices in two groups, the second one in the opposite order; calls take turns."""
    P = 4
    for _ in range(2):
        fresh()
        one, other = (RingRun(small_case(), P, "striped") for _ in range(2))
        names = make_groups(P)
        connect([*reversed(names)])

        def body(rank: Rank, one: RingRun = one, other: RingRun = other, names: list[str] = names) -> list:
            there = Rank(P - 1 - rank.rank, P, names[P - 1 - rank.rank], rank.device)
            return [run.body(at) for run, at in ((one, rank), (other, there), (one, rank), (other, there))]

        run_ring(P, body)
        assert not history().problems, history().problems[:5]


@on_the_machine
def test_activation_checkpointing() -> None:
    P = 3
    fresh()
    one = RingRun(small_case("causal", S=24), P, "zigzag")

    def body(rank: Rank) -> torch.Tensor:
        tensors = one.inputs(rank)
        leaves = [t.requires_grad_() for t in tensors[:3]]

        def layer(*inputs: torch.Tensor) -> torch.Tensor:
            return one.attend(rank, [t * 1 for t in inputs])[0] * 1

        out = checkpoint(layer, *leaves, use_reentrant=False, preserve_rng_state=False)
        (out * tensors[3]).sum().backward()
        return leaves[0].grad.cpu()

    run_ring(P, body)
    assert not history().problems, history().problems[:5]


@on_the_machine
def test_unshard() -> None:
    for P in SIZES:
        fresh()
        layout = random.choice(LAYOUTS)
        x = torch.randn(2, random.randint(1, 40), 3)

        def body(rank: Rank, x: torch.Tensor = x, layout: str = layout) -> torch.Tensor:
            there = x.to(rank.device).requires_grad_()
            part = ra.shard(there, 1, group=rank.group, layout=layout)
            whole = ra.unshard(part, 1, group=rank.group, layout=layout, seq_len=x.shape[1])
            whole.backward(whole.detach())
            assert torch.equal(there.grad.cpu(), x)
            return whole.detach().cpu()

        assert all(torch.equal(whole, x) for whole in run_ring(P, body))
        assert not history().problems, history().problems[:5]


@on_the_machine
def test_the_device_need_not_be_current() -> None:
    fresh()
    one = RingRun(small_case("causal"), 3, "zigzag")

    def around(rank: Rank, call: Callable[[], None]) -> None:
        native.set_current_device(15)
        call()
        assert native.current_device() == 15

    one.around = around
    one.check(one.run())
    assert not history().problems, history().problems[:5]
