"""shard, unshard and positions: inverse to each other, exact for every type, along every dimension, in both passes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS
from ranks import run_ranks
from reference import same_bits
from torch import Tensor

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(120)
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def positions_by_definition(S: int, layout: str, rank: int, P: int) -> list[int]:
    if P == 1:
        return list(range(S))
    if layout == "striped":
        return list(range(rank, S, P))
    chunks, mine = (P, [rank]) if layout == "contiguous" else (2 * P, [rank, 2 * P - 1 - rank])
    return [p for c in mine for p in range(c * S // chunks, (c + 1) * S // chunks)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions(layout: str) -> None:
    for P in (1, 2, 3, 4, 7, 16):
        for S in (0, 1, 2, 7, 16, random.randint(17, 300)):
            parts = [ra.positions(S, layout=layout, rank=rank, world_size=P) for rank in range(P)]
            for rank, part in enumerate(parts):
                assert part.dtype == torch.int64 and part.device.type == "cpu"
                assert part.tolist() == positions_by_definition(S, layout, rank, P)
            assert torch.cat(parts).sort().values.tolist() == list(range(S))


def test_default_layout_is_zigzag() -> None:
    assert ra.positions(8, rank=0, world_size=2).tolist() == [0, 1, 6, 7]


def whole_tensor(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def round_trip(shape: list[int], dim: int, dtype: torch.dtype, layout: str, seed: int) -> None:
    whole = whole_tensor(shape, dtype, seed)
    if seed % 2 and whole.dim() > 1:
        whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
    S = whole.shape[dim]
    own = ra.positions(S, layout=layout)
    expected = positions_by_definition(S, layout, dist.get_rank(), dist.get_world_size())
    assert own.tolist() == expected
    part = ra.shard(whole, dim, layout=layout)
    assert part.is_contiguous() and same_bits(part, whole.index_select(dim, own))
    assert part.numel() == 0 or part.data_ptr() != whole.data_ptr()  # new, also in a ring of one
    again = ra.unshard(part, dim, layout=layout, seq_len=S)
    assert again.is_contiguous() and same_bits(again, whole)
    if whole.dim() > 1:
        strided = part.transpose(0, -1).contiguous().transpose(0, -1)
        assert same_bits(ra.unshard(strided, dim, layout=layout, seq_len=S), whole)
    if S % (2 * dist.get_world_size()) == 0:
        assert same_bits(ra.unshard(part, dim, layout=layout), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_round_trip(P: int, layout: str) -> None:
    for dtype in DTYPES:
        shape = [random.randint(1, 4) for _ in range(random.randint(1, 4))]
        dim = random.randrange(-len(shape), len(shape))
        shape[dim] = random.choice((0, 1, P - 1, 7, 2 * P * random.randint(1, 5), random.randint(10, 60)))
        run_ranks(P, round_trip, shape, dim, dtype, layout, random.randrange(2**31))


def check_backward(shape: list[int], dim: int, layout: str, seed: int) -> None:
    """shard's backward assembles the whole gradient everywhere; unshard's takes this rank's part."""
    whole = whole_tensor(shape, torch.float64, seed).requires_grad_()
    weights = whole_tensor(shape, torch.float64, seed + 1)
    S = shape[dim]
    own = ra.positions(S, layout=layout)
    part = ra.shard(whole, dim, layout=layout)
    (part * weights.index_select(dim, own)).sum().backward()
    assert whole.grad is not None and same_bits(whole.grad, weights)

    leaf = part.detach().requires_grad_()
    (ra.unshard(leaf, dim, layout=layout, seq_len=S) * weights).sum().backward()
    assert leaf.grad is not None and same_bits(leaf.grad, weights.index_select(dim, own))

    whole.grad = None
    ra.unshard(ra.shard(whole, dim, layout=layout).square(), dim, layout=layout, seq_len=S).sum().backward()
    assert whole.grad is not None and torch.equal(whole.grad, 2 * whole.detach())

    leaf.grad = None
    ra.unshard(leaf, dim, layout=layout, seq_len=S).sum().backward()  # a gradient of stride 0
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.ones_like(leaf))
    whole.grad = None
    ra.shard(whole, dim, layout=layout).sum().backward()
    assert whole.grad is not None and torch.equal(whole.grad, torch.ones_like(whole))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_backward(P: int, layout: str) -> None:
    for _ in range(3):
        shape = [random.randint(1, 4) for _ in range(random.randint(1, 4))]
        dim = random.randrange(-len(shape), len(shape))
        shape[dim] = random.choice((1, 7, random.randint(10, 60)))
        run_ranks(P, check_backward, shape, dim, layout, random.randrange(2**31))


def check_gradcheck(layout: str, seed: int) -> bool:
    whole = whole_tensor([2, 7, 2], torch.float64, seed).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return ra.unshard(ra.shard(x, 1, layout=layout).sin(), 1, layout=layout, seq_len=7)

    return torch.autograd.gradcheck(function, whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(layout: str) -> None:
    assert run_ranks(2, check_gradcheck, layout, random.randrange(2**31)) == [True, True]


def test_not_distributed() -> None:
    x = torch.randn(3, 7)
    for layout in LAYOUTS:
        assert ra.positions(7, layout=layout).tolist() == list(range(7))
        part = ra.shard(x, -1, layout=layout)
        assert torch.equal(part, x) and part.data_ptr() != x.data_ptr()
        assert torch.equal(ra.unshard(part, -1, layout=layout), x)
