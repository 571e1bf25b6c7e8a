"""Decides whether the CUDA kernels are built, with which nvcc and for which GPUs.

The kernels share the CUDA runtime of torch, so nvcc must be of the same major version. It is the one of a toolkit
(CUDACXX, CUDA_HOME, PATH, /usr/local/cuda) or of pip's packages beside torch. Environment variables: RINGATTN_CUDA
(0: CPU only; 1: kernels, or an error; else: kernels where they can be built) and RINGATTN_ARCHS, as in "80;90".
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from setuptools.errors import SetupError

ARCHS = (80, 86, 89, 90)  # Ampere to Hopper; later GPUs run what their driver makes of the PTX
OLDEST_ARCH = 80  # the kernels use its asynchronous copies
SYSTEM = Path("/usr/local/cuda/bin/nvcc")


class BuildError(SetupError):
    """setuptools prints its text without a traceback."""


class Compiler(NamedTuple):
    nvcc: Path
    version: str  # "13.0.88"
    known: frozenset[int]  # the architectures it makes machine code for

    @property
    def major(self) -> str:
        return self.version.partition(".")[0]


class Kernels(NamedTuple):
    """What is built: kernels with machine code for `archs` and PTX of the last one, or none and why."""

    compiler: Compiler | None
    archs: tuple[int, ...] = ()
    no_cuda: str | None = None

    @property
    def ptx(self) -> int | None:
        return self.archs[-1] if self.archs else None

    def __str__(self) -> str:
        if self.compiler is None:
            return f"CPU only: {self.no_cuda}"
        names = ", ".join(map(str, self.archs))
        return f"CUDA kernels for {names} and PTX of {self.ptx} with nvcc {self.compiler.version}, {self.compiler.nvcc}"


def choose_kernels(version: str, cuda: str | None, folders: Iterable[Path], environment: Mapping[str, str]) -> Kernels:
    """version and cuda are torch's, as in "2.14.1+cu130" and "13.0"; folders: where the environment keeps packages."""
    wish = environment.get("RINGATTN_CUDA", "")
    if wish not in ("", "0", "1"):
        raise BuildError(f'RINGATTN_CUDA is "{wish}"; 0 (CPU only) or 1 (an error if CUDA is missing) was expected')
    if wish == "0":
        return Kernels(None, no_cuda="RINGATTN_CUDA is 0")
    compiler = find_compiler(cuda, folders, environment) if cuda else None
    if compiler is not None:
        return Kernels(compiler, architectures(environment.get("RINGATTN_ARCHS", ""), compiler))
    reason = "no nvcc was found" if cuda else f"torch {version} has no CUDA"
    if wish == "1":
        raise BuildError(f"RINGATTN_CUDA is 1, and {reason}. {how_to_install(cuda) if cuda else ''}")
    return Kernels(None, no_cuda=reason)


def find_compiler(cuda: str, folders: Iterable[Path], environment: Mapping[str, str]) -> Compiler | None:
    """The first nvcc of torch's CUDA major. None: there is no nvcc at all; if there are only others, an error."""
    others = []
    for nvcc in candidates(folders, environment):
        compiler = ask(nvcc)
        if compiler is None:
            continue
        if compiler.major == cuda.partition(".")[0]:
            return check_headers(compiler, cuda)
        others.append(f"\n  nvcc {compiler.version}, {nvcc}")
    if others:
        raise BuildError(
            f"torch was built with CUDA {cuda}, whose runtime the kernels share; there is only{''.join(others)}\n"
            f"{how_to_install(cuda)}"
        )
    return None


def candidates(folders: Iterable[Path], environment: Mapping[str, str]) -> Iterator[Path]:
    """Files named nvcc. CUDACXX, as for CMake, means this one and no other."""
    chosen = environment.get("CUDACXX")
    if chosen:
        found = shutil.which(chosen, path=environment.get("PATH"))
        if found is None or ask(Path(found)) is None:
            raise BuildError(f'CUDACXX is "{chosen}", which is not an nvcc that runs')
        yield Path(found)
        return
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    places = [Path(home, "bin", "nvcc") for home in (environment.get("CUDA_HOME"),) if home]
    places += [Path(on_path)] if on_path else []
    places.append(SYSTEM)
    # From CUDA 13 on pip's packages share one folder; those of CUDA 12 have no nvcc.
    places += [nvcc for folder in folders for nvcc in sorted(folder.glob("nvidia/cu[0-9]*/bin/nvcc"))]
    yield from dict.fromkeys(place for place in places if place.is_file())


def ask(nvcc: Path) -> Compiler | None:
    """None if it does not run, as a wrapper of a toolkit that was removed."""
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
        codes = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", version.stdout)
    if found is None:
        return None
    return Compiler(nvcc, found[1], frozenset(map(int, re.findall(r"\bsm_(\d+)$", codes.stdout, re.MULTILINE))))


def check_headers(compiler: Compiler, cuda: str) -> Compiler:
    """pip installs nvcc without the header that cuda_fp16.h includes."""
    root = compiler.nvcc.parent.parent
    if root.parent.name == "nvidia" and not (root / "include" / "cccl" / "nv" / "target").is_file():
        raise BuildError(f"{compiler.nvcc} lacks the headers of nvidia-cuda-cccl. {how_to_install(cuda)}")
    return compiler


def how_to_install(cuda: str) -> str:
    if int(cuda.partition(".")[0]) < 13:
        return f"Install the toolkit of CUDA {cuda} (pip has no nvcc of it), or set RINGATTN_CUDA=0 for CPU only.\n"
    names = " ".join(f'"{name}=={cuda}.*"' for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"))
    return (
        f"Install the toolkit of CUDA {cuda}, or pip's packages, or set RINGATTN_CUDA=0 for CPU only:\n\n"
        f"    python -m pip install {names} nvidia-cuda-cccl\n"
    )


def architectures(text: str, compiler: Compiler) -> tuple[int, ...]:
    """RINGATTN_ARCHS, sorted: numbers between semicolons, commas or spaces; ARCHS if empty."""
    words = re.split(r"[;,\s]+", text.strip(";, \t\n"))
    if words == [""]:
        return ARCHS
    expected = "numbers as in 80;86;89;90 were expected"
    for word in words:
        if not re.fullmatch(r"[0-9]{2,3}", word):
            raise BuildError(f'RINGATTN_ARCHS is "{text}"; {expected}')
        if int(word) < OLDEST_ARCH:
            raise BuildError(f'RINGATTN_ARCHS is "{text}"; the kernels need {OLDEST_ARCH} or newer, not {word}')
        if int(word) not in compiler.known:
            known = ", ".join(str(arch) for arch in sorted(compiler.known) if arch >= OLDEST_ARCH)
            raise BuildError(f'RINGATTN_ARCHS is "{text}"; nvcc {compiler.version} knows {known}, not {word}')
    return tuple(sorted({int(word) for word in words}))
