"""The rules of cuTensorMapEncodeTiled, one by one."""

import numpy as np
import pytest

from emulator import encode_tiled
from emulator.tensor_map import DATA_TYPES

GOOD = dict(dtype="bf16", size=(64, 64), strides=(128,), box=(64, 8), swizzle="128B")
THREE = dict(size=(64, 8, 8), strides=(128, 1024), box=(64, 8, 1))


@pytest.mark.parametrize(
    "change",
    [
        dict(size=(1 << 32, 64)),
        dict(strides=(16,)),
        dict(strides=((1 << 40) - 16,)),
        dict(box=(64, 256)),
        dict(box=(8, 1)),
        dict(element_strides=(1, 8)),
        dict(box=(16, 8), swizzle="32B"),
        dict(box=(32, 8), swizzle="64B"),
        dict(box=(256, 8), swizzle="none"),
        dict(offset=16),
        dict(fill_nan=True),
        dict(size=(64,), strides=(), box=(64,)),
        dict(size=(64, 2, 2, 2, 2), strides=(128, 256, 512, 1024), box=(64, 1, 1, 1, 1)),
        *[dict(dtype=one, box=(16, 8), swizzle="none") for one in DATA_TYPES],
    ],
)
def test_what_the_driver_accepts(change):
    assert len(encode_tiled(np.zeros((64, 64), np.uint16), **{**GOOD, **change})) == 128


@pytest.mark.parametrize(
    "change, rule",
    [
        (dict(size=(), strides=(), box=()), "1 to 5 dimensions"),
        (dict(size=(64,) * 6, strides=(128,) * 5, box=(8,) * 6), "1 to 5 dimensions"),
        (dict(strides=(128, 128)), "one stride less"),
        (dict(box=(64,)), "a box of all"),
        (dict(element_strides=(1,)), "a box of all"),
        (dict(offset=8), "address must be a multiple of 16"),
        (dict(size=(0, 64)), "sizes are 1"),
        (dict(size=(64, (1 << 32) + 1)), "sizes are 1 to 2"),
        (dict(strides=(120,)), "multiples of 16"),
        (dict(strides=(1 << 40,)), "below 2"),
        (dict(box=(0, 8)), "box sizes"),
        (dict(box=(64, 257)), "box sizes"),
        (dict(element_strides=(1, 0)), "element strides"),
        (dict(element_strides=(9, 1)), "element strides"),
        (dict(box=(60, 8)), "inner box must be a multiple of 16"),
        (dict(box=(72, 8)), "wider than the swizzle, 128"),
        (dict(box=(40, 8), swizzle="64B"), "wider than the swizzle, 64"),
        (dict(box=(24, 8), swizzle="32B"), "wider than the swizzle, 32"),
        (dict(dtype="s32", box=(16, 8), fill_nan=True), "NaN fill is for floats"),
        (dict(dtype="u8", fill_nan=True), "NaN fill is for floats"),
        (dict(swizzle="128B_atom_32B"), "swizzle"),
        (dict(dtype="16u4_align8b"), "packed elements are not modelled"),
        (dict(dtype="16u4_align16b"), "packed elements are not modelled"),
        (dict(dtype="16u6_align16b"), "packed elements are not modelled"),
        (dict(dtype="f8"), "unknown element type"),
        (dict(interleave="16B"), "at least 3 dimensions"),
        (dict(interleave="32B", swizzle="32B", offset=16, **THREE), "address must be a multiple of 32"),
        (dict(interleave="32B", swizzle="32B", **{**THREE, "strides": (144, 1024)}), "multiples of 32"),
        (dict(interleave="32B", swizzle="64B", **THREE), "swizzle is 32B"),
        (dict(interleave="16B", **THREE), "interleaved layouts are not modelled"),
        (dict(interleave="32B", swizzle="32B", **THREE), "interleaved layouts are not modelled"),
    ],
)
def test_what_the_driver_refuses(change, rule):
    with pytest.raises(ValueError, match=f"tensor map: .*{rule}"):
        encode_tiled(np.zeros((64, 64), np.uint16), **{**GOOD, **change})
