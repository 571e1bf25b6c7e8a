"""The doctor's verdicts, pure functions of facts, with invented facts for each; and what programs print, as facts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringattn_ext._doctor.collect import parse_gpus, parse_topology
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
    SelfTest,
    Torch,
)
from ringattn_ext._doctor.report import describe, summary
from ringattn_ext._doctor.verdicts import Verdict, covered_by, gpu_to_test, hindrance, judge, numbers

COMMANDS = Commands("REINSTALL", "FIT", "REPLACE", "TORCH", "REPLACE-TORCH")


def cpu_machine() -> Facts:
    return Facts(
        package=Package("0.1.0", "/site/ringattn_ext", "wheel"),
        build=Build("2.13.0+cpu", "2.13", None, (), None, None, None),
        library=Library("/site/ringattn_ext/_C.so", [], loaded=True),
        python=Python("3.11.7", "cpython-311", "/bin/python"),
        torch=Torch(version="2.13.1+cpu", gloo=True, threads=4),
        driver=Driver(),
        gpus=Gpus([], 0, [], None),
        cpu=Cpu(4, ["generic", "avx2"], None),
        network=Network(None, ["lo", "eth0"], None),
        commands=COMMANDS,
        self_tests=[SelfTest("2 ranks over gloo", True, 3.0, "float64 exact to 1e-15")],
    )


def gpu_machine(*archs: int) -> Facts:
    """GPUs of these architectures, sm_90 twice if none are named, and all that they need."""
    facts = cpu_machine()
    gpus = [Gpu(i, f"GPU of sm_{arch}", arch, 80 << 30) for i, arch in enumerate(archs or (90, 90))]
    facts.build = Build("2.13.0+cu130", "2.13", "13.0", (80, 86, 89, 90), 90, "13.0.88", None)
    facts.torch = Torch("2.13.0+cu130", cuda="13.0", cuda_usable=True, nccl="2.28.9", gloo=True, gpus=gpus)
    facts.driver = Driver("580.95.05", True, "13.0")
    facts.gpus = Gpus(gpus, len(gpus), [], None)
    return facts


def no_cuda_in_use(facts: Facts, error: str = "no") -> None:
    facts.torch.cuda_usable, facts.torch.cuda_error, facts.torch.gpus = False, error, []


def changed(facts: Facts, *changes: Callable[[Facts], object]) -> Facts:
    for change in changes:
        change(facts)
    return facts


def put(path: str, value: object) -> Callable[[Facts], object]:
    """facts.a.b = value"""
    *owners, name = path.split(".")

    def change(facts: Facts) -> None:
        target: object = facts
        for owner in owners:
            target = getattr(target, owner)
        setattr(target, name, value)

    return change


def of_status(facts: Facts, status: str) -> list[Verdict]:
    return [verdict for verdict in judge(facts) if verdict.status == status]


@pytest.mark.parametrize("facts", [cpu_machine(), gpu_machine(), gpu_machine(80), gpu_machine(86, 89)])
def test_healthy(facts: Facts) -> None:
    assert {verdict.status for verdict in judge(facts)} == {"ok"}
    assert hindrance(facts) is None
    assert summary(judge(facts)).endswith("\nno problems")


NO_TORCH = put("torch", Torch(missing=True))


@pytest.mark.parametrize(
    "facts, subject, text, command",
    [
        (changed(cpu_machine(), put("library.file", None)), "build", "for this Python (cpython-311)", "REINSTALL"),
        (
            changed(cpu_machine(), put("library", Library(None, ["/a/_C.cpython-312.so"]))),
            "build",
            "there is _C.cpython-312.so",
            "REINSTALL",
        ),
        (changed(cpu_machine(), put("build", None)), "build", "no compiled library", "REINSTALL"),
        (changed(cpu_machine(), NO_TORCH), "torch", "not installed", "TORCH"),
        (changed(cpu_machine(), put("torch", Torch(error="OSError: x"))), "torch", "OSError: x", "REPLACE-TORCH"),
        (changed(cpu_machine(), put("torch.version", "2.14.0")), "torch", "installed is torch 2.14.0", "FIT"),
        (changed(cpu_machine(), put("torch.version", "2.1.3")), "torch", "installed is torch 2.1.3", "FIT"),
        (
            changed(gpu_machine(), put("torch", Torch("2.13.0+cpu", gloo=True))),
            "torch",
            "built for CUDA 13.0; torch 2.13.0+cpu has no CUDA",
            "REPLACE",
        ),
        (
            changed(cpu_machine(), put("library.error", "ImportError: undefined symbol: _ZN3c10")),
            "library",
            "does not load: ImportError: undefined symbol: _ZN3c10",
            "REINSTALL",
        ),
        (
            changed(gpu_machine(), put("build.archs", ()), put("build.ptx", None), put("build.no_cuda", "no nvcc")),
            "gpu",
            "no CUDA kernels (no nvcc), though torch has CUDA",
            "REINSTALL",
        ),
        (
            changed(gpu_machine(), no_cuda_in_use, put("gpus.found", []), put("driver", Driver())),
            "driver",
            "no NVIDIA driver",
            "apt-get install -y nvidia-open",
        ),
        (
            changed(gpu_machine(), no_cuda_in_use, put("driver", Driver("580.95.05"))),
            "driver",
            "container",
            "docker run --gpus all IMAGE",
        ),
        (
            changed(gpu_machine(), no_cuda_in_use, put("driver", Driver("570.124.06", True, "12.8"))),
            "driver",
            "at least 580.65.06 is needed: driver 570.124.06 for torch's CUDA 13.0",
            "apt-get install -y nvidia-open",
        ),
        (
            changed(
                gpu_machine(),
                no_cuda_in_use,
                put("build.cuda", "12.8"),
                put("torch.cuda", "12.8"),
                put("driver", Driver("470.1", True, "11.4")),
            ),
            "driver",
            "at least 525.60.13 is needed",
            "apt-get install -y nvidia-open",
        ),
        (
            changed(gpu_machine(), lambda facts: no_cuda_in_use(facts, "Error 802: system not yet initialized")),
            "driver",
            "Error 802",
            "systemctl start nvidia-fabricmanager",
        ),
        (
            changed(gpu_machine(), lambda facts: no_cuda_in_use(facts, "unknown error")),
            "driver",
            "torch cannot use the GPU: unknown error",
            "nvidia-smi",
        ),
        (gpu_machine(75), "gpu", "0 GPU of sm_75, sm_75: the kernels need sm_80", "export CUDA_VISIBLE_DEVICES="),
        (gpu_machine(90, 70, 70, 80), "gpu", "1, 2 GPU of sm_70", "export CUDA_VISIBLE_DEVICES=0,3"),
        (
            changed(gpu_machine(90, 70), put("gpus.visible", "5, 3")),
            "gpu",
            "1 GPU of sm_70",
            "export CUDA_VISIBLE_DEVICES=5",
        ),
        (
            changed(gpu_machine(100), put("build.ptx", None)),
            "gpu",
            "code for sm_80, sm_86, sm_89, sm_90",
            "RINGATTN_ARCHS=100 REINSTALL",
        ),
        (
            changed(gpu_machine(80), put("build.archs", (86, 90))),
            "gpu",
            "sm_80: the library has code for sm_86, sm_90 only",
            "RINGATTN_ARCHS=80 REINSTALL",
        ),
        (
            changed(gpu_machine(100), put("build.nvcc", "13.1.48")),
            "gpu",
            "PTX for compute_90, of CUDA 13.1.48, and the driver reads that of CUDA 13.0",
            "apt-get install -y nvidia-open",
        ),
        (
            changed(cpu_machine(), put("cpu.requested", "avx512")),
            "cpu",
            'RINGATTN_CPU is "avx512"; this machine has generic, avx2',
            "unset RINGATTN_CPU",
        ),
        (changed(cpu_machine(), put("cpu.requested", "")), "cpu", 'RINGATTN_CPU is ""', "unset RINGATTN_CPU"),
        (
            changed(cpu_machine(), put("network.loopback_error", "Network is unreachable")),
            "network",
            "127.0.0.1 cannot be used: Network is unreachable",
            "ip link set dev lo up",
        ),
        (
            changed(cpu_machine(), put("network.gloo_interface", "ib0,eth0")),
            "network",
            "GLOO_SOCKET_IFNAME names ib0; this machine has lo, eth0",
            "unset GLOO_SOCKET_IFNAME",
        ),
        (
            changed(gpu_machine(), put("build.cuda", "12.8")),
            "torch",
            "built for CUDA 12.8; torch 2.13.0+cu130 has CUDA 13.0",
            "REPLACE",
        ),
        (changed(cpu_machine(), put("torch.gloo", False)), "gloo", "built without it", "REPLACE-TORCH"),
        (
            changed(cpu_machine(), put("self_tests", [SelfTest("2 ranks over gloo", False, 20.0, "rank 1 died")])),
            "self-test",
            "2 ranks over gloo: rank 1 died",
            "REINSTALL",
        ),
    ],
)
def test_problem(facts: Facts, subject: str, text: str, command: str) -> None:
    found = of_status(facts, "problem")
    assert [verdict.subject for verdict in found] == [subject], found
    assert text in found[0].text and found[0].command == command
    shown = summary(judge(facts))
    assert f"$ {command}\n" in shown and shown.endswith("\n1 problem")
    assert (hindrance(facts) == subject) == (subject in ("build", "torch", "library", "cpu", "network", "gloo"))
    assert describe(facts)


@pytest.mark.parametrize(
    "facts, subject, text",
    [
        (changed(cpu_machine(), put("gpus.on_bus", 1)), "gpu", "not used: torch 2.13.1+cpu has no CUDA"),
        (changed(gpu_machine(), no_cuda_in_use, put("gpus.visible", "")), "driver", 'CUDA_VISIBLE_DEVICES=""'),
        (gpu_machine(120), "gpu", "only PTX for compute_90"),
        (changed(gpu_machine(), put("torch.nccl", None)), "nccl", "cannot make a ring"),
        (changed(gpu_machine(), put("torch.no_peer_access", [[0, 1]])), "links", "host's memory only: 0-1"),
    ],
)
def test_warning(facts: Facts, subject: str, text: str) -> None:
    (verdict,) = of_status(facts, "warning")
    assert verdict.subject == subject and text in verdict.text
    assert of_status(facts, "problem") == []
    assert describe(facts)


def test_library_that_was_not_tried_and_tests_that_were_not_run() -> None:
    facts = changed(cpu_machine(), put("torch.version", "2.14.0"), put("self_tests", []))
    assert [verdict.subject for verdict in of_status(facts, "warning")] == ["library", "self-test"]


def test_driver_older_than_the_table_says_but_usable_is_fine() -> None:
    facts = changed(gpu_machine(), put("driver.version", "535.1"))  # forward compatibility package
    assert {verdict.status for verdict in judge(facts)} == {"ok"}


def test_lower_instruction_set_is_fine() -> None:
    (verdict,) = [v for v in judge(changed(cpu_machine(), put("cpu.requested", "generic"))) if v.subject == "cpu"]
    assert verdict.status == "ok" and "as RINGATTN_CPU asks; this machine also has avx2" in verdict.text


@pytest.mark.parametrize(
    "arch, archs, ptx, expected",
    [
        (80, (80, 90), None, "machine code for sm_80"),
        (89, (80, 86, 90), None, "machine code for sm_86"),
        (90, (80, 86), 86, "PTX for compute_86"),
        (90, (80, 86), None, None),
        (80, (86,), 86, None),
        (120, (80,), 80, "PTX for compute_80"),
        (121, (100, 120), 120, "machine code for sm_120"),
        (75, (70,), 70, None),
    ],
)
def test_coverage(arch: int, archs: tuple[int, ...], ptx: int | None, expected: str | None) -> None:
    assert covered_by(arch, Build("2.13.0", "2.13", "13.0", archs, ptx, None, None)) == expected


def test_first_covered_gpu_is_tested() -> None:
    gpu = gpu_to_test(gpu_machine(75, 90, 80))
    assert gpu is not None and gpu.index == 1
    assert gpu_to_test(cpu_machine()) is None
    assert gpu_to_test(changed(gpu_machine(), no_cuda_in_use)) is None
    assert gpu_to_test(changed(gpu_machine(), put("build.archs", ()), put("build.ptx", None))) is None


def test_numbers() -> None:
    assert [numbers(text) for text in ("2.13.0+cu130", "2.12.0a0+git", "13.0")] == [(2, 13, 0), (2, 12, 0), (13, 0)]


def test_gpus_of_nvidia_smi() -> None:
    text = "0, 9.0, 143771, NVIDIA H200\n1, 12.0, 32607, NVIDIA GeForce RTX 5090, OC\n"
    assert parse_gpus(text) == [
        Gpu(0, "NVIDIA H200", 90, 143771 << 20),
        Gpu(1, "NVIDIA GeForce RTX 5090, OC", 120, 32607 << 20),
    ]
    assert parse_gpus("") == [] and parse_gpus("No devices were found\n") == []


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\tSYS\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)


def test_topology_of_nvidia_smi() -> None:
    links = parse_topology(TOPOLOGY)
    assert links == [Link(0, 1, "NV18"), Link(0, 2, "SYS"), Link(1, 2, "NODE")]
    assert parse_topology("") == []
    facts = changed(gpu_machine(90, 90, 90), put("gpus.links", links))
    assert "NV18: 0-1; SYS: 0-2; NODE: 1-2" in describe(facts)
    assert "NV18 between all" in describe(changed(facts, put("gpus.links", links[:1])))
