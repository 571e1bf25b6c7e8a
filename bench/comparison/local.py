"""Measures the cases of one process: makes inputs, checks results, then times ours and the other alternately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ringattn_ext as ra

from .cases import DTYPES, Case
from .checks import Count, check, exact
from .measure import Run, compare, memory_rate, product_rate
from .result import Result

PAIRS, PAIRS_WITHOUT_BAR = 7, 3


class Sizes(NamedTuple):
    tokens: int = 4096
    decode_keys: int = 65536
    product: int = 4096
    memory: int = 1 << 28
    ring_tokens: int = 16384
    peer_tokens: int = 8192
    pairs: int = PAIRS


QUICK = Sizes(tokens=256, decode_keys=512, product=256, memory=1 << 22, ring_tokens=512, peer_tokens=512, pairs=2)


class Prepared(NamedTuple):
    ours: Run
    other: Run
    other_name: str
    count: Count
    other_count: Count
    before_ours: Run | None = None  # puts back what a run changes


def inputs(case: Case) -> list[Tensor]:
    """query, key, value and the gradient of out; as many queries as keys, or few."""
    lengths = (case.queries, case.keys, case.keys, case.queries)
    return [torch.randn(1, case.heads, tokens, case.head_dim).to(DTYPES[case.dtype]) for tokens in lengths]


def prepare_forward(case: Case) -> Prepared:
    query, key, value, _ = inputs(case)

    @torch.no_grad()
    def ours() -> Tensor:
        return ra.ring_attention(query, key, value, is_causal=case.causal)

    @torch.no_grad()
    def other() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)

    right = exact(query, key, value, None, causal=case.causal)
    return Prepared(ours, other, "torch", check(right, [ours()]), check(right, [other()]))


def prepare_backward(case: Case) -> Prepared:
    *tensors, grad_out = inputs(case)
    right = exact(*tensors, grad_out, causal=case.causal)

    def side(attention: Run) -> tuple[Run, Count]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = attention(*leaves, is_causal=case.causal)

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

        return run, check(right, [out, *run()])

    ours, count = side(ra.ring_attention)
    other, other_count = side(F.scaled_dot_product_attention)
    return Prepared(ours, other, "torch", count, other_count)


def prepare_carried(case: Case) -> Prepared:
    """The queries stand after a first block of keys, which the state has absorbed; the second one is measured."""
    tokens, dtype = case.queries, DTYPES[case.dtype]
    query, key, value, _ = inputs(case)
    earlier = [torch.randn_like(key) for _ in range(2)]
    state = [torch.zeros(query.shape), torch.full(query.shape[:3], -torch.inf), torch.zeros(query.shape[:3])]

    def absorb(first: int, keys: Tensor, values: Tensor) -> Tensor:
        places = ([tokens, 1, tokens], [first, 1, tokens], 2 * tokens, case.causal, None, None, None)
        return torch.ops.ringattn.block_forward_(*state, query, keys, values, *places, True)[0]

    absorb(0, *earlier)
    carried = [tensor.clone() for tensor in state]

    def put_back() -> None:
        for tensor, kept in zip(state, carried, strict=True):
            tensor.copy_(kept)

    out = absorb(tokens, key, value)
    whole = [torch.cat(both, 2) for both in zip(earlier, (key, value), strict=True)]
    right = exact(query, *whole, None, causal=case.causal, first_position=tokens)

    @torch.no_grad()
    def from_nothing() -> Tensor:
        return ra.ring_attention(query, key, value, is_causal=case.causal)

    assert out.dtype == dtype
    alone = exact(query, key, value, None, causal=case.causal)
    counts = check(right, [out]), check(alone, [from_nothing()])
    return Prepared(lambda: absorb(tokens, key, value), from_nothing, "from no state", *counts, put_back)


def prepare(case: Case) -> Prepared:
    if case.group == "carried":
        return prepare_carried(case)
    return prepare_backward(case) if case.direction == "backward" else prepare_forward(case)


def measure(case: Case, peak: float, pairs: int) -> Result:
    """peak: the matrix product's flop/s, or memory's bytes/s for a decode case."""
    prepared = prepare(case)
    times = compare(prepared.ours, prepared.other, pairs, prepared.before_ours)
    work, unit = (case.key_bytes, "GB/s") if case.group == "decode" else (case.flop, "GFLOP/s")
    rate = work / times.seconds
    return Result(
        case.group, case.name, case.threads, times.seconds, rate, unit, prepared.other_name, times.ratio, case.bar,
        rate / peak, case.share_bar, prepared.count.wrong, prepared.count.checked, prepared.other_count.wrong,
    )  # fmt: skip


def results(cases: Iterable[Case], sizes: Sizes) -> Iterator[Result]:
    """Measured one after the other. What the machine can do is measured anew where dtype, head_dim or threads change;
    float16 is held against float32, in which it is computed."""
    peaked, peak = None, 0.0
    for case in cases:
        torch.set_num_threads(case.threads)
        place = (case.group == "decode", case.dtype, case.head_dim, case.threads)
        if place != peaked:
            product = torch.bfloat16 if case.dtype == "bf16" else torch.float32
            peak = memory_rate(sizes.memory) if case.group == "decode" else product_rate(product, sizes.product)
            peaked = place
        pairs = sizes.pairs if case.bar is not None else min(sizes.pairs, PAIRS_WITHOUT_BAR)
        yield measure(case, peak, pairs)
