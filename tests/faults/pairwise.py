"""Covering arrays: few rows in which every pair of values of two parameters occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def all_pairs(parameters: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Every pair of values of two parameters."""
    found: set[Pair] = set()
    for (a, values_a), (b, values_b) in itertools.combinations(parameters.items(), 2):
        found |= {frozenset({(a, x), (b, y)}) for x, y in itertools.product(values_a, values_b)}
    return found


def covering_rows(parameters: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 20) -> list[dict[str, Any]]:
    """Rows that cover all pairs, always the same ones for a seed.

    Greedy: a row begins with a pair that is missing; then each other parameter, in random order, takes the value that
    completes most missing pairs. Of several such rows the best one is kept.
    """
    chance = random.Random(seed)
    missing = all_pairs(parameters)
    rows: list[dict[str, Any]] = []
    while missing:
        candidates = [_row(parameters, missing, chance) for _ in range(tries)]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append({name: best[name] for name in parameters})
    return rows


def _row(parameters: Mapping[str, Sequence[Any]], missing: set[Pair], chance: random.Random) -> dict[str, Any]:
    # Sets of strings have another order in every process.
    row: dict[str, Any] = dict(chance.choice(sorted(missing, key=lambda pair: sorted(map(repr, pair)))))
    others = [name for name in parameters if name not in row]
    chance.shuffle(others)
    for name in others:

        def completed(value: Any, name: str = name) -> int:
            return sum(frozenset({(name, value), item}) in missing for item in row.items())

        values = list(parameters[name])
        chance.shuffle(values)
        row[name] = max(values, key=completed)
    return row
