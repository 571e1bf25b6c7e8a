"""CUDA to PTX with the nvcc of the system or of pip."""

from __future__ import annotations

import hashlib
import shutil
import site
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .build import BUILD


def find_nvcc() -> Path | None:
    """nvcc on the path, or the one that pip's nvidia-cuda-nvcc brings."""
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        for one in sorted(Path(folder).glob("nvidia/**/bin/nvcc")):
            return one
    return None


def include_folders() -> list[Path]:
    """Headers that pip packages bring: CCCL and the CUDA runtime."""
    folders = []
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        for pattern in ("nvidia/**/include/cccl/cub/cub.cuh", "nvidia/**/include/cub/cub.cuh"):
            folders += [one.parent.parent for one in sorted(Path(folder).glob(pattern))]
        folders += [one.parent for one in sorted(Path(folder).glob("nvidia/**/include/cuda_runtime.h"))]
    return folders


def compile_cuda(source_or_path: str | Path, arch: str = "sm_80", options: Sequence[str] = ()) -> str:
    """PTX of a CUDA source (text, or the path of a file). Kept in build/emulator/ptx by what went into it.

    A text may include files beside the working directory only through options=["-I..."].
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found; pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm")
    is_path = isinstance(source_or_path, Path) or "\n" not in source_or_path and source_or_path.endswith(".cu")
    text = Path(source_or_path).read_text() if is_path else str(source_or_path)
    command = [str(nvcc), f"-arch={arch}", "-ptx", "-lineinfo", "-std=c++20", *options]
    for folder in include_folders():
        command += ["-I", str(folder)]
    key = hashlib.sha256("\0".join([text, str(nvcc.stat().st_mtime), *command]).encode()).hexdigest()[:24]
    kept = BUILD / "ptx" / f"{key}.ptx"
    if kept.exists() and not is_path:  # a file may include others, whose changes the key does not see
        return kept.read_text()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(source_or_path) if is_path else Path(scratch, "kernel.cu")
        if not is_path:
            path.write_text(text)
        result = Path(scratch, "kernel.ptx")
        done = subprocess.run([*command, str(path), "-o", str(result)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc failed\n{done.stdout}{done.stderr}")
        ptx = result.read_text()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(ptx)
    return ptx
