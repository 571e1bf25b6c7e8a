"""The guard of the import, python/ringattn_ext/_load.py, with false torches and a false library, in fresh processes.

The false library leaves a mark when it is loaded, so each refusal is shown to come before it.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import setup
from cuda_toolkit import Compiler

PACKAGE = setup.ROOT / "python" / "ringattn_ext"
COMPILER = Compiler(Path("nvcc"), "13.0.88", frozenset({80, 90}))
PIP = shlex.join([sys.executable, "-m", "pip"])


class Installation:
    """A package made of the real guard, a false library and what it is said to be built for."""

    def __init__(self, site_packages: Path) -> None:
        self.site_packages = site_packages
        self.package = site_packages / "ringattn_ext"
        self.mark = site_packages / "loaded"
        self.package.mkdir(parents=True)
        for name in ("_load.py", "_version.py"):
            shutil.copy(PACKAGE / name, self.package)
        (self.package / "__init__.py").write_text("from ringattn_ext._load import load\n\nload()\n")
        (self.package / "_C.py").write_text(f"import pathlib\n\npathlib.Path({str(self.mark)!r}).touch()\n")
        self.built_for("2.13.0+cpu", None)

    def built_for(self, version: str, cuda: str | None, *, kernels: bool | None = None) -> None:
        """With kernels if torch has CUDA, unless told otherwise."""
        has_kernels = cuda is not None if kernels is None else kernels
        kind = setup.Kernels(COMPILER, (80, 90)) if has_kernels else setup.Kernels(None, no_cuda="a test")
        text = setup.build_info(setup.Torch(Path("torch"), version, cuda), kind)
        (self.package / "_build_info.py").write_text(text)

    def has_torch(self, version: str, cuda: str | None) -> None:
        folder = self.site_packages / "torch"
        folder.mkdir()
        (folder / "__init__.py").write_text(f"from torch import version\n\n__version__ = {version!r}\n")
        (folder / "version.py").write_text(f"cuda = {cuda!r}\n")

    def run(self) -> subprocess.CompletedProcess[str]:
        """Imports the package by a Python that sees these packages alone (-S: no site-packages)."""
        code = f"import sys; sys.path.insert(0, {str(self.site_packages)!r}); import ringattn_ext"
        command = [sys.executable, "-S", "-E", "-c", code]
        return subprocess.run(command, cwd="/", stderr=subprocess.PIPE, text=True, timeout=60)

    def refusal(self) -> str:
        """The message of the ImportError, which must come before the library."""
        done = self.run()
        assert done.returncode == 1
        assert not self.mark.exists(), "the library was loaded first"
        _, found, message = done.stderr.partition("\nImportError: ")
        assert found, done.stderr
        assert message.count("pip install") == 1, "one mending command"
        return message


@pytest.fixture
def wheel(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "site-packages")


@pytest.fixture
def checkout(tmp_path: Path) -> Installation:
    (tmp_path / "my tree").mkdir()
    for name in ("setup.py", "CMakeLists.txt"):
        (tmp_path / "my tree" / name).touch()
    return Installation(tmp_path / "my tree" / "python")


@pytest.mark.parametrize(
    "built, installed",
    [
        (("2.13.0+cpu", None), ("2.13.0+cpu", None)),
        (("2.13.0+cpu", None), ("2.13.2+cu130", "13.0")),
        (("2.13.0", "13.0"), ("2.13.1+cu130", "13.0")),
        (("2.13.0+cu130", "13.0"), ("2.13.1+cu132", "13.2")),
    ],
)
def test_fitting_torch_loads_the_library(
    wheel: Installation, built: tuple[str, str | None], installed: tuple[str, str | None]
) -> None:
    wheel.built_for(*built)
    wheel.has_torch(*installed)
    done = wheel.run()
    assert done.returncode == 0, done.stderr
    assert wheel.mark.exists()


@pytest.mark.parametrize("installed", ["2.14.0+cpu", "2.12.1", "2.1.3", "3.13.0", "2.130.0"])
def test_another_minor(wheel: Installation, installed: str) -> None:
    wheel.has_torch(installed, None)
    message = wheel.refusal()
    assert "built for torch 2.13.0+cpu; installed is torch " + installed in message
    assert f"{PIP} install 'torch==2.13.*'\n" in message


def test_another_minor_in_a_checkout(checkout: Installation) -> None:
    checkout.has_torch("2.14.0+cpu", None)
    message = checkout.refusal()
    assert "built for torch 2.13.0+cpu; installed is torch 2.14.0+cpu" in message
    assert f"{PIP} install -e '{checkout.site_packages.parent}'\n" in message


def test_cuda_build_under_a_cpu_torch(wheel: Installation) -> None:
    wheel.built_for("2.13.0+cu130", "13.0")
    wheel.has_torch("2.13.0+cpu", None)
    message = wheel.refusal()
    assert "built for torch 2.13.0+cu130 with CUDA 13.0; installed is torch 2.13.0+cpu, which has no CUDA" in message
    assert f"{PIP} install --force-reinstall 'torch==2.13.*'\n" in message


def test_cuda_build_under_a_cpu_torch_in_a_checkout(checkout: Installation) -> None:
    checkout.built_for("2.13.0+cu130", "13.0")
    checkout.has_torch("2.13.0+cpu", None)
    assert f"{PIP} install -e '{checkout.site_packages.parent}'\n" in checkout.refusal()


def test_cuda_build_under_a_torch_of_another_cuda(wheel: Installation) -> None:
    wheel.built_for("2.13.0+cu130", "13.0")
    wheel.has_torch("2.13.0+cu126", "12.6")
    message = wheel.refusal()
    assert "with CUDA 13.0; installed is torch 2.13.0+cu126, which has CUDA 12.6" in message
    assert f"{PIP} install --force-reinstall 'torch==2.13.*'\n" in message


@pytest.mark.parametrize("installed", [("2.13.0+cpu", None), ("2.13.0+cu126", "12.6")])
def test_build_without_kernels_needs_no_cuda(wheel: Installation, installed: tuple[str, str | None]) -> None:
    wheel.built_for("2.13.0+cu130", "13.0", kernels=False)
    wheel.has_torch(*installed)
    done = wheel.run()
    assert done.returncode == 0, done.stderr
    assert wheel.mark.exists()


def test_torch_missing(wheel: Installation) -> None:
    message = wheel.refusal()
    assert "torch is not installed" in message
    assert f"{PIP} install 'torch==2.13.*'\n" in message


def test_broken_torch_shows_its_own_error(wheel: Installation) -> None:
    wheel.has_torch("2.13.0", None)
    (wheel.site_packages / "torch" / "__init__.py").write_text("import no_such_dependency\n")
    assert "No module named 'no_such_dependency'" in wheel.run().stderr
    assert not wheel.mark.exists()


@pytest.mark.parametrize("missing", ["_build_info.py", "_C.py"])
def test_not_built(checkout: Installation, wheel: Installation, missing: str) -> None:
    for installation in (checkout, wheel):
        installation.has_torch("2.13.0+cpu", None)
        (installation.package / missing).unlink()
    assert f"{PIP} install -e '{checkout.site_packages.parent}'\n" in checkout.refusal()
    assert f"{PIP} install --force-reinstall --no-deps ringattn_ext\n" in wheel.refusal()
