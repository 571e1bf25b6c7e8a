"""Builds and runs the C++ tests of csrc/core and csrc/cpu, which know nothing of torch or Python.

Those of csrc/cpu run under every instruction set, on emulated CPUs that lack the newer ones, and with sanitizers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import instruction_sets
import pytest

import setup

BUILD = setup.ROOT / "build"  # folders in it are kept between runs
EMULATOR = "qemu-x86_64"
SKIPPED_MEANS_FAILED = os.environ.get("CI_EMULATOR") == "1"


def run(*command: object, timeout: float, environment: Mapping[str, str] | None = None, status: int = 0) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    # The emulator says of every thread what it lacks of that CPU.
    errors = "\n".join(line for line in done.stderr.splitlines() if "TCG doesn't support" not in line)
    assert done.returncode == status, f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{errors}"
    return done.stdout


def build(folder: Path, target: str, **settings: object) -> Path:
    """Builds a target of the tree and returns its file."""
    program = setup.find_program("ninja")
    settings |= {"CMAKE_MAKE_PROGRAM": program, "RINGATTN_TESTS": "ON", "RINGATTN_TORCH_DIR": ""}
    definitions = [f"-D{key}={value}" for key, value in settings.items()]
    setup.forget_moved_build(folder)
    run(setup.find_program("cmake"), "-S", setup.ROOT, "-B", folder, "-G", "Ninja", *definitions, timeout=100)
    run(program, "-C", folder, f"-j{setup.job_count(os.environ.get('MAX_JOBS'))}", target, timeout=900)
    return folder / target


@pytest.fixture(scope="module")
def cpu_tests() -> Path:
    return build(BUILD / "tests", "ringattn_cpu_tests")


@pytest.fixture(scope="module")
def sanitized_tests() -> Path:
    return build(BUILD / "sanitize", "ringattn_cpu_tests", RINGATTN_SANITIZE="address,undefined")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_core() -> None:
    run(build(BUILD / "tests", "ringattn_core_tests"), timeout=240)


# --- runs of the tests of csrc/cpu, each on one core ---


def run_kernels(program: Path, name: str) -> None:
    output = run(program, timeout=480, environment=instruction_sets.environment(name))
    assert output.startswith(f"{name}, seed ")


def run_sanitized(program: Path, name: str) -> None:
    run(program, seed(), 64, timeout=600, environment=instruction_sets.environment(name))


def run_on_an_older_cpu(program: Path, cpu: str, best: str, refused: str) -> None:
    if shutil.which(EMULATOR) is None:
        reason = f"{EMULATOR} was not found; on Debian: apt-get install qemu-user"
        pytest.fail(reason) if SKIPPED_MEANS_FAILED else pytest.skip(reason)
    emulated = (EMULATOR, "-cpu", cpu, program)
    message = run(*emulated, timeout=120, environment=instruction_sets.environment(refused), status=2)
    assert f'RINGATTN_CPU is "{refused}": expected generic' in message
    environment = {name: value for name, value in os.environ.items() if name != "RINGATTN_CPU"}
    output = run(*emulated, seed(), 7, timeout=1100, environment=environment)
    assert output.startswith(f"{best}, seed ")


RUNS = {
    "kernels": run_kernels,
    "kernels_with_sanitizers": run_sanitized,
    "kernels_on_an_older_cpu": run_on_an_older_cpu,
}
Outcome = Callable[[], None]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, cpu_tests: Path) -> Iterator[dict[str, Future]]:
    """By test: what comes of its run. All that this session has selected begin with the first, as many at a time as
    there are cores."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asking = [item for item in items if item.module is request.module and "outcome" in item.fixturenames]
    lacking = set(instruction_sets.NAMES) - set(instruction_sets.of_this_machine())
    with ThreadPoolExecutor(setup.job_count(os.environ.get("MAX_JOBS"))) as pool:
        futures = {}
        for item in asking:
            if item.callspec.params.get("name") in lacking:
                continue
            name = item.originalname.removeprefix("test_")
            program = request.getfixturevalue("sanitized_tests") if "sanitizers" in name else cpu_tests
            futures[item.nodeid] = pool.submit(RUNS[name], program, **item.callspec.params)
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, runs: dict[str, Future]) -> Outcome:
    """Waits for the run of the test, and raises what it has raised."""
    return runs[request.node.nodeid].result


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", instruction_sets.each())
def test_kernels(name: str, outcome: Outcome) -> None:
    outcome()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", instruction_sets.each())
def test_kernels_with_sanitizers(name: str, outcome: Outcome) -> None:
    """Nothing outside of tensors and arrays is read or written, and nothing is done that C++ does not define."""
    outcome()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("cpu", "best", "refused"), [("qemu64", "generic", "avx2"), ("Haswell", "avx2", "avx512")]
)  # the oldest of 64 bits, and one with AVX2: an instruction that it lacks ends the program
def test_kernels_on_an_older_cpu(cpu: str, best: str, refused: str, outcome: Outcome) -> None:
    outcome()


def seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def symbols(object_file: Path) -> set[tuple[str, str]]:
    """Kind and name of what an object shows to the linker or wants from it."""
    lines = run("nm", object_file, timeout=60).splitlines()
    found = {(line[17:18], line[19:]) for line in lines}
    return {(kind, name) for kind, name in found if not kind.islower() or kind in "uvw"}


@pytest.mark.slow
def test_only_the_table_is_seen_of_an_instruction_set(cpu_tests: Path) -> None:
    """Of equal functions a linker keeps one, which could be one for newer CPUs: such objects show none."""
    objects = list((BUILD / "tests" / "CMakeFiles").glob("ringattn_cpu_*.dir/csrc/cpu/micro.cpp.o"))
    assert len(objects) >= 1
    for path in objects:
        shown = {(kind, name) for kind, name in symbols(path) if kind != "U"}
        assert len(shown) == 1 and re.fullmatch(r"_ZN8ringattn3cpu\d+\w+5tableE", next(iter(shown))[1]), (path, shown)
        wanted = {name for kind, name in symbols(path) if kind == "U"}
        assert wanted <= {"exp2", "exp2f", "memcpy", "memmove", "memset"}, (path, wanted)  # of C's libraries


@pytest.mark.slow
def test_no_instruction_set_is_asked_for_elsewhere(cpu_tests: Path) -> None:
    commands = run(setup.find_program("ninja"), "-C", BUILD / "tests", "-t", "commands", cpu_tests.name, timeout=60)
    compiled = [line for line in commands.splitlines() if " -c " in line]
    assert any("-mavx2" in line for line in compiled) or os.uname().machine != "x86_64"
    for line in compiled:
        assert line.endswith("csrc/cpu/micro.cpp") or not re.search(r" -m(avx|fma|f16c|arch)", line), line
