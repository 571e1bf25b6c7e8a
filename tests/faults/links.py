"""What only the system can do to a connection: cut it, slow it down, let one call on it fail.

For links, every rank has a network namespace of its own, joined to the others by a bridge in the namespace of the
leader. They have no names, and are gone with the processes in them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CLONE_NEWNET = 0x40000000
DEVICE = "ring0"  # of a rank, in its namespace
RATE = ("80mbit", "128kb", "50ms")  # rate, burst, longest wait in the queue


_kept: list[int] = []  # namespaces


def leave_network() -> None:
    """Into a new network namespace, which has nothing but a loopback device that is down. For processes of one thread,
    and their children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"unshare: {os.strerror(error)}")


def _run(*words: object) -> None:
    command = [str(word) for word in words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def make_bridge() -> None:
    """In the namespace of this process."""
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "link", "set", "bridge", "addrgenmode", "none", "up")


def connect(rank: int, pid: int) -> None:
    """A link from the bridge to a rank, whose process is in another namespace. That stays when the process has died, so
    that what its sockets have still to say is said."""
    _kept.append(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
    port, inside = f"port{rank}", ("nsenter", "-t", pid, "-n", "ip")
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", pid)
    _run("ip", "link", "set", port, "master", "bridge", "addrgenmode", "none", "up")
    _run(*inside, "link", "set", DEVICE, "addrgenmode", "none")
    _run(*inside, "addr", "add", f"10.0.0.{rank + 1}/24", "dev", DEVICE)
    _run(*inside, "link", "set", DEVICE, "up")
    _run(*inside, "link", "set", "lo", "up")


def cut(rank: int) -> None:
    _run("ip", "link", "set", f"port{rank}", "down")


def mend(rank: int) -> None:
    _run("ip", "link", "set", f"port{rank}", "up")


def slow_down(rank: int, pid: int) -> None:
    """In both directions."""
    rate, burst, latency = RATE
    queue = ("root", "tbf", "rate", rate, "burst", burst, "latency", latency)
    _run("tc", "qdisc", "add", "dev", f"port{rank}", *queue)
    _run("nsenter", "-t", pid, "-n", "tc", "qdisc", "add", "dev", DEVICE, *queue)


class FailingReads:
    """From now until `end`: the next read of every thread of a process but the main one, which reads other things,
    fails with ECONNRESET. Threads that begin later are left alone."""

    CALLS = "read,readv,recvfrom,recvmsg"

    def __init__(self, pid: int, folder: Path) -> None:
        said = folder / "strace"
        inject = f"inject={self.CALLS}:error=ECONNRESET:when=1"
        command = ["strace", "-o", str(folder / "calls"), "-e", f"trace={self.CALLS}", "-e", inject]
        threads = [name for name in os.listdir(f"/proc/{pid}/task") if name != str(pid)]
        for thread in threads:
            command += ["-p", thread]
        with said.open("w") as stderr:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr)
        deadline = time.monotonic() + 10
        while said.read_text().count("attached") < len(threads):
            assert self._process.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.01)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def _without_namespaces() -> tuple[str, bool]:
    if os.geteuid() != 0:
        return "network namespaces need root", False
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"{program} was not found; on Debian: apt-get install {package}", True
    queue = "tc qdisc add dev port0 root tbf rate 1mbit burst 9kb latency 1ms"
    trial = f"ip link add bridge type bridge && ip link add port0 type veth peer name port1 && {queue}"
    done = subprocess.run(["unshare", "-n", "sh", "-c", trial], capture_output=True, text=True, timeout=20)
    reason = f"this machine has no links between network namespaces: {done.stderr.strip()}"
    return (reason if done.returncode else ""), False


def _without_strace() -> tuple[str, bool]:
    if shutil.which("strace") is None:
        return "strace was not found; on Debian: apt-get install strace", True
    # As here: a process that is not its child.
    sleeper = subprocess.Popen(["sleep", "20"])
    try:
        command = ["timeout", "-s", "INT", "0.2", "strace", "-p", str(sleeper.pid)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    finally:
        sleeper.kill()
        sleeper.wait()
    reason = f"this machine lets no process trace another: {done.stderr.strip()}"
    return (reason if "attached" not in done.stderr else ""), False


MISSING: dict[str, Callable[[], tuple[str, bool]]] = {
    "": lambda: ("", False),
    "namespaces": _without_namespaces,
    "strace": _without_strace,
}


def what_is_missing(need: str) -> tuple[str, bool]:
    """Why a machine cannot do something (empty: it can), and whether a package would help."""
    return MISSING[need]()
