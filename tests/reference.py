"""Dense attention on the whole sequence in float64, written from its definition, and how far a result is from it.

    score[i, j] = scale * q[i] . k[j]     where the mask lets query i see key j
    lse[i]      = ln sum_j exp(score[i, j])
    out[i]      = sum_j exp(score[i, j] - lse[i]) * v[j]

A row that sees no key gives out = 0 and lse = -inf, and has no gradient. Gradients come from autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class Result(NamedTuple):
    """out [B, Hq, S, D], lse [B, Hq, S] and the gradients of (out, lse) for some (grad_out, grad_lse)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def visible(
    Sq: int,
    Skv: int,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: tuple[int, ...] | Tensor | None = None,
) -> Tensor:
    """[Sq, Skv] bool: which keys a query may see, pair by pair from the global positions."""
    i, j = torch.arange(Sq)[:, None], torch.arange(Skv)[None, :]
    mask = torch.ones(Sq, Skv, dtype=torch.bool)
    if is_causal:
        mask &= j <= i
    if window is not None:
        left, right = window
        if left >= 0:
            mask &= j >= i - left
        if right >= 0 and not is_causal:
            mask &= j <= i + right
    if cu_seqlens is not None:
        bounds = [int(bound) for bound in cu_seqlens]
        document = torch.full((max(Sq, Skv),), -1)
        for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            document[start:end] = number
        mask &= document[:Sq, None] == document[None, :Skv]
    return mask


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse). A key that nobody may see must be finite: use attention_by_rows otherwise."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = (scale * (query @ key.transpose(-1, -2))).masked_fill(~mask, -torch.inf)
    sees = mask.any(-1)
    lse = torch.logsumexp(scores.masked_fill(~sees[:, None], 0.0), dim=-1)
    out = torch.exp(scores - lse[..., None]) @ value
    return out, lse.masked_fill(~sees, -torch.inf)


def attention_by_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same, touching only the keys that a row may see, so that NaN and inf in others cannot get in."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    outs, lses = [], []
    for i in range(query.shape[2]):
        seen = mask[i].nonzero()[:, 0]
        if len(seen) == 0:
            outs.append(torch.zeros_like(query[:, :, i]))
            lses.append(torch.full_like(query[:, :, i, 0], -torch.inf))
            continue
        scores = scale * torch.einsum("bhd,bhnd->bhn", query[:, :, i], key[:, :, seen])
        outs.append(torch.einsum("bhn,bhnd->bhd", torch.softmax(scores, dim=-1), value[:, :, seen]))
        top = scores.detach().amax(-1)
        lses.append(top + (scores - top[..., None]).exp().sum(-1).log())  # NaN where softmax is
    return torch.stack(outs, dim=2), torch.stack(lses, dim=2)


def dense(tensors: tuple[Tensor, ...], mask: Tensor, scale: float | None, *, by_rows: bool = False) -> Result:
    """Everything in float64 from (query, key, value, grad_out, grad_lse) of any type."""
    query, key, value, grad_out, grad_lse = (t.detach().double() for t in tensors)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    inputs = [t.clone().requires_grad_() for t in (query, key, value)]
    out, lse = (attention_by_rows if by_rows else attention)(*inputs, mask, scale)
    gradients = torch.autograd.grad((out, lse), inputs, (grad_out, grad_lse), allow_unused=True)
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, gradients, strict=True)]
    return Result(out.detach(), lse.detach(), *found)


def term_norms(tensors: tuple[Tensor, ...], mask: Tensor, scale: float | None) -> dict[str, float]:
    """Norms of the sums of the absolute values of the terms that make up dq and dk.

    Where softmax saturates the terms cancel, and a gradient is a small rest of large numbers.
    """
    query, key, value, grad_out, grad_lse = (t.detach().double() for t in tensors)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = attention(query, key, value, mask, scale)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = (scale * (query @ key.transpose(-1, -2))).masked_fill(~mask, -torch.inf)
    probabilities = torch.exp(scores - lse.masked_fill(~mask.any(-1), 0.0)[..., None])
    delta = (grad_out.abs() * out.abs()).sum(-1, keepdim=True) + grad_lse.abs()[..., None]
    terms = scale * probabilities * (grad_out.abs() @ value.abs().transpose(-1, -2) + delta)
    dk = (terms.transpose(-1, -2) @ query.abs()).unflatten(1, (-1, groups)).sum(2)
    return {"dq": float((terms @ key.abs()).norm()), "dk": float(dk.norm())}


def relative_errors(got: Result, exact: Result, terms: dict[str, float]) -> dict[str, float]:
    """Norm of the error over norm of the exact tensor, for out, lse, dq, dk, dv.

    lse is a logarithm: its error counts against 1 at least. Where a gradient is a small rest of large terms, its error
    is taken relative to those. Rows that saw no key must say so exactly; NaN is an infinite error.
    """
    errors = {}
    for name, ours, reference in zip(Result._fields, got, exact, strict=True):
        assert ours.shape == reference.shape, (name, ours.shape, reference.shape)
        difference = ours.double() - reference
        size = float(reference.norm())
        if name == "lse":
            empty = reference == -torch.inf
            assert bool(((ours == -torch.inf) == empty).all()), "lse: -inf where a row saw keys, or the reverse"
            difference = difference.masked_fill(empty, 0.0)
            size = max(float(reference.masked_fill(empty, 0.0).norm()), reference.numel() ** 0.5)
        elif name in terms and size < 0.01 * terms[name]:
            size = terms[name]
        error = float(difference.norm())
        errors[name] = 0.0 if error == 0 else error / size if error == error and size > 0 else float("inf")
    return errors


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def assert_exact(got: Result, tensors: tuple[Tensor, ...], mask: Tensor, scale: float | None, note: object) -> None:
    """A float64 or float32 result against the dense one."""
    dtype = tensors[0].dtype
    assert got.out.dtype == got.dq.dtype == got.dk.dtype == got.dv.dtype == dtype
    assert got.lse.dtype == dtype
    errors = relative_errors(got, dense(tensors, mask, scale), term_norms(tensors, mask, scale))
    assert max(errors.values()) <= TOLERANCE[dtype], f"{errors}\n{note}"


def flash(tensors: tuple[Tensor, ...], mask: Tensor, scale: float | None) -> Result:
    """What the flash backend of scaled_dot_product_attention gives, forward and backward (lse: none)."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors[:3]]
    Sq, Skv = mask.shape
    causal = Sq == Skv and bool((mask == torch.ones_like(mask).tril()).all())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            *inputs,
            attn_mask=None if causal or bool(mask.all()) else mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=inputs[0].shape[1] != inputs[1].shape[1],
        )
    assert out.grad_fn is not None and "Flash" in type(out.grad_fn).__name__
    return Result(out.detach(), torch.empty(0), *torch.autograd.grad(out, inputs, tensors[3]))


def half_precision_ratios(got: Result, tensors: tuple[Tensor, ...], mask: Tensor, scale: float | None) -> dict:
    """For out, dq, dk, dv in bfloat16 or float16 and grad_lse = 0: our error over the larger of two others.

    The two: that of the flash backend on the same inputs, and that of rounding the exact result once. Errors below
    what float32 makes of the terms of a gradient count as that much.
    """
    assert not bool(tensors[4].any())
    exact, other = dense(tensors, mask, scale), flash(tensors, mask, scale)
    terms = term_norms(tensors, mask, scale)
    ratios = {}
    for name in ("out", "dq", "dk", "dv"):
        reference, ours = getattr(exact, name), getattr(got, name)
        assert ours.dtype == tensors[0].dtype
        error = float((ours.double() - reference).norm())
        allowed = max(
            float((getattr(other, name).double() - reference).norm()),
            float((reference.to(ours.dtype).double() - reference).norm()),
            1e-6 * terms.get(name, 0.0),
        )
        ratios[name] = 0.0 if error == 0 else error / allowed if error == error and allowed > 0 else float("inf")
    return ratios


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits: -0.0 is not 0.0, and a NaN is itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    a, b = (t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return bool((a == b).all())
