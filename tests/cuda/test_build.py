"""CMake builds the CUDA kernels, the launcher and the C++ benchmark, with a toolkit's nvcc or pip's.

Without a GPU the benchmark says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from emulator.build import program
from emulator.compile import find_nvcc

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build" / "cuda"


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def configured() -> str:
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc was not found; pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm"
    return run(
        program("cmake"), "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
        f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DRINGATTN_CUDA=ON", "-DRINGATTN_BENCH=ON", "-DRINGATTN_ARCHS=80",
    )  # fmt: skip


@pytest.mark.slow
def test_cmake_takes_what_pip_installs(tmp_path: Path) -> None:
    """All in one folder, the libraries in lib, where nvcc does not look; laid out here from whatever nvcc there is."""
    nvcc = find_nvcc()
    assert nvcc is not None
    (top,) = re.findall(r"#\$ TOP=(.+)", run(nvcc, "--dryrun", "none.cu"))
    folder = tmp_path / "nvidia" / "cu13"
    (folder / "bin").mkdir(parents=True)
    for one in Path(top, "bin").iterdir():
        (folder / "bin" / one.name).symlink_to(one.resolve())
    (folder / "bin" / "nvcc").unlink()
    shutil.copy(Path(top, "bin", "nvcc"), folder / "bin")  # it finds the rest from where it lies
    for name, file in {"lib": "libcudart_static.a", "include": "cuda_runtime.h", "nvvm": "bin/cicc"}.items():
        found = next(path for path in sorted(Path(top).resolve().rglob(Path(file).name)) if str(path).endswith(file))
        (folder / name).symlink_to(str(found).removesuffix(file).rstrip("/"))
    compiler = f"-DCMAKE_CUDA_COMPILER={folder / 'bin' / 'nvcc'}"
    ninja = f"-DCMAKE_MAKE_PROGRAM={program('ninja')}"
    options = ("-DRINGATTN_CUDA=ON", "-DRINGATTN_ARCHS=80", "-G", "Ninja", ninja)
    said = run(program("cmake"), "-S", ROOT, "-B", tmp_path / "build", compiler, *options)
    assert "CUDA compiler identification is NVIDIA" in said


def ninja(target: str) -> str:
    jobs = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
    return run(program("ninja"), "-C", BUILD, f"-j{jobs}", target)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_and_the_launcher_compile_without_a_warning(configured: str) -> None:
    assert "warning" not in ninja("ringattn_cuda")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_benchmark_links_and_needs_a_gpu(configured: str) -> None:
    if "Google Benchmark was not found" in configured:
        pytest.skip("Google Benchmark is not installed (libbenchmark-dev)")
    ninja("ringattn_bench_cuda")
    devices = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True) if shutil.which("nvidia-smi") else None
    )
    if devices is not None and "GPU 0" in devices.stdout:
        pytest.skip("there is a GPU: the benchmark would run")
    assert "no GPU" in run(BUILD / "ringattn_bench_cuda")
