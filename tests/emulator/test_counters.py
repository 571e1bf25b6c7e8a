"""Counters equal numbers computed by hand: coalesced, strided and conflicting accesses."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import compile_cuda, load

SOURCE = r"""
extern "C" __global__ void read(const float* in, float* out, int stride) { out[threadIdx.x] = in[threadIdx.x * stride]; }
extern "C" __global__ void shared(float* out, int stride) {
  __shared__ float s[1024];
  for (int i = threadIdx.x; i < 1024; i += 32) s[i] = i;
  __syncwarp();
  out[threadIdx.x] = s[threadIdx.x * stride % 1024];
}
extern "C" __global__ void wide(float4* out) {
  __shared__ float4 s[32];
  s[threadIdx.x] = make_float4(1, 2, 3, threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void loop(int* out, int n) {
  int x = 1;
  #pragma unroll 1
  for (int i = 0; i < n; ++i) { x = x * 3 ^ i; __syncthreads(); }
  out[threadIdx.x] = x;
}
"""


@pytest.fixture(scope="module")
def module():
    return load(compile_cuda(SOURCE))


@pytest.mark.parametrize("stride, sectors, ideal", [(1, 4, 4), (2, 8, 4), (8, 32, 4), (0, 1, 1), (9, 32, 4)])
def test_global_sectors(module, stride, sectors, ideal):
    report = module.launch("read", args=[np.zeros(512, np.float32), np.zeros(32, np.float32), stride])
    assert (report.global_read.bytes, report.global_read.sectors, report.global_read.ideal) == (128, sectors, ideal)
    assert (report.global_write.bytes, report.global_write.sectors, report.global_write.ideal) == (128, 4, 4)


@pytest.mark.parametrize("stride, transactions", [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (0, 1), (3, 1)])
def test_bank_conflicts(module, stride, transactions):
    report = module.launch("shared", args=[np.zeros(32, np.float32), stride])
    loads = [found for line, found in report.shared.items() if found[1] == 1]
    assert loads == [(transactions, 1)] or transactions == 1
    assert report.conflicts == transactions - 1


def test_wide_accesses_take_four_phases(module):
    report = module.launch("wide", args=[np.zeros((32, 4), np.float32)])
    assert sorted(report.shared.values()) == [(4, 4), (4, 4)] and report.conflicts == 0
    assert report.global_write.sectors == 16 and report.barriers == 1


def test_instruction_classes(module):
    reports = [module.launch("loop", block=64, args=[np.zeros(64, np.int32), n]) for n in (10, 11)]
    assert reports[0].barriers == 10 and reports[1].barriers == 11
    more = {name: reports[1].instructions[name] - reports[0].instructions[name] for name in reports[0].instructions}
    assert more["barrier"] == 2 and more["control"] >= 2  # one more round of two warps
    assert more["memory"] == more["float"] == more["matrix"] == 0
    assert reports[0].total == sum(reports[0].instructions.values())
    assert sum(reports[0].lines.values()) == reports[0].total
