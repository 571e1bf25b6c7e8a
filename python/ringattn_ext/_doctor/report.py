"""The facts and the verdicts as text for people."""

from __future__ import annotations

from ringattn_ext._doctor.facts import Build, Facts, Gpu, Link, Torch
from ringattn_ext._doctor.verdicts import Verdict

_INSTALLED = {"not installed": "no: found on sys.path"}
_MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


def describe(facts: Facts) -> str:
    """Everything but the verdicts."""
    sections = {
        "package": [
            ("version", facts.package.version),
            ("folder", facts.package.folder),
            ("installed", _INSTALLED.get(facts.package.installed, facts.package.installed)),
        ],
        "build": _build(facts.build),
        "found": [
            ("Python", f"{facts.python.version}, {facts.python.executable}"),
            ("torch", _torch(facts.torch)),
            ("driver", _driver(facts)),
            *[(f"GPU {gpu.index}", _gpu(gpu)) for gpu in facts.gpus.found],
            *([] if facts.gpus.found else [("GPUs", _no_gpus(facts))]),
            *([("links", _links(facts.gpus.links))] if facts.gpus.links else []),
            ("NCCL", facts.torch.nccl or "none"),
            ("gloo", "there" if facts.torch.gloo else "none"),
            ("CPU", _cpu(facts)),
        ],
    }
    width = max(len(name) for lines in sections.values() for name, _ in lines)
    return "\n\n".join(
        "\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in lines)])
        for title, lines in sections.items()
    )


def summary(verdicts: list[Verdict]) -> str:
    lines = ["\nverdicts"]
    width = max(len(verdict.subject) for verdict in verdicts)
    for verdict in verdicts:
        first, *more = verdict.text.splitlines()
        lines.append(f"  {_MARKS[verdict.status].ljust(7)}  {verdict.subject.ljust(width)}  {first}")
        lines += [f"{' ' * (13 + width)}{line}" for line in more if line.strip()]
        if verdict.command is not None:
            lines.append(f"{' ' * (13 + width)}$ {verdict.command}")
    problems = sum(verdict.status == "problem" for verdict in verdicts)
    lines.append(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return "\n".join(lines)


def _build(build: Build | None) -> list[tuple[str, str]]:
    if build is None:
        return [("torch", "not built")]
    lines = [("torch", build.torch), ("CUDA", build.cuda or "none")]
    if build.archs or build.ptx is not None:
        archs = ", ".join(f"sm_{arch}" for arch in build.archs)
        ptx = [] if build.ptx is None else [f"PTX for compute_{build.ptx}"]
        compiler = [f"by nvcc {build.nvcc}"] if build.nvcc else []
        lines.append(("GPUs", "; ".join([*([archs] if archs else []), *ptx, *compiler])))
        lines.append(("head_dim", "multiples of 8 up to 256 on GPUs, 1 to 256 on CPUs"))
    else:
        lines.append(("GPUs", f"CPU only: {build.no_cuda}" if build.no_cuda else "CPU only"))
        lines.append(("head_dim", "1 to 256"))
    return lines


def _torch(torch: Torch) -> str:
    if torch.version is None:
        return "not installed" if torch.missing else "cannot be imported"
    return f"{torch.version}, {f'CUDA {torch.cuda}' if torch.cuda else 'CPU only'}"


def _driver(facts: Facts) -> str:
    driver = facts.driver
    if driver.version is None and not driver.library:
        return "none"
    cuda = f", up to CUDA {driver.cuda}" if driver.cuda else ""
    return f"{driver.version or 'of unknown version'}{cuda}{'' if driver.library else ', without libcuda.so.1'}"


def _gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, compute capability {gpu.arch // 10}.{gpu.arch % 10}, {gpu.memory / 2**30:.0f} GiB"


def _no_gpus(facts: Facts) -> str:
    return f"{facts.gpus.on_bus} of NVIDIA on the PCI bus" if facts.gpus.on_bus else "none"


def _links(links: list[Link]) -> str:
    """By kind: "NV18: 0-1, 0-2; SYS: 1-2"."""
    kinds: dict[str, list[str]] = {}
    for link in links:
        kinds.setdefault(link.kind, []).append(f"{link.first}-{link.second}")
    if len(kinds) == 1:
        return f"{links[0].kind} between all"
    return "; ".join(f"{kind}: {', '.join(pairs)}" for kind, pairs in kinds.items())


def _cpu(facts: Facts) -> str:
    cpu = facts.cpu
    chosen = cpu.instruction_sets[-1] if cpu.requested is None else f'RINGATTN_CPU="{cpu.requested}"'
    threads = "" if facts.torch.threads is None else f", {facts.torch.threads} threads"
    return f"{chosen}, {cpu.cores} cores{threads}"
