"""Faults that a process does to itself at a moment of a pass: builds, loads and arms inject.cpp.

A moment is a list of steps (prefix, edge): the beginning or the end of a scope that the profiler sees and whose name
begins so, each looked for after the one before it.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("inject.cpp")
ACTIONS = ("kill", "stop", "exit", "hold", "raise")  # as in inject.cpp
BEGIN, END = 0, 1
Moment = Sequence[tuple[str, int]]


class Notice(ctypes.Structure):
    """What the other processes see of an armed one: when its fault began (0.0: not yet); and `released` ends a hold."""

    _fields_ = [("at", ctypes.c_double), ("released", ctypes.c_int32)]


def shared_notices(count: int) -> list[Notice]:
    """Shared with the processes that are forked from now on."""
    size = ctypes.sizeof(Notice)
    memory = mmap.mmap(-1, size * count)
    return [Notice.from_buffer(memory, size * i) for i in range(count)]


def build(folder: Path) -> Path:
    """Compiles the library into the folder, if it is not there already."""
    import torch

    root, abi = Path(torch.__file__).parent, int(torch._C._GLIBCXX_USE_CXX11_ABI)
    key = hashlib.sha256(f"{torch.__version__} {root}\n".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"inject-{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"unfinished-{os.getpid()}.so"
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += ["-isystem", str(root / "include"), str(SOURCE), "-o", str(unfinished)]
    command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    unfinished.replace(library)
    return library


_library: ctypes.CDLL | None = None


def load(path: Path) -> None:
    """Before any of the functions below; after torch was imported, whose libraries it needs."""
    global _library
    _library = ctypes.CDLL(str(path))


def arm(action: str, moment: Moment, patience: float, notice: Notice) -> None:
    """At that moment and after so many seconds, whichever thread comes to it, the action is carried out there. Once."""
    assert _library is not None
    prefixes = (ctypes.c_char_p * len(moment))(*[prefix.encode() for prefix, _ in moment])
    edges = (ctypes.c_int * len(moment))(*[edge for _, edge in moment])
    milliseconds = int(1000 * patience)
    _library.faults_arm(ACTIONS.index(action), milliseconds, ctypes.byref(notice), len(moment), prefixes, edges)


def act(action: str, notice: Notice) -> None:
    """Carries out the action here and now; not "raise", which Python can do itself."""
    assert _library is not None and action != "raise"
    _library.faults_act(ACTIONS.index(action), ctypes.byref(notice))
