"""How the package is used on a GPU: streams, devices, checkpoints, graphs, profiles, and what its errors say."""

from __future__ import annotations

import random

import pytest
import torch
from cases import Case, leaves
from reference import Result, same_bits
from torch.utils.checkpoint import checkpoint

import ringattn_ext as ra

from .on_device import attend, check, gradients, half_case, to

CASE = Case(B=2, Hq=4, Hkv=2, S=333, D=64, dtype=torch.bfloat16, is_causal=True)


def fresh(case: Case = CASE) -> tuple[torch.Tensor, ...]:
    return case.tensors(random.randrange(2**31), lse_gradient=False)


def assert_same(a: Result, b: Result, note: object = "") -> None:
    for name in Result._fields:
        assert same_bits(getattr(a, name).cpu(), getattr(b, name).cpu()), (name, note)


def test_ring_of_one(device: torch.device) -> None:
    tensors = fresh()
    moved = to(device, tensors)
    alone = attend(leaves(moved), moved[3], CASE)
    check(alone, tensors, CASE)
    assert_same(alone, attend(leaves(moved), moved[3], CASE, world_size=1))


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("options", [{}, {"world_size": 1}, {"world_size": 4}], ids=str)
def test_another_stream(device: torch.device, options: dict) -> None:
    """The inputs are written late on that stream: who reads them on another one reads NaN."""
    tensors = fresh()
    moved = to(device, tensors)
    expected = attend(leaves(moved), moved[3], CASE, **options)
    late = tuple(torch.full_like(t, torch.nan) for t in moved)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for to_, from_ in zip(late, moved, strict=True):
            to_.copy_(from_)
        got = attend(leaves(late), late[3], CASE, **options)
    stream.synchronize()
    assert_same(got, expected, options)


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("options", [{}, {"world_size": 3}], ids=str)
def test_another_device(options: dict) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = fresh()
    results = []
    for index in (0, 1):
        moved = to(f"cuda:{index}", tensors)
        with torch.cuda.device(0):
            results.append(attend(leaves(moved), moved[3], CASE, **options))
            assert torch.cuda.current_device() == 0
        assert results[-1].out.device == results[-1].dq.device == moved[0].device
    check(results[1], tensors, CASE)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"world_size": 3}], ids=str)
def test_checkpoints(device: torch.device, options: dict, use_reentrant: bool) -> None:
    moved = to(device, fresh())
    plain = attend(leaves(moved), moved[3], CASE, **options)
    call = ra.virtual_ring_attention if options else ra.ring_attention

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return call(query, key, value, **CASE.options(), **options)

    inputs = leaves(moved)
    out = checkpoint(layer, *inputs, use_reentrant=use_reentrant)
    out.backward(moved[3])
    for got, expected in zip((out, *[t.grad for t in inputs]), (plain.out, *plain[2:]), strict=True):
        assert same_bits(got.detach(), expected)


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("case", [CASE, half_case("full", torch.float16, 128, S=300)], ids=("causal", "full"))
def test_graphs(device: torch.device, case: Case) -> None:
    """Forward and backward are captured once and replayed with other inputs."""
    moved = [t.clone() for t in to(device, fresh(case))]
    inputs = leaves(tuple(moved))

    def step() -> Result:
        return attend(inputs, moved[3], case)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        tensors = fresh(case)
        with torch.no_grad():
            for to_, from_ in zip((*inputs, moved[3]), tensors, strict=False):
                to_.copy_(from_)
        graph.replay()
        torch.cuda.synchronize()
        replayed = Result(*[t.clone() for t in captured])
        assert_same(replayed, step(), "replayed")
        check(replayed, tensors, case)


def test_profile(device: torch.device) -> None:
    """Every step of a ring is a scope, and the operators are named."""
    moved = to(device, fresh())
    with torch.profiler.profile() as profile:
        attend(leaves(moved), moved[3], CASE, world_size=3)
    names = [event.key for event in profile.key_averages()]
    assert "ringattn::virtual_ring_forward" in names and "ringattn::virtual_ring_backward" in names
    if device.type == "cuda":
        assert any(name.startswith("ring step") for name in names), names


def text_of(error: type[Exception] | tuple[type[Exception], ...], *inputs: torch.Tensor) -> str:
    with pytest.raises(error) as caught:
        ra.virtual_ring_attention(*inputs, world_size=2)
    return str(caught.value)


def names_the_gpu(text: str, device: torch.device) -> bool:
    major, minor = torch.cuda.get_device_capability(device)
    words = (torch.cuda.get_device_name(device), f"sm_{major}{minor}", f"{major}.{minor}", "CUDA", "cuda")
    return any(word in text for word in words)


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dtypes_that_it_does_not_have(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 64, 64, dtype=dtype, device=device)
    text = text_of((TypeError, ValueError, NotImplementedError), x, x, x)
    assert str(dtype).removeprefix("torch.") in text and "bfloat16" in text and names_the_gpu(text, device), text


def test_head_dims_that_it_does_not_have(device: torch.device) -> None:
    x = torch.randn(1, 2, 64, 264, dtype=torch.bfloat16, device=device)
    text = text_of(ValueError, x, x, x)
    assert "head_dim" in text and "264" in text and "256" in text, text
    assert device.type == "cpu" or names_the_gpu(text, device), text


def test_tensors_on_two_devices(device: torch.device) -> None:
    x = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device=device)
    other = x.to("meta" if device.type == "cpu" else "cpu")
    text = text_of((ValueError, TypeError, RuntimeError), x, other, x)
    assert "key" in text or "device" in text, text


@pytest.mark.usefixtures("cuda_only")
def test_memory_does_not_grow_with_the_ring(device: torch.device) -> None:
    """Of a call beside its inputs and results, and nothing is left behind."""
    case = Case(Hq=8, Hkv=8, S=8192, D=128, dtype=torch.bfloat16, is_causal=True)
    moved = to(device, fresh(case))
    peaks = {}
    for P in (1, 2, 8):  # the first call may make what all use
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        query, key, value = leaves(moved)
        out = ra.virtual_ring_attention(query, key, value, world_size=P, is_causal=True)
        gradients(out, [query, key, value], moved[3])
        torch.cuda.synchronize()
        peaks[P] = torch.cuda.max_memory_allocated() - before
        del out
        assert P == 1 or torch.cuda.memory_allocated() == before, P
    assert peaks[8] <= 1.2 * peaks[2], peaks
