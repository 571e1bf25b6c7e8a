"""What CUDA's own headers make of ordinary C++: cooperative groups, cuda::barrier, pipelines, cuda::ptx, half, __int128."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import compile_cuda, load

SEEDS = [0, 1, 2]
GROUPS = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;
extern "C" __global__ void groups(const int* in, int* out) {
  __shared__ int s[128];
  auto block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  auto tile = cg::tiled_partition<8>(warp);
  int t = block.thread_rank();
  cg::memcpy_async(block, s, in, sizeof(int) * 128);
  cg::wait(block);
  out[t] = cg::reduce(warp, s[t], cg::plus<int>());
  out[t + 128] = cg::inclusive_scan(tile, s[t]);
  if (t % 3 == 0) {
    auto here = cg::coalesced_threads();
    out[t + 256] = 100 * here.size() + here.shfl(t, 0);
  }
  out[t + 384] = cg::labeled_partition(warp, t % 5).size();
  out[t + 512] = cg::binary_partition(warp, t % 7 == 0).size();
}
extern "C" __global__ void __cluster_dims__(1, 1, 1) cluster(const int* in, int* out) {
  __shared__ int s[128];
  auto all = cg::this_cluster();
  s[threadIdx.x] = in[threadIdx.x];
  all.sync();
  int* remote = all.map_shared_rank(s, 0);
  out[threadIdx.x] = remote[127 - threadIdx.x] + 1000 * (all.query_shared_rank(remote) + all.num_blocks() + all.block_rank());
}
"""


@pytest.fixture(scope="module")
def groups():
    return load(compile_cuda(GROUPS, "sm_90a"))


@pytest.mark.parametrize("seed", SEEDS)
def test_cooperative_groups(groups, seed):
    x = np.random.default_rng(seed).integers(0, 50, 128).astype(np.int32)
    out = np.zeros((5, 128), np.int32)
    groups.launch("groups", block=128, args=[x, out], seed=seed)
    t = np.arange(128)
    assert out[0].tolist() == np.repeat(x.reshape(4, 32).sum(1), 32).tolist()
    assert out[1].tolist() == x.reshape(-1, 8).cumsum(1).reshape(-1).tolist()
    third = [[i for i in range(w * 32, w * 32 + 32) if i % 3 == 0] for w in range(4)]
    assert out[2].tolist() == [100 * len(third[i // 32]) + third[i // 32][0] if i % 3 == 0 else 0 for i in t]
    for row, label in ((3, t % 5), (4, t % 7 == 0)):
        assert out[row].tolist() == [int((label[i // 32 * 32 : i // 32 * 32 + 32] == label[i]).sum()) for i in t]


@pytest.mark.parametrize("seed", SEEDS)
def test_cluster_of_one(groups, seed):
    x, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    groups.launch("cluster", block=128, args=[x, out], seed=seed)
    assert out.tolist() == (1000 + x[::-1]).tolist()


LIBCUXX = r"""
#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/ptx>
using Barrier = cuda::barrier<cuda::thread_scope_block>;
namespace ptx = cuda::ptx;
extern "C" __global__ void barrier(int* in, int* out) {
  __shared__ int s[128];
  __shared__ Barrier bar;
  int t = threadIdx.x;
  if (t == 0) init(&bar, 128);
  __syncthreads();
  cuda::memcpy_async(s + t, in + t, 4, bar);
  bar.arrive_and_wait();
  out[t] = s[127 - t];
  cuda::atomic_ref<int, cuda::thread_scope_device> sum(out[128]), most(out[129]);
  sum.fetch_add(s[t], cuda::std::memory_order_acq_rel);
  most.fetch_max(s[t]);
}
extern "C" __global__ void pipeline(int* in, int* out) {
  __shared__ int s[2][128];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  auto block = cooperative_groups::this_thread_block();
  auto pipe = cuda::make_pipeline(block, &state);
  int sum = 0;
  for (int i = 0; i < 5; ++i) {
    pipe.producer_acquire();
    cuda::memcpy_async(block, s[i % 2], in + i * 128, cuda::aligned_size_t<16>(512), pipe);
    pipe.producer_commit();
    pipe.consumer_wait();
    block.sync();
    sum += s[i % 2][127 - threadIdx.x];
    block.sync();
    pipe.consumer_release();
  }
  out[threadIdx.x] = sum;
}
extern "C" __global__ void bulk(int* in, int* out) {
  __shared__ alignas(128) int s[128];
  __shared__ Barrier bar;
  int t = threadIdx.x;
  if (t == 0) {
    init(&bar, blockDim.x);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  __syncthreads();
  Barrier::arrival_token token;
  if (t == 0) {
    cuda::memcpy_async(s, in, cuda::aligned_size_t<16>(512), bar);
    token = cuda::device::barrier_arrive_tx(bar, 1, 0);
  } else {
    token = bar.arrive();
  }
  bar.wait(std::move(token));
  s[t] *= 2;
  ptx::fence_proxy_async(ptx::space_shared);
  __syncthreads();
  if (t == 0) {
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out, s, 512);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
  }
}
"""


@pytest.fixture(scope="module")
def libcuxx():
    return load(compile_cuda(LIBCUXX, "sm_90a"))


@pytest.mark.parametrize("copies", ["early", "late", "random"])
@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_and_pipelines(libcuxx, copies, seed):
    x = np.random.default_rng(seed).integers(0, 50, 640).astype(np.int32)
    out = np.zeros(130, np.int32)
    libcuxx.launch("barrier", block=128, args=[x, out], seed=seed, copies=copies)
    assert out.tolist() == [*x[127::-1], x[:128].sum(), x[:128].max()]
    out = np.zeros(128, np.int32)
    libcuxx.launch("pipeline", block=128, args=[x, out], seed=seed, copies=copies)
    assert out.tolist() == x.reshape(5, 128).sum(0)[::-1].tolist()
    libcuxx.launch("bulk", block=128, args=[x, out], seed=seed, copies=copies)
    assert out.tolist() == (2 * x[:128]).tolist()


ARITHMETIC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void wide(const unsigned long long* in, unsigned long long* out) {
  int t = threadIdx.x;
  unsigned __int128 a = (unsigned __int128)in[t] << 64 | in[t + 32], b = in[t + 64] | 1, q = a / b, r = a % b, p = a * b + 7;
  __int128 s = (__int128)(long long)in[t] * (long long)in[t + 32] - 5;
  unsigned __int128 all[4] = {q, r, p, (unsigned __int128)s};
  for (int i = 0; i < 8; ++i) out[t + 32 * i] = (unsigned long long)(all[i / 2] >> 64 * (i % 2));
}
extern "C" __global__ void halves(const float* in, float* out) {
  int t = threadIdx.x;
  __half2 h = __float2half2_rn(in[t]), e = h2exp(h), q = h2sqrt(h);
  __nv_bfloat16 b = __float2bfloat16(in[t]);
  float found[] = {__low2float(e), __high2float(q), __half2float(hsin(h.x)), __half2float(hlog(h.x)), __half2float(hrcp(h.x)),
                   __bfloat162float(hexp(b)), __bfloat162float(hlog(b)), __half2float(__shfl_xor_sync(~0u, h.x, 1))};
  for (int i = 0; i < 8; ++i) out[t + 32 * i] = found[i];
}
"""


@pytest.fixture(scope="module")
def arithmetic():
    return load(compile_cuda(ARITHMETIC))


def test_integers_of_128_bits(arithmetic):
    x = np.random.default_rng(0).integers(0, 2**64, 96, np.uint64)
    x[[0, 33, 66]] = 2**64 - 1
    out = np.zeros((8, 32), np.uint64)
    arithmetic.launch("wide", args=[x, out])

    def signed(v):
        return v - 2**64 if v >> 63 else v

    for t in range(32):
        high, low, b = int(x[t]), int(x[t + 32]), int(x[t + 64]) | 1
        a = high << 64 | low
        for k, expected in enumerate((a // b, a % b, a * b + 7, signed(high) * signed(low) - 5)):
            assert int(out[2 * k, t]) | int(out[2 * k + 1, t]) << 64 == expected % 2**128


def test_functions_of_halves(arithmetic):
    x = np.random.default_rng(0).uniform(0.3, 3, 32).astype(np.float32)
    out = np.zeros((8, 32), np.float32)
    arithmetic.launch("halves", args=[x, out])
    h, b = x.astype(np.float16).astype(np.float32), (((x.view(np.uint32) + 0x8000) >> 16) << 16).view(np.float32)
    half = [np.exp(h), np.sqrt(h), np.sin(h), np.log(h), 1 / h]
    np.testing.assert_allclose(out[:5], half, rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(out[5:7], [np.exp(b), np.log(b)], rtol=1e-2, atol=4e-3)
    np.testing.assert_array_equal(out[7], h[np.arange(32) ^ 1])
