"""Times attention on a GPU beside torch's own backends and a matrix product, and how much of a paced copy a ring hides.

    python bench/gpu_timing.py [--json FILE] [--quick]

Every case is checked against float64 (on a slice of its heads) before it is timed; what it is compared with runs
alternately with it, and the ratio printed is the median of the ratios of neighbours. Rates count 4 N M D flop per head
forward (half of that under a causal mask) and 2.5 times as many backward, as FlashAttention does, whatever a kernel
computes twice; the share is that of the matrix product's rate in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringattn_ext as ra

HEADS, HEAD_TOKENS = 16, 16384  # heads * tokens per batch entry stay the same for all lengths
ROUNDS, WARM_UP = 9, 3
Run = Callable[[], Any]


@dataclass
class Case:
    name: str
    flop: float
    ours: Run
    others: dict[str, Run] = field(default_factory=dict)
    wrong: Callable[[], str] = lambda: ""  # what is wrong with the result, empty if nothing


@dataclass
class Result:
    name: str
    milliseconds: float
    tflops: float
    share: float  # of the matrix product
    ratios: dict[str, float]  # time of the other over ours: above 1 we are faster
    wrong: str


def seconds(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def alternate(runs: dict[str, Run], device: torch.device, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(WARM_UP + rounds):
        for name, run in runs.items():
            spent = seconds(run, device)
            if round_ >= WARM_UP:
                times[name].append(spent)
    return times


def measure(case: Case, device: torch.device, product_rate: float, rounds: int) -> Result:
    wrong = case.wrong()
    times = alternate({"ours": case.ours, **case.others}, device, rounds)
    ours = statistics.median(times["ours"])
    ratios = {
        name: statistics.median(other / own for other, own in zip(times[name], times["ours"], strict=True))
        for name in case.others
    }
    rate = case.flop / ours
    return Result(case.name, ours * 1e3, rate / 1e12, rate / product_rate, ratios, wrong)


def product_rate(device: torch.device, size: int, rounds: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / statistics.median(alternate({"product": lambda: a @ b}, device, rounds)["product"])


# --- cases ---


def inputs(device: torch.device, tokens: int, heads: int, head_dim: int) -> list[Tensor]:
    return [torch.randn(1, heads, tokens, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4)]


@torch.enable_grad()
def exact(tensors: list[Tensor], causal: bool, head: int, rows: int = 2048) -> list[Tensor]:
    """out, dq, dk and dv of one head in float64, so many rows of queries at a time."""
    query, key, value, grad_out = (t[:, head : head + 1].double() for t in tensors)
    key, value = key.requires_grad_(), value.requires_grad_()
    outs, query_gradients = [], []
    sums = [torch.zeros_like(key), torch.zeros_like(value)]
    for first in range(0, query.shape[2], rows):
        part = query[:, :, first : first + rows].detach().requires_grad_()
        scores = part @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        if causal:
            places = torch.arange(query.shape[2], device=query.device)
            scores = scores.masked_fill(places > places[first : first + rows, None], -torch.inf)
        out = scores.softmax(-1) @ value
        gradients = torch.autograd.grad(out, (part, key, value), grad_out[:, :, first : first + rows])
        outs.append(out.detach())
        query_gradients.append(gradients[0])
        for total, gradient in zip(sums, gradients[1:], strict=True):
            total += gradient
    return [torch.cat(outs, 2), torch.cat(query_gradients, 2), *sums]


def difference(got: Iterable[Tensor], expected: Iterable[Tensor], head: int) -> str:
    for name, one, right in zip(("out", "dq", "dk", "dv"), got, expected, strict=False):
        error = float((one.detach()[:, head : head + 1].double() - right).norm() / right.norm())
        if not error < 1e-2:  # bfloat16 rounds to 2^-9; exactness to the last bit is what the tests are for
            return f"{name} off by {error:.1e}"
    return ""


def torch_backends(tensors: list[Tensor], causal: bool, backward: bool) -> dict[str, Run]:
    """The backends that take these tensors."""
    found: dict[str, Run] = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        except RuntimeError:
            continue

        def forward(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend), torch.no_grad():
                F.scaled_dot_product_attention(*tensors[:3], is_causal=causal)

        def gradients(out: Tensor = out, leaves: list[Tensor] = leaves) -> None:
            torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)

        found[name] = gradients if backward else forward
    return found


def forward_case(device: torch.device, tokens: int, heads: int, head_dim: int, causal: bool) -> Case:
    tensors = inputs(device, tokens, heads, head_dim)
    run = lambda: ra.ring_attention(*tensors[:3], is_causal=causal)  # noqa: E731
    with torch.no_grad():
        wrong = difference([run()], exact(tensors, causal, 1), 1)

    def ours() -> None:
        with torch.no_grad():
            run()

    flop = 4 * tokens**2 * head_dim * heads / (2 if causal else 1)
    name = f"forward  D={head_dim} S={tokens} {'causal' if causal else 'full'}"
    return Case(name, flop, ours, torch_backends(tensors, causal, False), lambda: wrong)


def carried_case(device: torch.device, tokens: int, heads: int, head_dim: int) -> Case:
    """A block that starts from a state and leaves one, as in the middle of a ring, beside the same block as a whole."""
    query, key, value, _ = tensors = inputs(device, tokens, heads, head_dim)
    state = [
        torch.zeros(1, heads, tokens, head_dim, device=device),
        torch.full((1, heads, tokens), -torch.inf, device=device),
        torch.zeros(1, heads, tokens, device=device),
    ]
    place = ([0, 1, tokens], [0, 1, tokens], tokens, False, None, None, None)
    run = lambda: torch.ops.ringattn.block_forward_(*state, query, key, value, *place, False)  # noqa: E731
    run()
    out, _ = torch.ops.ringattn.finalize(*state, head_dim**-0.5, torch.bfloat16)
    wrong = difference([out], exact(tensors, False, 1), 1)

    def whole() -> None:
        with torch.no_grad():
            ra.ring_attention(query, key, value)

    name = f"forward  D={head_dim} S={tokens} full, carried"
    return Case(name, 4 * tokens**2 * head_dim * heads, run, {"whole": whole}, lambda: wrong)


def backward_case(
    device: torch.device, tokens: int, heads: int, head_dim: int, causal: bool, deterministic: bool
) -> Case:
    tensors = inputs(device, tokens, heads, head_dim)
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out = ra.ring_attention(*leaves, is_causal=causal, deterministic=deterministic)
    run = lambda: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)  # noqa: E731
    wrong = difference([out.detach(), *run()], exact(tensors, causal, 1), 1)
    flop = 2.5 * 4 * tokens**2 * head_dim * heads / (2 if causal else 1)
    how = "" if deterministic else ", atomic"
    name = f"backward D={head_dim} S={tokens} {'causal' if causal else 'full'}{how}"
    return Case(name, flop, run, torch_backends(tensors, causal, True), lambda: wrong)


# --- overlap ---


@dataclass
class Overlap:
    world_size: int
    gigabytes_per_second: float
    ring: float  # milliseconds
    kernels: float  # of the same ring whose copies are not slowed down
    copies: float  # of one rank's hops alone, at that speed
    hidden: float  # share of the copies that cost no time


def overlap(device: torch.device, world_size: int, tokens: int, head_dim: int, rounds: int) -> Overlap:
    """A ring of virtual ranks whose copies take as long as its kernels: what of them is hidden?

    The virtual ranks share the GPU, so all kernels take what one GPU takes for the whole sequence; each rank's copies
    run beside them.
    """
    tensors = inputs(device, tokens, HEADS, head_dim)[:3]

    def ring(speed: float | None) -> Run:
        def run() -> None:
            with torch.no_grad():
                ra.virtual_ring_attention(*tensors, world_size=world_size, layout="contiguous")

        def paced() -> None:
            os.environ["RINGATTN_LOOPBACK_GBPS"] = "" if speed is None else str(speed)
            run()

        return paced

    block_bytes = 2 * tensors[1].nbytes / world_size
    hops = world_size - 1
    free = statistics.median(alternate({"ring": ring(None)}, device, rounds)["ring"])
    speed = hops * block_bytes / (0.8 * free) / 1e9
    times = alternate({"paced": ring(speed), "free": ring(None)}, device, rounds)
    os.environ["RINGATTN_LOOPBACK_GBPS"] = ""
    paced, free = statistics.median(times["paced"]), statistics.median(times["free"])
    copies = hops * block_bytes / speed / 1e9
    hidden = 1 - max(paced - free, 0.0) / copies
    return Overlap(world_size, speed, paced * 1e3, free * 1e3, copies * 1e3, hidden)


# --- output ---


def line(result: Result) -> str:
    ratios = "  ".join(f"{name} {ratio:5.2f}x" for name, ratio in result.ratios.items())
    wrong = "0 wrong" if not result.wrong else f"WRONG: {result.wrong}"
    return (
        f"{result.name:<36}{result.milliseconds:9.3f} ms {result.tflops:8.1f} TFLOP/s {100 * result.share:5.1f} %  "
        f"{ratios:<32} {wrong}"
    )


def cases(device: torch.device, lengths: list[int]) -> Iterable[Case]:
    for head_dim in (64, 128):
        for tokens in lengths:
            heads = max(2, HEADS * HEAD_TOKENS // tokens // 8)
            for causal in (False, True):
                yield forward_case(device, tokens, heads, head_dim, causal)
            yield carried_case(device, tokens, heads, head_dim)
            for causal in (False, True):
                yield backward_case(device, tokens, heads, head_dim, causal, True)
            yield backward_case(device, tokens, heads, head_dim, False, False)


def versions(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "ringattn_ext": ra.__version__}
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "capability": torch.cuda.get_device_capability(device)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that everything runs")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --quick")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rounds = 2 if arguments.quick else ROUNDS
    lengths = [256] if arguments.quick else [2048, 8192, 16384]

    report = {"versions": versions(device), "results": [], "overlap": []}
    print("  ".join(f"{name} {value}" for name, value in report["versions"].items()))
    rate = product_rate(device, 512 if arguments.quick else 8192, rounds)
    print(f"bf16 matrix product: {rate / 1e12:.1f} TFLOP/s, of which the shares are\n")
    wrong = 0
    for case in cases(device, lengths):
        result = measure(case, device, rate, rounds)
        wrong += bool(result.wrong)
        report["results"].append(asdict(result))
        print(line(result), flush=True)
    if device.type == "cuda":
        print("\noverlap: a ring of virtual ranks on this GPU, copies slowed down to 0.8 of the kernels' time")
        for world_size in (2, 4, 8):
            one = overlap(device, world_size, 1024 if arguments.quick else 16384, 128, rounds)
            report["overlap"].append(asdict(one))
            print(
                f"P={one.world_size}  {one.gigabytes_per_second:7.1f} GB/s  ring {one.ring:8.2f} ms, kernels alone "
                f"{one.kernels:8.2f} ms, copies alone {one.copies:8.2f} ms: {100 * one.hidden:.0f} % hidden"
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)
    print(f"\n{wrong} results were wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
