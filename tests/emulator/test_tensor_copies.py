"""Tensor copies of every rank, swizzle, element type and reduction against numpy, with boxes that leave the tensor."""

import numpy as np
import pytest

from emulator import EmulatorError, encode_tiled, load
from emulator.tensor_kernels import (
    all_kernels,
    box_places,
    linear_reduction_kernel,
    module_text,
    swizzled,
)
from emulator.tensor_map import DATA_TYPES, SWIZZLES

COPIES = ["early", "late", "random"]
NUMPY = {
    "u8": "u1", "u16": "u2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "f16": "f2", "f32": "f4", "f64": "f8",
    "bf16": "u2", "f32_ftz": "f4", "tf32": "f4", "tf32_ftz": "f4",
}  # fmt: skip
# Outermost first: the tensor's sizes, a box (its innermost size is the test's), element strides, and where boxes start:
# inside, across either end, outside. Swizzled boxes have a multiple of 8 rows.
SHAPES = {
    1: ((37,), (), (1,), [(0,), (-5,), (30,), (64,)]),
    2: ((19, 20), (16,), (2, 1), [(0, 0), (-3, -1), (5, 13), (2, -64)]),
    3: ((5, 6, 18), (4, 4), (1, 2, 1), [(0, 0, 0), (-1, 4, 7), (3, -2, -9)]),
    4: ((3, 4, 5, 24), (2, 3, 4), (1, 2, 2, 1), [(0, 1, 0, 0), (2, -1, 3, -7), (-1, 2, -2, 15)]),
    5: ((2, 3, 4, 3, 17), (2, 2, 3, 1), (1, 1, 2, 1, 1), [(0, 0, 0, 0, 0), (-1, 1, -1, 2, 9), (1, -1, 2, 1, -3)]),
}


@pytest.fixture(scope="module")
def module():
    return load(all_kernels())


def bfloat(x):
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def real(x, dtype):
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else x


def integers(random, shape, dtype):
    x = random.integers(0 if dtype[0] == "u" else -9, 10, shape)
    return bfloat(x) if dtype == "bf16" else x.astype(NUMPY[dtype])


class Case:
    """A tensor with rows padded to 16 elements, its map, and the boxes that leave it."""

    def __init__(self, rank, dtype, swizzle, seed, **options):
        random = np.random.default_rng(seed)
        self.random, self.rank, self.dtype, self.swizzle = random, rank, dtype, swizzle
        self.shape, outer, self.steps, self.starts = SHAPES[rank]
        size = np.dtype(NUMPY[dtype]).itemsize
        inner = 16 if swizzle == "none" else int(swizzle[:-1]) // size
        self.box = (*outer, inner)
        self.x = integers(random, (*self.shape[:-1], -(-self.shape[-1] // 16) * 16), dtype)
        self.map = encode_tiled(
            self.x, dtype, self.shape[::-1], self.x.strides[-2::-1], self.box[::-1], self.steps[::-1], swizzle=swizzle,
            **options,
        )  # fmt: skip

    def places(self, start):
        return box_places(self.shape, start, self.box, self.steps)

    def traffic(self, start):
        """Bytes, sectors and ideal sectors of global memory."""
        places, inside = self.places(start)
        offsets = np.arange(self.x.size).reshape(self.x.shape)[tuple(places)][inside] * self.x.itemsize
        touched = {int(byte) // 32 for offset in offsets for byte in (offset, offset + self.x.itemsize - 1)}
        bytes_ = len(offsets) * self.x.itemsize
        return bytes_, len(touched), -(-bytes_ // 32)


def check_load(module, case, copies, seed, fill=0):
    for start in case.starts:
        places, inside = case.places(start)
        image = np.where(inside, case.x[tuple(places)], np.array(fill, case.x.dtype))
        out = np.zeros(image.nbytes, np.uint8)
        report = module.launch(
            f"load{case.rank}", args=[case.map, out, image.nbytes, *start[::-1]], seed=seed, copies=copies
        )
        expected = swizzled(image, case.swizzle)[: image.nbytes]
        np.testing.assert_array_equal(out.view(case.x.dtype), expected.view(case.x.dtype))
        read = report.global_read
        assert (read.bytes, read.sectors, read.ideal) == case.traffic(start)
        assert report.copied_bytes == read.bytes


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("rank, swizzle", [(1, "none"), *[(r, s) for r in (2, 3, 4, 5) for s in SWIZZLES]])
def test_loads(module, rank, swizzle, copies):
    check_load(module, Case(rank, "bf16", swizzle, rank), copies, seed=rank)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_load_types(module, dtype, copies):
    check_load(module, Case(2, dtype, "none", 1), copies, 0)
    check_load(module, Case(2, dtype, "128B", 1), copies, 1)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "tf32", "f32_ftz", "tf32_ftz"])
def test_fill_with_nan(module, dtype):
    for rank in (1, 3):
        check_load(
            module, Case(rank, dtype, "none", 1, fill_nan=True), "late", 0, 0x7FFF if dtype == "bf16" else np.nan
        )


def test_subnormals_of_flushing_types(module):
    x = np.array([1e-40, -1e-40, 1e-30, 0, 1, 2, 3, -4], np.float32)
    for dtype, expected in (("f32", x), ("f32_ftz", np.where(np.abs(x) < 1e-38, np.copysign(0, x), x))):
        out = np.zeros(8, np.float32)
        module.launch("load1", args=[encode_tiled(x, dtype, (8,), (), (8,)), out, 32, 0])
        assert out.tobytes() == expected.astype(np.float32).tobytes()


def combine(reduction, old, new, dtype):
    if reduction == "":
        return new
    if reduction in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[reduction](old, new)
    if reduction == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if reduction == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    x, y = real(old, dtype), real(new, dtype)
    result = {"add": np.add, "min": np.minimum, "max": np.maximum}[reduction](x, y)
    return bfloat(result) if dtype == "bf16" else result


def check_store(module, case, reduction, copies, seed):
    for start in case.starts:
        places, inside = case.places(start)
        image = integers(case.random, np.broadcast_shapes(*[one.shape for one in places]), case.dtype)
        held = swizzled(image, case.swizzle)[: image.nbytes].copy()
        expected = case.x.copy()
        old = expected[tuple(places)]
        rows = tuple(np.broadcast_to(one, image.shape)[inside] for one in places)
        expected[rows] = combine(reduction, old, image, case.dtype)[inside]
        report = module.launch(
            f"store{case.rank}{reduction}", args=[case.map, held, image.nbytes, *start[::-1]], seed=seed, copies=copies
        )
        np.testing.assert_array_equal(case.x, expected)  # and nothing outside was written
        written = report.global_write
        assert (written.bytes, written.sectors, written.ideal) == case.traffic(start)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("rank, swizzle", [(1, "none"), *[(r, s) for r in (2, 3, 4, 5) for s in SWIZZLES]])
def test_stores(module, rank, swizzle, copies):
    check_store(module, Case(rank, "f16", swizzle, rank), "", copies, rank)
    check_store(module, Case(rank, "f32", swizzle, rank), "add", copies, rank)


TENSOR_REDUCTIONS = [
    *[("add", t) for t in ("f16", "bf16", "u32", "s32", "u64", "s64", "f32", "f64")],
    *[(op, t) for op in ("min", "max") for t in ("f16", "bf16", "u32", "s32", "u64", "s64")],
    *[(op, t) for op in ("and", "or", "xor") for t in ("u32", "s32", "u64", "s64")],
    ("inc", "u32"),
    ("dec", "u32"),
]


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("reduction, dtype", TENSOR_REDUCTIONS)
def test_tensor_reductions(module, reduction, dtype, copies):
    check_store(module, Case(2, dtype, "128B", 3), reduction, copies, 1)


@pytest.mark.parametrize(
    "reduction, dtype", [("max", "f32"), ("and", "f16"), ("inc", "s32"), ("add", "u8"), ("xor", "u16")]
)
def test_reductions_that_do_not_exist(module, reduction, dtype):
    case = Case(1, dtype, "none", 0)
    with pytest.raises(EmulatorError, match=rf"no \.{reduction} of {dtype}"):
        module.launch(f"store1{reduction}", args=[case.map, np.zeros(256, np.uint8), 128, 0])


LINEAR_REDUCTIONS = [
    *[("add", t) for t in ("f16", "bf16", "u32", "s32", "u64", "f32", "f64")],
    *[(op, t) for op in ("min", "max") for t in ("f16", "bf16", "u32", "s32", "u64", "s64")],
    *[(op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")],
    ("inc", "u32"),
    ("dec", "u32"),
]


@pytest.mark.parametrize("copies", COPIES)
def test_linear_reductions(copies):
    module = load(module_text([linear_reduction_kernel(*one) for one in LINEAR_REDUCTIONS]))
    random = np.random.default_rng(0)
    for reduction, dtype in LINEAR_REDUCTIONS:
        kind = dtype.replace("b32", "u32").replace("b64", "u64")
        out, x = (integers(random, 96, kind) for _ in range(2))
        expected = combine(reduction, out, x, kind)
        report = module.launch(f"reduce_{reduction}_{dtype}", args=[out, x, x.nbytes], copies=copies)
        np.testing.assert_array_equal(out, expected)
        assert report.global_write.bytes == x.nbytes and report.global_write.sectors == x.nbytes // 32


def test_maps_that_are_larger_than_their_array(module):
    """The driver cannot know; the copy finds out."""
    x = np.zeros((8, 16), np.float32)
    encoded = encode_tiled(x, "f32", (16, 9), (64,), (16, 8))
    module.launch("load2", args=[encoded, np.zeros(512, np.uint8), 512, 0, 0])
    for kernel in ("load2", "store2", "store2add"):
        with pytest.raises(EmulatorError, match="out of bounds: global"):
            module.launch(kernel, args=[encoded, np.zeros(512, np.uint8), 512, 0, 1])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_sums_are_rounded_once(dtype):
    module = load(module_text([linear_reduction_kernel("add", dtype)]))
    random = np.random.default_rng(1)
    out, x = (random.standard_normal(512).astype(np.float32) for _ in range(2))
    if dtype == "f16":
        out, x = out.astype(np.float16), x.astype(np.float16)
        expected = out + x
    else:
        out, x = bfloat(out), bfloat(x)
        exact = (real(out, dtype).astype(np.float64) + real(x, dtype)).astype(np.float32).view(np.uint32)
        expected = ((exact + 0x7FFF + (exact >> 16 & 1)) >> 16).astype(np.uint16)
    module.launch(f"reduce_add_{dtype}", args=[out, x, x.nbytes])
    np.testing.assert_array_equal(out, expected)
