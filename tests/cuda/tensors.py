"""Tensors for the kernels of csrc/cuda: in many memory layouts, with NaN wherever nothing may be read or written."""

from __future__ import annotations

import random

import torch
from cases import restride
from reference import same_bits
from torch import Tensor

STRIDES = ("contiguous", "transposed", "packed", "padded", "wide", "shifted")


def place(x: Tensor, how: str) -> Tensor:
    """The values of x [B, H, S, D] in other memory; what lies between and around them is NaN.

    packed: a slice of [B, S, 3, H, D]; padded: rows start anywhere; wide: a slice in every dimension whose rows start
    at multiples of 16 bytes; shifted: as wide, but one element further.
    """
    if how not in ("wide", "shifted"):
        return restride(x, how)
    B, H, S, D = x.shape
    shift = how == "shifted"
    room = x.new_full((B + 1, H + 2, S + 1, D + 8 + 8 * shift), torch.nan)
    view = room[:B, 1 : H + 1, 1:, 8 - shift : D + 8 - shift]
    view.copy_(x)
    return view


def place_anyhow(x: Tensor) -> Tensor:
    return place(x, random.choice(STRIDES))


def place_expanded(x: Tensor) -> Tensor:
    """The first head (and batch) of x for all of them, with strides of 0."""
    B = random.choice((1, x.shape[0]))
    return place(x[:B, :1], random.choice(("contiguous", "transposed"))).expand(x.shape)


def unwritten(shape: tuple[int, ...], dtype: torch.dtype, how: str = "contiguous") -> Tensor:
    """NaN, in a room of NaN."""
    nothing = torch.full(shape, torch.nan, dtype=dtype)
    return nothing if how == "contiguous" else place(nothing, how)


def assert_nothing_written_around(view: Tensor) -> None:
    """Only the view itself may differ from NaN in the memory that it lies in. Overwrites the view."""
    view.fill_(torch.nan)
    room = view if view._base is None else view._base
    assert bool(room.isnan().all()), "written beside the tensor"


def assert_same(a: Tensor, b: Tensor, note: object = "") -> None:
    assert same_bits(a.contiguous(), b.contiguous()), f"bits differ by up to {(a - b).abs().max()} {note}"
