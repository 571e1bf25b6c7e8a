"""Child processes of the doctor: a file of this package run by the same Python, with the same sys.path.

What may fail, crash or hang happens in one, so that the doctor lives to report it. A child is not started with -m,
which would import the package first. It writes its answers to a file, a line of JSON each, as soon as it has them:
those before a crash count. What it prints goes to a log, whose last line may say why it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_RUN = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], None, '__main__')"


class Child:
    def __init__(self, name: str, file: str, folder: Path, *arguments: object, **defaults: str) -> None:
        """Runs `file`, which finds the path of its answers and the arguments in sys.argv[3:].

        folder: for the answers and the log. defaults: of environment variables, where they are not set.
        """
        self.name = name
        self.start = time.monotonic()
        self.overdue: float | None = None  # the seconds after which it was killed
        self._answers = folder / f"{name}.answers"
        self._log = folder / f"{name}.log"
        self._answers.touch()
        command = [sys.executable, "-c", _RUN, json.dumps(sys.path), str(_FOLDER / file), str(self._answers)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *map(str, arguments)],
                env=defaults | dict(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def answers(self) -> dict[str, Any]:
        """All that it has said, as one object."""
        lines = self._answers.read_text().splitlines(keepends=True)
        return {key: value for line in lines if line.endswith("\n") for key, value in json.loads(line).items()}

    def ended_well(self) -> bool:
        return self.overdue is None and self.process.wait() == 0

    def ending(self) -> str:
        """How it ended, in words."""
        if self.overdue is not None:
            return f"did not answer within {self.overdue:.0f} s"
        status = self.process.wait()
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with exit status {status}" + (f": {lines[-1]}" if status != 0 and lines else "")


def wait(children: Sequence[Child], limit: float, start_limit: float = 0.0) -> None:
    """Waits until all have ended, for `limit` seconds at most, and kills those that have not.

    The time counts from when each has given a first answer or ended, for which they have `start_limit` seconds.
    """
    try:
        _poll(lambda: all(child.answers() or child.ended for child in children), start_limit)
        _poll(lambda: all(child.ended for child in children), limit)
    finally:
        for child in children:
            if not child.ended:
                child.overdue = time.monotonic() - child.start
                child.process.kill()
                child.process.wait()


def _poll(condition: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and not condition():
        time.sleep(0.02)
