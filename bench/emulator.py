"""How fast the PTX emulator of the tests is, on one core: integer and float code, a matrix product with mma.sync, and
one with tensor copies and wgmma.

    python bench/emulator.py

Checks results first. Targets: 2 million warp instructions per second; 1024 x 1024 x 128 in at most 3 s.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from emulator import compile_cuda, encode_tiled, load  # noqa: E402
from emulator.test_ampere import MATMUL, bfloat  # noqa: E402
from emulator.test_warp_specialised import SOURCE as WARP_SPECIALISED  # noqa: E402

LOOP = """
extern "C" __global__ void loop(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned state = i;
  float x = in[i];
  for (int k = 0; k < n; ++k) {
    state = state * 1664525u + 1013904223u;
    x = fmaf(x, 0.999f, (float)(state >> 16) * 1e-6f);
    if (x > 2.0f) x -= 1.0f;
  }
  out[i] = x;
}
"""


def main() -> None:
    module = load(compile_cuda(LOOP))
    x, out = np.ones(256, np.float32), np.zeros(256, np.float32)
    start = time.perf_counter()
    report = module.launch("loop", grid=2, block=128, args=[x, out, 20000])
    seconds = time.perf_counter() - start
    state = np.arange(256, dtype=np.uint32)
    expected = x.copy()
    for _ in range(20000):
        state = state * np.uint32(1664525) + np.uint32(1013904223)
        product = expected.astype(np.float64) * np.float64(np.float32(0.999))
        add = (state >> np.uint32(16)).astype(np.float32) * np.float32(1e-6)
        expected = (product + add).astype(np.float32)
        expected = np.where(expected > 2, expected - 1, expected).astype(np.float32)
    wrong = int((np.abs(out - expected) > 1e-3).sum())
    print(f"integer and float: {report.total / seconds / 1e6:.2f} million warp instructions/s, {wrong} of 256 wrong")

    random = np.random.default_rng(0)
    a, b = (random.integers(-3, 4, (1024, 128)).astype(np.float32) for _ in range(2))
    arrays = [bfloat(a), bfloat(b)]
    maps = [encode_tiled(one, "bf16", (128, 1024), (256,), (64, 64), swizzle="128B") for one in arrays]
    c = np.zeros((1024, 1024), np.float32)
    products = {
        "mma.sync": (compile_cuda(MATMUL), dict(grid=(16, 16), block=128, args=[*arrays, c, 1024, 1024, 128])),
        "wgmma": (
            compile_cuda(WARP_SPECIALISED, "sm_90a", ["-DFAULT=0"]),
            dict(grid=(8, 16), block=384, shared_bytes=2 * 192 * 64 * 2, args=[*maps, c, 1024, 128]),
        ),
    }
    for name, (ptx, launch) in products.items():
        module = load(ptx)
        for check_races in (True, False):
            c[:] = 0
            start = time.perf_counter()
            module.launch("matmul", check_races=check_races, **launch)
            seconds = time.perf_counter() - start
            wrong = int((c != a @ b.T).sum())
            print(
                f"1024 x 1024 x 128 bf16, {name}, check_races={check_races}: {seconds:.2f} s, {wrong} of {c.size} wrong"
            )


if __name__ == "__main__":
    main()
