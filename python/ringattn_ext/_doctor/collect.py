"""Finds the facts. Nothing here imports torch or the library: a child process does, and may fail or crash."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ringattn_ext import _load
from ringattn_ext._doctor.children import Child, wait
from ringattn_ext._doctor.facts import (
    Build,
    Commands,
    Cpu,
    Driver,
    Facts,
    Gpu,
    Gpus,
    Library,
    Link,
    Network,
    Package,
    Python,
    Torch,
)
from ringattn_ext._version import __version__

PROBE_LIMIT_S = 90.0  # torch may come from a slow file system
TOOL_LIMIT_S = 15.0
FOLDER = Path(_load.__file__).resolve().parent


def collect() -> Facts:
    """All facts but those of the self-tests."""
    with tempfile.TemporaryDirectory(prefix="ringattn-doctor-") as folder:
        probes = [Child(what, "probe.py", Path(folder), what) for what in ("torch", "library")]
        wait(probes, PROBE_LIMIT_S)
        driver, torch = _torch(probes[0])
        library = _library(probes[1])
    build = _build()
    return Facts(
        package=Package(__version__, str(FOLDER), _installed()),
        build=build,
        library=library,
        python=Python(platform.python_version(), str(sys.implementation.cache_tag), sys.executable),
        torch=torch,
        driver=driver,
        gpus=Gpus(
            found=torch.gpus or _gpus_of_the_driver(),
            on_bus=_gpus_on_bus(),
            links=parse_topology(_output("nvidia-smi", "topo", "-m")),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        ),
        cpu=Cpu(len(os.sched_getaffinity(0)), _instruction_sets(), os.environ.get("RINGATTN_CPU")),
        network=Network(
            _loopback_error(), [name for _, name in socket.if_nameindex()], os.environ.get("GLOO_SOCKET_IFNAME")
        ),
        commands=_commands(build),
    )


def _torch(probe: Child) -> tuple[Driver, Torch]:
    answers = probe.answers()
    ending = f"the process that tried {probe.ending()}"
    found = answers.get("torch", {"error": ending}) | answers.get("cuda", {"cuda_error": ending})
    torch = Torch(**found)
    torch.gpus = [Gpu(**gpu) for gpu in found.get("gpus", [])]
    return Driver(**answers.get("driver", {}), version=_driver_version()), torch


def _build() -> Build | None:
    try:
        info: Any = importlib.import_module("ringattn_ext._build_info")
        return Build(
            torch=info.TORCH_VERSION,
            torch_minor=info.TORCH_MINOR,
            cuda=info.CUDA,
            archs=tuple(getattr(info, "ARCHS", ())),
            ptx=getattr(info, "PTX", None),
            nvcc=getattr(info, "NVCC", None),
            no_cuda=getattr(info, "NO_CUDA", None),
        )
    except Exception:  # not there, or cut off: the library is as good as not built
        return None


def _library(probe: Child) -> Library:
    spec = importlib.util.find_spec("ringattn_ext._C")
    file = spec.origin if spec else None
    others = [str(path) for path in sorted(FOLDER.glob("_C.*.so")) if str(path) != file]
    said = probe.answers().get("library", {"loaded": False})
    if not probe.ended_well():  # be it after the answer
        said["error"] = f"the process that tried {probe.ending()}"
    return Library(file, others, **said)


def _installed() -> str:
    for distribution in importlib.metadata.distributions(name="ringattn_ext"):
        if Path(str(distribution.locate_file("ringattn_ext"))).resolve() == FOLDER and distribution.files:
            if any(file.parts[:1] == ("ringattn_ext",) for file in distribution.files):
                return "wheel"
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
        if url.get("dir_info", {}).get("editable") and url.get("url") == FOLDER.parents[1].as_uri():
            return "editable"
    return "not installed"


def _commands(build: Build | None) -> Commands:
    torch = _load.pip_command("install", "torch")
    replace_torch = _load.pip_command("install", "--force-reinstall", "torch")
    reinstall = _load.reinstall_command()
    if build is None:
        return Commands(reinstall, reinstall, reinstall, torch, replace_torch)
    minor = build.torch_minor
    return Commands(
        reinstall,
        _load.fitting_command(minor, replace=False),
        _load.fitting_command(minor, replace=True),
        _load.torch_command(minor, replace=False),
        _load.torch_command(minor, replace=True),
    )


def _output(*command: str) -> str:
    """What a program prints; nothing if it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _driver_version() -> str | None:
    """Of the kernel module: "580.65.06"."""
    file = Path("/sys/module/nvidia/version")
    text = file.read_text() if file.is_file() else _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv")
    found = re.search(r"^\d+\.[\d.]+", text, re.MULTILINE)
    return found[0] if found else None


def _gpus_of_the_driver() -> list[Gpu]:
    query = "--query-gpu=index,compute_cap,memory.total,name"
    return parse_gpus(_output("nvidia-smi", query, "--format=csv,noheader,nounits"))


def parse_gpus(text: str) -> list[Gpu]:
    """Lines as in "0, 9.0, 143771, NVIDIA H200"; memory in MiB."""
    lines = re.findall(r"^(\d+), (\d+)\.(\d), (\d+), (.+)$", text, re.MULTILINE)
    return [
        Gpu(int(index), name.strip(), 10 * int(major) + int(minor), int(memory) << 20)
        for index, major, minor, memory, name in lines
    ]


def parse_topology(text: str) -> list[Link]:
    """The links between GPUs in the matrix that nvidia-smi topo -m prints, cells separated by tabs."""
    rows = [[cell.strip() for cell in re.sub(r"\x1b\[\d*m", "", line).split("\t")] for line in text.splitlines()]
    if not rows:
        return []
    numbers = [int(name[3:]) if re.fullmatch(r"GPU\d+", name) else None for name in rows[0]]
    links = []
    for row in rows[1:]:
        if re.fullmatch(r"GPU\d+", row[0]):
            first = int(row[0][3:])
            cells = zip(numbers, row, strict=False)
            links += [Link(first, number, cell) for number, cell in cells if number is not None and number > first]
    return links


def _gpus_on_bus() -> int:
    """PCI devices of NVIDIA (vendor 10de) that are display or 3D controllers (class 03)."""
    devices = Path("/sys/bus/pci/devices")
    found = 0
    for device in devices.iterdir() if devices.is_dir() else ():
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


def _instruction_sets() -> list[str]:
    """As csrc/cpu/capability.cpp asks for them."""
    file = Path("/proc/cpuinfo")
    line = re.search(r"^flags\s*:(.*)$", file.read_text() if file.is_file() else "", re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    avx512 = {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
    needed = {"avx2": {"avx2", "fma"}, "avx512": avx512, "avx512_bf16": avx512 | {"avx512_bf16"}}
    return ["generic", *(name for name, wanted in needed.items() if wanted <= flags)]


def _loopback_error() -> str | None:
    """Why a byte cannot be sent to oneself over 127.0.0.1; None if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as here, server.accept()[0] as there:
                here.sendall(b"?")
                there.settimeout(5)
                there.recv(1)
    except OSError as error:
        return str(error)
    return None
