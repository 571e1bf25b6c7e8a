"""mma.sync of every shape and type that is implemented, against the layouts of the manual written out here."""

# ruff: noqa: E501 PTX texts

import numpy as np
import pytest

from emulator import load
from emulator.test_ampere import bfloat

FORMS = [  # K, input, result
    (8, "bf16", "f32"), (16, "bf16", "f32"), (8, "f16", "f32"), (16, "f16", "f32"), (8, "f16", "f16"), (16, "f16", "f16"),
    (4, "tf32", "f32"), (8, "tf32", "f32"), (16, "s8", "s32"), (32, "s8", "s32"), (16, "u8", "s32"), (32, "u8", "s32"),
]  # fmt: skip


def encode(x, kind):
    if kind == "bf16":
        return bfloat(x)
    return x.astype(
        {"f16": np.float16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8, "f32": np.float32, "s32": np.int32}[kind]
    )


def fragments(x, places, kind):
    """places(lane, i): the element i of a lane. Returns 32-bit words by register."""
    data = encode(x, kind)
    per_word = 4 // data.itemsize
    count = sum(1 for _ in places(0))
    words = np.zeros((count // per_word, 32, per_word), data.dtype)
    for lane in range(32):
        for i, place in enumerate(places(lane)):
            words[i // per_word, lane, i % per_word] = data[place]
    return words.view(np.uint32).reshape(-1, 32)


@pytest.mark.parametrize("k, kind, result", FORMS)
def test_mma(k, kind, result):
    per = {"bf16": 2, "f16": 2, "tf32": 1, "s8": 4, "u8": 4}[kind]
    low = 0 if kind == "u8" else -5
    random = np.random.default_rng(k)
    a, b, c = (random.integers(low, 6, shape).astype(np.float32) for shape in [(16, k), (k, 8), (16, 8)])

    def a_places(lane):
        for half in range(k // (4 * per)):
            for row in (0, 8):
                for i in range(per):
                    yield lane // 4 + row, per * (lane % 4) + i + 4 * per * half

    def b_places(lane):
        for half in range(k // (4 * per)):
            for i in range(per):
                yield per * (lane % 4) + i + 4 * per * half, lane // 4

    def c_places(lane):
        for i in range(4):
            yield lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2

    inputs = [fragments(a, a_places, kind), fragments(b, b_places, kind), fragments(c, c_places, result)]
    counts = [len(one) for one in inputs]
    names = [f"r{i}" for i in range(sum(counts))]
    groups = [names[: counts[0]], names[counts[0] : counts[0] + counts[1]], names[counts[0] + counts[1] :]]
    lists = ["{" + ", ".join(group) + "}" for group in groups]
    loads = "\n".join(f"ld.global.b32 {name}, [p + {128 * i}];" for i, name in enumerate(names))
    stores = "\n".join(f"st.global.b32 [q + {128 * i}], {name};" for i, name in enumerate(groups[2]))
    ptx = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y) {{
.reg .b32 t, {", ".join(names)}; .reg .b64 p, q;
mov.u32 t, %tid.x;
ld.param.u64 p, [x]; mad.wide.u32 p, t, 4, p;
ld.param.u64 q, [y]; mad.wide.u32 q, t, 4, q;
{loads}
mma.sync.aligned.m16n8k{k}.row.col.{result}.{kind}.{kind}.{result} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};
{stores}
ret;
}}
"""
    out = np.zeros((counts[2], 32), np.uint32)
    report = load(ptx).launch("kernel", args=[np.concatenate(inputs), out])
    np.testing.assert_array_equal(out, fragments(a @ b + c, c_places, result))
    assert report.matrix_flops == 2 * 16 * 8 * k
