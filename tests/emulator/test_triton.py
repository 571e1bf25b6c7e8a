"""Programs that Triton compiled: right results in all copy modes and schedules, sizes that are no multiples of tiles."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

pytest.importorskip("triton")

from emulator import encode_tiled, load  # noqa: E402
from emulator import triton_kernels as kernels  # noqa: E402
from emulator.test_ampere import bfloat  # noqa: E402

MODES = [(copies, seed) for copies in ("early", "late", "random") for seed in (0, 1, 2)]
pytestmark = pytest.mark.slow


class Compiled:
    """A Triton kernel and how Triton launches it: parameters, then pointers to scratch memory that stay null."""

    def __init__(self, *args, **kwargs):
        ptx, self.metadata = kernels.compile_triton(*args, **kwargs)
        self.module = load(ptx)
        self.name = self.metadata.name
        self.warps = self.metadata.num_warps

    def __call__(self, grid, args, **how):
        count = len(self.module._native.parameters(self.name))
        args = [*args, *[0] * (count - len(args))]
        return self.module.launch(
            self.name, grid=grid, block=32 * self.warps, shared_bytes=self.metadata.shared, args=args, **how
        )


@pytest.fixture(scope="module")
def add():
    return Compiled(kernels.add, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256})


@pytest.fixture(scope="module")
def softmax():
    return Compiled(kernels.softmax, {"x": "*fp32", "out": "*fp32", "columns": "i32"}, {"BLOCK": 512})


@pytest.fixture(scope="module")
def total():
    return Compiled(kernels.total, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256})


@pytest.fixture(scope="module", params=[80, 90])
def matmul(request):
    types = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    return Compiled(kernels.matmul, types, {"BM": 64, "BN": 64, "BK": 32}, arch=request.param, stages=3)


@pytest.fixture(scope="module", params=[80, 90])
def attention(request):
    types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*fp32", "S": "i32", "scale": "fp32"}
    return Compiled(kernels.attention, types, {"D": 64, "BM": 64, "BN": 32}, arch=request.param)


def to_float(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("copies, seed", MODES)
def test_elementwise(add, softmax, total, copies, seed):
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((2, 700)).astype(np.float32)
    out = np.zeros_like(x)
    add(3, [x.copy(), y.copy(), out, 700], seed=seed, copies=copies)
    np.testing.assert_array_equal(out, x + y)
    x = random.standard_normal((5, 300)).astype(np.float32)
    out = np.zeros_like(x)
    softmax(5, [x, out, 300], seed=seed, copies=copies)
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, e / e.sum(1, keepdims=True), rtol=1e-5)
    x, out = np.arange(700, dtype=np.float32), np.zeros(1, np.float32)
    total(3, [x, out, 700], seed=seed, copies=copies)
    assert out[0] == x.sum()


@pytest.mark.parametrize("copies, seed", MODES)
def test_matmul(matmul, copies, seed):
    m, n, k = 100, 72, 80
    random = np.random.default_rng(seed)
    a, b = random.integers(-3, 4, (m, k)).astype(np.float32), random.integers(-3, 4, (k, n)).astype(np.float32)
    c = np.zeros((m, n), np.float32)
    matmul((2, 2), [bfloat(a), bfloat(b), c, m, n, k], seed=seed, copies=copies)
    np.testing.assert_array_equal(c, a @ b)


@pytest.mark.parametrize("copies, seed", MODES)
def test_attention(attention, copies, seed):
    s, d = 100, 64
    q, k, v = (bfloat(np.random.default_rng(seed + i).standard_normal((s, d))) for i in range(3))
    out = np.zeros((s, d), np.float32)
    attention(2, [q, k, v, out, s, d**-0.5 * 1.4426950408889634], seed=seed, copies=copies)
    scores = to_float(q) @ to_float(k).T * d**-0.5
    p = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(out, p / p.sum(1, keepdims=True) @ to_float(v), atol=2e-2)


@pytest.fixture(scope="module")
def descriptors():
    types = {name: "tensordesc<bf16[64,64]>" for name in "abc"} | {"K": "i32"}
    return Compiled(kernels.matmul_of_descriptors, types, {"BM": 64, "BN": 64, "BK": 64}, arch=90, stages=3)


@pytest.mark.parametrize("copies, seed", MODES)
def test_matmul_with_tensor_copies(descriptors, copies, seed):
    m, n, k = 100, 72, 200
    random = np.random.default_rng(seed)
    a, b = random.integers(-1, 2, (m, k)).astype(np.float32), random.integers(-1, 2, (k, n)).astype(np.float32)
    arrays = [bfloat(a), bfloat(b), np.zeros((m, n), np.uint16)]
    args = []
    for one in arrays:  # as Triton's launcher does: the map, then shape and strides
        rows, columns = one.shape
        args += [
            encode_tiled(one, "bf16", (columns, rows), (2 * columns,), (64, 64), swizzle="128B"),
            rows,
            columns,
            columns,
            1,
        ]
    descriptors((2, 2), [*args, k], seed=seed, copies=copies)
    np.testing.assert_array_equal(to_float(arrays[2]), to_float(bfloat(a @ b)))
