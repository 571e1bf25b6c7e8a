"""Builds ringattn_ext._C with CMake and Ninja, for the torch of the environment, with CUDA kernels where it has CUDA.

That torch is found on disk and its version is read as text: it is never imported, and it is never a build requirement,
since a front end would then fetch another one, which may differ from the one the user runs. The wheel requires the
minor version it was built with. What is fixed is in pyproject.toml; here is only what depends on the machine, and in
third_party/cuda_toolkit.py what decides about CUDA.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "third_party"))
from cuda_toolkit import BuildError, Kernels, choose_kernels  # noqa: E402

OLDEST, NEWEST = (2, 11), (2, 14)  # the torch minors that are supported
SUPPORTED = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
INSTALL_TORCH = f'python -m pip install "{SUPPORTED}"'


class Torch(NamedTuple):
    folder: Path  # the package
    version: str  # as torch.__version__ says it: "2.13.0+cpu"
    cuda: str | None  # as torch.version.cuda says it: "13.0"

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def requirement(self) -> str:
        return f"torch=={self.minor}.*"


def _includes_system_packages(prefix: str) -> bool:
    """Whether a virtual environment shows the packages of the Python it was made from."""
    config = Path(prefix, "pyvenv.cfg")
    pattern = r"^include-system-site-packages\s*=\s*true\s*$"
    return config.is_file() and re.search(pattern, config.read_text(), re.MULTILINE | re.IGNORECASE) is not None


def package_folders() -> list[Path]:
    """Where the environment that is built for keeps its packages, in the order in which Python looks.

    pip's isolated build runs the Python of the environment, with the environment's packages taken off sys.path; other
    front ends build in a virtual environment of their own, and then the activated one is meant.
    """
    shared = [site.getusersitepackages(), *site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])]
    folders = [entry for entry in sys.path if entry]
    if sys.prefix != sys.base_prefix:
        folders += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if sys.prefix == sys.base_prefix or _includes_system_packages(sys.prefix):
        folders += shared
    active = os.environ.get("VIRTUAL_ENV")
    if active:
        place = {"base": active, "platbase": active}
        folders += [sysconfig.get_path(kind, "venv", place) for kind in ("purelib", "platlib")]
        if _includes_system_packages(active):
            folders += shared
    return [Path(folder) for folder in dict.fromkeys(folders)]


def find_torch(folders: Iterable[Path]) -> Torch:
    """The first torch in these folders, which must be of a supported version."""
    folders = list(folders)
    file = next((file for folder in folders if (file := folder / "torch" / "version.py").is_file()), None)
    if file is None:
        looked = "".join(f"\n  {folder}" for folder in folders if folder.is_dir())
        raise BuildError(
            f"ringattn_ext is built against an installed torch, and none was found in{looked}\n"
            f"Install one into the environment (activated, if the build runs in another one):\n\n    {INSTALL_TORCH}\n"
        )
    text = file.read_text()
    version = re.search(r"""^__version__\b[^=\n]*=\s*['"](\d+\.\d+[^'"]*)['"]""", text, re.MULTILINE)
    cuda = re.search(r"""^cuda\b[^=\n]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    if version is None:
        raise BuildError(f"{file} does not say which version of torch it belongs to")
    torch = Torch(file.parent, version[1], cuda[1] if cuda else None)
    major, minor = (int(re.match(r"\d+", part)[0]) for part in torch.version.split(".")[:2])  # type: ignore[index]
    if not OLDEST <= (major, minor) <= NEWEST:
        raise BuildError(
            f"ringattn_ext supports torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}; "
            f"{torch.folder} is torch {torch.version}. Install a supported one:\n\n    {INSTALL_TORCH}\n"
        )
    return torch


def job_count(text: str | None) -> int:
    """How many compilers run at a time: MAX_JOBS, or as many as there are CPUs this process may use."""
    if not text:
        return len(os.sched_getaffinity(0))
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise BuildError(f'MAX_JOBS is "{text}"; a whole number of at least 1 was expected')
    return int(text)


def find_program(name: str) -> str:
    """cmake or ninja: of the Python package of that name, which is a build requirement, else of the system.

    Not simply the first one on PATH: an environment need not be activated, and a build that meets another version of
    Ninja than the last time starts over.
    """
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        files = []
    programs = [str(file.locate()) for file in files if file.parts[-2:] == ("bin", name)]
    programs.sort(key=lambda path: "/data/" not in path)  # the program itself rather than a script that calls it
    path = programs[0] if programs else shutil.which(name)
    if path is None:
        raise BuildError(f"{name} was not found; install it:\n\n    python -m pip install {name}\n")
    return path


def build_folder(torch: Torch, kernels: Kernels) -> Path:
    """Kept between builds, so that they are incremental; one for each torch, nvcc and Python."""
    nvcc = f"nvcc-{kernels.compiler.version}-" if kernels.compiler else ""
    name = f"torch-{torch.version}-{nvcc}{sys.implementation.cache_tag}"
    return ROOT / "build" / re.sub(r"[^\w.]+", "-", "-".join(filter(None, [name, sanitizers()])))


def sanitizers() -> str:
    """With which the module is compiled, as in "address,undefined": tests/sanitized.py says so here."""
    return os.environ.get("RINGATTN_SANITIZE", "")


def forget_moved_build(folder: Path, nvcc: Path | None = None) -> None:
    """Delete a build folder whose tree or nvcc has moved: CMake would refuse it."""
    cache = folder / "CMakeCache.txt"
    expected = [f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n"]
    if nvcc:
        expected.append(f"CMAKE_CUDA_COMPILER:FILEPATH={nvcc}\n")
    if cache.is_file() and not all(line in cache.read_text() for line in expected):
        shutil.rmtree(folder)


def _pybind11_include(folder: Path, torch: Torch) -> Path:
    """A copy of pybind11's headers in the build folder; torch's own where pybind11 is not installed.

    In an isolated build the originals lie at a new temporary path every time, and Ninja would compile again what
    includes them.
    """
    try:
        import pybind11
    except ModuleNotFoundError:
        return torch.folder / "include"

    copy = folder / f"pybind11-{pybind11.__version__}"
    if not copy.is_dir():
        partial = copy.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(pybind11.get_include(), partial)
        partial.rename(copy)
    return copy


def _cuda_settings(kernels: Kernels) -> dict[str, object]:
    if kernels.compiler is None:
        return {"RINGATTN_CUDA": "OFF"}
    return {
        "RINGATTN_CUDA": "ON",
        "CMAKE_CUDA_COMPILER:FILEPATH": kernels.compiler.nvcc,
        "RINGATTN_ARCHS": ";".join(map(str, kernels.archs)),
    }


def compile_module(torch: Torch, kernels: Kernels) -> Path:
    """Configures and builds the target _C and returns its file."""
    jobs = job_count(os.environ.get("MAX_JOBS"))
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise BuildError(f"{headers} has no Python.h; on Debian:\n\n    apt-get install -y python3-dev\n")
    folder = build_folder(torch, kernels)
    forget_moved_build(folder, kernels.compiler.nvcc if kernels.compiler else None)
    folder.mkdir(parents=True, exist_ok=True)

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    settings: dict[str, object] = {
        "CMAKE_MAKE_PROGRAM": find_program("ninja"),
        "RINGATTN_TORCH_DIR": torch.folder,
        "RINGATTN_PYTHON_INCLUDE": headers,
        "RINGATTN_PYBIND11_INCLUDE": _pybind11_include(folder, torch),
        "RINGATTN_MODULE_SUFFIX": suffix,
        "RINGATTN_MODULE_DIR": folder / "module",
        "RINGATTN_SANITIZE": sanitizers(),
        **_cuda_settings(kernels),
    }
    print(f"ringattn_ext: torch {torch.version} in {torch.folder}; {jobs} jobs in {folder}", flush=True)
    print(f"ringattn_ext: {kernels}", flush=True)
    definitions = [f"-D{key}={value}" for key, value in settings.items()]
    _run(find_program("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja", *definitions)
    _run(settings["CMAKE_MAKE_PROGRAM"], "-C", folder, f"-j{jobs}", "_C")
    return folder / "module" / f"_C{suffix}"


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, stdin=subprocess.DEVNULL).returncode != 0:
        raise BuildError(f"this command failed, its output is above: {' '.join(words)}")


class FreshBuild(build):
    """Modules that have been deleted since the last build would otherwise still be put into the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def build_info(torch: Torch, kernels: Kernels) -> str:
    nvcc = kernels.compiler.version if kernels.compiler else None
    return (
        "# Written by setup.py: the torch that _C was built for, and its CUDA kernels.\n"
        f'TORCH_VERSION = "{torch.version}"\n'
        f'TORCH_MINOR = "{torch.minor}"\n'
        f"CUDA: str | None = {torch.cuda!r}  # of torch\n"
        f"ARCHS: tuple[int, ...] = {kernels.archs}  # with machine code; none: CPU only\n"
        f"PTX: int | None = {kernels.ptx}\n"
        f"NVCC: str | None = {nvcc!r}\n"
        f"NO_CUDA: str | None = {kernels.no_cuda!r}  # why this build is CPU only\n"
    )


class BuildModule(build_ext):
    def run(self) -> None:
        folders = package_folders()
        self.torch = find_torch(folders)
        self.kernels = choose_kernels(self.torch.version, self.torch.cuda, folders, os.environ)
        super().run()
        # Beside the module: among the sources in an editable install, else in the wheel alone.
        info = Path(self.get_ext_fullpath("ringattn_ext._C")).with_name("_build_info.py")
        info.write_text(build_info(self.torch, self.kernels))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(compile_module(self.torch, self.kernels), target)


def dependencies(commands: Iterable[str]) -> list[str]:
    """torch, of the minor that is built for. A source distribution is built for none and can be made without one."""
    try:
        return [find_torch(package_folders()).requirement]
    except BuildError as error:
        if {"egg_info", "sdist"}.isdisjoint(commands):
            sys.exit(f"error: {error}")
        return [SUPPORTED]


if __name__ == "__main__":
    setup(
        install_requires=dependencies(sys.argv[1:]),
        ext_modules=[Extension("ringattn_ext._C", sources=[])],
        cmdclass={"build": FreshBuild, "build_ext": BuildModule},
    )
