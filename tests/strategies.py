"""Whole configurations, for hypothesis: shapes, masks, layouts, rings, data, strides, and wanted gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import DTYPES, LAYOUTS, STRIDES, Case
from configurations import DATA, NORMAL, Configuration
from hypothesis import strategies as st

HEADS = [(1, 1), (2, 2), (4, 4), (4, 2), (6, 1), (9, 3)]  # of queries, of keys and values
HEAD_DIMS = [1, 2, 8, 16, 32, 40, 64, 128]
ELEMENTS = 60_000  # of a query
SEEDS = st.integers(0, 2**30)
STRIDES_TOO = ("contiguous", *STRIDES)


def lengths(P: int, longest: int) -> st.SearchStrategy[int]:
    """Of whole sequences: none, one, fewer than ranks, odd, around a tile, any."""
    special = [0, 1, P - 1, P, P + 1, 2 * P + 1, 16, 31, 63, 64, 65, 127, 129]
    return st.one_of(
        st.sampled_from([n for n in special if n <= longest]), st.integers(0, min(9, longest)), st.integers(0, longest)
    )


@st.composite
def masks(draw: st.DrawFn, S: int) -> dict[str, Any]:
    """The mask fields of a Case with as many keys as queries. Documents may be empty, also several in a row."""
    fields: dict[str, Any] = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        side = st.one_of(st.sampled_from([-1, 0]), st.integers(0, 3), st.integers(0, max(S, 1)))
        fields["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        cuts = draw(st.lists(st.one_of(st.sampled_from([0, S, S // 2]), st.integers(0, S)), max_size=7))
        fields["cu_seqlens"] = (0, *sorted(cuts), S)
    return fields


@st.composite
def cases(draw: st.DrawFn, P: int, longest: int = 150, cross: bool = True, **fields: Any) -> Case:
    """Those of attention between unequal lengths too (cross), which takes no mask. fields: what is not drawn."""
    B = draw(st.sampled_from([1, 1, 2, 3, 0]))
    Hq, Hkv = draw(st.sampled_from(HEADS))
    D = draw(st.sampled_from(HEAD_DIMS))
    longest = max(9, min(longest, ELEMENTS // (max(B, 1) * Hq * D)))
    S = draw(lengths(P, longest))
    drawn: dict[str, Any] = {"B": B, "Hq": Hq, "Hkv": Hkv, "S": S, "D": D, "dtype": draw(st.sampled_from(DTYPES))}
    if cross and draw(st.integers(0, 4)) == 0:
        drawn["Skv"] = draw(lengths(P, longest))
    else:
        drawn |= draw(masks(S))
    drawn["scale"] = draw(st.one_of(st.none(), st.sampled_from([0.05, 1.0]), st.floats(0.02, 3.0)))
    return Case(**(drawn | fields))


@st.composite
def data(draw: st.DrawFn) -> tuple[str, ...]:
    """Mostly of one kind. The gradient of out times 30 would only overflow float16."""
    if draw(st.booleans()):
        return NORMAL
    kinds = draw(st.tuples(*[st.sampled_from(DATA)] * 3))
    return *kinds, draw(st.sampled_from([kind for kind in DATA if kind != "times 30"]))


@st.composite
def configurations(draw: st.DrawFn, sizes: st.SearchStrategy[int], **how: Any) -> Configuration:
    """sizes: of the ring. how: arguments of cases."""
    P = draw(sizes)
    all_of_them = st.sampled_from([(True, True, True)])
    return Configuration(
        case=draw(cases(P, **how)),
        P=P,
        layout=draw(st.sampled_from(LAYOUTS)),
        data=draw(data()),
        strides=draw(st.tuples(*[st.sampled_from(STRIDES_TOO)] * 4)),
        needs_grad=draw(st.one_of(all_of_them, st.tuples(*[st.booleans()] * 3))),
        outputs=draw(st.sampled_from([(True, True), (True, False), (False, True)])),
        seed=draw(SEEDS),
    )


@st.composite
def plain(draw: st.DrawFn, sizes: st.SearchStrategy[int], **how: Any) -> Configuration:
    """Configurations of ordinary data with all gradients: for properties that compare two calls."""
    return replace(draw(configurations(sizes, **how)), data=NORMAL, needs_grad=(True,) * 3, outputs=(True, True))
