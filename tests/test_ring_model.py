"""Every order in which the ranks of a small ring can run ends well, also when one of them stops. See ring_model.py."""

import pytest
from mask_cases import MaskCase
from ring_model import ModelError, check_states, explore
from ring_programs import MASKS, Ring, programs, small_ring

from ringattn_ext._C import Layout, reach

ORDERS = ("host", "mailbox", "streams")
RINGS = [("contiguous", mask) for mask in MASKS] + [("zigzag", mask) for mask in ("full", "causal", "near")]
BOTH = ("forward", "backward")


def prove(ring: Ring, calls: tuple[str, ...], order: str, *, reduced: bool = False) -> None:
    """All ranks finish, and what they end with does not depend on the order: there is one end."""
    report = explore(programs(ring, calls), order, reduced=reduced)
    assert report.ends == [("finished",) * ring.P]
    check_states(report, ring.P, len(calls) * reach(ring.layout, ring.layout, ring.case.mask()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("layout", "mask"), RINGS)
@pytest.mark.parametrize("P", range(1, 5))
def test_all_interleavings(P: int, layout: str, mask: str, order: str) -> None:
    ring = small_ring(P, layout, mask)
    prove(ring, ("inference",), order)
    prove(ring, ("forward",), order)
    prove(ring, BOTH, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("P", range(2, 5))
def test_ranks_without_tokens(P: int, order: str) -> None:
    """Their messages are empty and not sent."""
    for tokens in range(P):
        report = explore(programs(Ring(Layout("contiguous", P, tokens), MaskCase(tokens)), BOTH), order)
        assert report.ends == [("finished",) * P]
        check_states(report, P, tokens)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("P", range(2, 5))
def test_the_gradient_of_queries_alone(P: int, order: str) -> None:
    report = explore(programs(small_ring(P), BOTH, accumulators=False), order)
    assert report.ends == [("finished",) * P]
    check_states(report, P, 2 * P - 3)


SEQUENCES = [
    ("inference", "inference"),
    ("forward", "forward"),
    ("forward", "backward", "backward"),
    ("forward", "backward", "inference"),
    ("inference", "forward", "backward", "forward"),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("calls", SEQUENCES, ids="-".join)
@pytest.mark.parametrize("P", range(2, 5))
def test_calls_in_the_memory_of_those_before(P: int, calls: tuple[str, ...], order: str) -> None:
    prove(small_ring(P), calls, order, reduced=P == 4)


@pytest.mark.parametrize(("P", "mask"), [(5, "full"), (5, "near"), (6, "near")])
def test_larger_rings(P: int, mask: str) -> None:
    prove(small_ring(P, "contiguous", mask), BOTH, "host", reduced=True)


@pytest.mark.parametrize("P", range(2, 5))
def test_headers(P: int) -> None:
    ring = small_ring(P)
    report = explore(programs(ring, ("forward",), headers=True))
    assert report.ends == [("finished",) * P]
    check_states(report, P, P - 1)
    for refusing in range(P):
        report = explore(programs(ring, ("forward",), headers=True, refusing=refusing))
        assert report.ends == [("refused",) * P]  # all, and with nothing but headers sent
        check_states(report, P, 1)


@pytest.mark.parametrize("P", range(2, 5))
def test_a_rank_stops(P: int) -> None:
    """At any moment, for ever. All others come to an end, and what those that finish have is right."""
    ranks = programs(small_ring(P), BOTH, headers=True)
    for victim in range(P):
        report = explore(ranks, stopping=victim, reduced=P == 4)
        others = {end[:victim] + end[victim + 1 :] for end in report.ends if end[victim] == "stopped"}
        assert {("failed",) * (P - 1), ("finished",) * (P - 1)} <= others
        assert {how for end in others for how in end} == {"failed", "finished"}
        assert {end for end in report.ends if end[victim] != "stopped"} == {("finished",) * P}
        check_states(report, P, 2 * P - 2)


@pytest.mark.parametrize("closes", ["pending", "none"])
@pytest.mark.parametrize("P", range(2, 5))
def test_a_rank_that_fails_must_close_all_its_connections(P: int, closes: str) -> None:
    """Else a rank that is through with the lost one, or far from it, waits for one that has given up.

    To close the connections on which something is pending is not enough: a rank may be through with one of its
    neighbours in this exchange, and that one comes back for the next.
    """
    ranks = programs(small_ring(P), BOTH)
    for victim in range(P):
        if P == 2:
            report = explore(ranks, stopping=victim, closes=closes)
            assert {("failed", "stopped"), ("stopped", "failed")} & set(report.ends)
            check_states(report, P, 2 * P - 2)
        else:
            with pytest.raises(ModelError, match=f"^rank [^{victim}] waits for ever: it waits for exchange"):
                explore(ranks, stopping=victim, closes=closes, reduced=P == 4)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("layout", "mask"), [("contiguous", "near"), ("contiguous", "causal"), ("zigzag", "full")])
@pytest.mark.parametrize("P", range(1, 4))
def test_the_reduced_search_comes_to_the_same_ends(P: int, layout: str, mask: str, order: str) -> None:
    ranks = programs(small_ring(P, layout, mask), BOTH, headers=order == "host")
    for stopping in (None, *range(P)) if order == "host" else (None,):
        full = explore(ranks, order, stopping=stopping)
        reduced = explore(ranks, order, stopping=stopping, reduced=True)
        assert sorted(reduced.ends) == sorted(full.ends)
        assert reduced.states <= full.states // (1 if P == 1 else 2)
