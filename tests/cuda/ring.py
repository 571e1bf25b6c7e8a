"""What one rank of a ring computes in forward, on the emulated GPU, and how far that is from the exact result."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from cases import Case
from reference import attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn_ext._C import Layout

from .block import INFINITE, NAMES, Device, Report, launch
from .tensors import assert_nothing_written_around, place, unwritten

Segments = list[tuple[int, int, int]]  # start, stride, length


def segments_of(layout: Layout, rank: int) -> Segments:
    return [(s.start, s.stride, s.length) for s in layout.segments(rank)]


def cut(segments: Segments, first: int, last: int) -> Segments:
    """The tokens [first, last) in local order."""
    found, before = [], 0
    for start, stride, length in segments:
        a, b = max(first - before, 0), min(last - before, length)
        if a < b:
            found.append((start + stride * a, stride, b - a))
        before += length
    return found


def positions(segments: Segments) -> list[int]:
    return [p for start, stride, length in segments for p in range(start, start + stride * length, stride)]


def mask_fields(case: Case) -> dict:
    left, right = case.window or (-1, -1)
    bounds = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, dtype=torch.int32)
    return {
        "key_count": case.key_len,
        "left": INFINITE if left < 0 else left,
        "right": 0 if case.is_causal else INFINITE if right < 0 else right,
        "document_bounds": bounds,
        "document_count": None if bounds is None else len(bounds) - 1,
    }


def scale_of(case: Case) -> float:
    return case.D**-0.5 if case.scale is None else case.scale


@dataclass
class Pass:
    """The queries of one rank, and the calls that absorb keys into them. Outputs and state are NaN before."""

    case: Case
    query: Tensor
    segments: Segments
    device: Device
    out_strides: str = "contiguous"
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = tuple(self.query.shape)
        self.state = tuple(unwritten(s, torch.float32) for s in (shape, shape[:3], shape[:3]))
        self.out, self.lse = unwritten(shape, self.query.dtype, self.out_strides), unwritten(shape[:3], torch.float32)

    def fields(self) -> dict:
        B, Hq, Sq, D = self.query.shape
        o, m, l = self.state  # noqa: E741
        return {
            "dtype": NAMES[self.query.dtype], "B": B, "Hq": Hq, "Hkv": self.case.Hkv, "Sq": Sq, "D": D,
            "scale": scale_of(self.case), "query": self.query, "query_segments": self.segments, "o": o, "m": m, "l": l,
            "out": self.out, "lse": self.lse, **mask_fields(self.case),
        }  # fmt: skip

    def absorb(self, key: Tensor, value: Tensor, segments: Segments, load: bool, store: bool, finalize: bool) -> None:
        self.reports += launch(
            "forward", self.device, **self.fields(), key=key, value=value, Skv=key.shape[2], key_segments=segments,
            load_state=load, store_state=store, finalize=finalize,
        )  # fmt: skip

    def finalize(self) -> None:
        self.reports += launch("finalize", self.device, **self.fields())


def error_ratio(got: Tensor, tensors: tuple[Tensor, ...], mask: Tensor, scale: float, noise: float = 0.0) -> float:
    """The error of an output over the larger of two: of the flash backend, and of rounding the exact one once.

    noise: what float32 leaves uncertain in the exponents, which others may be lucky with.
    """
    query, key, value = tensors[:3]
    exact, lse = attention(query.double(), key.double(), value.double(), mask, scale)
    sees = mask.any(-1)[:, None]
    allowed = float((exact.to(got.dtype).double() - exact).norm())
    if key.shape[2] > 0 and query.shape[2] > 0:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            flash = F.scaled_dot_product_attention(
                query.contiguous(), key.contiguous(), value.contiguous(), attn_mask=mask, scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip
        allowed = max(allowed, float((torch.where(sees, flash.double(), 0.0) - exact).norm()))
    allowed += noise * float(exact.norm())
    error = float((got.double() - exact).norm())
    return 0.0 if error == 0 else error / allowed if error == error and allowed > 0 else float("inf")


def check_pass(one: Pass, tensors: tuple[Tensor, ...], mask: Tensor, note: object, noise: float = 0.0) -> float:
    """A pass against the whole sequence; mask: [its queries, all keys]. The fewer elements, the more is chance."""
    limit = 1.5 if one.out.numel() >= 4096 else 1.5 + 12 / max(one.out.numel(), 1) ** 0.5
    scale = scale_of(one.case)
    nothing = ~mask.any(-1)
    assert bool((one.out[:, :, nothing] == 0).all()), f"a row that sees nothing has an output {note}"
    assert bool((one.lse[:, :, nothing] == -torch.inf).all()), f"a row that sees nothing has an lse {note}"
    _, lse = attention(tensors[0].double(), tensors[1].double(), tensors[2].double(), mask, scale)
    difference = (one.lse.double() - lse)[:, :, ~nothing]
    size = max(float(lse[:, :, ~nothing].norm()), difference.numel() ** 0.5)
    error = float(difference.norm())
    assert error <= 2e-5 * size, f"lse is wrong by {error / max(size, 1e-30)} {note}"
    ratio = error_ratio(one.out, tensors, mask, scale, noise)
    assert ratio <= limit, f"the error is {ratio} times that of others {note}"
    return ratio


def random_device(archs: tuple[int, ...] = (80, 89)) -> Device:
    return Device(random.choice(archs), random.choice(("early", "late", "random")), random.randrange(5))


def check_rank(
    case: Case, tensors: tuple[Tensor, ...], layout: Layout, rank: int, device: Device, strides: str
) -> None:
    """Runs a rank and compares."""
    one = run_ring(case, tensors, layout, rank, device, strides)
    own = positions(one.segments)
    note = (case, layout.kind, layout.world_size, rank, device, strides)
    check_pass(one, (tensors[0][:, :, own], *tensors[1:3]), case.mask[own], note)
    assert_nothing_written_around(one.out)


def run_ring(case: Case, tensors: tuple[Tensor, ...], layout: Layout, rank: int, device: Device, strides: str) -> Pass:
    """Rank `rank` absorbs all blocks in random order, each in one to three calls; the last one may finalize."""
    query, key, value = tensors[:3]
    own = segments_of(layout, rank)
    one = Pass(case, place(query[:, :, positions(own)], strides), own, device, strides)
    calls = []
    for block in random.sample(range(layout.world_size), layout.world_size):
        segments = segments_of(layout, block)
        chosen = positions(segments)
        local_key, local_value = place(key[:, :, chosen], strides), place(value[:, :, chosen], strides)
        cuts = sorted(random.choices(range(len(chosen) + 1), k=random.choice((0, 0, 1, 2))))
        for first, last in zip((0, *cuts), (*cuts, len(chosen)), strict=True):
            keys, values = local_key[:, :, first:last], local_value[:, :, first:last]
            calls.append((keys, values, cut(segments, first, last)))
    by_kernel = random.random() < 0.3
    for i, call in enumerate(calls):
        last = i == len(calls) - 1
        one.absorb(*call, load=i > 0, store=not last or by_kernel or random.random() < 0.3,
                   finalize=last and not by_kernel)  # fmt: skip
    if by_kernel:
        one.finalize()
    return one
