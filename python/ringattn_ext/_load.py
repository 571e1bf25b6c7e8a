"""Loads the compiled library, after making sure that the torch of this process is the one it was built for.

C++ has no stable interface between torch's minor versions: under another one the library may crash, or worse. So the
check comes before the library, and every refusal says what was built, what was found and the one command that mends it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path

from ringattn_ext._version import __version__

_SOURCES = Path(__file__).resolve().parents[2]  # in a checkout; anything else if installed from a wheel


def runs_as_command() -> bool:
    """Whether this process is `python -m ringattn_ext ...` and Python is still looking for __main__.

    Python documents that sys.argv[0] is "-m" for that time. In sys.orig_argv the word before the arguments is then the
    module, or ends with it.
    """
    word = sys.orig_argv[-len(sys.argv)] if 0 < len(sys.argv) < len(sys.orig_argv) else ""
    return sys.argv[:1] == ["-m"] and re.fullmatch(r"(-\w*m)?ringattn_ext(\.__main__)?", word) is not None


def load() -> None:
    """Import ringattn_ext._C. If it does not fit the installed torch: ImportError, with the library untouched."""
    try:
        built = importlib.import_module("ringattn_ext._build_info")
    except ModuleNotFoundError:
        raise ImportError(_not_built()) from None
    if importlib.util.find_spec("ringattn_ext._C") is None:
        raise ImportError(_not_built())
    name = f"ringattn_ext {__version__} was built for torch {built.TORCH_VERSION}"
    has_kernels = bool(getattr(built, "ARCHS", ()))
    if has_kernels:
        name += f" with CUDA {built.CUDA}"

    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        install = torch_command(built.TORCH_MINOR, replace=False)
        raise ImportError(f"{name}, and torch is not installed. Install it:\n\n    {install}\n") from None

    found: str = str(torch.__version__)
    found_cuda: str | None = torch.version.cuda
    if ".".join(found.split(".")[:2]) != built.TORCH_MINOR:
        raise ImportError(f"{name}; installed is torch {found}. {_mend(built.TORCH_MINOR, replace=False)}")
    # The kernels use the CUDA runtime that torch loads, by its major version. A module without kernels uses none.
    if has_kernels and _major(found_cuda) != _major(built.CUDA):
        has = f"CUDA {found_cuda}" if found_cuda else "no CUDA"
        raise ImportError(
            f"{name}; installed is torch {found}, which has {has}. {_mend(built.TORCH_MINOR, replace=True)}"
        )

    importlib.import_module("ringattn_ext._C")


def _major(version: str | None) -> str | None:
    return version.partition(".")[0] if version else None


def _not_built() -> str:
    text = f"ringattn_ext {__version__} has no compiled library for this Python ({sys.implementation.cache_tag})"
    return f"{text}. {'Build it' if sources() else 'Install it again'}:\n\n    {reinstall_command()}\n"


def _mend(minor: str, *, replace: bool) -> str:
    text = "Build it again for this torch" if sources() else "Install the torch that it was built for"
    return f"{text}:\n\n    {fitting_command(minor, replace=replace)}\n"


def reinstall_command() -> str:
    """Makes the compiled library anew."""
    if sources():
        return pip_command("install", "-e", str(sources()))
    return pip_command("install", "--force-reinstall", "--no-deps", "ringattn_ext")


def fitting_command(minor: str, *, replace: bool) -> str:
    """From sources: build for the torch that is there. From a wheel: get the torch that it was built for."""
    return reinstall_command() if sources() else torch_command(minor, replace=replace)


def torch_command(minor: str, *, replace: bool) -> str:
    """Installs a torch of this minor; `replace`: though the one that is there fulfils the requirement."""
    # pip would find that a CPU build fulfils the requirement, and leave it.
    force = ["--force-reinstall"] if replace else []
    return pip_command("install", *force, f"torch=={minor}.*")


def sources() -> Path | None:
    """The checkout that this package lies in; None if installed from a wheel."""
    found = (_SOURCES / "setup.py").is_file() and (_SOURCES / "CMakeLists.txt").is_file()
    return _SOURCES if found else None


def pip_command(*words: str) -> str:
    return shlex.join([sys.executable or "python", "-m", "pip", *words])
