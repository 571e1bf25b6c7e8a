"""What the doctor knows about an installation: plain data, which the verdicts are made from and --json prints.

None stands for "not there" or "could not be asked".
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Package:
    version: str
    folder: str
    installed: str  # "editable", "wheel", or "not installed" where it is only on sys.path


@dataclass
class Build:
    """What setup.py wrote beside the library."""

    torch: str  # version: "2.13.0+cpu"
    torch_minor: str
    cuda: str | None  # of that torch
    archs: tuple[int, ...]  # GPU architectures with machine code, as in 90; none: no CUDA kernels
    ptx: int | None  # the architecture whose PTX is included
    nvcc: str | None
    no_cuda: str | None  # why there are no CUDA kernels


@dataclass
class Library:
    file: str | None
    other_files: list[str]  # libraries for other Pythons
    loaded: bool = False
    error: str | None = None


@dataclass
class Python:
    version: str
    tag: str  # "cpython-311"
    executable: str


@dataclass
class Gpu:
    index: int
    name: str
    arch: int  # compute capability 9.0 is 90
    memory: int  # bytes


@dataclass
class Torch:
    version: str | None = None
    missing: bool = False
    error: str | None = None  # why it cannot be imported
    cuda: str | None = None
    cuda_usable: bool = False
    cuda_error: str | None = None  # what torch says if it has CUDA and cannot use it
    nccl: str | None = None
    gloo: bool = False
    threads: int | None = None
    gpus: list[Gpu] = field(default_factory=list)
    no_peer_access: list[list[int]] = field(default_factory=list)  # pairs of GPUs


@dataclass
class Driver:
    version: str | None = None  # of the kernel module
    library: bool = False  # whether libcuda.so.1 can be loaded
    cuda: str | None = None  # the newest CUDA that it can run


@dataclass
class Link:
    """Between two GPUs, in the words of nvidia-smi topo -m: NV18, PIX, SYS, …"""

    first: int
    second: int
    kind: str


@dataclass
class Gpus:
    found: list[Gpu]  # by torch, or else by nvidia-smi
    on_bus: int  # NVIDIA GPUs among the PCI devices, also those that no driver serves
    links: list[Link]  # nvidia-smi's numbers
    visible: str | None  # CUDA_VISIBLE_DEVICES


@dataclass
class Cpu:
    cores: int  # that this process may use
    instruction_sets: list[str]  # of generic, avx2, avx512, avx512_bf16; the best comes last
    requested: str | None  # RINGATTN_CPU


@dataclass
class Network:
    loopback_error: str | None
    interfaces: list[str]
    gloo_interface: str | None  # GLOO_SOCKET_IFNAME


@dataclass
class SelfTest:
    name: str
    passed: bool
    seconds: float
    text: str  # errors found, or what went wrong


@dataclass
class Commands:
    """What mends an installation of this kind, in this Python."""

    reinstall: str  # makes the library anew
    fit: str  # makes library and torch fit if the minors differ
    replace: str  # the same if a torch of the right minor is there, but the wrong kind
    torch: str  # installs torch
    replace_torch: str


@dataclass
class Facts:
    package: Package
    build: Build | None
    library: Library
    python: Python
    torch: Torch
    driver: Driver
    gpus: Gpus
    cpu: Cpu
    network: Network
    commands: Commands
    self_tests: list[SelfTest] = field(default_factory=list)
