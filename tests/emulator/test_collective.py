"""Warp collectives: shuffles, votes, matches, reductions, elect."""

# ruff: noqa: E501 PTX texts

import numpy as np

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
