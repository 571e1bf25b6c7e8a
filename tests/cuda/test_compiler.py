"""What the compiler says of every kernel on every architecture: no spills, the occupancy that the shapes claim, HMMA.

Compiled once for each state of a kernel's sources, into build/cuda_compiler; two compilers at a time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from emulator.compile import find_nvcc, include_folders

from .block import KERNELS, ROOT, native

KEPT = ROOT / "build" / "cuda_compiler"
FILES = sorted(KERNELS.glob("*.cu"))
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
REGISTERS = 65536  # of a multiprocessor, for all of them
SECONDS = 240  # that all kernels may take for one architecture on two cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass
class Compiled:
    """What ptxas -v and cuobjdump -sass say."""

    registers: int
    stack: int
    spills: int
    shared: int
    seconds: float
    instructions: dict[str, int]  # by the first part of the name in SASS


def closure(path: Path) -> set[Path]:
    """A file and all files of csrc that it includes."""
    found: set[Path] = set()
    open_files = [path]
    while open_files:
        one = open_files.pop()
        if one in found:
            continue
        found.add(one)
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', one.read_text(), re.M):
            open_files.append(ROOT / "csrc" / name)
    return found


@functools.cache
def disassembler() -> tuple[Path, dict[str, str]]:
    """cuobjdump, and an environment in which it finds nvdisasm."""
    places = [Path(p) for p in (shutil.which("cuobjdump"),) if p]
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        places += sorted(Path(folder).glob("nvidia/**/bin/cuobjdump"))
    if not places:
        raise RuntimeError("cuobjdump was not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return places[0], {**os.environ, "PATH": f"{places[0].parent}{os.pathsep}{os.environ['PATH']}"}


def run(*command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def includes() -> list[str]:
    """Where the headers of the CUDA runtime lie, if pip brought them; a system's nvcc knows."""
    return [option for folder in include_folders() for option in ("-I", str(folder))]


def number(pattern: str, report: str) -> int:
    return sum(int(x) for x in re.findall(pattern, report))


def compile_one(path: Path, arch: int) -> Compiled:
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc was not found; pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm"
    texts = [one.read_bytes() for one in sorted(closure(path))]
    digest = hashlib.sha256(b"\0".join([*texts, str(nvcc.stat().st_mtime).encode()])).hexdigest()[:16]
    kept = KEPT / f"{path.stem}-{arch}-{digest}.json"
    if kept.exists():
        return Compiled(**json.loads(kept.read_text()))
    cubin = kept.with_suffix(".cubin")
    start = time.perf_counter()
    report = run(
        nvcc, "-std=c++20", "-Icsrc", *includes(), f"-arch=sm_{arch}", "-Xptxas", "-v", "-cubin", path, "-o", cubin
    )
    seconds = time.perf_counter() - start
    assert "warning" not in report, report
    program, environment = disassembler()
    counts: dict[str, int] = {}
    listing = run(program, "-sass", cubin, env=environment)
    for name in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)", listing):
        counts[name] = counts.get(name, 0) + 1
    cubin.unlink()
    made = Compiled(
        number(r"Used (\d+) registers", report),
        number(r"(\d+) bytes stack frame", report) + number(r"(\d+) bytes cumulative stack", report),
        number(r"(\d+) bytes spill", report),
        number(r"(\d+) bytes smem", report),
        seconds,
        counts,
    )
    kept.write_text(json.dumps(asdict(made)))
    return made


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], Compiled]:
    """(file, architecture): what was made of it."""
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc was not found; pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm"
    KEPT.mkdir(parents=True, exist_ok=True)
    known = run(nvcc, "--list-gpu-arch")
    jobs = [(path, arch) for arch in ARCHITECTURES for path in FILES if f"compute_{arch}\n" in known]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda job: compile_one(*job), jobs))
    return {(path.stem, arch): one for (path, arch), one in zip(jobs, made, strict=True)}


def tiled(name: str) -> tuple[str, int] | None:
    """(kernel, head_dim) of a kernel whose tile is in the table of shapes."""
    found = re.fullmatch(r"(\w+)_(?:bf16|fp16)_(\d+)", name)
    return (found[1], int(found[2])) if found else None


def test_no_spills_and_no_local_memory(compiled: dict[tuple[str, int], Compiled]) -> None:
    for (name, arch), one in compiled.items():
        local = {kind: n for kind, n in one.instructions.items() if kind in ("LDL", "STL")}
        assert not one.stack and not one.spills and not local, (name, arch, one)


def test_the_claimed_thread_blocks_fit_a_multiprocessor(compiled: dict[tuple[str, int], Compiled]) -> None:
    for (name, arch), one in compiled.items():
        kernel = tiled(name)
        shape = native.shape(kernel[0], arch, kernel[1]) if kernel else {"warps": 8, "blocks": 4, "shared_bytes": 0}
        of_warp = -(-one.registers * 32 // 256) * 256  # registers are given to warps in pieces of 256
        assert shape["blocks"] * shape["warps"] * of_warp <= REGISTERS, (name, arch, one.registers, shape)
        assert one.shared <= 1024, (name, arch, "static shared memory")  # sm_90 and later count what they reserve


def test_tensor_cores_do_the_products(compiled: dict[tuple[str, int], Compiled]) -> None:
    for (name, arch), one in compiled.items():
        kernel = tiled(name)
        if kernel is None:
            assert "HMMA" not in one.instructions, (name, arch)
            continue
        assert one.instructions.get("HMMA", 0) >= 64, (name, arch, one.instructions)
        assert one.instructions.get("LDSM", 0) >= 16 and one.instructions.get("LDGSTS", 0) >= 4, (name, arch)


def test_time(compiled: dict[tuple[str, int], Compiled]) -> None:
    for arch in {arch for _, arch in compiled}:
        seconds = sum(one.seconds for (_, which), one in compiled.items() if which == arch)
        print(f"sm_{arch}: {seconds:.0f} s of one core")
        assert seconds <= 2 * SECONDS, arch


def test_every_file_compiles_alone(tmp_path: Path) -> None:
    """With nothing but the path to csrc, for whatever architecture the compiler takes by itself."""
    nvcc = find_nvcc()

    def one(path: Path) -> None:
        output = tmp_path / f"{path.stem}.o"
        run(nvcc, "-std=c++20", "-Icsrc", *includes(), "-c", path.relative_to(ROOT), "-o", output)
        assert output.stat().st_size > 0

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, FILES))


def test_no_torch_in_a_kernel() -> None:
    """Nor anything but csrc and headers of the language and of CUDA: a .cu compiles in seconds."""
    allowed = {"cfloat", "cmath", "cstdint", "limits", "type_traits", "utility", "cuda_bf16.h", "cuda_fp16.h"}
    for path in FILES:
        for one in closure(path):
            assert one.is_relative_to(ROOT / "csrc" / "cuda") or one.is_relative_to(ROOT / "csrc" / "core"), (path, one)
            named = set(re.findall(r"^\s*#\s*include\s+<([^>]+)>", one.read_text(), re.M))
            assert named <= allowed, (path, one, named - allowed)
