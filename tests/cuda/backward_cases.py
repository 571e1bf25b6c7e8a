"""What a ring computes in backward, on the emulated GPU, and how far its gradients are from the exact ones."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from cases import Case
from reference import attention, dense, flash, term_norms
from torch import Tensor

from ringattn_ext._C import Layout

from .block import NAMES, Device, Report, launch
from .ring import Segments, mask_fields, positions, scale_of, segments_of
from .tensors import place

ACCUMULATORS = ("contiguous", "transposed", "wide", "packed")


class Gradients(NamedTuple):
    """dq [B, Hq, Sq, D], dk and dv [B, Hkv, Skv, D] in float32, or None for one that is not wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


def accumulator(x: Tensor, how: str) -> Tensor:
    """The values of x in other memory. What lies between and around them is -0.0, which no addition leaves as it is."""
    view = place(x, how)
    room = view if view._base is None else view._base
    room.fill_(-0.0)
    view.copy_(x)
    return view


def assert_nothing_added_around(view: Tensor) -> None:
    """Overwrites the view."""
    view.fill_(-0.0)
    room = view if view._base is None else view._base
    assert bool((room.view(torch.int32) == -(2**31)).all()), "written beside the accumulator"


def surrounded(x: Tensor) -> Tensor:
    """A contiguous copy with NaN before and behind."""
    room = torch.full((x.numel() + 80,), torch.nan)
    view = room[37 : 37 + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def statistics(tensors: tuple[Tensor, ...], mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """minus_lse_log2 and minus_delta [B, Hq, Sq] of exact attention, rounded once."""
    query, key, value, grad_out = (t.double() for t in tensors[:4])
    out, lse = attention(query, key, value, mask, scale)
    minus_lse_log2 = torch.where(lse == -torch.inf, -torch.inf, -lse * math.log2(math.e))
    return minus_lse_log2.float(), -(out * grad_out).sum(-1).float()


@dataclass
class Backward:
    """The launches of a backward pass over whole tensors (query, key, value, grad_out)."""

    case: Case
    tensors: tuple[Tensor, ...]
    device: Device
    deterministic: bool = True
    strides: str = "contiguous"
    accumulators: str = "contiguous"
    mask: Tensor | None = None  # [Sq, Skv] where it is not that of the case
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mask = self.case.mask if self.mask is None else self.mask
        self.statistics = statistics(self.tensors, self.mask, scale_of(self.case))

    def zeros(self) -> Gradients:
        query, key, value = (torch.zeros(t.shape) for t in self.tensors[:3])
        return Gradients(query, key, value)

    def add(
        self,
        local: tuple[Tensor, ...],
        segments: tuple[Segments, Segments],
        gradients: Gradients,
        statistics: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Adds what the queries and keys in `segments` give; local: their query, key, value and grad_out."""
        query, key, value, grad_out = local
        if statistics is None:
            own = positions(segments[0])
            statistics = tuple(t[:, :, own] for t in self.statistics)
        minus_lse_log2, minus_delta = (surrounded(t) for t in statistics)
        self.reports += launch(
            "backward", self.device, dtype=NAMES[query.dtype], B=query.shape[0], Hq=query.shape[1], Hkv=key.shape[1],
            Sq=query.shape[2], Skv=key.shape[2], D=query.shape[3], scale=scale_of(self.case), query=query, key=key,
            value=value, grad_out=grad_out, query_segments=segments[0], key_segments=segments[1],
            minus_lse_log2=minus_lse_log2, minus_delta=minus_delta, grad_query=gradients.dq, grad_key=gradients.dk,
            grad_value=gradients.dv, deterministic=self.deterministic, **mask_fields(self.case),
        )  # fmt: skip

    def whole(self, gradients: Gradients | None = None) -> Gradients:
        """All queries and keys in one call."""
        gradients = self.zeros() if gradients is None else gradients
        local = tuple(place(t, self.strides) for t in self.tensors[:4])
        self.add(local, ([(0, 1, self.case.S)], [(0, 1, self.case.key_len)]), gradients)
        return gradients

    def ring(self, layout: Layout) -> Gradients:
        """Every rank's queries against every block of keys, in any order, each gradient in an accumulator of its own.

        Accumulators start from numbers that are taken off again at the end.
        """
        ranks = range(layout.world_size)
        segments = [segments_of(layout, rank) for rank in ranks]
        own = [positions(s) for s in segments]
        local = [[place(t[:, :, p], self.strides) for t in self.tensors[:4]] for p in own]
        shapes = [[t.shape for t in tensors[:3]] for tensors in local]
        starts = [[torch.randn(shape) / 8 for shape in one] for one in shapes]
        sums = [[accumulator(x, self.accumulators) for x in one] for one in starts]
        for query, key in random.sample([(i, j) for i in ranks for j in ranks], len(ranks) ** 2):
            parts = (local[query][0], local[key][1], local[key][2], local[query][3])
            gradients = Gradients(sums[query][0], sums[key][1], sums[key][2])
            self.add(parts, (segments[query], segments[key]), gradients)
        found = self.zeros()
        for rank in ranks:
            for whole, total, start in zip(found, sums[rank], starts[rank], strict=True):
                whole[:, :, own[rank]] = total - start
                assert_nothing_added_around(total)
        return found


def ratios(one: Backward, got: Gradients, noise: float = 0.0) -> dict[str, float]:
    """For each gradient: the error of its final cast over the larger of two others, on the whole sequence.

    The two: that of the flash backend on the same inputs, and that of rounding the exact gradient once. Errors below
    what float32 makes of the terms of a gradient count as that much. noise: of the terms, where the scores are large.
    """
    query, key, value, grad_out = one.tensors[:4]
    scale, mask = scale_of(one.case), one.mask
    inputs = (query, key, value, grad_out, torch.zeros(query.shape[:3]))
    exact, terms = dense(inputs, mask, scale), term_norms(inputs, mask, scale)
    sees = mask.any(-1)
    other = (
        flash((query[:, :, sees], key, value, grad_out[:, :, sees]), mask[sees], scale) if bool(sees.any()) else None
    )
    found = {}
    for name, ours in got._asdict().items():
        if ours is None:
            continue
        reference = getattr(exact, name)
        rounded = ours.to(query.dtype).double()
        allowed = float((reference.to(query.dtype).double() - reference).norm())
        allowed = max(allowed, (1e-6 + noise) * terms.get(name, float(reference.norm())))
        if other is not None:
            theirs = getattr(other, name).double()
            expected = reference[:, :, sees] if name == "dq" else reference
            allowed = max(allowed, float((theirs - expected).norm()))
        error = float((rounded - reference).norm())
        found[name] = 0.0 if error == 0 else error / allowed if error == error and allowed > 0 else float("inf")
    return found


def check(one: Backward, got: Gradients, note: object = "", noise: float = 0.0) -> None:
    """The fewer elements, the more is chance."""
    assert all(bool(t.isfinite().all()) for t in got if t is not None), f"not finite {note} {one.case} {one.device}"
    if got.dq is not None:
        assert bool((got.dq[:, :, ~one.mask.any(-1)] == 0).all()), f"a row that sees nothing has a gradient {note}"
    for name in ("dk", "dv"):
        if getattr(got, name) is not None:
            unseen = getattr(got, name)[:, :, ~one.mask.any(0)]
            assert bool((unseen == 0).all()), f"{name} of a key that nobody sees {note}"
    for name, ratio in ratios(one, got, noise).items():
        size = max(getattr(got, name).numel(), 1)
        limit = 1.5 if size >= 4096 else 1.5 + 12 / size**0.5
        assert ratio <= limit, (name, ratio, limit, one.case, one.device, one.deterministic, one.strides, note)
