"""torch.compile: ring_attention traces without a break, and the compiler neither drops nor reorders ring calls."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

import ringattn_ext as ra
from ringattn_ext._C import Layout
from ringattn_ext._fakes import _kept_size

RING_OPS = ("ringattn::ring_forward", "ringattn::ring_backward", "ringattn::gather")


def _inputs(S: int, Hq: int = 4, Hkv: int = 2, D: int = 16) -> list[torch.Tensor]:
    shapes = ((1, Hq, S, D), (1, Hkv, S, D), (1, Hkv, S, D))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _ring_calls(function, *args) -> list[tuple[str, list[int]]]:
    """The ring operators that run in function(*args), in order, with the shape of their first argument."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        function(*args)
    events = [event for event in trace.events() if event.name in RING_OPS]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, list(event.input_shapes[0])) for event in events]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_one_graph_same_bits(backend):
    inputs = _inputs(33)

    def attend(query, key, value):
        return ra.ring_attention(query, key, value, is_causal=True, enable_gqa=True, window=(7, 0), return_lse=True)

    torch._dynamo.reset()
    results = torch.compile(attend, fullgraph=True, backend=backend)(*inputs)
    expected = attend(*inputs)
    weights = [torch.randn_like(result) for result in expected]
    gradients = torch.autograd.grad(results, inputs, weights)
    for got, want in zip(
        (*results, *gradients), (*expected, *torch.autograd.grad(expected, inputs, weights)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_documents_are_a_graph_input():
    inputs = _inputs(20)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, cu: ra.ring_attention(q, k, v, cu_seqlens=cu, is_causal=True, enable_gqa=True), fullgraph=True
    )
    for bounds in ([0, 5, 20], [0, 11, 20], [0, 0, 20]):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        expected = ra.ring_attention(*inputs, cu_seqlens=cu_seqlens, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(compiled(*inputs, cu_seqlens), expected, rtol=0, atol=0)


def test_virtual_ring_and_blocks_trace():
    inputs = _inputs(19)
    torch._dynamo.reset()

    def attend(query, key, value):
        return ra.virtual_ring_attention(query, key, value, world_size=3, is_causal=True, enable_gqa=True)

    out = torch.compile(attend, fullgraph=True)(*inputs)
    expected = attend(*inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    for got, want in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(got, want)


def _independent_calls(long, short, unused, use_all: bool):
    """Three ring calls that do not depend on each other, of unequal sizes; the last one's result may be unused."""
    first = ra.ring_attention(*long, is_causal=True, enable_gqa=True)
    second = ra.ring_attention(*short, is_causal=True, enable_gqa=True)
    third = ra.ring_attention(*unused, layout="striped", enable_gqa=True)
    total = second.sum() + first.square().sum()
    return total + third.sum() if use_all else total


def _order_and_survival(seed: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(seed + rank)
    calls = [_inputs(S) for S in (24, 8, 16)]
    leaves = [tensor for call in calls for tensor in call]
    # Rank 0 alone uses the third result: its graphs differ from the other rank's, the messages must not.
    use_all = rank == 0

    def step(*tensors):
        loss = _independent_calls(tensors[0:3], tensors[3:6], tensors[6:9], use_all)
        # All ranks agree on which inputs need gradients, so the third call's backward runs only where it was used.
        return loss

    expected = step(*leaves)
    expected_forward = _ring_calls(step, *leaves)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    loss = compiled(*leaves)
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        compiled(*leaves)  # compile for this mode, too, outside the profiler
    forward = _ring_calls(compiled, *leaves)
    assert forward == expected_forward, (forward, expected_forward)
    assert [shape[2] for _, shape in forward] == [24, 8, 16]


def _backward_order(seed: int) -> None:
    torch.manual_seed(seed + dist.get_rank())
    calls = [_inputs(S) for S in (24, 8, 16)]
    leaves = [tensor for call in calls for tensor in call]

    def step(*tensors):
        return _independent_calls(tensors[0:3], tensors[3:6], tensors[6:9], True)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    expected = torch.autograd.grad(step(*leaves), leaves)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(got, want)
    names = [name for name, _ in _ring_calls(lambda: compiled(*leaves).backward())]
    assert names == ["ringattn::ring_forward"] * 3 + ["ringattn::ring_backward"] * 3
    with torch.no_grad():
        compiled(*leaves)  # compile for this mode, outside the profiler
        calls_without_grad = _ring_calls(compiled, *leaves)
    assert len(calls_without_grad) == 3, calls_without_grad


def _dead_code(seed: int) -> None:
    """No result of any call is used; other collectives of the package lie between."""
    torch.manual_seed(seed)
    inputs = _inputs(12)

    def step(query, key, value):
        out = ra.ring_attention(query, key, value, enable_gqa=True)
        ra.unshard(out, 2)
        ra.ring_attention(query * 2, key, value, enable_gqa=True, layout="contiguous")
        return query + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    compiled(*inputs)
    names = [name for name, _ in _ring_calls(compiled, *inputs)]
    assert names == ["ringattn::ring_forward", "ringattn::gather", "ringattn::ring_forward"]
    with torch.inference_mode():
        compiled(*inputs)
        assert len(_ring_calls(compiled, *inputs)) == 3


@pytest.mark.parametrize("job", [_order_and_survival, _backward_order, _dead_code])
def test_calls_keep_program_order_on_two_ranks(job):
    run_ranks(2, job, int(torch.randint(1 << 30, ())), timeout=240)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_traced_sizes_are_those_of_the_layout(layout):
    for P in range(2, 18):
        for N in (0, 1, P - 1, P, 2 * P, 2 * P + 1, 997):
            B, Hkv, D = 2, 3, 5
            key = torch.empty(B, Hkv, 0, D)
            whole = 2 * B * Hkv * Layout(layout, P, N).capacity * D
            assert _kept_size(key, P, layout, N, [False, True, False]) == whole
            assert _kept_size(key, P, layout, N, [False] * 3) == 0
