"""Runs tests against a module that was compiled with sanitizers: python tests/sanitized.py thread tests/test_x.py …

The first argument is what gcc's -fsanitize takes. torch and Python are not instrumented: what they do among themselves
is not looked at.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "third_party")]

import setup  # noqa: E402

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:abort_on_error=1",  # Python leaks by design
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:second_deadlock_stack=1",
}


def runtime(name: str) -> str:
    """The library that must be loaded first."""
    done = subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def package(folder: Path) -> None:
    """The package with the sanitized module."""
    found = setup.find_torch(setup.package_folders())
    kernels = setup.choose_kernels(found.version, None, [], os.environ)
    module = setup.compile_module(found, kernels)
    target = folder / "ringattn_ext"
    built = shutil.ignore_patterns("_C.*.so", "__pycache__", "_build_info.py")
    shutil.copytree(ROOT / "python" / "ringattn_ext", target, ignore=built)
    shutil.copy2(module, target)
    (target / "_build_info.py").write_text(setup.build_info(found, kernels))


def main(kind: str, *arguments: str) -> int:
    os.environ["RINGATTN_SANITIZE"] = kind
    with tempfile.TemporaryDirectory(prefix="ringattn-sanitized-") as folder:
        package(Path(folder))
        libraries = runtime("tsan") if "thread" in kind else f"{runtime('asan')} {runtime('ubsan')}"
        # pytest has taken stderr, and a process that a sanitizer ends gives nothing back.
        report = Path(folder, "report")
        options = {name: f"{value}:log_path={report}" for name, value in OPTIONS.items()}
        environment = os.environ | options | {"LD_PRELOAD": libraries, "PYTHONPATH": folder}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        for file in Path(folder).glob("report.*"):
            print(file.read_text(errors="replace"))
        return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
