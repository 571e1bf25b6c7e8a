"""Block and warp algorithms of CUB (pip's nvidia-cuda-cccl or the toolkit's), compiled with nvcc."""

import numpy as np
import pytest

from emulator import compile_cuda, load

SOURCE = r"""
#include <cub/cub.cuh>
extern "C" __global__ void reduce(const int* in, int* out, int n) {
  using Reduce = cub::BlockReduce<int, 128>;
  __shared__ Reduce::TempStorage storage;
  int i = blockIdx.x * 128 + threadIdx.x;
  int sum = Reduce(storage).Sum(i < n ? in[i] : 0);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
extern "C" __global__ void scan(const int* in, int* out) {
  using Scan = cub::BlockScan<int, 128>;
  __shared__ Scan::TempStorage storage;
  int items[4];
  for (int i = 0; i < 4; ++i) items[i] = in[threadIdx.x * 4 + i];
  Scan(storage).ExclusiveSum(items, items);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = items[i];
}
extern "C" __global__ void sort(const unsigned* in, unsigned* out) {
  using Sort = cub::BlockRadixSort<unsigned, 128, 4>;
  __shared__ Sort::TempStorage storage;
  unsigned items[4];
  for (int i = 0; i < 4; ++i) items[i] = in[threadIdx.x * 4 + i];
  Sort(storage).Sort(items);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = items[i];
}
extern "C" __global__ void exchange(const int* in, int* out) {  // blocked to striped, in each warp
  using Exchange = cub::WarpExchange<int, 4, 32>;
  __shared__ Exchange::TempStorage storage[4];
  int items[4];
  for (int i = 0; i < 4; ++i) items[i] = in[threadIdx.x * 4 + i];
  Exchange(storage[threadIdx.x / 32]).BlockedToStriped(items, items);
  for (int i = 0; i < 4; ++i) out[threadIdx.x / 32 * 128 + i * 32 + threadIdx.x % 32] = items[i];
}
"""


@pytest.fixture(scope="module")
def module():
    return load(compile_cuda(SOURCE))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("copies", ["early", "late", "random"])
def test_cub(module, seed, copies):
    random = np.random.default_rng(seed)
    x = random.integers(-1000, 1000, 512).astype(np.int32)
    how = dict(block=128, seed=seed, copies=copies)
    sums = np.zeros(4, np.int32)
    module.launch("reduce", grid=4, args=[x, sums, 450], **how)
    padded = np.where(np.arange(512) < 450, x, 0)
    assert sums.tolist() == padded.reshape(4, 128).sum(1).tolist()
    out = np.zeros_like(x)
    module.launch("scan", args=[x, out], **how)
    assert out.tolist() == [0, *np.cumsum(x)[:-1].tolist()]
    keys, sorted_keys = random.integers(0, 2**32, 512, np.uint32), np.zeros(512, np.uint32)
    module.launch("sort", args=[keys, sorted_keys], **how)
    assert sorted_keys.tolist() == sorted(keys.tolist())
    module.launch("exchange", args=[x, out], **how)
    assert out.tolist() == x.tolist()
