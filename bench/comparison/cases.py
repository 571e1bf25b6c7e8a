"""The cases that one process measures, as data, with the bars they should reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
HEADS = 8

# How many times faster than torch, for head_dim 64 and 128: full mask, causal mask.
BARS: dict[tuple[str, str], dict[int, tuple[float | None, float | None]]] = {
    ("bf16", "forward"): {64: (2.2, 2.4), 128: (2.2, 2.4)},
    ("bf16", "backward"): {64: (1.5, 1.6), 128: (1.4, 1.5)},
    ("fp32", "forward"): {64: (1.15, 1.25), 128: (1.1, 1.2)},
    ("fp32", "backward"): {64: (1.2, 1.25), 128: (1.08, 1.12)},
    ("fp16", "forward"): {64: (1.5, None), 128: (1.3, None)},
    ("fp16", "backward"): {64: (8.0, None), 128: (8.0, None)},
}
PRODUCT_SHARE = 0.8  # of the matrix product's rate, for bf16 forward
CARRIED_BAR = 1 / 1.03  # a state that is there costs at most 3 %
RESTRICTED_BAR = 1.0


@dataclass(frozen=True)
class Case:
    group: str  # attention, carried, decode or avx2
    dtype: str
    direction: str  # forward or backward
    head_dim: int
    causal: bool
    threads: int
    queries: int
    keys: int
    heads: int = HEADS
    bar: float | None = None
    share_bar: float | None = None

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        what = {"decode": f"decode {self.queries} row{'s' if self.queries > 1 else ''}", "carried": "carried"}.get(
            self.group, self.direction
        )
        return f"{self.dtype} {what} D={self.head_dim} {'' if self.group == 'decode' else mask}".rstrip()

    @property
    def flop(self) -> float:
        """Forward 4 per pair and dimension, backward 2.5 times as many; under a causal mask half of it."""
        pairs = self.queries * self.keys * (0.5 if self.causal else 1.0)
        return 4 * self.heads * pairs * self.head_dim * (2.5 if self.direction == "backward" else 1.0)

    @property
    def key_bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.heads * self.keys * self.head_dim * DTYPES[self.dtype].itemsize


def bar_of(dtype: str, direction: str, head_dim: int, causal: bool) -> float | None:
    return BARS[dtype, direction].get(head_dim, (None, None))[causal]


def attention_cases(threads: int, tokens: int) -> Iterator[Case]:
    """Forward and backward beside torch."""
    for dtype in DTYPES:
        for head_dim in (64, 128):
            for direction in ("forward", "backward"):
                for causal in (False, True):
                    yield Case(
                        "attention", dtype, direction, head_dim, causal, threads, tokens, tokens,
                        bar=bar_of(dtype, direction, head_dim, causal),
                        share_bar=PRODUCT_SHARE if (dtype, direction) == ("bf16", "forward") else None,
                    )  # fmt: skip


def carried_cases(threads: int, tokens: int) -> Iterator[Case]:
    """A block that continues a state, beside the same block that starts from nothing."""
    for dtype in ("bf16", "fp32"):
        for head_dim in (64, 128):
            for causal in (False, True):
                yield Case("carried", dtype, "forward", head_dim, causal, threads, tokens, tokens, bar=CARRIED_BAR)


def decode_cases(threads: int, keys: int) -> Iterator[Case]:
    """Few queries and many keys, beside torch; the rate is that of reading keys and values."""
    for dtype in ("bf16", "fp32"):
        for head_dim in (64, 128):
            for queries in (1, 4, 16):
                yield Case("decode", dtype, "forward", head_dim, False, threads, queries, keys)


def restricted_cases(threads: int, tokens: int) -> Iterator[Case]:
    """Both sides restricted to AVX2; see restricted.py."""
    for head_dim in (64, 128):
        for direction in ("forward", "backward"):
            for causal in (False, True):
                yield Case(
                    "avx2", "fp32", direction, head_dim, causal, threads, tokens, tokens, bar=RESTRICTED_BAR
                )  # fmt: skip
