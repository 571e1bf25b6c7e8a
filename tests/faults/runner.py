"""Runs cases: one process has torch and the library imported, and forks a leader for every case.

Groups are made after the fork; before it nothing has computed, and there is one thread.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CASE_LIMIT = 240.0  # s; leaders have limits of their own, so this one is for what nobody thought of
TESTS = Path(__file__).resolve().parent.parent


class Runner:
    """The process that forks. Environment variables are those of all its cases."""

    def __init__(self, library: Path, **environment: str) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faults.runner", str(there.fileno()), str(library)],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path} | environment,
                pass_fds=[there.fileno()],
            )
        self._socket = here

    def run(self, case: tuple) -> dict[str, Any]:
        """The report of the case; see Leader. From any thread."""
        here, there = Pipe()
        with here:
            with there:
                socket.send_fds(self._socket, [json.dumps(case).encode()], [there.fileno()])
            try:
                leader = json.loads(here.recv_bytes())
                if here.poll(CASE_LIMIT):
                    return _with_ranks(json.loads(here.recv_bytes()))
            except EOFError:
                return {"broken": "the leader of the case died"}
            os.killpg(leader, signal.SIGKILL)
            return {"broken": f"no end in {CASE_LIMIT} s"}

    def close(self) -> None:
        self._socket.close()
        self._process.kill()  # it has nothing to clean up, and the end of Python takes its time
        self._process.wait()


def _with_ranks(data: Any) -> Any:
    """JSON has no keys that are numbers."""
    if isinstance(data, dict):
        return {int(key) if key.isdecimal() else key: _with_ranks(value) for key, value in data.items()}
    return [_with_ranks(item) for item in data] if isinstance(data, list) else data


def serve(control: socket.socket, library: Path) -> None:
    """Forks a leader for every case that comes."""
    from faults import inject
    from faults.cases import Case
    from faults.leader import lead

    inject.load(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how leaders end
    gc.freeze()  # what is there already is not looked at, and so not copied, in every process
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            connection = Connection(fds[0])
            connection.send_bytes(json.dumps(os.getpid()).encode())
            lead(Case(*json.loads(message)), connection)
        os.close(fds[0])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
