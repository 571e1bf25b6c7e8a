"""One small ring call that is right: what tests spoil something in, and the proof that a group still works.

Tensors are views into buffers whose other entries are NaN, so that a call that writes or reads beside them shows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringattn_ext as ra

B, HQ, HKV, TOKENS, D = 2, 4, 2, 6, 8  # TOKENS: of each rank
INPUTS = ("query", "key", "value")


def padded(tensor: Tensor) -> Tensor:
    """The same values, as a view into a buffer of NaN."""
    buffer = torch.full([size + 2 for size in tensor.shape], float("nan"), dtype=tensor.dtype)
    view = buffer[tuple(slice(1, -1) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


def inputs(
    rank: int,
    world_size: int,
    *,
    seq_len: int | None = None,
    key_seq_len: int | None = None,
    layout: str = "zigzag",
    shape: tuple[int, int, int, int] = (B, HQ, HKV, D),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Query, key, value: whole, and this rank's part of them."""
    seq_len = TOKENS * world_size if seq_len is None else seq_len
    key_seq_len = seq_len if key_seq_len is None else key_seq_len
    b, hq, hkv, d = shape
    generator = torch.Generator().manual_seed(seed)
    whole, parts = [], []
    for heads, length in ((hq, seq_len), (hkv, key_seq_len), (hkv, key_seq_len)):
        whole.append(torch.randn(b, heads, length, d, generator=generator, dtype=torch.float64).to(dtype))
        own = ra.positions(length, layout=layout, rank=rank, world_size=world_size)
        parts.append(padded(whole[-1][:, :, own]))
    return whole, parts


def small_call(rank: int, world_size: int, **changes: Any) -> dict[str, Any]:
    """The arguments of a ring_attention call that is right."""
    _, parts = inputs(rank, world_size)
    call = dict(zip(INPUTS, parts, strict=True)) | {"layout": "zigzag", "seq_len": TOKENS * world_size}
    return call | {"enable_gqa": True} | changes


def buffers(call: dict[str, Any]) -> list[Tensor]:
    """Copies of all memory that the tensors of a call are views into."""
    tensors = [value for value in call.values() if isinstance(value, Tensor) and value.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return [torch.empty(0, dtype=torch.uint8).set_(storage).clone() for storage in storages]


def attempt(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """What calling it ends in: the name of the exception's type, and its text. ("", "") if nothing was raised."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        name = type(error).__name__
        assert isinstance(error, ra.RingError) == (name == "RingError")
        return name, str(error)
    return "", ""


def prove(group: Any = None, seed: int = 1) -> None:
    """A causal call on the group, forward and backward, against dense attention."""
    on_ring = dist.is_initialized()
    rank = dist.get_rank(group) if on_ring and not isinstance(group, str) else 0
    world_size = dist.get_world_size(group) if on_ring and not isinstance(group, str) else 1
    prove_at(rank, world_size, group, seed)


def prove_at(rank: int, world_size: int, group: Any, seed: int = 1) -> None:
    """prove, for a group that does not say its rank and size."""
    whole, parts = inputs(rank, world_size, seed=seed)
    leaves = [part.detach().requires_grad_() for part in parts]
    out = ra.ring_attention(*leaves, group=group, is_causal=True, enable_gqa=True)
    references = [tensor.double().requires_grad_() for tensor in whole]
    dense = F.scaled_dot_product_attention(*references, is_causal=True, enable_gqa=True)
    weights = torch.randn(dense.shape, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
    own = ra.positions(whole[0].shape[2], rank=rank, world_size=world_size)
    gradients = torch.autograd.grad((out * weights[:, :, own].float()).sum(), leaves)
    expected = torch.autograd.grad((dense * weights).sum(), references)
    results = {"out": (out, dense)} | {name: pair for name, *pair in zip(INPUTS, gradients, expected, strict=True)}
    for name, (got, wanted) in results.items():
        assert_near(got, wanted[:, :, own], f"{name}, seed {seed}")


def assert_near(got: Tensor, wanted: Tensor, what: str = "") -> None:
    """As torch.testing.assert_close, which in every rank would first import half of torch."""
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    worst = ((got.double() - wanted.double()).abs() - 1e-3 * wanted.double().abs()).nan_to_num(nan=torch.inf)
    assert worst.numel() == 0 or worst.max() <= 1e-4, f"{what}: off by {worst.max():.2g} beyond tolerance"
