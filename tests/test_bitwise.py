"""Equal bits: from run to run, for any number of threads, in any memory layout, on virtual ranks and on processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from cases import DTYPES, LAYOUTS, MASKS, STRIDES, Call, Case, by_group, random_case, restride, run_on_rank, run_virtual
from ranks import run_ranks
from reference import Result, same_bits

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(120)


def assert_same_bits(got: Result, expected: Result, note: object) -> None:
    different = [name for name in Result._fields if not same_bits(getattr(got, name), getattr(expected, name))]
    assert not different, (different, note)


def case_of(dtype: torch.dtype) -> Case:
    """Large enough that every thread gets tiles."""
    return random_case(random.choice(MASKS), dtype=dtype, S=random.randint(130, 300), B=2, Hkv=2, D=40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("P", [1, 2, 3, 7])
def test_virtual_across_runs_and_threads(P: int, dtype: torch.dtype) -> None:
    case, layout = case_of(dtype), random.choice(LAYOUTS)
    tensors = case.tensors(random.randrange(2**31))
    first = run_virtual(case, tensors, P, layout)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        assert_same_bits(run_virtual(case, tensors, P, layout), first, (case, layout, threads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("P", [1, 2, 3])
def test_processes_across_runs_and_threads_and_against_virtual_ranks(P: int, dtype: torch.dtype) -> None:
    case, layout, seed = case_of(dtype), random.choice(LAYOUTS), random.randrange(2**30)
    expected = run_virtual(case, case.tensors(seed), P, layout)
    for threads in (1, 1, 2, 3):
        call = Call(layout, threads=threads)
        ((_, got),) = by_group(case, layout, run_ranks(P, run_on_rank, case, seed, call)).items()
        assert_same_bits(got, expected, (case, call))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_virtual_strides(strides: str, dtype: torch.dtype) -> None:
    for P in (1, 3):
        case, layout = random_case(random.choice(MASKS), dtype=dtype), random.choice(LAYOUTS)
        tensors = case.tensors(random.randrange(2**31))
        other = (*(restride(t, strides) for t in tensors[:4]), tensors[4])
        expected = run_virtual(case, tensors, P, layout)
        assert_same_bits(run_virtual(case, other, P, layout), expected, (case, P, layout))


@pytest.mark.parametrize("strides", STRIDES)
def test_process_strides(strides: str) -> None:
    case, seed = random_case(random.choice(MASKS), dtype=random.choice(DTYPES)), random.randrange(2**30)
    results = [
        by_group(case, "zigzag", run_ranks(2, run_on_rank, case, seed, Call(strides=how)))[0, 1]
        for how in ("contiguous", strides)
    ]
    assert_same_bits(results[1], results[0], case)


@pytest.mark.parametrize("P", [1, 3])
def test_expanded_inputs(P: int) -> None:
    """Stride 0 over batch, heads and tokens; the gradient of an expanded output gradient too."""
    one = {
        name: torch.randn(shape) for name, shape in (("q", (1, 4, 50, 8)), ("kv", (2, 1, 50, 8)), ("do", (2, 4, 1, 8)))
    }
    whole = [one["q"].expand(2, 4, 50, 8), one["kv"].expand(2, 4, 50, 8), one["kv"].expand(2, 4, 50, 8)]
    whole += [one["do"].expand(2, 4, 50, 8), torch.randn(2, 4, 1).expand(2, 4, 50)]
    case = Case(B=2, Hq=4, Hkv=4, S=50, dtype=torch.float32, is_causal=True)
    expected = run_virtual(case, tuple(t.contiguous() for t in whole), P, "zigzag")
    assert_same_bits(run_virtual(case, tuple(whole), P, "zigzag"), expected, case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_projection(layout: str) -> None:
    """q, k, v as chunks of one [B, S, 3, H, D] projection: its gradient is that of separate tensors."""
    packed = torch.randn(2, 60, 3, 4, 16, requires_grad=True)
    out = ra.virtual_ring_attention(*packed.permute(2, 0, 3, 1, 4), world_size=3, layout=layout, is_causal=True)
    out.square().sum().backward()
    separate = [x.detach().contiguous().requires_grad_() for x in packed.permute(2, 0, 3, 1, 4)]
    other = ra.virtual_ring_attention(*separate, world_size=3, layout=layout, is_causal=True)
    other.square().sum().backward()
    assert same_bits(out, other)
    assert packed.grad is not None
    for got, x in zip(packed.grad.permute(2, 0, 3, 1, 4), separate, strict=True):
        assert x.grad is not None and same_bits(got, x.grad)


def test_output_has_the_memory_order_of_the_query() -> None:
    q = torch.randn(2, 30, 4, 8).transpose(1, 2)
    for P in (1, 3):
        out = ra.virtual_ring_attention(q, q, q, world_size=P)
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_heads_do_not_change_a_row(dtype: torch.dtype) -> None:
    """The bits of one head alone are those it has in a batch."""
    case = random_case(random.choice(MASKS), dtype=dtype, B=2, Hq=2, Hkv=2, D=40)
    tensors = case.tensors(random.randrange(2**31))
    P, layout = random.choice((1, 3)), random.choice(LAYOUTS)
    whole = run_virtual(case, tensors, P, layout)
    alone = run_virtual(replace(case, B=1, Hq=1, Hkv=1), tuple(t[1:, 1:] for t in tensors), P, layout)
    assert_same_bits(alone, Result(*(t[1:, 1:] for t in whole)), (case, P, layout))


def test_deterministic_or_not_is_the_same_here() -> None:
    """On the CPU there is no faster way that is not deterministic."""
    x = torch.randn(1, 2, 90, 16, requires_grad=True)
    grads = []
    for deterministic in (True, False):
        out = ra.virtual_ring_attention(x, x, x, world_size=2, is_causal=True, deterministic=deterministic)
        grads.append((out, *torch.autograd.grad(out.square().sum(), x)))
    assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))
