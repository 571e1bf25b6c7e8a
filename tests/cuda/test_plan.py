"""The table of tile shapes and the launch plan, without any kernel: sizes that fit, names that exist, refusals."""

from __future__ import annotations

import itertools
import re

import pytest

from .block import KERNELS, native

ARCHITECTURES = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
SHAPES = ("forward", "backward_keys", "backward_queries")
HEAD_DIMS = (64, 128, 256)
RESERVED = 1024  # bytes of shared memory that the system takes of every thread block

ROWS = (1 << 20, 1 << 20, 1 << 14, 1 << 8)  # address, strides


def fields(**given: object) -> dict:
    shapes = {"dtype": "bf16", "B": 2, "Hq": 4, "Hkv": 2, "Sq": 300, "Skv": 500, "D": 64, "scale": 0.125}
    tensors = dict.fromkeys(
        ("query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value"), ROWS
    ) | dict.fromkeys(("o", "m", "l", "lse", "delta", "minus_delta", "minus_lse_log2"), 1 << 20)
    return {**shapes, **tensors, **given}


def kernels(kind: str, arch: int = 80, **given: object) -> list[str]:
    return [plan[0] for plan in native.plan(kind, arch, fields(**given))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", SHAPES)
def test_shapes_fit(kernel: str, arch: int) -> None:
    for D in HEAD_DIMS:
        s = native.shape(kernel, arch, D)
        note = (kernel, arch, D, s)
        assert s["shared_bytes"] <= s["shared_limit"], note
        of_multiprocessor = s["shared_limit"] + RESERVED  # as the manual has it for all of them
        assert s["blocks"] * (s["shared_bytes"] + RESERVED) <= of_multiprocessor, note
        threads = 32 * s["warps"]
        assert threads in (128, 256) and s["blocks"] * threads <= 1024, note
        own = s["keys"] if kernel == "backward_keys" else s["queries"]
        assert own == 16 * s["tiles_per_warp"] * s["warps"] // s["column_warps"], note
        assert s["keys"] % s["score_columns"] == 0 and s["score_columns"] % 16 == 0, note
        # All threads copy a tile, eight of them a row of 64 columns, in steps that keep the swizzle.
        for rows in (s["queries"], s["keys"]):
            assert rows % 16 == 0 and rows % (threads // 8) == 0 and threads // 8 % 8 == 0, note
        assert D % (64 * s["column_warps"]) == 0 or s["column_warps"] == 1, note


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_grids(arch: int) -> None:
    for D, Sq, Skv in itertools.product((8, 64, 72, 128, 136, 256), (1, 63, 64, 65, 128, 129, 1000), (1, 64, 129)):
        given = fields(D=D, Sq=Sq, Skv=Skv)
        tile = next(n for n in HEAD_DIMS if D <= n)
        ((name, grid, threads, shared, _),) = native.plan("forward", arch, given)
        s = native.shape("forward", arch, tile)
        assert name == f"ringattn_forward_bf16_{tile}" and threads == 32 * s["warps"]
        assert grid == 2 * 4 * -(-Sq // s["queries"]) and shared == s["shared_bytes"]
        keys, queries = native.plan("backward", arch, given)
        assert keys[1] == 2 * 2 * -(-Skv // native.shape("backward_keys", arch, tile)["keys"])
        assert queries[1] == 2 * 4 * -(-Sq // native.shape("backward_queries", arch, tile)["queries"])
        for kind in ("finalize", "merge", "delta", "cast"):
            ((_, grid, threads, shared, _),) = native.plan(kind, arch, given)
            assert (grid - 8) * threads < 2 * 4 * Sq * 8 <= grid * threads and shared == 0


def test_backward_launches_what_is_wanted() -> None:
    assert kernels("backward") == ["ringattn_backward_keys_bf16_64", "ringattn_backward_queries_bf16_64"]
    assert kernels("backward", deterministic=False) == ["ringattn_backward_keys_bf16_64"]
    none = (0, 0, 0, 0)
    assert kernels("backward", grad_query=none) == ["ringattn_backward_keys_bf16_64"]
    assert kernels("backward", grad_key=none) == kernels("backward", grad_value=none) == kernels("backward")
    for deterministic in (True, False):
        wanted = {"grad_key": none, "grad_value": none, "deterministic": deterministic}
        assert kernels("backward", **wanted) == ["ringattn_backward_queries_bf16_64"]
        assert kernels("backward", grad_query=none, **wanted) == []


def test_nothing_to_do_is_no_launch() -> None:
    for empty in ({"B": 0}, {"Hq": 0, "Hkv": 0}, {"Sq": 0}):
        for kind in ("forward", "backward", "finalize", "merge", "delta", "cast"):
            assert kernels(kind, **empty) == [], (kind, empty)
    assert kernels("backward", Skv=0) == []
    assert len(kernels("forward", Skv=0)) == 1  # to finalize


def planned_names() -> set[str]:
    found = set()
    for dtype, D, deterministic in itertools.product(("bf16", "fp16"), HEAD_DIMS, (True, False)):
        for kind in ("forward", "backward", "finalize", "merge", "delta", "cast"):
            found |= set(kernels(kind, dtype=dtype, D=D, deterministic=deterministic))
    return found


def test_every_planned_kernel_has_a_file_and_every_file_is_planned() -> None:
    planned = planned_names()
    files = {f"ringattn_{path.stem}": path for path in KERNELS.glob("*.cu") if path.stem != "pace"}  # works on no block
    assert planned == set(files)
    for name, path in files.items():
        text = path.read_text()
        assert re.findall(r"\b(ringattn_\w+)\(", text) == [name]
        dtype = "bfloat16" if "_bf16" in name else "float16"
        assert f"{dtype}" in text and len(text.splitlines()) <= 15
        for D in re.findall(r"_(\d+)$", name):  # stands in the bounds and in the call
            assert set(re.findall(r"kArch, (\d+)\)|DType::\w+, (\d+)", text)) <= {(D, ""), ("", D)}


@pytest.mark.parametrize("D", [-8, 0, 1, 4, 12, 63, 260, 264, 512])
def test_head_dims_that_no_kernel_takes(D: int) -> None:
    for kind in ("forward", "backward", "finalize", "merge", "delta", "cast"):
        with pytest.raises(ValueError, match=rf"head_dim that is a multiple of 8 and at most 256, not {D}\b"):
            kernels(kind, D=D)


def test_dtypes_that_no_kernel_takes() -> None:
    for kind in ("forward", "backward", "finalize", "merge", "delta", "cast"):
        with pytest.raises(ValueError, match="bfloat16 and float16"):
            kernels(kind, dtype="fp32")


def test_grids_that_are_too_large_are_refused() -> None:
    largest = {"B": 1 << 12, "Hq": 1 << 10, "Hkv": 1 << 10}
    for kind in ("forward", "backward", "finalize", "merge", "delta", "cast"):
        assert kernels(kind, **largest, Sq=128 * 64, Skv=128 * 64), kind
        with pytest.raises(ValueError, match="too many tiles for one launch"):
            kernels(kind, **largest, Sq=1024 * 128, Skv=1024 * 128)
