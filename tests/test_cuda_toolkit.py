"""third_party/cuda_toolkit.py: when CUDA kernels are built, with which nvcc, for which GPUs. Compilers are scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

import cuda_toolkit
from cuda_toolkit import BuildError, Compiler, Kernels, architectures, choose_kernels

CODES = (75, 80, 86, 87, 89, 90, 100, 120)
COMPILER = Compiler(Path("nvcc"), "13.0.88", frozenset(CODES))


@pytest.fixture(autouse=True)
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(cuda_toolkit, "SYSTEM", tmp_path / "no toolkit")


def fake_nvcc(folder: Path, version: str = "13.0.88") -> Path:
    """A script that says what nvcc says."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    codes = "".join(f"sm_{code}\\n" for code in CODES)
    release = ".".join(version.split(".")[:2])
    path.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"--version) echo 'Cuda compilation tools, release {release}, V{version}';;\n"
        f"--list-gpu-code) printf '{codes}';;\nesac\n"
    )
    path.chmod(0o755)
    return path


def pips_nvcc(site_packages: Path, version: str = "13.0.88", *, headers: bool = True) -> Path:
    root = site_packages / "nvidia" / f"cu{version.split('.')[0]}"
    if headers:
        (root / "include" / "cccl" / "nv").mkdir(parents=True)
        (root / "include" / "cccl" / "nv" / "target").touch()
    return fake_nvcc(root, version)


def chosen(
    folders: list[Path], version: str = "2.14.1+cu130", cuda: str | None = "13.0", **environment: str
) -> Kernels:
    return choose_kernels(version, cuda, folders, environment)


def test_torch_without_cuda(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path)
    kernels = chosen([tmp_path], "2.13.0+cpu", None, CUDACXX=str(nvcc))
    assert kernels == Kernels(None, (), "torch 2.13.0+cpu has no CUDA") and kernels.ptx is None
    assert str(kernels) == "CPU only: torch 2.13.0+cpu has no CUDA"
    with pytest.raises(BuildError, match=r"RINGATTN_CUDA is 1, and torch 2.13.0\+cpu has no CUDA"):
        chosen([tmp_path], "2.13.0+cpu", None, CUDACXX=str(nvcc), RINGATTN_CUDA="1")


def test_no_nvcc(tmp_path: Path) -> None:
    assert chosen([tmp_path]) == Kernels(None, (), "no nvcc was found")
    with pytest.raises(BuildError, match=r"RINGATTN_CUDA is 1, and no nvcc was found") as error:
        chosen([tmp_path], RINGATTN_CUDA="1")
    assert 'pip install "nvidia-cuda-nvcc==13.0.*"' in str(error.value)
    with pytest.raises(BuildError, match=r"the toolkit of CUDA 12.8 \(pip has no nvcc of it\)"):
        chosen([tmp_path], "2.12.0+cu128", "12.8", RINGATTN_CUDA="1")


def test_everything_there(tmp_path: Path) -> None:
    nvcc = pips_nvcc(tmp_path)
    kernels = chosen([tmp_path])
    assert kernels == Kernels(Compiler(nvcc, "13.0.88", frozenset(CODES)), (80, 86, 89, 90), None)
    assert kernels.ptx == 90
    assert str(kernels) == f"CUDA kernels for 80, 86, 89, 90 and PTX of 90 with nvcc 13.0.88, {nvcc}"
    assert chosen([tmp_path], RINGATTN_CUDA="1", RINGATTN_ARCHS="") == kernels
    assert chosen([tmp_path], RINGATTN_CUDA="0") == Kernels(None, (), "RINGATTN_CUDA is 0")


@pytest.mark.parametrize("wish", ["ON", "2", "yes", " 1"])
def test_bad_wish(tmp_path: Path, wish: str) -> None:
    with pytest.raises(BuildError, match=f'RINGATTN_CUDA is "{wish}"; 0 .* or 1 .* was expected'):
        chosen([tmp_path], RINGATTN_CUDA=wish)


def test_where_nvcc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last place to the first, of which each hides the one before."""
    assert chosen([tmp_path / "a", tmp_path / "b"]).compiler is None
    expected = pips_nvcc(tmp_path / "b")
    places: dict[str, str] = {}

    def found() -> Path:
        compiler = chosen([tmp_path / "a", tmp_path / "b"], **places).compiler
        assert compiler is not None
        return compiler.nvcc

    assert found() == expected
    expected = pips_nvcc(tmp_path / "a")
    assert found() == expected
    expected = fake_nvcc(tmp_path / "system")
    monkeypatch.setattr(cuda_toolkit, "SYSTEM", expected)
    assert found() == expected
    expected = fake_nvcc(tmp_path / "path")
    places["PATH"] = str(expected.parent)
    assert found() == expected
    expected = fake_nvcc(tmp_path / "home")
    places["CUDA_HOME"] = str(tmp_path / "home")
    assert found() == expected
    expected = fake_nvcc(tmp_path / "chosen")
    places["CUDACXX"] = str(expected)
    assert found() == expected


def test_nvcc_of_another_major(tmp_path: Path) -> None:
    old = fake_nvcc(tmp_path / "old", "12.8.93")
    with pytest.raises(BuildError) as error:
        chosen([tmp_path], PATH=str(old.parent))
    assert f"built with CUDA 13.0, whose runtime the kernels share; there is only\n  nvcc 12.8.93, {old}\n" in str(
        error.value
    )
    assert "RINGATTN_CUDA=0 for CPU only" in str(error.value)
    pips = pips_nvcc(tmp_path)
    compiler = chosen([tmp_path], PATH=str(old.parent)).compiler
    assert compiler is not None and compiler.nvcc == pips, "pip's takes the place of a toolkit that does not fit"
    with pytest.raises(BuildError, match="there is only"):  # but not of the one that was asked for
        chosen([tmp_path], CUDACXX=str(old))
    assert chosen([tmp_path], "2.12.0+cu128", "12.8", PATH=str(old.parent)).archs == (80, 86, 89, 90)


def test_nvcc_that_does_not_run(tmp_path: Path) -> None:
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\nexec /removed/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    assert chosen([tmp_path], PATH=str(wrapper.parent)).no_cuda == "no nvcc was found"
    for bad in (wrapper, tmp_path / "nothing"):
        with pytest.raises(BuildError, match=f'CUDACXX is "{bad}", which is not an nvcc that runs'):
            chosen([tmp_path], CUDACXX=str(bad))


def test_pips_nvcc_lacks_headers(tmp_path: Path) -> None:
    pips_nvcc(tmp_path, headers=False)
    with pytest.raises(BuildError, match="lacks the headers of nvidia-cuda-cccl"):
        chosen([tmp_path])


@pytest.mark.parametrize(
    "text, archs",
    [
        ("", (80, 86, 89, 90)),
        (" ; ", (80, 86, 89, 90)),
        ("80", (80,)),
        ("80;90", (80, 90)),
        ("90,80", (80, 90)),
        (" 120  80 , 90;80; ", (80, 90, 120)),
    ],
)
def test_architectures(text: str, archs: tuple[int, ...]) -> None:
    assert architectures(text, COMPILER) == archs


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("8.0", "numbers as in 80;86;89;90 were expected"),
        ("sm_80", "numbers as in"),
        ("80;90a", "numbers as in"),
        ("80;all", "numbers as in"),
        ("٨٠", "numbers as in"),
        ("75;80", "the kernels need 80 or newer, not 75"),
        ("80;95", "nvcc 13.0.88 knows 80, 86, 87, 89, 90, 100, 120, not 95"),
    ],
)
def test_bad_architectures(text: str, complaint: str) -> None:
    with pytest.raises(BuildError) as error:
        architectures(text, COMPILER)
    assert f'RINGATTN_ARCHS is "{text}"' in str(error.value) and complaint in str(error.value)
