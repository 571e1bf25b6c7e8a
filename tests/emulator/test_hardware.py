"""The comparison with a GPU, without one: planted differences are found, and what may differ is let pass and counted."""

# ruff: noqa: E501 PTX texts

import contextlib

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, load, module
from emulator.hardware.compare import compare, decode, ulp
from emulator.hardware.driver import DriverError
from emulator.hardware.fake import FakeDriver
from emulator.hardware.inexact import INEXACT, UNDEFINED, inexact
from emulator.hardware.plugin import InProcess
from emulator.hardware.record import BITS, BOUNDS, FAILS, NANS, SUMS, Recorder, unrunnable

HEAD = ".version 9.0\n.target {target}\n.address_size 64\n"
ONE = (
    HEAD
    + """.visible .entry one(.param .u64 x, .param .u64 y) {{
.reg .b32 t; .reg .b64 p, q; .reg .f32 a, b; .reg .pred r;
mov.u32 t, %tid.x; ld.param.u64 p, [x]; mad.wide.u32 p, t, 4, p; ld.param.u64 q, [y]; mad.wide.u32 q, t, 4, q;
ld.global.f32 a, [p];
{instruction}
st.global.f32 [q], b; ret; }}
"""
)


class Changed(FakeDriver):
    """Changes the last array behind every launch."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def run(self, *launch):
        super().run(*launch)
        (arena,) = [data for start, data in self._memory.items() if start >> 40 >= 3000]
        self.change(arena[-1024:-512])  # arrays of up to 512 bytes have so much room


def flip(byte):
    def change(data):
        data[byte] ^= 1

    return change


def add_ulps(n):
    def change(data):
        data[:128].view(np.uint32)[:] += np.uint32(n)

    return change


@contextlib.contextmanager
def recording(driver):
    before, recorder = module.watch, Recorder(InProcess(driver))
    module.watch = recorder
    try:
        yield recorder
    finally:
        module.watch = before


def run(instruction, driver, target="sm_80", x=None, **options):
    x = np.random.default_rng(0).uniform(0.5, 4, 32).astype(np.float32) if x is None else x
    with recording(driver) as recorder:
        text = ONE.format(instruction=instruction, target=target)
        load(text).launch("one", args=[x, np.zeros(32, np.float32)], **options)
    return recorder


def test_equal_results():
    recorder = run("add.rn.f32 b, a, a;", FakeDriver())
    assert recorder.compared == {BITS: 1} and not recorder.differences and not recorder.left_out
    assert {"add.rn.f32", "ld.global.f32", "mov.u32 %tid.x"} <= recorder.forms_compared


def test_one_bit():
    recorder = run("mov.f32 b, 0f3F800000;", Changed(flip(4 * 7 + 1)))
    (text,) = recorder.differences
    assert "one in " in text and "test_one_bit" in text and "argument 1" in text
    assert "[7]: emulator 0x3f800000, hardware 0x3f800100; 1 of 32 elements differ" in text
    assert not recorder.compared


@pytest.mark.parametrize("instruction, ulps, level", [
    ("ex2.approx.ftz.f32 b, a;", 2, BOUNDS), ("ex2.approx.ftz.f32 b, a;", 40, None),
    ("rsqrt.approx.f32 b, a;", 1, BOUNDS), ("rsqrt.approx.f32 b, a;", 9, None),
    ("tanh.approx.f32 b, a;", 4000, BOUNDS), ("tanh.approx.f32 b, a;", 40000, None),
    ("add.rn.f32 b, a, a;", 1, None), ("div.rn.f32 b, a, a;", 1, None), ("div.full.f32 b, a, a;", 2, BOUNDS),
    ("ex2.approx.ftz.f32 b, a; add.rn.f32 b, b, b;", 6, SUMS), ("ex2.approx.ftz.f32 b, a; add.rn.f32 b, b, b;", 4000, None),
    ("mul.f32 b, a, a; add.f32 b, b, a;", 1, SUMS), ("mul.rn.f32 b, a, a; add.f32 b, b, a;", 1, None),
])  # fmt: skip
def test_documented_bounds(instruction, ulps, level):
    recorder = run(instruction, Changed(add_ulps(ulps)))
    assert recorder.compared == ({level: 1} if level else {})
    assert len(recorder.differences) == (level is None)


def test_nan_payloads():
    x = np.full(32, np.nan, np.float32)
    payload = Changed(add_ulps(5))
    assert run("add.rn.f32 b, a, a;", payload, x=x).compared == {NANS: 1}
    assert len(run("mov.b32 b, a;", payload, x=x).differences) == 1  # nothing computes: bits are bits


def test_sums_of_matrices():
    ptx = (
        HEAD.format(target="sm_80")
        + """.visible .entry product(.param .u64 x, .param .u64 y) {
.reg .b32 t, a<4>, b<2>; .reg .b64 p, q; .reg .f32 c<4>;
mov.u32 t, %tid.x; ld.param.u64 p, [x]; mad.wide.u32 p, t, 16, p; ld.param.u64 q, [y]; mad.wide.u32 q, t, 4, q;
ld.global.v4.b32 {a0, a1, a2, a3}, [p]; mov.f32 c0, 0f00000000; mov.b32 b0, a1; mov.b32 b1, a2;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c0, c0, c0};
st.global.f32 [q], c0; ret; }
"""
    )
    words = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32).view(np.uint32) >> 16
    for ulps, level in ((9, SUMS), (1 << 21, None)):
        with recording(Changed(add_ulps(ulps))) as recorder:
            load(ptx).launch("product", args=[words.astype(np.uint16), np.zeros(32, np.float32)])
        assert recorder.compared == ({level: 1} if level else {}), ulps


def test_written_beside():
    def change(data):
        data[128] = 0

    (text,) = run("mov.f32 b, a;", Changed(change)).differences
    assert "the GPU wrote beside argument 1" in text


def test_reasons_to_leave_out():
    assert run("mov.f32 b, a;", FakeDriver(), target="sm_100").left_out == {"the GPU cannot run sm_100": 1}
    assert run("mov.f32 b, a;", FakeDriver(80), target="sm_90a").left_out == {"the GPU cannot run sm_90a": 1}
    for target, capability, fits in (
        ("sm_80", 120, True),
        ("sm_90a", 100, False),
        ("sm_100f", 103, True),
        ("sm_100f", 120, False),
    ):
        assert (unrunnable(HEAD.format(target=target), capability) == "") == fits
    recorder = run("mov.f32 b, a;", Changed(flip(0)), undefined="a reason")
    assert recorder.left_out == {"a reason": 1} and not recorder.compared
    clock = ".reg .b32 u; mov.u32 u, %clock; {use}"
    recorder = run(clock.format(use="mov.f32 b, a;"), FakeDriver())
    assert recorder.compared == {BITS: 1}  # reads it for nothing
    recorder = run(clock.format(use="mov.b32 b, u;"), Changed(flip(0)))
    assert recorder.left_out == {"different, and may be: reads a clock": 1} and not recorder.differences
    assert "reads a clock (one)" in "\n".join(recorder.summary())


def test_memory_that_is_too_large_to_copy(monkeypatch):
    monkeypatch.setattr("emulator.hardware.record.MOST_BYTES", 255)
    assert run("mov.f32 b, a;", FakeDriver()).left_out == {"more than 0 MiB of memory": 1}


def test_launches_that_the_emulator_refuses():
    with recording(FakeDriver()) as recorder:
        with pytest.raises(EmulatorError, match="misaligned"):
            load(ONE.format(instruction="ld.global.f32 b, [p + 2];", target="sm_80")).launch(
                "one", args=[np.zeros(33, "f4")] * 2
            )
    assert recorder.left_out == {"the emulator refuses it: misaligned": 1} and not recorder.differences


class Survives(FakeDriver):
    def run(self, *launch):
        with contextlib.suppress(DriverError):
            super().run(*launch)


@pytest.mark.parametrize("name", ["trap", "assertion failed"])
def test_kernels_that_stop_themselves(name):
    body = "__trap()" if name == "trap" else "assert(!threadIdx.x)"
    source = f'#include <cassert>\nextern "C" __global__ void stop() {{ if (threadIdx.x == 5) {body}; }}\n'
    for driver, found in ((FakeDriver(), {FAILS: 1}), (Survives(), {})):
        with recording(driver) as recorder, pytest.raises(EmulatorError, match=name):
            load(compile_cuda(source)).launch("stop")
        assert recorder.compared == found
        assert [f"{name} on the emulator, but the driver says success" in text for text in recorder.differences] == [
            True
        ] * (not found)


class Older(FakeDriver):
    version = 12080

    def load(self, ptx):
        if not ptx.startswith(".version 8.7"):
            raise DriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
        return super().load(ptx)


def test_older_drivers():
    recorder = run("mov.f32 b, a;", Older())
    assert recorder.compared == {BITS: 1} and recorder.notes == {
        "the PTX version was lowered to what the driver knows": 1
    }


class Refuses(FakeDriver):
    def load(self, ptx):
        raise DriverError("CUDA_ERROR_INVALID_PTX", "ptxas says why")


def test_ptx_that_the_driver_refuses():
    (text,) = run("mov.f32 b, a;", Refuses()).differences
    assert text.endswith("loading: CUDA_ERROR_INVALID_PTX: ptxas says why")


def test_summary():
    recorder = run("add.rn.f32 b, a, a;", Changed(flip(0)))
    with recording(FakeDriver()):
        module.watch = recorder
        for why in ("", "a reason"):
            text = ONE.format(instruction="sub.rn.f32 b, a, a; " + "neg.f32 b, b;" * bool(why), target="sm_80")
            load(text).launch("one", args=[np.zeros(32, np.float32)] * 2, undefined=why)
    text = "\n".join(recorder.summary())
    assert "1 launches compared, 1 left out, 1 different" not in text  # the flip was in the driver of all
    assert "left out: a reason" in text and "different: one in " in text
    rows, forms = recorder.coverage()
    assert rows["neg f"] == "a reason" and rows["brx "] == "no launch that succeeded executed it"
    assert "neg.f32" in forms["a reason"]


def test_table():
    for row in [*INEXACT, *UNDEFINED]:
        assert row.why and row.section
    forms = {"ex2.approx.ftz.bf16x2", "div.rn.f32", "cos.approx.f32", "mma.sync.f32.x.s32", "wgmma.fence.sync.aligned"}
    assert {row.section for row in inexact(forms)} == {"9.7.4.10 ex2", "9.7.3.18 sin, 9.7.3.19 cos"}


def test_decoding():
    assert decode(np.array([0x3F80, 0xC000], np.uint16).tobytes(), "bf16").tolist() == [1, -2]
    assert ulp(np.array([1.0, 1.5, 0.0, 2.0**-130, 4.0]), "f32").tolist() == [
        2.0**-23,
        2.0**-23,
        2.0**-149,
        2.0**-149,
        2.0**-21,
    ]
    assert compare("x", b"abc", b"abd", "", set(), []).index == 2
    assert compare("x", b"", b"", "<f4", {"f32"}, []) is None
