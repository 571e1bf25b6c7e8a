"""PTX kernels that copy one box of a tensor, of every rank, swizzle and reduction; and what numpy says they copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

SPACE = 32768
REDUCTIONS = ["add", "min", "max", "inc", "dec", "and", "or", "xor"]
_HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
_REGISTERS = ".reg .b32 i, n, v, s, b; .reg .b64 p, m, q; .reg .pred lead, more;"
_SHARED = f".shared .align 1024 .b8 space[{SPACE}]; .shared .align 8 .b64 bar;"
_START = "mov.u32 i, %tid.x; setp.eq.u32 lead, i, 0; mul.lo.u32 i, i, 4; ld.param.u32 n, [bytes]; mov.u32 s, space;"


def _loop(body: str) -> str:  # over the words of the box, by the whole block
    return f"""NEXT: setp.ge.u32 more, i, n; @more bra END;
cvt.u64.u32 q, i; add.u64 q, q, p; add.u32 v, s, i;
{body}
add.u32 i, i, 128; bra NEXT; END:"""


def _coordinates(rank: int) -> tuple[str, str, str]:
    names = [f"c{k}" for k in range(rank)]
    params = "".join(f", .param .u32 p{name}" for name in names)
    loads = f".reg .b32 {', '.join(names)}; " + " ".join(f"ld.param.u32 {name}, [p{name}];" for name in names)
    return params, loads, "{" + ", ".join(names) + "}"


def load_kernel(rank: int) -> str:
    """load{rank}(map, out, bytes, coordinates...): the bytes of the box as they lie in shared memory."""
    params, loads, at = _coordinates(rank)
    return f""".visible .entry load{rank}(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 bytes{params}) {{
{_REGISTERS} {_SHARED}
{_START} {loads} ld.param.u64 p, [out]; mov.b64 m, map; cvta.param.u64 m, m; mov.u32 b, bar;
@lead mbarrier.init.shared::cta.b64 [b], 1;
fence.mbarrier_init.release.cluster; bar.sync 0;
@lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], n;
@lead cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [s], [m, {at}], [b];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 more, [b], 0; @!more bra WAIT;
{_loop("ld.shared.b32 v, [v]; st.global.b32 [q], v;")}
ret; }}
"""


def store_kernel(rank: int, reduction: str = "") -> str:
    """store{rank}{reduction}(map, in, bytes, coordinates...)."""
    params, loads, at = _coordinates(rank)
    opcode = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduction}" if reduction else ""
    opcode = opcode or f"cp.async.bulk.tensor.{rank}d.global.shared::cta"
    return f""".visible .entry store{rank}{reduction}(
.param .align 64 .b8 map[128], .param .u64 in, .param .u32 bytes{params}) {{
{_REGISTERS} {_SHARED}
{_START} {loads} ld.param.u64 p, [in]; mov.b64 m, map; cvta.param.u64 m, m;
{_loop("ld.global.b32 b, [q]; st.shared.b32 [v], b;")}
fence.proxy.async.shared::cta; bar.sync 0;
@lead {opcode}.tile.bulk_group [m, {at}], [s];
@lead cp.async.bulk.commit_group;
@lead cp.async.bulk.wait_group 0;
ret; }}
"""


def linear_reduction_kernel(reduction: str, dtype: str) -> str:
    """reduce_{reduction}_{dtype}(out, in, bytes)."""
    noftz = ".noftz" if reduction == "add" and dtype in ("f16", "bf16") else ""
    return f""".visible .entry reduce_{reduction}_{dtype}(.param .u64 out, .param .u64 in, .param .u32 bytes) {{
{_REGISTERS} {_SHARED}
{_START} ld.param.u64 p, [in]; ld.param.u64 m, [out];
{_loop("ld.global.b32 b, [q]; st.shared.b32 [v], b;")}
fence.proxy.async.shared::cta; bar.sync 0;
@lead cp.reduce.async.bulk.global.shared::cta.bulk_group.{reduction}{noftz}.{dtype} [m], [s], n;
@lead cp.async.bulk.commit_group;
@lead cp.async.bulk.wait_group 0;
ret; }}
"""


def module_text(kernels: Sequence[str]) -> str:
    return _HEAD + "\n".join(kernels)


def all_kernels() -> str:
    ranks = range(1, 6)
    stores = [store_kernel(rank, what) for rank, what in itertools.product(ranks, ["", *REDUCTIONS])]
    return module_text([*[load_kernel(rank) for rank in ranks], *stores])


# ---- what is copied


def box_places(
    shape: Sequence[int], start: Sequence[int], box: Sequence[int], steps: Sequence[int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Indices (outermost dimension first, clipped into the tensor) of a box's elements, and which are inside.

    All arguments are outermost first; the innermost dimension has no step.
    """
    axes, inside = [], []
    for k, (size, first, extent, step) in enumerate(zip(shape, start, box, steps, strict=True)):
        step = 1 if k == len(shape) - 1 else step
        at = first + np.arange(0, extent, step)
        axes.append(np.clip(at, 0, size - 1))
        inside.append((at >= 0) & (at < size))
    truth = np.ones((1,) * len(shape), bool)
    for k, one in enumerate(inside):
        truth = truth & one.reshape([-1 if j == k else 1 for j in range(len(shape))])
    return list(np.ix_(*axes)), truth


def swizzled(image: np.ndarray, swizzle: str) -> np.ndarray:
    """Where the bytes of a box lie: 16-byte chunk c of the 128-byte row r of shared memory is chunk c ^ (r % n)."""
    n = {"none": 1, "32B": 2, "64B": 4, "128B": 8}[swizzle]
    flat = np.ascontiguousarray(image).reshape(-1).view(np.uint8)
    padded = np.zeros(-(-len(flat) // 1024) * 1024, np.uint8)
    chunks = np.arange(len(padded) // 16)
    to = chunks // 8 * 8 + (chunks % 8 ^ chunks // 8 % n)
    source = np.concatenate([flat, np.zeros(len(padded) - len(flat), np.uint8)]).reshape(-1, 16)
    padded.reshape(-1, 16)[to] = source
    return padded
