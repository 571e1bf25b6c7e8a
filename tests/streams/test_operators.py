"""What surrounds the ring on devices with streams: building blocks, documents, failures, graphs, what is refused."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn_ext as ra

from .case_runs import RingRun, check_result, run_virtual, small_case
from .machine import Rank, device, faults, fresh, history, native, run_ring, using
from .worker import on_the_machine

ops = torch.ops.ringattn


def blocks(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, where: torch.device) -> list[Tensor]:
    """Causal attention within two documents, in two blocks, merged; then backward in two blocks."""
    q, k, v, grad_out = (t.to(where) for t in (q, k, v, grad_out))
    S, half = q.shape[2], q.shape[2] // 2
    scale = 0.3
    mask = (True, None, torch.tensor([0, 3, S]), scale)
    rows = q.shape[:3]
    cuts = [(0, half), (half, S)]
    states = []
    for first, last in cuts:
        state = [
            torch.zeros(q.shape, device=where),
            torch.full(rows, -torch.inf, device=where),
            torch.zeros(rows, device=where),
        ]
        part = [first, 1, last - first]
        keys, values = k[:, :, first:last], v[:, :, first:last]
        ops.block_forward_(*state, q, keys, values, [0, 1, S], part, S, *mask, False)
        states.append(state)
    ops.merge_(*states[0], *states[1], scale)
    out, lse = ops.finalize(*states[0], scale, q.dtype)
    delta = ops.delta(out, grad_out, None)
    dq = torch.zeros(q.shape, device=where)
    dk, dv = (torch.zeros(t.shape, device=where) for t in (k, v))
    for first, last in cuts:
        take = slice(first, last)
        dk_part, dv_part = (torch.zeros(k[:, :, take].shape, device=where) for _ in range(2))
        ops.block_backward_(
            dq, dk_part, dv_part, grad_out, q, k[:, :, take], v[:, :, take], lse, delta, [0, 1, S],
            [first, 1, last - first], S, *mask, True,
        )  # fmt: skip
        dk[:, :, take] += dk_part
        dv[:, :, take] += dv_part
    return [t.cpu().float() for t in (out, lse, delta, dq, dk, dv)]


@on_the_machine
def test_blocks() -> None:
    fresh()
    q, k, v, grad_out = (torch.randn(2, 2, 23, 8).bfloat16() for _ in range(4))
    expected = blocks(q, k, v, grad_out, torch.device("cpu"))
    got = blocks(q, k, v, grad_out, device(3))  # while another device is current
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)
    with using(native.pool_stream(3)):
        blocks(q, k, v, grad_out, device(3))
    assert not history().problems, history().problems[:5]


@on_the_machine
def test_documents_that_change_from_call_to_call() -> None:
    """More of them than are kept, on two streams, in a ring and on virtual ranks."""
    fresh()
    runs = [RingRun(small_case("documents", S=30), 2, "zigzag") for _ in range(20)]
    chosen = [random.choice(runs) for _ in range(40)]

    def body(rank: Rank) -> None:
        streams = [native.pool_stream(rank.rank) for _ in range(2)]
        inputs = {id(run): run.inputs(rank) for run in runs}
        for stream in streams:
            native.wait_for(stream, native.current_stream(rank.rank))
        for i, run in enumerate(chosen):
            with using(streams[i % 2]):
                run.attend(rank, inputs[id(run)])
        for stream in streams:
            native.wait_for(native.current_stream(rank.rank), stream)

    run_ring(2, body)
    for run in runs:
        check_result(run.case, run.tensors, run_virtual(run.case, 3, "zigzag", run.tensors), run.case)
    assert not history().problems, history().problems[:5]


@on_the_machine
def test_one_gradient_alone() -> None:
    for wanted in range(3):
        fresh()
        one = RingRun(small_case(), 3, "zigzag")

        def body(rank: Rank, one: RingRun = one, wanted: int = wanted) -> None:
            tensors = one.inputs(rank)
            tensors[wanted].requires_grad_()
            out, _ = one.attend(rank, tensors)
            out.backward(tensors[3])

        run_ring(3, body)
        assert not history().problems, history().problems[:5]


@pytest.mark.parametrize("virtual", (False, True))
@on_the_machine
def test_a_kernel_fails_in_the_middle(virtual: bool) -> None:
    """Whatever was on its way, no memory is given back while somebody may still use it; and the next call works."""
    P = 3
    one = RingRun(small_case("full", S=24), P, "zigzag")

    def run() -> Any:
        if virtual:
            return run_virtual(one.case, P, "zigzag", one.tensors)
        return one.run()

    fresh()
    run()
    for nth in range(native.occurrences("kernel")):
        fresh()
        with pytest.raises(RuntimeError), faults(kernel=nth):
            run()
        native.destroy_groups()
        check_result(one.case, one.tensors, run(), one)
        assert not history().problems, (nth, history().problems[:5])


@on_the_machine
def test_captures_have_memory_of_their_own() -> None:
    """Calls that are captured into one graph share buffers, which no other call uses."""
    P = 2
    one = RingRun(small_case("causal"), P, "zigzag")
    barrier = threading.Barrier(P)

    def body(rank: Rank) -> None:
        tensors = one.inputs(rank)
        before = native.usage(rank.rank)[0]
        held = []
        for graph in (0, 7, 7, 0, 8):
            barrier.wait(30)
            native.set_capture(graph)
            barrier.wait(30)
            one.attend(rank, tensors)
            held.append(native.usage(rank.rank)[0] - before)
        barrier.wait(30)
        native.set_capture(0)
        assert held == [held[0], *[2 * held[0]] * 4], held
        ra.release_workspace(rank.group)
        assert native.usage(rank.rank)[0] == before

    fresh()
    run_ring(P, body)
    assert not history().problems, history().problems[:5]


@on_the_machine
def test_what_the_kernels_do_not_take() -> None:
    x = torch.zeros(1, 2, 4, 8, device=device())
    with pytest.raises(TypeError, match="query: double of a GPU .* takes bfloat16 and float16, got float32"):
        ra.virtual_ring_attention(x, x, x, world_size=1)
    y = torch.zeros(1, 2, 4, 12, device=device(), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiple of 8 and at most 256, got 12"):
        ra.virtual_ring_attention(y, y, y, world_size=2)
