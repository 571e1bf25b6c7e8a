"""Instructions that the kernels of no other test execute, each on 32 lanes."""

# ruff: noqa: E501 PTX texts

import numpy as np
import pytest

from emulator.instruction_runner import execute, floats, integers

ADDRESS = "ld.param.u64 p, [p0]; mad.wide.u32 p, t, 4, p;"
WORDS = integers("u32", 7)


@pytest.mark.parametrize("t", ["f32", "f64"])
def test_signs(t):
    a, b = floats(t, 1), floats(t, 2)
    sign = a.dtype.type(1 << 8 * a.itemsize - 1)
    np.testing.assert_array_equal(execute(f"abs.{t} d, a;", t, (t, a)), a & ~sign)
    np.testing.assert_array_equal(execute(f"neg.{t} d, a;", t, (t, a)), a ^ sign)
    got = execute(f"copysign.{t} d, a, b;", t, (t, a), (t, b))
    np.testing.assert_array_equal(got, (b & ~sign) | (a & sign))


@pytest.mark.parametrize("t", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_mad_is_fma(mode, t):
    inputs = [(t, floats(t, seed)) for seed in range(3)]
    mad, fma = (execute(f"{opcode}.{mode}.{t} d, a, b, c;", t, *inputs) for opcode in ("mad", "fma"))
    np.testing.assert_array_equal(mad, fma)


def test_integers():
    a, b = integers("u32", 1), integers("u32", 2)
    np.testing.assert_array_equal(execute("cnot.b32 d, a;", "u32", ("u32", a & 1)), 1 - (a & 1))
    low = (a & 0xFFFFFF) * (b & 0xFFFFFF)
    np.testing.assert_array_equal(execute("mul24.lo.u32 d, a, b;", "u32", ("u32", a), ("u32", b)), low)
    x, y = ((one << 8).view(np.int32).astype(np.int64) >> 8 for one in (a, b))
    got = execute("mul24.lo.s32 d, a, b;", "s32", ("u32", a), ("u32", b))
    np.testing.assert_array_equal(got, (x * y & 0xFFFFFFFF).astype(np.uint32))


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
@pytest.mark.parametrize("t", ["u32", "s32"])
def test_extension(t, mode):
    counts = np.arange(32, dtype=np.uint32) * 5 % 40
    got = execute(f"szext.{mode}.{t} d, a, b;", t, ("u32", WORDS), ("u32", counts))
    for word, count, found in zip(WORDS.tolist(), counts.tolist(), got.tolist(), strict=True):
        bits = count % 32 if mode == "wrap" else min(count, 32)
        value = word & ((1 << bits) - 1)
        if t == "s32" and bits and value >> (bits - 1):
            value -= 1 << bits
        assert found == value & 0xFFFFFFFF, (word, bits)


def test_find_nth():
    bases, offsets = np.arange(32, dtype=np.uint32), (np.arange(32) % 7 - 3).astype(np.int32)
    got = execute("fns.b32 d, a, b, c;", "u32", ("u32", WORDS), ("u32", bases), ("s32", offsets))
    for word, base, offset, found in zip(WORDS.tolist(), bases.tolist(), offsets.tolist(), got.tolist(), strict=True):
        way = range(base, 32) if offset > 0 else range(base, -1, -1) if offset else range(base, base + 1)
        places = [at for at in way if word >> at & 1]
        wanted = max(abs(offset), 1)
        assert found == (places[wanted - 1] if len(places) >= wanted else 0xFFFFFFFF), (word, base, offset)


@pytest.mark.parametrize("form, dtype, function, tolerance", [
    ("ex2.approx.f16", "f16", np.exp2, 2**-9.9), ("ex2.approx.ftz.bf16", "bf16", np.exp2, 2**-7),
    ("tanh.approx.f16", "f16", np.tanh, 2**-10), ("tanh.approx.bf16", "bf16", np.tanh, 2**-7),
])  # fmt: skip
def test_half_approximations(form, dtype, function, tolerance):
    x = np.random.default_rng(0).uniform(-4, 4, 32)
    if dtype == "f16":
        codes = x.astype(np.float16)
        x = codes.astype(np.float64)
        got = execute(f"{form} d, a;", dtype, (dtype, codes.view(np.uint16))).view(np.float16)
    else:
        codes = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        x = (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        words = execute(f"{form} d, a;", dtype, (dtype, codes))
        got = (words.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(got, function(x), rtol=tolerance, atol=tolerance / 8)


def test_branch_by_index():
    table = "T: .branchtargets A, B, C;\n.reg .b32 i; rem.u32 i, a, 3; brx.idx i, T;\n"
    blocks = "A: mov.b32 d, 10; bra END; B: mov.b32 d, 20; bra END; C: mov.b32 d, 30; END: add.u32 d, d, i;"
    got = execute(table + blocks, "u32", ("u32", WORDS))
    np.testing.assert_array_equal(got, 10 * (WORDS % 3 + 1) + WORDS % 3)


def test_state_spaces():
    spaces = ADDRESS + ".reg .b64 s; .shared .b32 word; mov.u64 s, word; cvta.shared.u64 s, s; mov.b32 d, 0;"
    questions = [("global", "p", 1), ("shared", "p", 0), ("shared", "s", 1), ("local", "s", 0), ("global", "s", 0)]
    for i, (space, pointer, _) in enumerate(questions):
        spaces += f"isspacep.{space} q, {pointer}; @q or.b32 d, d, {1 << i};"
    expected = sum(answer << i for i, (_, _, answer) in enumerate(questions))
    assert execute(spaces, "u32", ("u32", WORDS)).tolist() == [expected] * 32


@pytest.mark.parametrize("hint", [
    "ldu.global.b32 d, [p];",
    "prefetch.global.L2 [p]; prefetch.global.L1 [p]; prefetchu.L1 [p]; ld.global.b32 d, [p];",
    "prefetch.global.L2::evict_last [p]; ld.global.b32 d, [p];",
    "and.b64 p, p, -128; applypriority.global.L2::evict_normal [p], 128; mov.b32 d, a;",
    ".reg .b64 y; createpolicy.fractional.L2::evict_last.b64 y, 0.5; ld.global.L2::cache_hint.b32 d, [p], y;",
    "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 d, a;",
    "nanosleep.u32 20; nanosleep.u32 t; mov.b32 d, a;",
    "pmevent 3; mov.b32 d, a;",
])  # fmt: skip
def test_hints_change_nothing(hint):
    np.testing.assert_array_equal(execute(ADDRESS + hint, "u32", ("u32", WORDS)), WORDS)


def test_discarded_memory_is_written_again():
    instruction = ADDRESS + (
        "setp.eq.u32 q, t, 0; @q discard.global.L2 [p], 128; bar.warp.sync -1; st.global.b32 [p], t; ld.global.b32 d, [p];"
    )
    assert execute(instruction, "u32", ("u32", WORDS.copy())).tolist() == list(range(32))
