"""What attention should give: float64, for sampled rows of one head; and how many rows of a result differ from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Largest error of a row over its norm. Far above rounding and far below what one tile left out makes; exactness to the
# last bit is what the tests are for.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SAMPLES = 64
FEW = 32  # the gradient of a query that sees fewer keys may be nothing but rounding
ROWS_AT_A_TIME = 1024


class Count(NamedTuple):
    """Rows that were wrong, of those that were looked at."""

    wrong: int
    checked: int

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(self.wrong + other.wrong, self.checked + other.checked)


class Exact(NamedTuple):
    """Rows of out and of the gradients of one head: those of the sampled queries, and of the sampled keys."""

    head: int
    queries: Tensor  # indices
    keys: Tensor
    out: Tensor  # [len(queries), D]
    grad_query: Tensor | None
    grad_key: Tensor | None  # [len(keys), D]
    grad_value: Tensor | None


def sample(tokens: int, count: int = SAMPLES, few: int = FEW) -> Tensor:
    """Indices from 0 to tokens - 1: the first, the last, and others behind the `few` first at random; all of a few."""
    if tokens <= count + few:
        return torch.arange(tokens)
    between = torch.randperm(tokens - 1 - few)[: count - 2] + few
    return torch.cat([torch.tensor([0, tokens - 1]), between]).sort().values


def exact(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None, *, causal: bool, first_position: int = 0
) -> Exact:
    """Dense attention of one head, chosen at random, of the first batch entry.

    query, grad_out: [B, H, Sq, D]; key, value: [B, H, Skv, D]. The first query stands at `first_position` of the keys.
    """
    head = int(torch.randint(query.shape[1], ()))
    queries, keys, values = (tensor[0, head].double() for tensor in (query, key, value))
    rows, columns = sample(len(queries)), sample(len(keys))
    scale = queries.shape[1] ** -0.5

    def weights_of(part: Tensor) -> Tensor:
        scores = queries[part] @ keys.T * scale
        if causal:
            scores.masked_fill_(torch.arange(len(keys)) > (part + first_position)[:, None], -torch.inf)
        return scores.softmax(-1)

    if grad_out is None:
        return Exact(head, rows, columns, weights_of(rows) @ values, None, None, None)

    # A key's gradient is a sum over all queries.
    gradients = grad_out[0, head].double()
    out, grad_query = torch.zeros_like(queries), torch.zeros_like(queries)
    grad_key, grad_value = (torch.zeros(len(columns), queries.shape[1], dtype=torch.float64) for _ in range(2))
    for part in torch.arange(len(queries)).split(ROWS_AT_A_TIME):
        weights, gradient = weights_of(part), gradients[part]
        out[part] = weights @ values
        delta = (out[part] * gradient).sum(-1, keepdim=True)
        score_gradients = weights * (gradient @ values.T - delta) * scale
        grad_query[part] = score_gradients @ keys
        grad_key += score_gradients[:, columns].T @ queries[part]
        grad_value += weights[:, columns].T @ gradient
    return Exact(head, rows, columns, out[rows], grad_query[rows], grad_key, grad_value)


def wrong_rows(rows: Tensor, expected: Tensor, tolerance: float) -> int:
    """How many rows are off by more than `tolerance` of their norm, or of the median norm where theirs is smaller."""
    error, size = (rows.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    return int((~(error <= tolerance * size.clamp(min=size.median()))).sum())  # NaN is wrong


def check(expected: Exact, results: Sequence[Tensor]) -> Count:
    """results: out, or out and the gradients of query, key and value, [B, H, S, D]."""
    tolerance = TOLERANCES[results[0].dtype]
    right = [expected.out, expected.grad_query, expected.grad_key, expected.grad_value]
    places = [expected.queries, expected.queries, expected.keys, expected.keys]
    total = Count(0, 0)
    for result, rows, place in zip(results, right, places, strict=False):
        assert rows is not None, "gradients were not computed exactly"
        total += Count(wrong_rows(result.detach()[0, expected.head, place], rows, tolerance), len(place))
    return total
