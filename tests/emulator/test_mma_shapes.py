"""mma.sync of every shape and type that is implemented, against the layouts of the manual written out here."""

# ruff: noqa: E501 PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, load
from emulator.test_ampere import bfloat

BYTES = ["s8", "u8"]
FLOAT8 = ["e4m3", "e5m2"]
FORMS = [  # K, inputs, result
    (8, "bf16", "bf16", "f32"), (16, "bf16", "bf16", "f32"), (8, "f16", "f16", "f32"), (16, "f16", "f16", "f32"),
    (8, "f16", "f16", "f16"), (16, "f16", "f16", "f16"), (4, "tf32", "tf32", "f32"), (8, "tf32", "tf32", "f32"),
    *[(k, x, y, "s32") for k in (16, 32) for x in BYTES for y in BYTES],
    *[(k, x, y, d) for k in (16, 32) for x in FLOAT8 for y in FLOAT8 for d in ("f16", "f32")],
]  # fmt: skip
# Small integers as codes of 8-bit floats: sign, exponent, mantissa; exact in both.
CODES = {
    "e4m3": {0: 0x00, 1: 0x38, 2: 0x40, 3: 0x44, 4: 0x48, 5: 0x4A, 6: 0x4C},
    "e5m2": {0: 0x00, 1: 0x3C, 2: 0x40, 3: 0x42, 4: 0x44, 6: 0x46},
}


def encode(x, kind):
    if kind == "bf16":
        return bfloat(x)
    if kind in FLOAT8:
        return np.vectorize(lambda v: CODES[kind][abs(int(v))] | (0x80 if v < 0 else 0))(x).astype(np.uint8)
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


def product(form, inputs, counts, kind="b32"):
    """Runs mma.sync on register contents: rows of 32 lanes for A, B and C in turn. Returns D and the report."""
    names = [f"r{i}" for i in range(sum(counts))]
    groups = [names[: counts[0]], names[counts[0] : counts[0] + counts[1]], names[counts[0] + counts[1] :]]
    lists = ["{" + ", ".join(group) + "}" for group in groups]
    data = np.concatenate(inputs)
    size = data.itemsize
    loads = "\n".join(f"ld.global.{kind} {name}, [p + {32 * size * i}];" for i, name in enumerate(names))
    stores = "\n".join(f"st.global.{kind} [q + {32 * size * i}], {name};" for i, name in enumerate(groups[2]))
    ptx = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y) {{
.reg .b32 t; .reg .{kind} {", ".join(names)}; .reg .b64 p, q;
mov.u32 t, %tid.x;
ld.param.u64 p, [x]; mad.wide.u32 p, t, {size}, p;
ld.param.u64 q, [y]; mad.wide.u32 q, t, {size}, q;
{loads}
mma.sync.aligned.{form} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};
{stores}
ret;
}}
"""
    out = np.zeros((counts[2], 32), data.dtype)
    return out, load(ptx).launch("kernel", args=[data, out])


def c_places(lane):
    for i in range(4):
        yield lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


def places_of(k, per):
    def a_places(lane):
        for half in range(k // (4 * per)):
            for row in (0, 8):
                for i in range(per):
                    yield lane // 4 + row, per * (lane % 4) + i + 4 * per * half

    def b_places(lane):
        for half in range(k // (4 * per)):
            for i in range(per):
                yield per * (lane % 4) + i + 4 * per * half, lane // 4

    return a_places, b_places


def matrix(random, shape, kind):
    values = [0, 1, 2, 3, 4, 6] if kind == "u8" else [-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6]
    return random.choice(values, shape).astype(np.float32)


@pytest.mark.parametrize("k, kind_a, kind_b, result", FORMS)
def test_mma(k, kind_a, kind_b, result):
    random = np.random.default_rng(k)
    a, b, c = matrix(random, (16, k), kind_a), matrix(random, (k, 8), kind_b), matrix(random, (16, 8), result)
    a_places, b_places = places_of(k, 4 // encode(a, kind_a).itemsize)
    inputs = [fragments(a, a_places, kind_a), fragments(b, b_places, kind_b), fragments(c, c_places, result)]
    form = f"m16n8k{k}.row.col.{result}.{kind_a}.{kind_b}.{result}"
    out, report = product(form, inputs, [len(one) for one in inputs])
    np.testing.assert_array_equal(out, fragments(a @ b + c, c_places, result))
    assert report.matrix_flops == 2 * 16 * 8 * k


@pytest.mark.parametrize("saturates", [False, True])
def test_integer_overflow(saturates):
    a, b = np.full((16, 16), 127, np.float32), np.full((16, 8), 127, np.float32)
    a[8:] = -128
    c = np.where(np.arange(16)[:, None] < 8, 2**31 - 1000, -(2**31) + 1000) + np.zeros((16, 8), np.int64)
    a_places, b_places = places_of(16, 4)
    inputs = [fragments(a, a_places, "s8"), fragments(b, b_places, "s8"), fragments(c, c_places, "s32")]
    form = f"m16n8k16.row.col.{'satfinite.' if saturates else ''}s32.s8.s8.s32"
    out, _ = product(form, inputs, [2, 1, 4])
    exact = a.astype(np.int64) @ b.astype(np.int64) + c
    exact = np.clip(exact, -(2**31), 2**31 - 1) if saturates else (exact + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(out, fragments(exact, c_places, "s32"))


@pytest.mark.parametrize("rows, k", [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_double(rows, k):
    random = np.random.default_rng(k)
    a, b, c = random.integers(-99, 99, (rows, k)), random.integers(-99, 99, (k, 8)), random.integers(-9, 9, (rows, 8))
    lanes = np.arange(32)
    g, t = lanes // 4, lanes % 4
    halves = rows // 8
    fragments_a = [a[g + 8 * (i % halves), t + 4 * (i // halves)] for i in range(halves * k // 4)]
    fragments_b = [b[t + 4 * i, g] for i in range(k // 4)]
    c_of = lambda x: [x[g + 8 * (i // 2), 2 * t + i % 2] for i in range(2 * halves)]  # noqa: E731
    inputs = [np.array(one, np.float64) for one in (fragments_a, fragments_b, c_of(c))]
    form = f"m{rows}n8k{k}.row.col.f64.f64.f64.f64"
    out, report = product(form, inputs, [len(one) for one in inputs], "f64")
    np.testing.assert_array_equal(out, c_of(a @ b + c))
    assert report.matrix_flops == 2 * rows * 8 * k


@pytest.mark.parametrize(
    "form, counts",
    [
        ("m16n8k16.row.col.f32.bf16.f16.f32", [4, 2, 4]),
        ("m16n8k32.row.col.f32.e4m3.s8.f32", [4, 2, 4]),
        ("m16n8k32.row.col.f32.f16.f16.f32", [8, 4, 4]),
        ("m16n8k16.row.col.satfinite.f32.f16.f16.f32", [4, 2, 4]),
        ("m8n8k4.row.col.f32.f16.f16.f32", [2, 2, 8]),
        ("m16n8k8.row.col.f16.bf16.bf16.f16", [2, 1, 2]),
    ],
)
def test_unknown_forms_are_refused(form, counts):
    with pytest.raises(EmulatorError, match="PTX line .*mma.sync"):
        product(form, [np.zeros((n, 32), np.uint32) for n in counts], counts)
