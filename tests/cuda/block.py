"""One block of attention on the emulated GPU: the launches that csrc/cuda/plan.cpp makes, executed from their PTX."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulator import Module, Report, address, compile_cuda, load
from emulator.build import build_module
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "csrc" / "cuda" / "kernels"
native = build_module(Path(__file__).parent, ROOT / "build" / "cuda_plan", "_plan")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
INFINITE = 2**31 - 1


@functools.cache
def source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "csrc" / "cuda").rglob("*"), *(ROOT / "csrc" / "core").rglob("*.h")]):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def kernel_module(name: str, arch: int) -> Module:
    """The module of a __global__ function ringattn_<name>, which stands in csrc/cuda/kernels/<name>.cu."""
    # The digest makes the kept PTX follow the headers.
    text = (KERNELS / f"{name}.cu").read_text() + f"\n// {source_digest()}\n"
    return load(compile_cuda(text, arch=f"sm_{arch}", options=["-I", str(ROOT / "csrc")]))


def memory(x: Tensor) -> np.ndarray:
    """The storage of a tensor, as an array that the emulator sees as one region."""
    whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return _arrays.setdefault(whole.data_ptr(), whole.view(torch.int16 if x.element_size() == 2 else x.dtype).numpy())


_arrays: dict[int, np.ndarray] = {}


def pointer(x: Tensor) -> int:
    return address(memory(x)) + x.storage_offset() * x.element_size()


def rows(x: Tensor) -> tuple[int, int, int, int]:
    assert x.dim() == 4 and (x.stride(3) == 1 or x.shape[3] == 1)
    return (pointer(x), x.stride(0), x.stride(1), x.stride(2))


@dataclass
class Device:
    """How launches are emulated."""

    arch: int = 80
    copies: str = "late"
    seed: int = 0
    check_races: bool = True
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def launch(kind: str, device: Device, **fields: Any) -> list[Report]:
    """Plans and executes one entry of the kernel table. Tensors become pointers; 4-dimensional ones rows."""
    given = {
        name: (rows(value) if name in ROW_FIELDS else pointer(value)) if isinstance(value, Tensor) else value
        for name, value in fields.items()
        if value is not None
    }
    for name in INPUTS & fields.keys():
        if isinstance(fields[name], Tensor):
            memory(fields[name]).flags.writeable = False
    reports = []
    for kernel, grid, threads, shared, parameters in native.plan(kind, device.arch, given):
        module = kernel_module(kernel.removeprefix("ringattn_"), device.arch)
        reports.append(
            module.launch(
                kernel,
                grid=grid,
                block=threads,
                shared_bytes=shared,
                args=[parameters],
                seed=device.seed,
                copies=device.copies,
                check_races=device.check_races,
                threads=device.threads,
            )  # fmt: skip
        )
    _arrays.clear()
    return reports


INPUTS = {"query", "key", "value", "grad_out", "grad_lse", "other_o", "other_m", "other_l", "document_bounds"}
ROW_FIELDS = {"query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value"}


def sizes(query: Tensor, key: Tensor, segments: tuple[Sequence, Sequence] | None = None) -> dict[str, Any]:
    """The fields that shapes give; positions from 0 on unless segments are given."""
    B, Hq, Sq, D = query.shape
    Skv = key.shape[2]
    query_segments, key_segments = segments or ([(0, 1, Sq)], [(0, 1, Skv)])
    return {
        "dtype": NAMES[query.dtype], "B": B, "Hq": Hq, "Hkv": key.shape[1], "Sq": Sq, "Skv": Skv, "D": D,
        "query_segments": query_segments, "key_segments": key_segments, "key_count": Skv,
    }  # fmt: skip
