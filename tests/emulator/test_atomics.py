"""atom and red of every operation, type and vector that exists, lane after lane against numpy scalars."""

import numpy as np
import pytest

from emulator import EmulatorError, load
from emulator.instruction_runner import ORDER_OF_LANES

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
NUMPY = {
    "f16": "f2", "bf16": "u2", "f16x2": "f2", "bf16x2": "u2", "b16": "u2", "u32": "u4", "s32": "i4", "b32": "u4",
    "u64": "u8", "s64": "i8", "b64": "u8", "f32": "f4", "f64": "f8",
}  # fmt: skip
BYTES = {"f16": 2, "bf16": 2, "b16": 2, "b128": 16, **{t: 8 for t in ("u64", "s64", "b64", "f64")}}
SCALARS = [
    *[("add", t) for t in ("f16", "bf16", "f16x2", "bf16x2", "u32", "s32", "u64", "f32", "f64")],
    *[(op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64")],
    *[(op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")],
    ("inc", "u32"),
    ("dec", "u32"),
]
VECTORS = [
    ("add", "f32", 2), ("add", "f32", 4),
    *[(op, t, n) for op in ("add", "min", "max") for t in ("f16", "bf16") for n in (2, 4, 8)],
    *[(op, t + "x2", n) for op in ("add", "min", "max") for t in ("f16", "bf16") for n in (2, 4)],
]  # fmt: skip


def kernel(opcode, dtype, width=1, sources=1, returns=True, targets=8, space="global"):
    """Lane i applies its operands to target i / (32 / targets); old values go to `old`."""
    size = BYTES.get(dtype, 4)
    kind = f".b{8 * size}"
    names = [[f"{letter}{k}" for k in range(width)] for letter in "rbc"[: 1 + sources]]
    groups = ["{" + ", ".join(one) + "}" if width > 1 else one[0] for one in names]
    bytes_ = size * width
    loads = "".join(
        f"ld.global{kind} {name}, [p + {s * 32 * bytes_ + k * size}];\n"
        for s, row in enumerate(names[1:])
        for k, name in enumerate(row)
    )
    stores = "".join(f"st.global{kind} [q + {k * size}], {name};\n" for k, name in enumerate(names[0]))
    operands = ", ".join(groups[1:])
    return f"""{HEAD}.visible .entry kernel(.param .u64 x, .param .u64 y, .param .u64 z) {{
.reg .b32 t, u; .reg .b64 m, p, q; .reg {kind} {", ".join(name for row in names for name in row)};
mov.u32 t, %tid.x; div.u32 u, t, {32 // targets};
ld.param.u64 m, [x]; mad.wide.u32 m, u, {bytes_}, m;
ld.param.u64 p, [y]; mad.wide.u32 p, t, {bytes_}, p;
ld.param.u64 q, [z]; mad.wide.u32 q, t, {bytes_}, q;
{loads}
{f"atom.{space}.{opcode} {groups[0]}, [m], {operands};" if returns else f"red.{space}.{opcode} [m], {operands};"}
{stores if returns else ""}ret; }}
"""


def to_real(x, dtype):
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype.startswith("bf") else x


def from_real(x, dtype):
    if not dtype.startswith("bf"):
        return x
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def apply(operation, old, b, dtype):
    with np.errstate(over="ignore"):
        if operation == "inc":
            return np.where(old >= b, 0, old + 1).astype(old.dtype)
        if operation == "dec":
            return np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype)
        f = {
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
        }
        return from_real(f[operation](to_real(old, dtype), to_real(b, dtype)), dtype)  # fmt: skip


def values(random, shape, dtype):
    if dtype.startswith("bf"):
        return from_real(random.standard_normal(shape), dtype)
    if dtype[0] == "f":
        return random.standard_normal(shape).astype(NUMPY[dtype])
    limits = np.iinfo(NUMPY[dtype])
    return random.integers(limits.min, limits.max, shape, NUMPY[dtype], endpoint=True)


def order_matters(operation, dtype, returns, targets):
    return targets < 32 and (returns or operation not in ("min", "max", "and", "or", "xor") and "f" not in dtype)


def check(operation, dtype, width, opcode, returns, targets):
    random = np.random.default_rng(len(opcode))
    elements = width * (2 if dtype.endswith("x2") else 1)
    memory, b = values(random, (targets, elements), dtype), values(random, (32, elements), dtype)
    lanes = 32 // targets  # of each target
    if operation in ("inc", "dec"):
        memory, b = memory % 4, b % 5
    expected, olds = memory.copy(), np.zeros_like(b)
    for lane in range(32):
        olds[lane] = expected[lane // lanes]
        expected[lane // lanes] = apply(operation, expected[lane // lanes], b[lane], dtype)
    old = np.zeros_like(b)
    load(kernel(opcode, dtype, width, returns=returns, targets=targets)).launch(
        "kernel", args=[memory, b, old],
        undefined=ORDER_OF_LANES if order_matters(operation, dtype, returns, targets) else "",
    )  # fmt: skip
    np.testing.assert_array_equal(memory, expected)
    if returns:
        np.testing.assert_array_equal(old, olds)


@pytest.mark.parametrize("targets", [8, 32])
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("operation, dtype", SCALARS)
def test_scalars(operation, dtype, returns, targets):
    noftz = ".noftz" if "f16" in dtype else ""
    check(operation, dtype, 1, f"{operation}{noftz}.{dtype}", returns, targets)


@pytest.mark.parametrize("targets", [8, 32])
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("operation, dtype, width", VECTORS)
def test_vectors(operation, dtype, width, returns, targets):
    noftz = ".noftz" if "f16" in dtype else ""
    check(operation, dtype, width, f"{operation}{noftz}.v{width}.{dtype}", returns, targets)


@pytest.mark.parametrize("targets", [8, 32])
@pytest.mark.parametrize("bytes_", [4, 8, 16])
def test_exchange(bytes_, targets):
    random = np.random.default_rng(bytes_)
    memory, b = random.integers(0, 256, (targets, bytes_), np.uint8), random.integers(0, 256, (32, bytes_), np.uint8)
    before, old, lanes = memory.copy(), np.zeros_like(b), 32 // targets
    load(kernel(f"exch.b{8 * bytes_}", f"b{8 * bytes_}", targets=targets)).launch(
        "kernel", args=[memory, b, old], undefined=ORDER_OF_LANES if targets < 32 else ""
    )
    np.testing.assert_array_equal(memory, b[lanes - 1 :: lanes])
    np.testing.assert_array_equal(old, [before[i // lanes] if i % lanes == 0 else b[i - 1] for i in range(32)])


@pytest.mark.parametrize("bytes_", [2, 4, 8, 16])
def test_compare_and_swap(bytes_):
    random = np.random.default_rng(bytes_)
    memory = random.integers(0, 256, (8, bytes_), np.uint8)
    b, c = random.integers(0, 256, (2, 32, bytes_), np.uint8)
    b[1::4] = memory  # the second lane of each target swaps, then the last one swaps again
    b[3::4] = c[1::4]
    before, old = memory.copy(), np.zeros_like(b)
    opcode = f"cas.b{8 * bytes_}"
    load(kernel(opcode, f"b{8 * bytes_}", sources=2)).launch(
        "kernel", args=[memory, np.concatenate([b, c]), old], undefined=ORDER_OF_LANES
    )
    np.testing.assert_array_equal(memory, c[3::4])
    np.testing.assert_array_equal(old, [before[i // 4] if i % 4 < 2 else c[i // 4 * 4 + 1] for i in range(32)])


@pytest.mark.parametrize("bytes_", [2, 4, 8, 16])
def test_compare_and_swap_of_words_of_their_own(bytes_):
    random = np.random.default_rng(bytes_)
    memory, b, c = random.integers(0, 256, (3, 32, bytes_), np.uint8)
    b[::2] = memory[::2]
    before, old = memory.copy(), np.zeros_like(b)
    text = kernel(f"cas.b{8 * bytes_}", f"b{8 * bytes_}", sources=2, targets=32)
    load(text).launch("kernel", args=[memory, np.concatenate([b, c]), old])
    before_odd = np.where(np.arange(32)[:, None] % 2 == 0, c, before)
    np.testing.assert_array_equal(memory, before_odd)
    np.testing.assert_array_equal(old, before)


@pytest.mark.parametrize(
    "opcode, dtype, width, returns, space",
    [
        ("min.f32", "f32", 1, True, "global"),
        ("min.noftz.f16", "f16", 1, True, "global"),
        ("exch.b32", "b32", 1, False, "global"),
        ("add.v2.s32", "s32", 2, False, "global"),
        ("add.v4.f64", "f64", 4, False, "global"),
        ("min.v2.f32", "f32", 2, False, "global"),
        ("add.noftz.v8.f16x2", "f16x2", 8, False, "global"),
        ("add.v2.f32", "f32", 2, False, "shared"),
    ],
)
def test_forms_that_do_not_exist(opcode, dtype, width, returns, space):
    with pytest.raises(EmulatorError, match=r"no such combination.*(atom|red)"):
        load(kernel(opcode, dtype, width, returns=returns, space=space))


def test_misaligned_vector():
    memory = np.zeros(64, np.float32)
    text = kernel("add.v2.f32", "f32", 2, returns=False).replace("mad.wide.u32 m", "add.u64 m, m, 4; mad.wide.u32 m")
    with pytest.raises(EmulatorError, match="misaligned"):
        load(text).launch("kernel", args=[memory, np.zeros(64, np.float32), np.zeros(64, np.float32)])
