"""What copies count, against numbers computed by hand: sectors of global memory and shared transactions.

A shared access of b bytes per lane goes in phases of 128 bytes: 32, 16 or 8 lanes of 4, 8 or 16 bytes. A phase takes as
many transactions as the most distinct words in one bank of four bytes.
"""

import numpy as np
import pytest

from emulator import encode_tiled, load
from emulator.tensor_kernels import load_kernel, module_text, store_kernel


def launch(size, address, source=None, prepare="", operand="", lanes=32):
    """Every lane copies `size` bytes to shared byte `address` from `source`, PTX expressions that set a from t.

    operand: the source size or the ignore-src predicate, which `prepare` sets.
    """
    text = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x) {{
.shared .align 1024 .b8 s[16384];
.reg .b32 t, a, b, c, r, base; .reg .b64 p; .reg .pred q;
mov.u32 t, %tid.x; mov.u32 base, s;
{source or f"mul.lo.u32 a, t, {size};"}
ld.param.u64 p, [x]; mad.wide.u32 p, a, 1, p;
{address}
add.u32 base, base, a;
{prepare}
cp.async.{"cg" if size == 16 else "ca"}.shared.global [base], [p], {size}{operand};
cp.async.wait_all;
ret; }}
"""
    report = load(text).launch("kernel", block=lanes, args=[np.zeros(65536, np.uint8)])
    assert len(report.shared) == 1
    read = report.global_read
    return *next(iter(report.shared.values())), read.bytes, read.sectors, read.ideal


@pytest.mark.parametrize("size, phases", [(4, 1), (8, 2), (16, 4)])
def test_coalesced(size, phases):
    found = launch(size, f"mul.lo.u32 a, t, {size};")
    assert found == (phases, phases, 32 * size, size, size)


@pytest.mark.parametrize(
    "size, stride, sectors", [(4, 8, 8), (4, 32, 32), (8, 16, 16), (8, 64, 32), (16, 32, 32), (16, 256, 32)]
)
def test_strided_reads(size, stride, sectors):
    found = launch(size, f"mul.lo.u32 a, t, {size};", f"mul.lo.u32 a, t, {stride};")
    assert found[2:] == (32 * size, sectors, size)


@pytest.mark.parametrize(
    "size, stride, transactions, phases",
    [
        (4, 8, 2, 1),  # two words in every other bank
        (4, 128, 32, 1),  # a column: one bank
        (4, 132, 1, 1),  # padded by a word
        (8, 16, 4, 2),  # 16 lanes over 256 bytes
        (8, 128, 32, 2),
        (16, 32, 8, 4),  # 8 lanes over 256 bytes
        (16, 128, 32, 4),  # a column of 16-byte chunks: 8 lanes in the same four banks
        (16, 144, 4, 4),  # padded by a chunk
    ],
)
def test_conflicting_writes(size, stride, transactions, phases):
    assert launch(size, f"mul.lo.u32 a, t, {stride};")[:2] == (transactions, phases)


def test_unswizzled_and_swizzled_tile():
    # Lanes 8r to 8r+7 fill row r of 128 bytes: no conflicts either way. Read by columns the swizzle matters: lane l
    # writes chunk l/8 of row l%8.
    rows = "shr.u32 b, t, 3; and.b32 c, t, 7;"
    columns = "and.b32 b, t, 7; shr.u32 c, t, 3;"
    plain, swizzle = "mad.lo.u32 a, b, 8, c; mul.lo.u32 a, a, 16;", "xor.b32 c, c, b; "
    assert launch(16, rows + plain)[:2] == (4, 4)
    assert launch(16, rows + swizzle + plain)[:2] == (4, 4)
    assert launch(16, columns + plain)[:2] == (32, 4)  # 8 lanes of a phase in one column: 8 transactions each
    assert launch(16, columns + swizzle + plain)[:2] == (4, 4)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_only_bytes_that_are_read_count(size):
    address, phases = f"mul.lo.u32 a, t, {size};", {4: 1, 8: 2, 16: 4}[size]
    nothing = launch(size, address, prepare="mov.u32 r, 0;", operand=", r")
    assert nothing == (phases, phases, 0, 0, 0)
    even = launch(size, address, prepare=f"and.b32 r, t, 1; mul.lo.u32 r, r, {size};", operand=", r")  # odd lanes read
    assert even == (phases, phases, 16 * size, min(32, 32 * size // 32), size // 2)
    half = launch(size, address, prepare=f"mov.u32 r, {size // 2};", operand=", r")
    assert half == (phases, phases, 16 * size, size, size // 2)
    ignored = launch(
        size, address, prepare="setp.lt.u32 q, t, 8;", operand=", q"
    )  # ignore-src: the first 8 lanes read nothing
    assert ignored == (phases, phases, 24 * size, 24 * size // 32, 24 * size // 32)


def test_partial_warp():
    assert launch(16, "mul.lo.u32 a, t, 16;", lanes=12) == (2, 2, 192, 6, 6)


@pytest.mark.parametrize("first, sectors", [(0, 32), (8, 40), (16, 32), (-16, 24), (48, 8)])
def test_tensor_boxes(first, sectors):
    """8 rows of 64 bf16: 4 sectors each, 5 if a row starts in the middle of one; columns from 64 on are outside."""
    module = load(module_text([load_kernel(2), store_kernel(2)]))
    x = np.zeros((16, 128), np.uint16)
    encoded = encode_tiled(x, "bf16", (64 if first in (-16, 48) else 128, 16), (256,), (64, 8))
    inside = 8 * 2 * {-16: 48, 48: 16}.get(first, 64)
    for kernel in ("load2", "store2"):
        report = module.launch(kernel, args=[encoded, np.zeros(1024, np.uint8), 1024, first, 4])
        found = report.global_read if kernel == "load2" else report.global_write
        assert (found.bytes, found.sectors, found.ideal) == (inside, sectors, inside // 32)
