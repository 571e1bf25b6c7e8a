"""Runs one instruction on 32 lanes; awkward inputs; exact values of float codes. For the tests of instructions."""

import math
from fractions import Fraction

import numpy as np

from emulator import load

LANES = 32
# For launches that a GPU need not repeat: Module.launch(undefined=...).
ORDER_OF_LANES = "atomics of several lanes on one word: the order is not defined"


NUMPY = {
    "u8": "u1",
    "s8": "i1",
    "u16": "u2",
    "s16": "i2",
    "u32": "u4",
    "s32": "i4",
    "u64": "u8",
    "s64": "i8",
    "f32": "f4",
    "f64": "f8",
}


def bits_of(t):
    if t.endswith("x2"):
        return 2 * bits_of(t[:-2])
    return (
        32
        if t == "tf32"
        else int("".join(c for c in t.replace("bf16", "f16").replace("e4m3", "8").replace("e5m2", "8") if c.isdigit()))
    )


def words(t):
    return np.dtype(f"u{max(bits_of(t), 8) // 8}")


def execute(instruction, out, *inputs):
    """Runs `instruction` with operands d, a, b, c on 32 lanes; inputs are (type, array); returns d as raw words."""
    arrays = [np.ascontiguousarray(values).view(words(t)) for t, values in inputs]
    result = np.zeros(LANES, words(out))
    registers, loads, names = [], [], "abce"
    for i, (t, _) in enumerate(inputs):
        size = bits_of(t)
        registers.append(f".reg .b{max(size, 16)} {names[i]};")
        loads.append(f"ld.param.u64 p, [p{i}]; mad.wide.u32 p, t, {size // 8}, p; ld.global.b{size} {names[i]}, [p];")
    size = bits_of(out)
    params = ", ".join(f".param .u64 p{i}" for i in range(len(inputs) + 1))
    ptx = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel({params}) {{
.reg .b32 t; .reg .b64 p; .reg .b{max(size, 16)} d; .reg .pred q, r;
{chr(10).join(registers)}
mov.u32 t, %tid.x;
{chr(10).join(loads)}
{instruction}
ld.param.u64 p, [p{len(inputs)}]; mad.wide.u32 p, t, {size // 8}, p; st.global.b{size} [p], d;
ret;
}}
"""
    load(ptx).launch("kernel", args=[*arrays, result])
    return result


def integers(t, seed):
    low = -(1 << bits_of(t) - 1) if t[0] == "s" else 0
    high = low + (1 << bits_of(t)) - 1
    random = np.random.default_rng(seed)
    edge = [low, high, 0, 1, high - 1, low + 1, high // 2, 5]
    random.shuffle(edge)
    values = (
        edge
        + [int(x) for x in random.integers(low, high, LANES - 8 - 8, dtype=NUMPY[t], endpoint=True)]
        + [int(x) for x in random.integers(0, 40, 8)]
    )
    return np.array(values, dtype=NUMPY[t])


def wrap(x, bits):
    return x & ((1 << bits) - 1)


INTEGER_TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]


FORMATS = {"f16": (5, 10), "bf16": (8, 7), "tf32": (8, 10), "f32": (8, 23), "f64": (11, 52)}


def to_number(code, t):
    """The value of a code: a Fraction, or a float infinity or NaN; with the sign of zero as a float."""
    e_bits, m_bits = FORMATS[t]
    sign = -1 if code >> (e_bits + m_bits) & 1 else 1
    e, m = code >> m_bits & ((1 << e_bits) - 1), code & ((1 << m_bits) - 1)
    bias = (1 << e_bits - 1) - 1
    if e == (1 << e_bits) - 1:
        return math.nan if m else sign * math.inf
    if e == 0 and m == 0:
        return sign * 0.0
    return sign * (Fraction(m, 1 << m_bits) + (1 if e else 0)) * Fraction(2) ** (max(e, 1) - bias)


def to_code(x, t, mode="rn", negative_zero=False):
    e_bits, m_bits = FORMATS[t]
    bias, top = (1 << e_bits - 1) - 1, ((1 << e_bits) - 1) << m_bits
    sign_bit = 1 << (e_bits + m_bits)
    if isinstance(x, float):
        if math.isnan(x):
            return None
        if math.isinf(x):
            return top | (sign_bit if x < 0 else 0)
        return sign_bit if math.copysign(1, x) < 0 else 0
    if x == 0:
        return sign_bit if negative_zero else 0
    size = abs(x)
    e = max(math.floor(math.log2(size.numerator) - math.log2(size.denominator)) - 1, -1100)
    while Fraction(2) ** (e + 1) <= size:
        e += 1
    e = max(e, 1 - bias)
    scaled = size / Fraction(2) ** (e - m_bits)
    whole, rest = scaled.numerator // scaled.denominator, scaled - scaled.numerator // scaled.denominator
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": x < 0 and rest > 0,
        "rp": x > 0 and rest > 0,
    }[mode]
    code = whole + up + ((e + bias - 1) << m_bits)
    if code >= top:
        stays = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        code = top - 1 if stays else top
    return code | (sign_bit if x < 0 else 0)


def floats(t, seed):
    e_bits, m_bits = FORMATS[t]
    total = e_bits + m_bits
    top = ((1 << e_bits) - 1) << m_bits
    random = np.random.default_rng(seed)
    edge = [0, 1 << total, 1, top - 1, top, 1 << m_bits, (1 << m_bits) - 1, top | 1 << total]
    random.shuffle(edge)
    middle = ((1 << e_bits - 1) - 1) << m_bits  # 1.0
    codes = edge + [middle + int(x) for x in random.integers(-(3 << m_bits), 3 << m_bits, 16)]
    codes += [int(x) for x in random.integers(0, top, 8)]
    codes = [c | int(s) << total for c, s in zip(codes, random.integers(0, 2, LANES), strict=True)]
    if t == "tf32":
        codes = [c << 13 for c in codes]
    return np.array(codes, words(t))
