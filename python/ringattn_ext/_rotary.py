"""Rotary position embedding at explicit positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn_ext._arguments import real, tensor


def rotary(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Rotates the pairs (i, i + D/2) of the last dimension by the angle position * base ** (-2i / D).

    Positions are given, not counted: a rank's tokens keep the angles of their global positions in every layout. Pass
    `ringattn_ext.positions(seq_len, layout=..., group=...)`.

    Args:
        x: [B, H, S, D], D even; float64, float32, bfloat16 or float16.
        positions: [S] or [B, S], whole numbers.
        base: of the angles' geometric sequence, > 0.

    Returns:
        As x. Computed in float32 (float64 for float64) and rounded once. Differentiable in x.

    Raises ValueError for an odd D, shapes that do not fit, or a base that is not finite and > 0; TypeError for x that
    is not floating point or positions that are not whole numbers.

    Source: Su et al.: RoFormer (arXiv:2104.09864), with the halves as in GPT-NeoX.
    """
    x, positions, base = tensor("x", x), tensor("positions", positions), real("base", base)
    if not x.is_floating_point():
        raise TypeError(f"x: expected a floating-point dtype, got {x.dtype}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions: expected an integer dtype, got {positions.dtype}")
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions [B, H, S, D], got {x.dim()}")
    B, _, S, D = x.shape
    if D % 2 != 0:
        raise ValueError(f"x: expected an even last dimension, got {D}")
    if tuple(positions.shape) not in ((S,), (B, S)):
        raise ValueError(f"positions: expected shape [{S}] or [{B}, {S}], got {list(positions.shape)}")
    if not (base > 0 and math.isfinite(base)):
        raise ValueError(f"base: expected a finite number above 0, got {base}")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

    # Angles in float64: float32 has no room for both a large position and its fraction of a turn.
    exponents = torch.arange(0, D, 2, dtype=torch.float64, device=x.device) / D
    angles = positions.to(device=x.device, dtype=torch.float64)[..., None] * base**-exponents
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if positions.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]  # over the heads

    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
