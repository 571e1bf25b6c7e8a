"""A ring of two ranks beside one process with two threads, and beside the pip package ring-attention-pytorch.

The processes of both sides stay up and take turns, so that noise hits both alike. A pass is measured in every rank from
a barrier on, and counts as long as the slowest.

The gradients of keys and values that ring-attention-pytorch 0.5.20 computes on a ring are wrong (it takes the buffer
received and the buffer sent for the one and the other), which its lines count; its work is that of a right ring.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn_ext as ra

from .cases import DTYPES
from .checks import Count, check, exact
from .local import Sizes
from .measure import Run, alternate, seconds
from .result import Result
from .workers import Workers

PEER = "ring-attention-pytorch"
RANKS = 2
RING_BAR = 0.9
PEER_BARS = {False: 1.9, True: 6.5}  # full, causal
PEER_BUCKET = 512  # the default of its module


@dataclass(frozen=True)
class RingCase:
    group: str  # ring or peer
    dtype: str
    tokens: int
    heads: int
    head_dim: int
    causal: bool
    layout: str
    backward: bool
    bar: float

    @property
    def name(self) -> str:
        passes = "forward+backward" if self.backward else "forward"
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} {passes} {'' if self.group == 'peer' else self.layout + ' '}{mask}"

    @property
    def threads(self) -> int:
        return RANKS

    @property
    def flop(self) -> float:
        pairs = self.tokens**2 * (0.5 if self.causal else 1.0)
        return 4 * self.heads * pairs * self.head_dim * (3.5 if self.backward else 1.0)


def ring_cases(sizes: Sizes) -> Iterator[RingCase]:
    for causal, layout in ((False, "contiguous"), (True, "zigzag")):
        yield RingCase("ring", "bf16", sizes.ring_tokens, 8, 64, causal, layout, True, RING_BAR)


def peer_cases(sizes: Sizes) -> Iterator[RingCase]:
    for backward in (False, True):
        for causal in (False, True):
            yield RingCase("peer", "fp32", sizes.peer_tokens, 4, 64, causal, "zigzag", backward, PEER_BARS[causal])


def peer_obstacle() -> str | None:
    """Why the peer cannot be measured; None if it can."""
    if importlib.util.find_spec("ring_attention_pytorch") is None:
        return f"{PEER} is not installed; `make bench-peers` and `make bench PEERS=1` bring it"
    return None


# --- in the workers ---

_runs: dict[str, Run] = {}  # what a process measures, by side


def prepare(case: RingCase, side: str, seed: int) -> Count:
    """Makes the run of a side: "whole", "ring" or "peer". Returns what rank 0 found wrong."""
    torch.manual_seed(seed)
    shape = (1, case.heads, case.tokens, case.head_dim)
    whole = [torch.randn(shape).to(DTYPES[case.dtype]) for _ in range(4)]
    run = {"whole": _whole, "ring": _ring, "peer": _peer}[side](case, whole)
    results = run()
    _runs[side] = run
    layout = "contiguous" if side == "peer" else case.layout
    if side == "peer":
        results = [result.transpose(1, 2) for result in results]
    if side != "whole":
        results = [ra.unshard(result.detach(), 2, layout=layout) for result in results]
        if dist.get_rank() > 0:
            return Count(0, 0)
    grad_out = whole[3] if case.backward else None
    return check(exact(*whole[:3], grad_out, causal=case.causal), results)


def _with_gradients(attention: Run, leaves: list[Tensor], grad_out: Tensor, backward: bool) -> Run:
    """-> out, or out and the gradients of the leaves."""
    leaves = [leaf.requires_grad_(backward) for leaf in leaves]

    def run() -> list[Tensor]:
        out = attention(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad_out)] if backward else [out]

    return run


def _whole(case: RingCase, whole: list[Tensor]) -> Run:
    return _with_gradients(
        lambda *leaves: ra.ring_attention(*leaves, is_causal=case.causal), whole[:3], whole[3], case.backward
    )


def _ring(case: RingCase, whole: list[Tensor]) -> Run:
    *parts, grad_out = (ra.shard(tensor, 2, layout=case.layout) for tensor in whole)

    def attention(*leaves: Tensor) -> Tensor:
        return ra.ring_attention(*leaves, layout=case.layout, is_causal=case.causal)

    return _with_gradients(attention, parts, grad_out, case.backward)


def _peer(case: RingCase, whole: list[Tensor]) -> Run:
    """Its own order of dimensions: [B, S, H, D]. Contiguous parts: it does all of the work under a causal mask whatever
    the layout is, and masks fewer tiles so."""
    from ring_attention_pytorch import ring_flash_attn

    parts = [ra.shard(tensor, 2, layout="contiguous").transpose(1, 2).contiguous() for tensor in whole]

    def attention(*leaves: Tensor) -> Tensor:
        return ring_flash_attn(*leaves, causal=case.causal, bucket_size=PEER_BUCKET, ring_reduce_col=True)

    return _with_gradients(attention, parts[:3], parts[3], case.backward)


def timed(side: str) -> float:
    if dist.is_initialized():
        dist.barrier()
    return seconds(_runs[side])


# --- here ---


def measure(case: RingCase, ring: Workers, other: Workers, pairs: int) -> Result:
    """The ranks of `ring`, and the workers of the other side, which may be the same."""
    side, name = ("peer", PEER) if case.group == "peer" else ("whole", "one process")
    seed = int(torch.randint(2**31, ()))
    count, other_count = ring.call(prepare, case, "ring", seed)[0], other.call(prepare, case, side, seed)[0]
    times = alternate(lambda: max(ring.call(timed, "ring")), lambda: max(other.call(timed, side)), pairs)
    return Result(
        case.group, case.name, case.threads, times.seconds, case.flop / times.seconds, "GFLOP/s", name, times.ratio,
        case.bar, wrong=count.wrong, checked=count.checked, other_wrong=other_count.wrong,
    )  # fmt: skip


def results(cases: list[RingCase], sizes: Sizes) -> Iterator[Result]:
    """Of one group."""
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(Workers(RANKS, 1))
        other = ring if cases[0].group == "peer" else stack.enter_context(Workers(1, RANKS))
        for case in cases:
            yield measure(case, ring, other, sizes.pairs)
