"""Clusters of one block: mapa, st.async, red.async, and the forms of mbarrier, in PTX."""

# ruff: noqa: E501 PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, load

COPIES = ["early", "late", "random"]


def run(body, out, **options):
    """One warp runs body: t is the lane, b and s the addresses of an mbarrier and of 4096 bytes that hold 0, p that of out[t]."""
    text = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x) {{
.shared .align 1024 .b8 space[4096]; .shared .align 8 .b64 bar;
.reg .b32 t, b, s, r, u, v, w; .reg .b64 l, m, p, q; .reg .f32 f, g; .reg .pred lead, done;
mov.u32 t, %tid.x; mov.u32 b, bar; mov.u32 s, space; setp.eq.u32 lead, t, 0;
ld.param.u64 p, [x]; mad.wide.u32 p, t, {out.itemsize}, p;
mad.lo.u32 r, t, 4, s;
mov.u32 u, 0; {" ".join(f"st.shared.u32 [r + {128 * k}], u;" for k in range(32))}
bar.sync 0;
{body}
ret; }}
"""
    return load(text).launch("kernel", args=[out], **options)


WAIT = "AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [b], 0; @!done bra AGAIN;\n"
EXPECT = "@lead mbarrier.init.shared::cta.b64 [b], 1; fence.mbarrier_init.release.cluster; bar.sync 0;\n"
EXPECT += "@lead mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [b], {};\nbar.sync 0;\n"
COMPLETE = "shared::cluster.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_async_stores(copies, seed):
    """Lane t stores to the place of lane 31 - t through the address of rank 0."""
    out = np.zeros(32, np.uint64)
    body = (
        EXPECT.format(32 * 16 + 32 * 8)
        + "mov.u32 u, 0; mapa.shared::cluster.u32 v, s, u; mapa.shared::cluster.u32 w, b, u;"
    )
    body += "sub.u32 r, 31, t; mad.lo.u32 r, r, 16, v; add.u32 u, t, 100; mov.b32 f, u; mov.b32 g, t;"
    body += f"st.async.weak.{COMPLETE}.v4.f32 [r], {{f, g, f, g}}, [w];"
    body += f"mad.lo.u32 r, t, 8, v; cvt.u64.u32 l, t; st.async.{COMPLETE}.b64 [r + 1024], l, [w];" + WAIT
    body += "mad.lo.u32 r, t, 16, s; ld.shared.b64 l, [r + 8]; mad.lo.u32 r, t, 8, s; ld.shared.b64 m, [r + 1024];"
    run(body + "add.u64 l, l, m; st.global.b64 [p], l;", out, copies=copies, seed=seed)
    assert out.tolist() == [(31 - t) << 32 | 131 - t + t for t in range(32)]


@pytest.mark.parametrize("copies", COPIES)
def test_async_store_read_before_its_wait(copies):
    body = EXPECT.format(128) + f"mad.lo.u32 r, t, 4, s; st.async.{COMPLETE}.b32 [r], t, [b];"
    body += "xor.b32 r, r, 4; ld.shared.b32 u, [r]; st.global.b32 [p], u;"
    if copies == "late":
        with pytest.raises(EmulatorError, match="before the mbarrier wait"):
            run(body, np.zeros(32, np.uint32), copies=copies)
    with pytest.raises(EmulatorError, match="before the mbarrier wait|data race"):
        run(body, np.zeros(32, np.uint32), copies=copies)


REDUCTIONS = [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("add", "s64"), ("min", "u32"), ("min", "s32"), ("max", "u32"),
    ("max", "s32"), ("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
]  # fmt: skip


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("operation, dtype", REDUCTIONS)
def test_async_reductions(operation, dtype, copies):
    """Four lanes on each place; the initial value is 6, the operands are the threads minus 9, or plus 1 for and."""
    bytes_ = int(dtype[1:]) // 8
    kind, register = f"b{8 * bytes_}", "l" if bytes_ == 8 else "u"
    add = {"and": 1, "inc": 40, "dec": 40}.get(operation, -9)
    body = f"shr.u32 w, t, 2; mad.lo.u32 r, w, {bytes_}, s; mov.{kind} {register}, 6; st.shared.{kind} [r], {register};"
    body = body.replace("st.shared", "and.b32 v, t, 3; setp.eq.u32 done, v, 0; @done st.shared") + "bar.sync 0;"
    body += EXPECT.format(32 * bytes_) + f"add.s32 u, t, {add}; cvt.s64.s32 l, u;"
    body += f"red.async.relaxed.cluster.{COMPLETE}.{operation}.{dtype} [r], {register}, [b];" + WAIT
    out = np.zeros(32, f"{'i' if dtype[0] == 's' else 'u'}{bytes_}")
    run(body + f"ld.shared.{kind} {register}, [r]; st.global.{kind} [p], {register};", out, copies=copies)
    step = {
        "add": lambda x, y: x + y, "min": min, "max": max, "and": lambda x, y: x & y, "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y, "inc": lambda x, y: 0 if x >= y else x + 1,
        "dec": lambda x, y: y if x == 0 or x > y else x - 1,
    }[operation]  # fmt: skip
    for place in range(8):
        value = 6
        for t in range(4 * place, 4 * place + 4):
            operand = t + add
            value = step(value, operand if dtype[0] == "s" else operand % (1 << 8 * bytes_))
            value = value if dtype[0] == "s" else value % (1 << 8 * bytes_)
        assert out[4 * place] == value


def test_rank_beyond_the_cluster():
    with pytest.raises(EmulatorError, match="out of bounds: rank 1 in a cluster of one"):
        run("mov.u32 u, 1; mapa.shared::cluster.u32 v, s, u;", np.zeros(32, np.uint32))


def test_states_of_arrivals():
    """Counts that are pending before each arrival, and tests of the phase by its state."""
    out = np.zeros(32, np.uint32)
    body = "@lead mbarrier.init.shared.b64 [b], 33; bar.sync 0; mbarrier.arrive.release.cta.shared.b64 l, [b];"
    body += "mbarrier.pending_count.b64 u, l; mbarrier.test_wait.shared.b64 done, [b], l; selp.u32 v, 100, 0, done;"
    body += "add.u32 u, u, v; bar.sync 0; @lead mbarrier.arrive.shared.b64 m, [b], 1; bar.sync 0;"
    body += "mbarrier.test_wait.acquire.cta.shared.b64 done, [b], l; selp.u32 v, 1000, 0, done; add.u32 u, u, v;"
    run(body + "st.global.u32 [p], u;", out)
    assert out.tolist() == [1000 + 33 - t for t in range(32)]


def test_drops_and_transactions():
    """Phase 0 has 32 arrivals, half of which drop out; phase 1 has 16, of which one brings 5 at once."""
    out = np.zeros(32, np.uint32)
    body = "@lead mbarrier.init.shared.b64 [b], 32; bar.sync 0; setp.lt.u32 done, t, 16; "
    body += "@done mbarrier.arrive_drop.shared.b64 l, [b]; @!done mbarrier.arrive.shared.b64 l, [b]; bar.sync 0;"
    body += "mbarrier.test_wait.parity.shared.b64 done, [b], 0; selp.u32 u, 1, 0, done; bar.sync 0;"
    body += "@lead mbarrier.expect_tx.relaxed.cta.shared.b64 [b], 64; @lead mbarrier.arrive.shared.b64 _, [b], 5;"
    body += "setp.lt.u32 done, t, 11; @done mbarrier.arrive.noComplete.shared.b64 l, [b], 1; bar.sync 0;"
    body += "mbarrier.test_wait.parity.shared.b64 done, [b], 1; selp.u32 v, 10, 0, done; add.u32 u, u, v; bar.sync 0;"
    body += "@lead mbarrier.complete_tx.relaxed.cta.shared.b64 [b], 64; bar.sync 0;"
    body += "mbarrier.test_wait.parity.shared.b64 done, [b], 1; selp.u32 v, 100, 0, done; add.u32 u, u, v;"
    run(body + "st.global.u32 [p], u;", out)
    assert out.tolist() == [101] * 32


def test_generic_addresses_of_mbarriers():
    out = np.zeros(32, np.uint32)
    body = "cvt.u64.u32 q, b; cvta.shared.u64 q, q; @lead mbarrier.init.b64 [q], 32; bar.sync 0; mbarrier.arrive.b64 l, [q];"
    run(body + "mbarrier.try_wait.b64 done, [q], l, 1000; selp.u32 u, 1, 0, done; st.global.u32 [p], u;", out)
    assert out.tolist() == [1] * 32  # all lanes arrive before any asks


@pytest.mark.parametrize(
    "body, words",
    [
        ("@lead mbarrier.init.shared.b64 [b], 1; @lead mbarrier.arrive.noComplete.shared.b64 l, [b], 1;", "noComplete"),
        ("@lead mbarrier.init.shared.b64 [b], 1; @lead mbarrier.inval.shared.b64 [b]; @lead mbarrier.arrive.shared.b64 l, [b];", "none was initialised"),
        ("@lead mbarrier.init.shared.b64 [b], 0;", "count 0 out of bounds"),
        ("@lead mbarrier.init.shared.b64 [b], 1048576;", "count 1048576 out of bounds"),
        ("@lead mbarrier.init.shared.b64 [b], 1; @lead mbarrier.expect_tx.shared.b64 [b], 1048576;", "overflow"),
        ("@lead mbarrier.init.shared.b64 [b + 4], 1;", "misaligned"),
    ],
)  # fmt: skip
def test_misuse(body, words):
    with pytest.raises(EmulatorError, match=words):
        run(body, np.zeros(32, np.uint32))
