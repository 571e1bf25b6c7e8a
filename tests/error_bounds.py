"""How near a result must be to the exact one, number by number, whatever the data are.

A sum rounds relative to the sum of the absolute values of its terms, so an error is judged against that. Allowed are:

- one unit of the input type (2^-8 for bfloat16, 2^-11 for float16) for every rounding to it on the way: of the
  probabilities and of out itself for out; of these, of dS and of the gradient itself for gradients; none for lse;
- 64 epsilons of the accumulation type for the sums: at most 150 terms, whose errors add up as their square root as a
  rule, with all terms equal as their number, and a ring's steps add a few;
- what exp makes of the error of a score, which is an epsilon of the sum of the absolute products in it: 8 of them for
  forward, backward and the reference itself.

For ordinary inputs that is what the other tests ask for: 1e-5 in float32 (they: 2e-5), 2e-14 in float64 (1e-10).

A weight or a gradient of one that is rounded to the input type has no digits below its smallest normal number, and so
have results; the instruction for products of bfloat16 pairs takes numbers below 2^-126 for 0, and what multiplies them
later may be large. exp of the accumulation type gives 0 where it has no normal number, so that such a weight is lost
whole, not an epsilon of it. Results above half the largest float16 may overflow, and are not judged.
"""

from __future__ import annotations

import torch
from configurations import Configuration, Found
from reference import Result, attention, dense
from torch import Tensor

ROUNDINGS = {"out": 2, "lse": 0, "dq": 4, "dk": 4, "dv": 4}
UNIT = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {
    torch.float64: 2.0**-1022,
    torch.float32: 2.0**-126,
    torch.bfloat16: 2.0**-100,
    torch.float16: 2.0**-14,
}
LOST = {dtype: max(size, 2.0**-970 if dtype == torch.float64 else 2.0**-100) for dtype, size in SMALLEST.items()}


def terms(tensors: tuple[Tensor, ...], mask: Tensor, scale: float) -> tuple[Result, float]:
    """For every number of a result the sum of the absolute values of its terms, 0 where it has none; and the largest
    such sum of a score."""
    smallest = SMALLEST[tensors[0].dtype]
    query, key, value, grad_out, grad_lse = (t.detach().double() for t in tensors)
    _, lse = attention(query, key, value, mask, scale)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = (scale * (query @ key.transpose(-1, -2))).masked_fill(~mask, -torch.inf)
    weights = torch.exp(scores - lse.masked_fill(~mask.any(-1), 0.0)[..., None])
    weights = weights.clamp(min=LOST[tensors[0].dtype]) * mask
    query, key, value, grad_out = (t.abs() for t in (query, key, value, grad_out))
    sizes = scale * (query @ key.transpose(-1, -2)) * mask
    out = weights @ value
    delta = (grad_out * out).sum(-1) + grad_lse.abs()
    ds = weights * (grad_out @ value.transpose(-1, -2) + delta[..., None])
    ds = ds.clamp(min=smallest / min(scale, 1.0)) * mask
    rows, columns = (smallest * mask.any(dim)[:, None].double() for dim in (1, 0))
    of_keys = (scale * ds.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad_out)
    dk, dv = (t.unflatten(1, (-1, groups)).sum(2) + columns for t in of_keys)
    largest = sizes.amax(-1) if sizes.shape[-1] else torch.zeros_like(lse)
    result = Result(out + rows, 1.0 + largest, scale * ds @ key + rows, dk, dv)
    return result, float(largest.max()) if largest.numel() else 0.0


def tolerance(name: str, dtype: torch.dtype, largest_score: float) -> float:
    """Of an error relative to the sum of its terms' absolute values."""
    epsilon = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return ROUNDINGS[name] * UNIT[dtype] + epsilon * (64 + 8 * largest_score)


def excess(name: str, got: Tensor, exact: Tensor, sizes: Tensor, allowed: float) -> float:
    """The largest error as a multiple of what is allowed; infinite where only one is NaN or infinite."""
    assert got.shape == exact.shape, (name, got.shape, exact.shape)
    stored, got = got.dtype, got.double()
    error = torch.where(got == exact, 0.0, (got - exact).abs())
    ratio = torch.where(error == 0, 0.0, error / (allowed * sizes)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if stored == torch.float16:
        ratio = ratio[sizes < torch.finfo(stored).max / 2]
    return float(ratio.max()) if ratio.numel() else 0.0


def excesses(configuration: Configuration, found: Found, own: tuple[Tensor, Tensor] | None = None) -> dict[str, float]:
    """Of all tensors of a result, whole or a rank's part. own: the positions of its queries and keys, if a part."""
    case, tensors, found_types = configuration.case, configuration.tensors(), set()
    exact = dense(tensors, case.mask, configuration.scale)
    sizes, largest = terms(tensors, case.mask, configuration.scale)
    ratios = {}
    for name in Found._fields:
        got, reference, size = (getattr(r, name) for r in (found, exact, sizes))
        if got is None:
            continue
        if own is not None:
            reference, size = (t[:, :, own[name in ("dk", "dv")]] for t in (reference, size))
        ratios[name] = excess(name, got, reference, size, tolerance(name, case.dtype, largest))
        if name != "lse":
            found_types.add(got.dtype)
    assert found_types == {case.dtype}
    assert found.lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    wanted = [need and configuration.is_differentiated for need in configuration.needs_grad]
    assert [gradient is not None for gradient in found[2:]] == wanted
    return ratios


def assert_near(configuration: Configuration, found: Found, own: tuple[Tensor, Tensor] | None = None) -> None:
    ratios = excesses(configuration, found, own)
    assert max(ratios.values()) <= 1.0, f"errors, of what is allowed: {ratios}\n{configuration}"
