"""python -m ringattn_ext doctor: real runs, on copies of the package that are broken in one way each."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import setup
from ringattn_ext import _doctor
from ringattn_ext._doctor import collect, rank, self_test
from ringattn_ext._doctor import facts as facts_module
from ringattn_ext._doctor.children import Child, wait
from ringattn_ext._load import runs_as_command

PACKAGE = setup.ROOT / "python" / "ringattn_ext"
LIBRARY = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
PIP = shlex.join([sys.executable, "-m", "pip"])


class Installation:
    """A copy of the package, as a wheel would have put it into `site`."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.package = site / "ringattn_ext"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        places = {"PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | places | environment,
            cwd=self.site,
            capture_output=True,
            text=True,
            timeout=200,
        )

    def doctor(self, *options: str, **environment: str) -> dict[str, Any]:
        """What the doctor says, after making sure of its exit status and that it says nothing else."""
        done = self.python(*options, "-m", "ringattn_ext", "doctor", "--json", **environment)
        said = json.loads(done.stdout)
        assert done.stderr == ""
        assert said["healthy"] == (not problems(said)) == (done.returncode == 0)
        return said

    def add(self, file: str, text: str) -> None:
        with (self.package / file).open("a") as end:
            end.write(text)

    def second_rank(self, statement: str) -> None:
        """Runs a statement on rank 1 when it calls ring_attention."""
        self.add(
            "_attention.py",
            "\n\n_true = ring_attention\n\n\ndef ring_attention(*args, **kwargs):\n"
            "    import os, time\n    import torch.distributed as dist\n"
            f"    if dist.get_rank() == 1:\n        {statement}\n    return _true(*args, **kwargs)\n",
        )


def problems(said: dict[str, Any]) -> dict[str, str]:
    """The problems by subject, which all have a command."""
    found = [verdict for verdict in said["verdicts"] if verdict["status"] == "problem"]
    assert all(verdict["command"] for verdict in found)
    return {verdict["subject"]: f"{verdict['text']} $ {verdict['command']}" for verdict in found}


def software_problems(said: dict[str, Any]) -> dict[str, str]:
    """Those that are not of the machine's GPU."""
    return {subject: text for subject, text in problems(said).items() if subject not in ("gpu", "driver")}


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "site")


def test_healthy(installation: Installation) -> None:
    said = installation.doctor()
    assert software_problems(said) == {}
    assert said["library"]["loaded"] and said["torch"]["version"].startswith(said["build"]["torch_minor"] + ".")
    ring = said["self_tests"][0]
    assert ring["passed"] and ring["seconds"] < self_test.START_LIMIT_S
    assert "float64 exact to" in ring["text"] and "float32 exact to" in ring["text"]
    assert said["package"]["folder"] == str(installation.package)


def test_text(installation: Installation) -> None:
    done = installation.python("-m", "ringattn_ext", "doctor", RINGATTN_CPU="sse9")
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles[:4] == ["package", "build", "found", "verdicts"]
    (number,) = [n for n, line in enumerate(lines) if line.startswith("  PROBLEM  cpu")]
    assert 'RINGATTN_CPU is "sse9"' in lines[number] and lines[number + 1].strip() == "$ unset RINGATTN_CPU"
    assert max(map(len, lines)) < 200 + len(str(installation.site))


def test_keys_are_documented() -> None:
    text = _doctor.__doc__
    assert text is not None
    for kind in vars(facts_module).values():
        if is_dataclass(kind):
            assert [field.name for field in fields(kind) if field.name not in text] == [], kind


@pytest.mark.parametrize("kind", ["wheel", "editable", "not installed"])
def test_kind_of_installation(
    monkeypatch: pytest.MonkeyPatch, installation: Installation, tmp_path: Path, kind: str
) -> None:
    """A wheel's metadata names the files beside it; an editable one lies elsewhere and names the sources."""
    monkeypatch.setattr(collect, "FOLDER", installation.package)
    place = {"wheel": installation.site, "editable": tmp_path / "editable", "not installed": tmp_path / "another"}[kind]
    information = place / "ringattn_ext-0.1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ringattn_ext\nVersion: 0.1.0\n")
    (information / "RECORD").write_text("__e.pth,,\n" if kind == "editable" else "ringattn_ext/__init__.py,,\n")
    if kind == "editable":
        url = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
        (information / "direct_url.json").write_text(json.dumps(url))
    monkeypatch.setattr(sys, "path", [str(place)])
    assert collect._installed() == kind


def test_library_missing(installation: Installation) -> None:
    (installation.package / LIBRARY).unlink()
    (installation.package / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    said = installation.doctor()
    text = software_problems(said).pop("build")
    assert "no compiled library for this Python" in text and "_C.cpython-39-x86_64-linux-gnu.so" in text
    assert text.endswith(f"$ {PIP} install --force-reinstall --no-deps ringattn_ext")
    assert said["self_tests"] == [] and not said["library"]["loaded"]


def test_build_information_missing(installation: Installation) -> None:
    (installation.package / "_build_info.py").unlink()
    said = installation.doctor()
    assert software_problems(said).keys() == {"build"} and said["build"] is None


def test_another_torch_minor(installation: Installation) -> None:
    installation.add("_build_info.py", '\nTORCH_VERSION, TORCH_MINOR = "2.1.3+cpu", "2.1"\n')
    (installation.package / LIBRARY).write_text("must not be touched")
    said = installation.doctor()
    assert software_problems(said).keys() == {"torch"}
    assert "built for torch 2.1.3+cpu; installed is torch 2." in problems(said)["torch"]
    assert problems(said)["torch"].endswith(f"$ {PIP} install 'torch==2.1.*'")


@pytest.mark.parametrize("size", [10, 5000])  # ImportError: file too short; a crash on some systems
def test_library_that_cannot_load(installation: Installation, size: int) -> None:
    library = installation.package / LIBRARY
    start = library.read_bytes()[:size]
    library.unlink()
    library.write_bytes(start)
    said = installation.doctor()
    assert software_problems(said).keys() == {"library"}
    assert "does not load: " in problems(said)["library"]
    assert said["torch"]["version"] is not None and said["self_tests"] == []


def test_missing_symbol(installation: Installation) -> None:
    (installation.package / LIBRARY).unlink()
    text = "undefined symbol: _ZN3c1010no_such_thingEv"
    (installation.package / "_C.py").write_text(f"raise ImportError({text!r}, name='ringattn_ext._C')\n")
    assert text in software_problems(installation.doctor())["library"]


def test_torch_missing(installation: Installation) -> None:
    said = installation.doctor("-S")
    assert problems(said)["torch"].startswith("not installed $ ")
    assert "install 'torch==2." in problems(said)["torch"] and said["torch"]["missing"]


@pytest.mark.parametrize(
    "torch, text",
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("import sys; sys.exit('goodbye')", "SystemExit: goodbye"),
        ("print('noise'); raise OSError('libc10.so: cannot open')", "OSError: libc10.so: cannot open"),
    ],
)
def test_broken_torch(installation: Installation, torch: str, text: str) -> None:
    (installation.site / "torch").mkdir()
    (installation.site / "torch" / "__init__.py").write_text(f"{torch}\n")
    said = installation.doctor()
    assert software_problems(said).keys() == {"torch"}
    assert "cannot be imported: " in problems(said)["torch"] and text in problems(said)["torch"]


def test_rank_that_dies(installation: Installation) -> None:
    installation.second_rank(f"os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    text = software_problems(installation.doctor())["self-test"]
    assert "rank 1 was killed by SIGSEGV" in text


def test_rank_that_is_wrong(installation: Installation) -> None:
    installation.second_rank("return _true(*args, **kwargs) * 1.001")
    text = software_problems(installation.doctor())["self-test"]
    assert "float64 output is off by 1.0e-03, 1e-10 is tolerated" in text


def test_rank_that_raises(installation: Installation) -> None:
    installation.second_rank("raise OSError('no more pages')")
    assert "rank 1: OSError: no more pages" in software_problems(installation.doctor())["self-test"]


@pytest.mark.slow
def test_rank_that_hangs(installation: Installation) -> None:
    mark = installation.site / "pid"
    installation.second_rank(f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")
    start = time.monotonic()
    said = installation.doctor()
    (test,) = said["self_tests"]
    assert re.search(r"rank 1 did not answer within \d+ s", software_problems(said)["self-test"])
    assert test["seconds"] < self_test.START_LIMIT_S + self_test.LIMIT_S + 5 and time.monotonic() - start < 200
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_answers_before_a_hang_count(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "file = open(sys.argv[3], 'a')\n"
        "print('{\"first\": 1}\\n{\"second\": ', end='', file=file, flush=True)\n"
        "time.sleep(1000)\n"
    )
    child = Child("sleeper", str(script), tmp_path)
    wait([child], 2.0, 60.0)
    assert child.answers() == {"first": 1} and not child.ended_well()
    assert re.fullmatch(r"did not answer within \d+ s", child.ending())


def test_reference_of_the_test_on_gpus() -> None:
    errors = rank.on_virtual_ranks("cpu")
    assert len(errors) == 4
    for error in errors:
        assert 1e-4 < error["error"] < error["tolerance"] / 4, error


@pytest.mark.parametrize(
    "argv, orig_argv, expected",
    [
        (["-m", "doctor"], ["python", "-m", "ringattn_ext", "doctor"], True),
        (["-m"], ["python", "-X", "dev", "-m", "ringattn_ext"], True),
        (["-m", "doctor"], ["python", "-Bmringattn_ext", "doctor"], True),
        (["-m", "doctor"], ["python", "-m", "ringattn_ext.__main__", "doctor"], True),
        (["-m", "ringattn_ext"], ["python", "-m", "other", "ringattn_ext"], False),
        (["-m", "doctor"], ["python", "-m", "ringattn_ext.other", "doctor"], False),
        (["-m", "doctor"], ["python", "-m", "my_ringattn_ext", "doctor"], False),
        (["-c", "doctor"], ["python", "-c", "import ringattn_ext", "doctor"], False),
        (["/path/ringattn_ext/__main__.py", "doctor"], ["python", "-m", "ringattn_ext", "doctor"], False),
        (["-m"], ["ringattn_ext"], False),
        ([], [], False),
    ],
)
def test_runs_as_command(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], orig_argv: list[str], expected: bool
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert runs_as_command() is expected


def test_everything_else_still_refuses(installation: Installation) -> None:
    (installation.package / LIBRARY).unlink()
    (installation.site / "other").mkdir()
    (installation.site / "other" / "__init__.py").write_text("import ringattn_ext\n")
    (installation.site / "other" / "__main__.py").write_text("")
    for words in (["-c", "import ringattn_ext", "doctor"], ["-m", "other", "doctor"], ["-m", "ringattn_ext", "shapes"]):
        done = installation.python(*words)
        assert done.returncode == 1 and "has no compiled library" in done.stderr, words
        assert done.stdout == ""
    assert installation.python("-m", "ringattn_ext", "--help").returncode == 0
