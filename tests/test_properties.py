"""Properties of any call, with hypothesis: over whole configurations, fresh ones in every run.

A failing example is printed as it must be written down to be made again, with RINGATTN_TEST_SEED, which repeats the
whole run, and with the decorator that repeats the example alone. HYPOTHESIS_PROFILE=many, as make test-properties sets
it, runs many more examples. How near a result must be to the dense one in float64: see error_bounds.py.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS
from configurations import Configuration, Found, assemble, play, play_all, play_virtual
from error_bounds import assert_near, excess, terms, tolerance
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from ranks import run_ranks
from reference import Result, dense, same_bits
from spoiled import REFUSED, assert_disagreement, assert_refusal, disagree, fields_of, refuse
from strategies import SEEDS, configurations, plain
from test_blocks import absorb, empty_state, scale_of
from torch import Tensor

import ringattn_ext as ra

ops = torch.ops.ringattn

# Not derandomized, which is said because hypothesis does it by itself where it sees a CI. Its health checks are about
# time: a draw of many tensors' configurations is slow on a busy machine.
COMMON = {
    "deadline": None,
    "derandomize": False,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("few", max_examples=24, **COMMON)
settings.register_profile("many", max_examples=1000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
MANY = settings.default.max_examples > 100

pytestmark = pytest.mark.timeout(3600 if MANY else 180)

SEED = int(os.environ.get("RINGATTN_TEST_SEED") or secrets.randbelow(2**31))
RANKS_TIMEOUT = 60.0
REAL = st.integers(1, 4)
RINGS = st.integers(2, 4)
VIRTUAL = st.integers(1, 8)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """In place of the one of conftest.py: one number for the module, from which hypothesis draws."""
    request.node.add_report_section("setup", "seed", f"RINGATTN_TEST_SEED={SEED}")
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    return SEED


def prop(*strategies: Any, share: float = 1.0, **named: Any) -> Any:
    """A property of everything that is drawn from these. share: of the profile's number of examples."""

    def decorate(test: Any) -> Any:
        drawn = given(*strategies, **named)(test)
        return hypothesis.seed(SEED)(settings(max_examples=max(1, int(share * settings.default.max_examples)))(drawn))

    return decorate


def assert_same_bits(a: Found, b: Found) -> None:
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in Found._fields}
    assert all((x is None) == (y is None) for x, y in pairs.values())
    different = [name for name, (x, y) in pairs.items() if x is not None and not same_bits(x, y)]
    assert not different, different


# --- against dense attention ---


@prop(configurations(REAL), share=2)
def test_real_ranks(configuration: Configuration) -> None:
    parts = run_ranks(configuration.P, play, configuration, timeout=RANKS_TIMEOUT)
    assert_near(configuration, assemble(configuration, parts))


@prop(configurations(VIRTUAL), share=4)
def test_virtual_ranks(configuration: Configuration) -> None:
    assert_near(configuration, play_virtual(configuration))


@prop(configurations(VIRTUAL), VIRTUAL, st.sampled_from(LAYOUTS))
def test_layout_and_ring_do_not_matter(one: Configuration, P: int, layout: str) -> None:
    """Two rings differ by no more than the errors of both."""
    other = replace(one, P=P, layout=layout)
    a, b, sizes, largest = play_virtual(one), play_virtual(other), *terms(one.tensors(), one.case.mask, one.scale)
    for name in Found._fields:
        x, y, size = (getattr(r, name) for r in (a, b, sizes))
        if x is not None:
            allowed = 2 * tolerance(name, one.case.dtype, largest)
            overflows = x.isinf() & (name != "lse")
            exact = torch.where(overflows, y, x).double()
            assert excess(name, y, exact, size, allowed) <= 1.0, (name, other)


# --- sharding ---


def round_trip(shape: list[int], dim: int, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    whole = torch.arange(torch.tensor(shape).prod()).view(shape).to(dtype)
    own = ra.positions(shape[dim], layout=layout)
    part = ra.shard(whole, dim, layout=layout)
    assert same_bits(part, whole.index_select(dim, own))
    return own, ra.unshard(part, dim, layout=layout, seq_len=shape[dim])


@prop(REAL, st.data(), share=0.5)
def test_shard_and_unshard_are_inverse(P: int, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = data.draw(st.integers(0, 40))
    dtype = data.draw(
        st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
    )
    layout = data.draw(st.sampled_from(LAYOUTS))
    whole = torch.arange(torch.tensor(shape).prod()).view(shape).to(dtype)
    answers = run_ranks(P, round_trip, shape, dim, dtype, layout, timeout=RANKS_TIMEOUT)
    assert all(same_bits(again, whole) for _, again in answers)
    assert torch.cat([own for own, _ in answers]).sort().values.tolist() == list(range(shape[dim]))


@prop(st.integers(0, 5000), st.integers(1, 64), st.sampled_from(LAYOUTS), share=4)
def test_positions_are_a_permutation(S: int, P: int, layout: str) -> None:
    parts = [ra.positions(S, layout=layout, rank=rank, world_size=P) for rank in range(P)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(S))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= (2 if layout == "zigzag" else 1)
    assert all(bool((part.diff() > 0).all()) for part in parts)


# --- the algebra of states ---


def copy(state: tuple) -> tuple:
    return tuple(t.clone() for t in state)


def merged(a: tuple, b: tuple, scale: float) -> tuple:
    total = copy(a)
    ops.merge_(*total, *b, scale)
    return total


def assert_same_state(a: tuple, b: tuple, sizes: Result, largest: float, case: Any) -> None:
    """The same result within four times the error of one: o and l are only defined up to a factor."""
    for name, x, y in zip(("out", "lse"), *(ops.finalize(*s, scale_of(case), s[0].dtype) for s in (a, b)), strict=True):
        size = getattr(sizes, name)
        empty = (x == -torch.inf) & (y == -torch.inf)
        x, y = x.masked_fill(empty, 0.0), y.masked_fill(empty, 0.0)
        allowed = 4 * tolerance(name, x.dtype, largest)
        assert excess(name, x, y.double(), size, allowed) <= 1.0, name


@prop(configurations(st.just(1)), st.data(), share=2)
def test_states_merge_in_any_order(configuration: Configuration, data: st.DataObject) -> None:
    """A row's keys in random parts: merging is commutative and associative, and the empty state is its identity."""
    case, (q, k, v, *rest) = configuration.case, configuration.tensors()
    cuts = sorted(data.draw(st.lists(st.integers(0, case.key_len), max_size=4)))
    states = []
    for first, last in zip((0, *cuts), (*cuts, case.key_len), strict=True):
        states.append(empty_state(q))
        if first < last:
            absorb(case, states[-1], q, k, v, first, last, False)
    scale, empty = scale_of(case), empty_state(q)
    for state in states:
        for total in (merged(state, empty, scale), merged(empty, state, scale)):
            assert all(torch.equal(a, b) for a, b in zip(total, state, strict=True))
    sizes, largest = terms((q, k, v, *rest), case.mask, scale)
    if case.dtype in (torch.bfloat16, torch.float16):  # weights are rounded on their way into a state
        largest += 2 / torch.finfo(torch.float32).eps * torch.finfo(case.dtype).eps / 8
    a, b, c = (data.draw(st.sampled_from(states)) for _ in range(3))
    assert_same_state(merged(a, b, scale), merged(b, a, scale), both(sizes), largest, case)
    assert_same_state(
        merged(merged(a, b, scale), c, scale), merged(a, merged(b, c, scale), scale), both(sizes), largest, case
    )
    pool = data.draw(st.permutations(states))
    while len(pool) > 1:  # a random tree
        i, j = data.draw(st.permutations(range(len(pool))))[:2]
        joined = merged(pool[i], pool[j], scale)
        pool = [state for n, state in enumerate(pool) if n not in (i, j)] + [joined]
    whole = empty_state(q)
    absorb(case, whole, q, k, v, 0, case.key_len, False)
    assert_same_state(pool[0], whole, sizes, largest, case)


def both(sizes: Result) -> Result:
    """Of states that saw only some of the keys: the largest values stand for all."""
    top = sizes.out.amax() if sizes.out.numel() else 0.0
    return sizes._replace(out=torch.full_like(sizes.out, top))


# --- who may see what ---


@prop(plain(VIRTUAL, cross=False), st.data(), share=2)
def test_what_is_not_seen_does_not_matter(configuration: Configuration, data: st.DataObject) -> None:
    """Causality, windows and documents: with some tokens changed, the others' results have the same bits."""
    case, mask = configuration.case, configuration.case.mask
    assume(case.S > 0)
    first = data.draw(st.integers(0, case.S - 1))
    changed = torch.zeros(case.S, dtype=torch.bool)
    changed[first : data.draw(st.integers(first, case.S - 1)) + 1] = True
    before, fresh = configuration.tensors(), replace(configuration, seed=configuration.seed + 1).tensors()
    after = [t.clone() for t in before]
    for target, source in zip(after, fresh, strict=True):
        target[:, :, changed] = source[:, :, changed]
    queries = ~changed & ~mask[:, changed].any(1)  # that stay as they are
    keys = ~changed & ~mask[~queries].any(0)
    note(f"{int(queries.sum())} queries and {int(keys.sum())} keys of {case.S} must stay")
    a, b = play_virtual(configuration), play_virtual(configuration, tuple(after))
    for name in Found._fields:
        stay = keys if name in ("dk", "dv") else queries
        x, y = (getattr(r, name)[:, :, stay] for r in (a, b))
        assert same_bits(x, y), name


@prop(plain(VIRTUAL, cross=False), st.data())
def test_gradients_stop_at_what_is_not_seen(configuration: Configuration, data: st.DataObject) -> None:
    """With a gradient in some rows alone, those of all other queries and of keys that these do not see are 0."""
    case = configuration.case
    assume(case.S > 0)
    rows = torch.tensor(data.draw(st.lists(st.booleans(), min_size=case.S, max_size=case.S)))
    q, k, v, do, dlse = configuration.tensors()
    do[:, :, ~rows], dlse[:, :, ~rows] = 0.0, 0.0
    found = play_virtual(configuration, (q, k, v, do, dlse))
    unseen = ~case.mask[rows].any(0)
    assert found.dq is not None and found.dk is not None and found.dv is not None
    assert bool((found.dq[:, :, ~rows] == 0).all())
    assert bool((found.dk[:, :, unseen] == 0).all()) and bool((found.dv[:, :, unseen] == 0).all())


# --- of attention as a function ---


@prop(plain(VIRTUAL), st.integers(-3, 3), st.integers(0, 2**20))
def test_linear_in_the_values(one: Configuration, power: int, other: int) -> None:
    """To the bit for powers of two, which round nothing; within the errors of both for sums."""
    q, k, v, *rest = one.tensors()
    a = play_virtual(one)
    scaled = play_virtual(one, (q, k, v * 2.0**power, *rest))
    if one.case.dtype != torch.float16:  # which has no digits left below 2^-14
        assert same_bits(scaled.out, a.out * 2.0**power)
    assert same_bits(scaled.lse, a.lse)
    if one.case.dtype in (torch.float64, torch.float32):
        w = replace(one, seed=one.seed + 1 + other).tensors()[2]
        b, total = play_virtual(one, (q, k, w, *rest)), play_virtual(one, (q, k, v + w, *rest))
        sizes, largest = terms((q, k, v.abs() + w.abs(), *rest), one.case.mask, one.scale)
        exact = a.out.double() + b.out.double()
        assert excess("out", total.out, exact, sizes.out, 3 * tolerance("out", one.case.dtype, largest)) <= 1.0


@prop(plain(VIRTUAL), st.integers(-8, 8))
def test_a_constant_added_to_all_keys(one: Configuration, shift: int) -> None:
    """Leaves out as it is, and moves lse by scale * q.c: numbers of few digits, so that adding rounds nothing."""
    q, k, v, *rest = one.tensors()
    k = (4 * k).round().clamp(-16, 16) / 4
    moved = k + shift
    assert torch.equal(moved.double(), k.double() + shift)
    a, b = (play_virtual(one, (q, keys, v, *rest)) for keys in (k, moved))
    sizes, _ = terms((q, k, v, *rest), one.case.mask, one.scale)
    of_lse, largest = terms((q, k.abs() + abs(shift), v, *rest), one.case.mask, one.scale)
    lse = a.lse.double() + one.scale * shift * q.double().sum(-1)
    allowed = {name: 2 * tolerance(name, one.case.dtype, largest) for name in ("out", "lse")}
    assert excess("out", b.out, a.out.double(), sizes.out, allowed["out"]) <= 1.0
    assert excess("lse", b.lse, lse, of_lse.lse, allowed["lse"]) <= 1.0


@prop(plain(VIRTUAL), SEEDS)
def test_permuted_keys(one: Configuration, order: int) -> None:
    """Without a mask their order does not matter; their gradients are permuted."""
    one = replace(one, case=replace(one.case, is_causal=False, window=None, cu_seqlens=None))
    q, k, v, *rest = one.tensors()
    to = torch.randperm(one.case.key_len, generator=torch.Generator().manual_seed(order))
    a, b = play_virtual(one), play_virtual(one, (q, k[:, :, to], v[:, :, to], *rest))
    sizes, largest = terms((q, k, v, *rest), one.case.mask, one.scale)
    for name in Found._fields:
        x, y, size = (getattr(r, name) for r in (a, b, sizes))
        if name in ("dk", "dv"):
            x, size = x[:, :, to], size[:, :, to]
        assert excess(name, y, x.double(), size, 2 * tolerance(name, one.case.dtype, largest)) <= 1.0, name


# --- calls after calls ---

SMALL = {"longest": 40}


@st.composite
def wrong_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Right calls, one that is wrong on one rank, and right calls again."""
    P = draw(RINGS)
    some = configurations(st.just(P), **SMALL)
    wrong = draw(some)
    return {
        "before": draw(st.lists(some, max_size=3)),
        "wrong": wrong,
        "what": draw(st.sampled_from([*fields_of(wrong), *(f"refused {argument}" for argument in REFUSED)])),
        "odd": draw(st.integers(0, P - 1)),
        "after": draw(st.lists(some, min_size=1, max_size=2)),
    }


def make_wrong(wrong: Configuration, what: str, odd: int, group: Any = None) -> dict[str, Any]:
    if what.startswith("refused "):
        return refuse(wrong, what.removeprefix("refused "), odd, group)
    return disagree(wrong, what, odd, group)


def play_wrong_calls(before: list, wrong: Configuration, what: str, odd: int, after: list) -> tuple[Any, list[Found]]:
    results = play_all(before)
    answer = make_wrong(wrong, what, odd)
    return answer, results + play_all(after)


@prop(wrong_calls(), share=2)
def test_disagreement_at_any_time(calls: dict[str, Any]) -> None:
    """An error that says it, on every rank; the calls around it are right."""
    P, what, odd = calls["wrong"].P, calls["what"], calls["odd"]
    answers = run_ranks(P, play_wrong_calls, **calls, timeout=RANKS_TIMEOUT)
    if what.startswith("refused "):
        assert_refusal([answer for answer, _ in answers], odd)
    else:
        assert_disagreement([answer for answer, _ in answers], what, odd)
    for i, configuration in enumerate([*calls["before"], *calls["after"]]):
        assert_near(configuration, assemble(configuration, [results[i] for _, results in answers]))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[str, Configuration]], Configuration]:
    P = draw(REAL)
    some = configurations(st.just(P), **SMALL)
    acts = ["call", "call", "forward", "abandon", "release", "gather", *(["scale", "refused scale"] if P > 1 else [])]
    return draw(st.lists(st.tuples(st.sampled_from(acts), some), min_size=1, max_size=6)), draw(some)


def live_through(history: list[tuple[str, Configuration]]) -> None:
    for act, configuration in history:
        if act == "call":
            play(configuration)
        elif act == "forward":
            with torch.no_grad():
                play(replace(configuration, needs_grad=(False,) * 3))
        elif act == "abandon":  # a graph that nobody goes back through
            play(replace(configuration, outputs=(False, False)))
        elif act == "release":
            ra.release_workspace()
        elif act == "gather":
            S = configuration.case.S
            ra.unshard(ra.shard(torch.arange(S), 0), 0, seq_len=S)
        else:
            make_wrong(configuration, act, dist.get_world_size() - 1)


def after_a_history_and_alone(history: list, last: Configuration) -> tuple[Found, Found]:
    live_through(history)
    group = dist.new_group()
    alone = play(last, group)
    dist.destroy_process_group(group)
    return play(last), alone


@prop(histories())
def test_a_call_does_not_know_of_those_before_it(calls: tuple[list, Configuration]) -> None:
    """After any others it has the bits of a first call on a group, and of virtual ranks."""
    history, last = calls
    answers = run_ranks(last.P, after_a_history_and_alone, history, last, timeout=RANKS_TIMEOUT)
    after, alone = (assemble(last, [answer[i] for answer in answers]) for i in range(2))
    assert_same_bits(after, alone)
    assert_same_bits(after, play_virtual(last))


# --- the measure itself ---


@prop(plain(st.just(1)), st.sampled_from(Found._fields), SEEDS, share=2)
def test_the_bounds_see_an_error(one: Configuration, name: str, where: int) -> None:
    """One number that is off by a sixteenth of its terms is enough."""
    exact = dense(one.tensors(), one.case.mask, one.scale)
    dtype, precise = one.case.dtype, torch.float64 if one.case.dtype == torch.float64 else torch.float32
    found = Found(*(t.to(precise if n == "lse" else dtype) for n, t in zip(Found._fields, exact, strict=True)))
    assert_near(one, found)
    size = getattr(terms(one.tensors(), one.case.mask, one.scale)[0], name).flatten()
    wrong = getattr(found, name).clone(memory_format=torch.contiguous_format)
    seen = (size > 0) & (wrong.flatten() > -torch.inf)
    assume(bool(seen.any()))
    index = int(seen.nonzero()[where % int(seen.sum())])
    wrong.view(-1)[index] += size[index] / 16
    with pytest.raises(AssertionError):
        assert_near(one, found._replace(**{name: wrong}))
