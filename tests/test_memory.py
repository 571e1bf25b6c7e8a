"""Peak memory of a rank does not depend on the number of ranks.

Fresh processes run a causal forward and backward with a fixed number of tokens per rank. What counts is the high-water
mark of resident memory (VmHWM, which writing 5 to /proc/self/clear_refs resets) above what was resident before the
call. malloc maps and unmaps every tensor on its own, so that the mark is that of tensors alive at the same time. An
all-gather of keys and values, measured in the same way, must fail the bound: the test would see growth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor

import ringattn_ext as ra

MIB = 2**20
BOUND = 2 * MIB
S_LOCAL, D = 32, 256

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def ring(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ra.ring_attention(query, key, value, is_causal=True)


class AllGather(torch.autograd.Function):
    """Whole keys or values on every rank."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), dim=2)[dist.get_rank()].contiguous()


def gather_and_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, AllGather.apply(key), AllGather.apply(value))


METHODS: dict[str, Callable[..., Tensor]] = {"ring": ring, "all-gather": gather_and_attend}


def extra_peak(method: str, dtype: torch.dtype, heads: int) -> int:
    """Bytes above what was resident before a forward and a backward pass."""

    def inputs(H: int) -> list[Tensor]:
        return [torch.randn(1, H, S_LOCAL, D).to(dtype).requires_grad_() for _ in range(3)]

    attend = METHODS[method]
    small = inputs(1)
    attend(*small).sum().backward()  # connections, libraries, thread pools
    tensors = inputs(heads)
    grad = torch.randn(1, heads, S_LOCAL, D).to(dtype)
    dist.barrier()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    attend(*tensors).backward(grad)
    after = resident("VmHWM")
    dist.barrier()
    return after - before


@pytest.fixture(scope="module")
def exact_malloc() -> Iterator[None]:
    """For the processes that are started meanwhile: large tensors are mapped on their own and given back at once."""
    names = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def largest_extra_peak(P: int, method: str, dtype: torch.dtype, heads: int) -> int:
    pool = RankPool(P)
    try:
        return max(pool.run(extra_peak, method, dtype, heads, timeout=80))
    finally:
        pool.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_ranks_need_no_more_than_two(dtype: torch.dtype, exact_malloc: None) -> None:
    block = 16 * MIB  # keys and values of a rank
    heads = block // (2 * S_LOCAL * D * dtype.itemsize)
    two, four = (largest_extra_peak(P, "ring", dtype, heads) for P in (2, 4))
    print(f"{dtype}: P = 2: {two / MIB:.2f} MiB, P = 4: {four / MIB:.2f} MiB, block {block / MIB:.0f} MiB")
    assert two >= 2 * block  # the measurement sees the two buffers
    assert four <= two + BOUND, (two, four)


def test_the_bound_would_catch_an_all_gather(exact_malloc: None) -> None:
    heads = 16 * MIB // (2 * S_LOCAL * D * 4)
    two, four = (largest_extra_peak(P, "all-gather", torch.float32, heads) for P in (2, 4))
    print(f"all-gather: P = 2: {two / MIB:.2f} MiB, P = 4: {four / MIB:.2f} MiB")
    assert four > two + BOUND
