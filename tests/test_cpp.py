"""Builds and runs the C++ tests of csrc/core and csrc/cpu, which know nothing of torch or Python."""

import os
import subprocess
from pathlib import Path

import pytest

import setup

FOLDER = setup.ROOT / "build" / "tests"  # kept between runs


def run(*command: object, timeout: float) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}"


@pytest.fixture(scope="module")
def ninja() -> list[object]:
    """The build command; the folder is configured."""
    program = setup.find_program("ninja")
    settings = {"CMAKE_MAKE_PROGRAM": program, "RINGATTN_TESTS": "ON", "RINGATTN_TORCH_DIR": ""}
    definitions = [f"-D{key}={value}" for key, value in settings.items()]
    setup.forget_moved_build(FOLDER)
    run(setup.find_program("cmake"), "-S", setup.ROOT, "-B", FOLDER, "-G", "Ninja", *definitions, timeout=100)
    return [program, "-C", FOLDER, f"-j{setup.job_count(os.environ.get('MAX_JOBS'))}"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["ringattn_core_tests", "ringattn_cpu_tests"])
def test_executable(ninja: list[object], name: str) -> None:
    run(*ninja, name, timeout=600)
    run(Path(FOLDER, name), timeout=240)
