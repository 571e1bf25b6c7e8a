"""Warp collectives: shuffles, votes, matches, reductions, elect."""

# ruff: noqa: E501 PTX texts

import numpy as np
import pytest

from emulator import EmulatorError
from emulator.instruction_runner import execute, integers, wrap


def test_shuffles():
    a = np.arange(100, 132, dtype=np.uint32)
    lane = np.arange(32)
    got = execute("shfl.sync.up.b32 d|q, a, 3, 0, -1; @!q add.u32 d, d, 1000;", "u32", ("u32", a))
    assert got.tolist() == np.where(lane >= 3, a[lane - 3], a + 1000).tolist()
    got = execute("shfl.sync.down.b32 d|q, a, 5, 31, -1; @!q add.u32 d, d, 1000;", "u32", ("u32", a))
    assert got.tolist() == np.where(lane < 27, a[(lane + 5) % 32], a + 1000).tolist()
    got = execute("shfl.sync.bfly.b32 d, a, 6, 31, -1;", "u32", ("u32", a))
    assert got.tolist() == a[lane ^ 6].tolist()
    got = execute("shfl.sync.idx.b32 d, a, 3, 0x181f, -1;", "u32", ("u32", a))  # segments of 8
    assert got.tolist() == a[lane // 8 * 8 + 3].tolist()


def test_votes_matches_and_reductions():
    a = integers("u32", 4)
    a[::5] = 77
    odd = (a & 1).astype(bool)
    prefix = "and.b32 d, a, 1; setp.eq.u32 q, d, 1; "
    ballot = int(sum(1 << i for i in range(32) if odd[i]))
    assert execute(prefix + "vote.sync.ballot.b32 d, q, -1;", "u32", ("u32", a)).tolist() == [ballot] * 32
    assert execute(prefix + "vote.sync.any.pred r, q, -1; selp.u32 d, 1, 0, r;", "u32", ("u32", a)).tolist() == [1] * 32
    assert execute(prefix + "vote.sync.all.pred r, q, -1; selp.u32 d, 1, 0, r;", "u32", ("u32", a)).tolist() == [0] * 32
    got = execute("match.any.sync.b32 d, a, -1;", "u32", ("u32", a))
    assert got.tolist() == [sum(1 << k for k in range(32) if a[k] == a[i]) for i in range(32)]
    values = [int(x) for x in a]
    signed = [int(x) for x in a.view(np.int32)]
    for op, expected in {
        "add.u32": wrap(sum(values), 32), "min.u32": min(values), "max.u32": max(values), "min.s32": wrap(min(signed), 32),
        "max.s32": wrap(max(signed), 32), "and.b32": int(np.bitwise_and.reduce(a)), "or.b32": int(np.bitwise_or.reduce(a)),
        "xor.b32": int(np.bitwise_xor.reduce(a)),
    }.items():  # fmt: skip
        assert execute(f"redux.sync.{op} d, a, -1;", "u32", ("u32", a)).tolist() == [expected] * 32
    got = execute("elect.sync d|q, -1; @q add.u32 d, d, 50;", "u32", ("u32", a))
    assert got.tolist() == [50] + [0] * 31


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_groups_with_masks_of_their_own(size):
    """Lanes that come together in tiles: each tile is a collective of its own."""
    a = np.arange(100, 132, dtype=np.uint32)
    lane = np.arange(32)
    mask = f".reg .b32 m, l; mov.u32 l, %laneid; and.b32 l, l, {-size}; shl.b32 m, {(1 << size) - 1}, l; "
    tiles = a.reshape(-1, size)
    got = execute(mask + "redux.sync.add.u32 d, a, m;", "u32", ("u32", a))
    assert got.tolist() == np.repeat(tiles.sum(1), size).tolist()
    got = execute(mask + f"shfl.sync.bfly.b32 d, a, 1, {(32 - size) << 8 | 31}, m;", "u32", ("u32", a))
    assert got.tolist() == a[lane ^ 1].tolist()
    got = execute(mask + "match.any.sync.b32 d, a, m;", "u32", ("u32", a))
    assert got.tolist() == [1 << i for i in range(32)]
    got = execute(mask + "elect.sync d|q, m; @q add.u32 d, d, 50; bar.warp.sync m;", "u32", ("u32", a))
    assert got.tolist() == [i // size * size + 50 * (i % size == 0) for i in range(32)]


def test_groups_that_diverged():
    """Half of each tile takes another way: the halves meet, whatever the order, and the tiles do not wait for others."""
    a = np.arange(32, dtype=np.uint32)
    way = (
        ".reg .b32 m, l; mov.u32 l, %laneid; and.b32 l, l, -8; shl.b32 m, 255, l; and.b32 l, a, 4; setp.eq.u32 q, l, 0;"
    )
    for first in ("@q bra ON;", "@!q bra ON;"):
        got = execute(
            f"{way} mov.b32 d, a; {first} add.u32 d, d, 1000; ON: redux.sync.add.u32 d, d, m;", "u32", ("u32", a)
        )
        assert got.tolist() == [sum(range(i // 8 * 8, i // 8 * 8 + 8)) + 4000 for i in range(32)]
    some = f"{way} setp.lt.u32 r, a, 12; @!r bra OFF; redux.sync.add.u32 d, a, m; OFF:"
    with pytest.raises(EmulatorError, match="missing lanes"):  # lanes 12 to 15 never come
        execute(some, "u32", ("u32", a))
