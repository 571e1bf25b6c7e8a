"""What the facts mean: a line each, and for a problem the one command that mends it. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ringattn_ext._doctor.facts import Build, Facts, Gpu

# The oldest driver for each major version of CUDA, on Linux. Source: NVIDIA, CUDA Toolkit Release Notes, "CUDA Toolkit
# and Minimum Required Driver Version for CUDA Minor Version Compatibility"; for 13 that of CUDA 13.0.
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
OLDEST_ARCH = 80  # what the CUDA kernels are written for
INSTALL_DRIVER = "apt-get install -y nvidia-open"  # of NVIDIA's repository for Debian and Ubuntu


@dataclass
class Verdict:
    status: str  # "ok", "warning" or "problem"
    subject: str
    text: str
    command: str | None = None  # always there for a problem


def ok(subject: str, text: str) -> Verdict:
    return Verdict("ok", subject, text)


def warning(subject: str, text: str, command: str | None = None) -> Verdict:
    return Verdict("warning", subject, text, command)


def problem(subject: str, text: str, command: str) -> Verdict:
    return Verdict("problem", subject, text, command)


def judge(facts: Facts) -> list[Verdict]:
    """All verdicts, in the order in which problems are best mended."""
    parts = (_build, _torch, _library, _driver, _kernels, _peers, _cpu, _network, _self_tests)
    return [verdict for part in parts for verdict in part(facts)]


def hindrance(facts: Facts) -> str | None:
    """The subject of a problem that keeps the self-tests from being run; None if there is none."""
    parts = (_build, _torch, _library, _cpu, _network)
    return next((v.subject for part in parts for v in part(facts) if v.status == "problem"), None)


def gpu_to_test(facts: Facts) -> Gpu | None:
    """The first GPU that torch can use and the build has kernels for."""
    build = facts.build
    if build is None or not facts.torch.cuda_usable:
        return None
    return next((gpu for gpu in facts.torch.gpus if covered_by(gpu.arch, build) is not None), None)


def covered_by(arch: int, build: Build) -> str | None:
    """What of the build a GPU of this architecture can run: machine code of the same major version that is not newer,
    or PTX that is not newer."""
    if arch < OLDEST_ARCH:
        return None
    same = [number for number in build.archs if number // 10 == arch // 10 and number <= arch]
    if same:
        return f"machine code for sm_{max(same)}"
    return f"PTX for compute_{build.ptx}" if build.ptx is not None and build.ptx <= arch else None


def numbers(version: str) -> tuple[int, ...]:
    """Of "13.0.88" or "2.13.0+cu130", those before the first letter."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def _build(facts: Facts) -> Iterator[Verdict]:
    if facts.build is None or facts.library.file is None:
        text = f"no compiled library for this Python ({facts.python.tag})"
        if facts.library.other_files:
            text += f"; there is {', '.join(path.rpartition('/')[2] for path in facts.library.other_files)}"
        yield problem("build", text, facts.commands.reinstall)


def _torch(facts: Facts) -> Iterator[Verdict]:
    torch, build = facts.torch, facts.build if facts.library.file else None
    if torch.missing:
        yield problem("torch", "not installed", facts.commands.torch)
    elif torch.version is None:
        yield problem("torch", f"cannot be imported: {torch.error}", facts.commands.replace_torch)
    elif build is None:
        yield ok("torch", f"{torch.version} can be imported")
    elif numbers(torch.version)[:2] != numbers(build.torch_minor):
        text = f"the library was built for torch {build.torch}; installed is torch {torch.version}"
        yield problem("torch", text, facts.commands.fit)
    elif build.archs and not torch.cuda:
        text = f"the library was built for CUDA {build.cuda}; torch {torch.version} has no CUDA"
        yield problem("torch", text, facts.commands.replace)
    elif build.archs and build.cuda and torch.cuda and numbers(build.cuda)[0] != numbers(torch.cuda)[0]:
        text = f"the library was built for CUDA {build.cuda}; torch {torch.version} has CUDA {torch.cuda}"
        yield problem("torch", text, facts.commands.replace)
    else:
        yield ok("torch", f"{torch.version} fits the library, built for {build.torch}")


def _library(facts: Facts) -> Iterator[Verdict]:
    earlier = [*_build(facts), *_torch(facts)]
    if any(verdict.status == "problem" for verdict in earlier):
        if not any(verdict.subject == "build" for verdict in earlier):
            yield warning("library", "not tried, because of torch")
    elif facts.library.error is not None:
        yield problem("library", f"does not load: {facts.library.error}", facts.commands.reinstall)
    else:
        yield ok("library", "loads")


def _driver(facts: Facts) -> Iterator[Verdict]:
    torch, driver, gpus = facts.torch, facts.driver, facts.gpus
    if torch.cuda is None or not (gpus.found or gpus.on_bus):
        return
    fits = f"driver {driver.version or '?'} for torch's CUDA {torch.cuda}"
    oldest = OLDEST_DRIVER.get(numbers(torch.cuda)[0])
    too_old = (oldest is not None and driver.version is not None and numbers(driver.version) < numbers(oldest)) or (
        driver.cuda is not None and numbers(driver.cuda)[0] < numbers(torch.cuda)[0]
    )
    if torch.cuda_usable:  # also with an older driver, under NVIDIA's forward compatibility package
        yield ok("driver", f"torch can use the GPU: {fits}")
    elif driver.version is None and not driver.library:
        yield problem("driver", "there is an NVIDIA GPU, and no NVIDIA driver", INSTALL_DRIVER)
    elif not driver.library:
        text = "libcuda.so.1 is missing though the kernel has the driver: a container that was started without GPUs?"
        yield problem("driver", text, "docker run --gpus all IMAGE")
    elif too_old:
        wanted = f"at least {oldest}" if oldest else "a newer one"
        yield problem("driver", f"too old, {wanted} is needed: {fits}", INSTALL_DRIVER)
    elif gpus.visible is not None:
        text = f'CUDA_VISIBLE_DEVICES="{gpus.visible}" leaves torch no GPU'
        yield warning("driver", text, "unset CUDA_VISIBLE_DEVICES")
    elif torch.cuda_error is not None and "802" in torch.cuda_error:  # cudaErrorSystemNotReady
        text = f"torch cannot use the GPUs before the fabric manager runs: {torch.cuda_error}"
        yield problem("driver", text, "systemctl start nvidia-fabricmanager")
    else:
        yield problem("driver", f"torch cannot use the GPU: {torch.cuda_error}; {fits}", "nvidia-smi")


def _kernels(facts: Facts) -> Iterator[Verdict]:
    build, torch, gpus = facts.build, facts.torch, facts.gpus
    if build is None or torch.version is None:
        return
    if not (gpus.found or gpus.on_bus):
        yield ok("gpu", "none found: the CPU kernels are used")
        return
    if torch.cuda is None:
        yield warning("gpu", f"not used: torch {torch.version} has no CUDA")
        return
    if not build.archs and build.ptx is None:
        reason = f" ({build.no_cuda})" if build.no_cuda else ""
        text = f"the library has no CUDA kernels{reason}, though torch has CUDA and there is a GPU"
        yield problem("gpu", text, facts.commands.reinstall)
        return
    good = [gpu for gpu in gpus.found if covered_by(gpu.arch, build) is not None]
    for (name, arch), alike in _grouped(gpus.found).items():
        which = f"{_list(alike)} {name}, sm_{arch}"
        code = covered_by(arch, build)
        if arch < OLDEST_ARCH:
            text = f"{which}: the kernels need sm_{OLDEST_ARCH} or newer"
            yield problem("gpu", text, _only(good, facts))
        elif code is None:
            has = ", ".join(f"sm_{number}" for number in build.archs)
            command = f"RINGATTN_ARCHS={arch} {facts.commands.reinstall}"
            yield problem("gpu", f"{which}: the library has code for {has} only", command)
        elif not code.startswith("PTX"):
            yield ok("gpu", f"{which}: {code}")
        elif build.nvcc and facts.driver.cuda and numbers(build.nvcc)[:2] > numbers(facts.driver.cuda)[:2]:
            text = f"{which}: only {code}, of CUDA {build.nvcc}, and the driver reads that of CUDA {facts.driver.cuda}"
            yield problem("gpu", text, INSTALL_DRIVER)
        else:
            yield warning("gpu", f"{which}: only {code}, which the driver compiles when it is first used")


def _grouped(gpus: list[Gpu]) -> dict[tuple[str, int], list[int]]:
    groups: dict[tuple[str, int], list[int]] = {}
    for gpu in gpus:
        groups.setdefault((gpu.name, gpu.arch), []).append(gpu.index)
    return groups


def _list(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def _only(gpus: list[Gpu], facts: Facts) -> str:
    """Shows these GPUs alone to CUDA. Their numbers count those that are visible now."""
    visible = [name.strip() for name in (facts.gpus.visible or "").split(",")] if facts.torch.gpus else [""]
    names = [visible[gpu.index] if visible != [""] else str(gpu.index) for gpu in gpus]
    return f"export CUDA_VISIBLE_DEVICES={','.join(names)}"


def _peers(facts: Facts) -> Iterator[Verdict]:
    torch = facts.torch
    if len(torch.gpus) < 2:
        return
    if torch.nccl is None:
        yield warning("nccl", "torch has none: several GPUs cannot make a ring")
    if torch.no_peer_access:
        pairs = ", ".join(f"{first}-{second}" for first, second in torch.no_peer_access)
        yield warning("links", f"GPUs that reach each other through the host's memory only: {pairs}")
    else:
        yield ok("links", f"all {len(torch.gpus)} GPUs reach each other directly")


def _cpu(facts: Facts) -> Iterator[Verdict]:
    cpu = facts.cpu
    best = cpu.instruction_sets[-1]
    if cpu.requested is None or cpu.requested == best:
        yield ok("cpu", f"kernels for {best}")
    elif cpu.requested in cpu.instruction_sets:
        yield ok("cpu", f"kernels for {cpu.requested}, as RINGATTN_CPU asks; this machine also has {best}")
    else:
        text = f'RINGATTN_CPU is "{cpu.requested}"; this machine has {", ".join(cpu.instruction_sets)}'
        yield problem("cpu", text, "unset RINGATTN_CPU")


def _network(facts: Facts) -> Iterator[Verdict]:
    network = facts.network
    unknown = [name for name in (network.gloo_interface or "").split(",") if name and name not in network.interfaces]
    if network.loopback_error is not None:
        text = f"127.0.0.1 cannot be used: {network.loopback_error}"
        yield problem("network", text, "ip link set dev lo up")
    elif unknown:
        text = f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}; this machine has {', '.join(network.interfaces)}"
        yield problem("network", text, "unset GLOO_SOCKET_IFNAME")
    else:
        yield ok("network", "127.0.0.1 can be used")
    if facts.torch.version is not None and not facts.torch.gloo:
        yield problem("gloo", "this torch was built without it", facts.commands.replace_torch)


def _self_tests(facts: Facts) -> Iterator[Verdict]:
    reason = hindrance(facts)
    if reason is not None:
        yield warning("self-test", f"not run because of the problem above: {reason}")
    for test in facts.self_tests:
        if test.passed:
            yield ok("self-test", f"{test.name}, {test.seconds:.1f} s: {test.text}")
        else:
            yield problem("self-test", f"{test.name}: {test.text}", facts.commands.reinstall)
