"""Builds the C++ part into build/emulator, once for each state of the sources, and imports it."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pybind11

FOLDER = Path(__file__).parent
BUILD = FOLDER.parent.parent / "build" / "emulator"


def program(name: str) -> str:
    """A program beside this Python (pip installs cmake and ninja there) or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise RuntimeError(f"{name} was not found; pip install {name}")
    return found


def run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed\n{done.stdout.decode()}")


def build(source: Path, folder: Path, settings: Sequence[str] = ()) -> None:
    """Builds the CMake project in `source` into `folder`; settings: further ones, as "-Dname=value"."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # test processes may start together
        fcntl.flock(lock, fcntl.LOCK_EX)
        ninja = program("ninja")
        if not (folder / "build.ninja").exists():
            settings = [
                *settings,
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            ]
            run(program("cmake"), "-S", source, "-B", folder, "-G", "Ninja", *settings)
        run(ninja, "-C", folder, f"-j{os.environ.get('MAX_JOBS') or len(os.sched_getaffinity(0))}")


def import_module(folder: Path, name: str) -> ModuleType:
    path = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_module(source: Path, folder: Path, name: str) -> ModuleType:
    """Builds the CMake project in `source` into `folder` and imports its extension module."""
    build(source, folder)
    return import_module(folder, name)


native = build_module(FOLDER, BUILD, "_emulator")
EmulatorError = native.EmulatorError
