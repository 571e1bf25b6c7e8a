"""Attention forward in Triton, as its tutorials write it, for sizes that are multiples of the tiles: a rival."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from emulator import Report, load
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def attention(q, k, v, out, lse, S, scale_log2, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    x = tl.load(q + rm[:, None] * D + rd[None, :])
    m = tl.full((BM,), -float("inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)  # noqa: E741
    acc = tl.zeros((BM, D), tl.float32)
    keys = k + rn[None, :] * D + rd[:, None]
    values = v + rn[:, None] * D + rd[None, :]
    for _ in range(0, S, BN):
        s = tl.dot(x, tl.load(keys))
        new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new[:, None])
        factor = tl.exp2(m - new)
        l = l * factor + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(tl.bfloat16), tl.load(values), acc * factor[:, None])
        m = new
        keys += BN * D
        values += BN * D
    tl.store(out + rm[:, None] * D + rd[None, :], (acc / l[:, None]).to(tl.bfloat16))
    tl.store(lse + rm, (m + tl.log2(l)) * 0.6931471805599453)


class TritonForward:
    """Compiled for one tile; a launch is counted in the emulator."""

    def __init__(self, D: int, BM: int, BN: int, warps: int, stages: int, arch: int = 80):
        self.D, self.BM = D, BM
        types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*bf16", "lse": "*fp32", "S": "i32"}
        signature = {**types, "scale_log2": "fp32", "D": "constexpr", "BM": "constexpr", "BN": "constexpr"}
        divisible = {(i,): [["tt.divisibility", 16]] for i in range(6)}
        source = ASTSource(fn=attention, signature=signature, constexprs={"D": D, "BM": BM, "BN": BN}, attrs=divisible)
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        self.metadata, self.module = made.metadata, load(made.asm["ptx"])

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray) -> Report:
        """The bits of bfloat16 of [S, D]; lse [S] in float32."""
        S = len(lse)
        args = [q, k, v, out, lse, S, self.D**-0.5 * 1.4426950408889634]
        count = len(self.module._native.parameters(self.metadata.name))
        return self.module.launch(
            self.metadata.name,
            grid=S // self.BM,
            block=32 * self.metadata.num_warps,
            shared_bytes=self.metadata.shared,
            args=[*args, *[0] * (count - len(args))],  # pointers to scratch memory that stay null
            check_races=False,
            threads=2,
        )
