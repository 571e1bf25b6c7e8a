"""Triton kernels for test_triton.py, compiled without a GPU: programs of another compiler."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_triton(
    kernel, signature: dict[str, str], constants: dict[str, int], arch: int = 80, warps: int = 4, stages: int = 2
):
    """PTX, kernel name and bytes of shared memory. Integers and pointers count as divisible by 16 where named *..."""
    full = {**signature, **{name: "constexpr" for name in constants}}
    attributes = {}
    for i, name in enumerate(kernel.arg_names):
        if full[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=full, constexprs=constants, attrs=attributes)
    made = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages}
    )
    return made.asm["ptx"], made.metadata


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * columns + i, e / tl.sum(e, 0), mask=i < columns)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0))


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * K + (k + rk)[None, :], mask=(rm < M)[:, None] & (k + rk < K)[None, :], other=0.0)
        y = tl.load(b + (k + rk)[:, None] * N + rn[None, :], mask=(k + rk < K)[:, None] & (rn < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=(rm < M)[:, None] & (rn < N)[None, :])


@triton.jit
def attention(q, k, v, out, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    x = tl.load(q + rm[:, None] * D + rd[None, :], mask=(rm < S)[:, None], other=0.0)
    m = tl.full((BM,), -float("inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)  # noqa: E741
    acc = tl.zeros((BM, D), tl.float32)
    for n in range(0, S, BN):
        y = tl.load(k + (n + rn)[None, :] * D + rd[:, None], mask=(n + rn < S)[None, :], other=0.0)
        s = tl.where((n + rn < S)[None, :], tl.dot(x, y) * scale, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        factor = tl.exp2(m - new)
        l = l * factor + tl.sum(p, 1)  # noqa: E741
        z = tl.load(v + (n + rn)[:, None] * D + rd[None, :], mask=(n + rn < S)[:, None], other=0.0)
        acc = tl.dot(p.to(tl.bfloat16), z, acc * factor[:, None])
        m = new
    tl.store(out + rm[:, None] * D + rd[None, :], acc / l[:, None], mask=(rm < S)[:, None])


@triton.jit
def matmul_of_descriptors(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([m, k]), b.load([k, n]), acc)
    c.store([m, n], acc.to(tl.bfloat16))
