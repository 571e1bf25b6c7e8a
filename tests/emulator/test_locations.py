"""Errors name every source line between the fault and the kernel, through functions that were inlined."""

# ruff: noqa: E501 CUDA and PTX texts

import re

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, load

SOURCE = """__device__ __forceinline__ int inner(const int* p, int i) {
  return p[i];
}
__device__ __forceinline__ int middle(const int* p, int i) {
  int x = inner(p, i + 1);
  return x * inner(p, i);
}
__device__ __forceinline__ int outer(const int* p, int i) {
  return middle(p, i + 2) + 3;
}
extern "C" __global__ void kernel(const int* in, int* out) {
  out[threadIdx.x] = outer(in, threadIdx.x);
  out[threadIdx.x] += middle(in, threadIdx.x);
}
"""


@pytest.mark.parametrize(
    "elements, lines",
    [
        (34, [2, 5, 9, 12]),  # outer reads two elements beyond the threads, its first inner call three
        (32, [2, 5, 9, 12]),
    ],
)
def test_the_whole_chain(elements, lines):
    module = load(compile_cuda(SOURCE))
    with pytest.raises(EmulatorError, match="out of bounds: global read") as caught:
        module.launch("kernel", args=[np.zeros(elements, np.int32), np.zeros(32, np.int32)])
    assert [int(one) for one in re.findall(r"(?:source|inlined at) .*kernel\.cu:(\d+)", str(caught.value))] == lines


def test_chains_of_two_callers_differ():
    source = SOURCE.replace("outer(in, threadIdx.x)", "outer(in, 0)").replace(
        "middle(in, threadIdx.x)", "middle(in, 30 + threadIdx.x)"
    )
    with pytest.raises(EmulatorError) as caught:
        load(compile_cuda(source)).launch("kernel", args=[np.zeros(32, np.int32), np.zeros(32, np.int32)])
    assert [int(one) for one in re.findall(r"(?:source|inlined at) .*kernel\.cu:(\d+)", str(caught.value))] == [
        2,
        5,
        13,
    ]


def test_no_inlining_no_chain():
    source = 'extern "C" __global__ void kernel(int* out) {\n  out[threadIdx.x] = 1;\n}\n'
    with pytest.raises(EmulatorError) as caught:
        load(compile_cuda(source)).launch("kernel", args=[np.zeros(31, np.int32)])
    assert re.search(r"source .*kernel\.cu:2$", str(caught.value)) and "inlined" not in str(caught.value)
