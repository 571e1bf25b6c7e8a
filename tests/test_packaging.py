"""setup.py: which torch it finds, how many jobs it runs, what it puts into a wheel."""

import email.message
import email.parser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

import setup
from cuda_toolkit import Compiler

CPU_ONLY = setup.Kernels(None, no_cuda="a test")

VERSION_FILE = """from typing import Optional
__version__ = '{version}'
cuda: Optional[str] = {cuda!r}
hip: Optional[str] = None
"""


def fake_torch(site_packages: Path, version: str, cuda: str | None = None) -> Path:
    """Writes a torch that says its version and cannot be imported."""
    folder = site_packages / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    (folder / "version.py").write_text(VERSION_FILE.format(version=version, cuda=cuda))
    return folder


@pytest.mark.parametrize(
    "version, cuda, requirement",
    [
        ("2.11.0", None, "torch==2.11.*"),
        ("2.13.0+cpu", None, "torch==2.13.*"),
        ("2.14.1+cu130", "13.0", "torch==2.14.*"),
        ("2.12.0a0+git1234abc", "12.8", "torch==2.12.*"),
    ],
)
def test_torch_is_read_from_disk(tmp_path: Path, version: str, cuda: str | None, requirement: str) -> None:
    folder = fake_torch(tmp_path / "second", version, cuda)
    torch = setup.find_torch([tmp_path / "first", tmp_path / "second"])
    assert torch == setup.Torch(folder, version, cuda)
    assert torch.requirement == requirement


def test_the_first_torch_counts(tmp_path: Path) -> None:
    fake_torch(tmp_path / "b", "2.12.0")
    fake_torch(tmp_path / "a", "2.13.0")
    assert setup.find_torch([tmp_path / "b", tmp_path / "a"]).version == "2.12.0"


@pytest.mark.parametrize("version", ["2.10.2", "2.15.0", "1.13.1", "3.0.0"])
def test_torch_of_another_time_is_refused(tmp_path: Path, version: str) -> None:
    fake_torch(tmp_path, version)
    with pytest.raises(setup.BuildError) as error:
        setup.find_torch([tmp_path])
    assert version in str(error.value) and str(tmp_path) in str(error.value)
    assert "2.11 to 2.14" in str(error.value)
    assert 'python -m pip install "torch>=2.11,<2.15"' in str(error.value)


def test_no_torch_gives_the_command(tmp_path: Path) -> None:
    with pytest.raises(setup.BuildError) as error:
        setup.find_torch([tmp_path])
    assert str(tmp_path) in str(error.value)
    assert str(error.value).count("pip install") == 1
    assert 'python -m pip install "torch>=2.11,<2.15"' in str(error.value)


def virtual_environment(folder: Path, *options: str) -> tuple[Path, Path]:
    """A new one without pip: its Python and its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, str(folder)], check=True, timeout=60)
    return folder / "bin" / "python", next(folder.glob("lib/python3*/site-packages"))


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """What pip puts on PYTHONPATH for an isolated build: setuptools, and the environment's packages are hidden."""
    folder = tmp_path / "overlay"
    folder.mkdir()
    packages = Path(setuptools.__file__).parent.parent
    for name in ("setuptools", "_distutils_hack", "pkg_resources"):
        if (packages / name).is_dir():
            (folder / name).symlink_to(packages / name)
    (folder / "sitecustomize.py").write_text(
        "import site, sys\n\nsys.path = [entry for entry in sys.path if entry not in site.getsitepackages()]\n"
    )
    return folder


def found_in_isolation(python: Path, overlay: Path, **environment: str) -> str:
    """What setup.py says, run by this Python as in pip's isolated build."""
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(setup.ROOT)!r}); import setup\n"
        "assert not [entry for entry in sys.path if (pathlib.Path(entry) / 'torch').exists()]\n"
        "print(setup.find_torch(setup.package_folders()))"
    )
    isolated = {"PYTHONPATH": str(overlay), "PYTHONNOUSERSITE": "1"}
    clean = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    done = subprocess.run(
        [str(python), "-c", code],
        env=clean | isolated | environment,
        cwd=overlay,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.stdout


def test_isolated_build_sees_the_environments_torch(tmp_path: Path, overlay: Path) -> None:
    python, site_packages = virtual_environment(tmp_path / "environment")
    assert "none was found" in found_in_isolation(python, overlay)
    torch = fake_torch(site_packages, "2.12.1+cpu")
    assert repr(setup.Torch(torch, "2.12.1+cpu", None)) in found_in_isolation(python, overlay)


def test_front_end_with_its_own_environment_sees_the_activated_one(tmp_path: Path, overlay: Path) -> None:
    python, _ = virtual_environment(tmp_path / "front_end")
    active = tmp_path / "active"
    torch = fake_torch(virtual_environment(active)[1], "2.14.0+cu130", "13.0")
    assert "none was found" in found_in_isolation(python, overlay)
    found = found_in_isolation(python, overlay, VIRTUAL_ENV=str(active))
    assert repr(setup.Torch(torch, "2.14.0+cu130", "13.0")) in found


def test_own_environment_comes_before_the_activated_one(tmp_path: Path, overlay: Path) -> None:
    python, site_packages = virtual_environment(tmp_path / "own")
    fake_torch(site_packages, "2.11.0")
    active = tmp_path / "active"
    fake_torch(virtual_environment(active)[1], "2.14.0")
    assert "2.11.0" in found_in_isolation(python, overlay, VIRTUAL_ENV=str(active))


def test_packages_of_the_user_count_where_the_environment_shows_them(tmp_path: Path, overlay: Path) -> None:
    user = tmp_path / "user"
    fake_torch(user / "lib" / f"python3.{sys.version_info.minor}" / "site-packages", "2.12.0")
    closed, _ = virtual_environment(tmp_path / "closed")
    assert "2.12.0" not in found_in_isolation(closed, overlay, PYTHONUSERBASE=str(user))
    shared, site_packages = virtual_environment(tmp_path / "shared", "--system-site-packages")
    assert "2.12.0" in found_in_isolation(shared, overlay, PYTHONUSERBASE=str(user))
    fake_torch(site_packages, "2.13.0")
    assert "2.13.0" in found_in_isolation(shared, overlay, PYTHONUSERBASE=str(user))


@pytest.mark.parametrize("text, jobs", [("1", 1), ("12", 12), ("007", 7)])
def test_max_jobs(text: str, jobs: int) -> None:
    assert setup.job_count(text) == jobs


@pytest.mark.parametrize("text", [None, ""])
def test_max_jobs_defaults_to_the_usable_cpus(text: str | None) -> None:
    assert setup.job_count(text) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " 2", "2 ", "٣"])
def test_bad_max_jobs_is_an_error(text: str) -> None:
    with pytest.raises(setup.BuildError, match=f'MAX_JOBS is "{text}"; a whole number of at least 1'):
        setup.job_count(text)


def test_source_distribution_needs_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup, "package_folders", lambda: [tmp_path])
    assert setup.dependencies(["sdist", "--formats", "gztar"]) == ["torch>=2.11,<2.15"]
    for command in ("dist_info", "bdist_wheel", "editable_wheel", "build_ext"):
        with pytest.raises(SystemExit, match="none was found"):
            setup.dependencies([command])


def test_moved_build_folder_is_dropped(tmp_path: Path) -> None:
    cache = tmp_path / "build" / "CMakeCache.txt"
    cache.parent.mkdir()
    cache.write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={setup.ROOT}\n")
    setup.forget_moved_build(cache.parent)
    assert cache.is_file()
    cache.write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/somewhere/else\n")
    setup.forget_moved_build(cache.parent)
    assert not cache.parent.exists()


def test_build_folder_of_another_nvcc_is_dropped(tmp_path: Path) -> None:
    nvcc = Path("/here/nvcc")
    cache = tmp_path / "build" / "CMakeCache.txt"
    cache.parent.mkdir()
    lines = "CMAKE_HOME_DIRECTORY:INTERNAL={}\nCMAKE_CUDA_COMPILER:FILEPATH={}\n"
    cache.write_text(lines.format(setup.ROOT, "/here/nvcc"))
    setup.forget_moved_build(cache.parent, nvcc)
    assert cache.is_file()
    cache.write_text(lines.format(setup.ROOT, "/there/nvcc"))
    setup.forget_moved_build(cache.parent, nvcc)
    assert not cache.parent.exists()


def test_each_nvcc_has_a_build_folder() -> None:
    torch = setup.Torch(Path("torch"), "2.14.1+cu130", "13.0")
    kinds = [CPU_ONLY, *(setup.Kernels(Compiler(Path("nvcc"), v, frozenset()), (80,)) for v in ("13.0.88", "13.2.1"))]
    assert len({setup.build_folder(torch, kernels) for kernels in kinds}) == 3


def cmake_settings(monkeypatch: pytest.MonkeyPatch, folder: Path, kernels: setup.Kernels) -> list[str]:
    """The command that configures."""
    commands: list[list[str]] = []
    monkeypatch.setattr(setup, "_run", lambda *words: commands.append([str(word) for word in words]))
    monkeypatch.setattr(setup, "build_folder", lambda torch, kernels: folder)
    setup.compile_module(setup.find_torch(setup.package_folders()), kernels)
    return commands[0]


def test_kernels_reach_cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = setup.Kernels(Compiler(Path("/here/nvcc"), "13.0.88", frozenset()), (80, 90))
    settings = cmake_settings(monkeypatch, tmp_path, kernels)
    assert {"-DRINGATTN_CUDA=ON", "-DRINGATTN_ARCHS=80;90"} <= set(settings)
    assert "-DCMAKE_CUDA_COMPILER:FILEPATH=/here/nvcc" in settings
    settings = cmake_settings(monkeypatch, tmp_path, CPU_ONLY)
    assert "-DRINGATTN_CUDA=OFF" in settings and "nvcc" not in " ".join(settings)


def test_the_build_says_why_it_is_cpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cmake_settings(monkeypatch, tmp_path, setup.Kernels(None, no_cuda="torch 2.13.0 has no CUDA"))
    assert "\nringattn_ext: CPU only: torch 2.13.0 has no CUDA\n" in capfd.readouterr().out


def test_max_jobs_reaches_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.setattr(setup, "_run", lambda *words: commands.append([str(word) for word in words]))
    monkeypatch.setattr(setup, "build_folder", lambda torch, kernels: tmp_path / "build")
    setup.compile_module(setup.find_torch(setup.package_folders()), CPU_ONLY)
    configure, build = commands
    assert "-G" in configure and "Ninja" in configure
    assert "-j3" in build and build[-1] == "_C"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the tree, in its build folder, so that only what has changed is compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    leftover = setup.ROOT / "build" / f"lib.{setup.sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    (leftover / "ringattn_ext").mkdir(parents=True, exist_ok=True)
    (leftover / "ringattn_ext" / "deleted_long_ago.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", folder, setup.ROOT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> email.message.Message:
    (path,) = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return email.parser.Parser().parsestr(wheel.read(path).decode())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_requires_the_torch_it_was_built_for_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    folders = setup.package_folders()
    torch = setup.find_torch(folders)
    kernels = setup.choose_kernels(torch.version, torch.cuda, folders, os.environ)
    required = metadata(wheel, "METADATA").get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == [torch.requirement]
    assert not [line for line in required if "extra ==" in line and "torch" in line]
    info: dict[str, object] = {}
    exec(wheel.read("ringattn_ext/_build_info.py"), info)
    assert (info["TORCH_VERSION"], info["TORCH_MINOR"], info["CUDA"]) == (torch.version, torch.minor, torch.cuda)
    assert (info["ARCHS"], info["PTX"], info["NO_CUDA"]) == (kernels.archs, kernels.ptx, kernels.no_cuda)
    assert info["NVCC"] == (kernels.compiler.version if kernels.compiler else None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_holds_the_package(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = setup.ROOT / "python" / "ringattn_ext"
    sources = {path for suffix in ("*.py", "*.pyi", "py.typed") for path in package.rglob(suffix)}
    expected = {str(path.relative_to(package.parent)) for path in sources}
    expected |= {"ringattn_ext/_build_info.py", f"ringattn_ext/_C{setup.sysconfig.get_config_var('EXT_SUFFIX')}"}
    assert files == expected
    tag = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-"
    assert metadata(wheel, "WHEEL")["Tag"].startswith(tag)
    assert metadata(wheel, "METADATA")["License-Expression"] == "BSD-3-Clause"
    assert metadata(wheel, "METADATA")["Version"] == "0.1.0"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_module_is_tied_to_no_place(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".so")]
    dynamic = subprocess.check_output(["readelf", "-d", wheel.extract(name, tmp_path)], text=True, timeout=60)
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert "libpython" not in dynamic
