"""Instructions that are not modelled are refused when a module is loaded, with their PTX line."""

# ruff: noqa: E501 PTX texts

import pytest

from emulator import EmulatorError, load

ACCUMULATORS = "{" + ", ".join(["f"] * 4) + "}"
HALVES = "{r, r}"


@pytest.mark.parametrize(
    "instruction",
    [
        f"wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {HALVES}, l, l, q, 1, 1, 0, 0;",
        f"wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {ACCUMULATORS}, l, l, q, 1, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {r, r, r, r}, l, l, q;",
        f"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {ACCUMULATORS}, l, l, r, 0, q, 1, 1, 0, 0;",
        f"mma.sp.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {ACCUMULATORS}, {HALVES}, {HALVES}, {ACCUMULATORS}, r, 0;",
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {r, r, r, r, r, r, r, r}, [l], r;",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [r], [r], 16, [r];",
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [r], [l, {r, r, r, r}], [r], {h, h};",
        "tensormap.replace.tile.global_address.global.b1024.b64 [l], l;",
        "tex.2d.v4.f32.f32 {f, f, f, f}, [l, {f, f}];",
        "ld.global.frobnicate.b32 r, [l];",
        "frobnicate.b32 r, r;",
    ],
)
def test_refused(instruction):
    ptx = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel() {{
.reg .b16 h; .reg .b32 r; .reg .b64 l; .reg .f32 f; .reg .pred q;
{instruction}
ret; }}
"""
    with pytest.raises(EmulatorError) as caught:
        load(ptx)
    assert "PTX line 6: " in str(caught.value) and instruction in str(caught.value)
