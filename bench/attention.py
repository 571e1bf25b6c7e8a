"""Attention on this machine's CPU, checked and then timed beside torch, one process and a peer.

    python bench/attention.py [--quick] [--only REGEX] [--threads 1 2] [--json FILE] [--chart FILE]

Groups: attention (forward and backward beside torch.nn.functional.scaled_dot_product_attention), carried (a block that
continues a state beside one that starts from nothing), decode (few queries, many keys), avx2 (ours and torch both
restricted to AVX2), ring (two gloo ranks beside one process with two threads), peer (the pip package
ring-attention-pytorch on the same ranks, where it is installed).

A line per case. Before it is timed, rows of its results are compared with float64, and the line ends with how many were
wrong. The ratio says how many times faster ours is: the median over pairs of alternate runs. The share is that of
torch.matmul's rate, measured next to the cases, of bfloat16 or float32; of the rate at which memory is read for decode.
Rates count 4 Sq Skv D flop per head forward and 2.5 times as many backward, half of it under a causal mask. A bar is
what was set beforehand. The exit status is 1 if a result of ours is wrong; no time can fail.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparison import cases, local, restricted, ring
from comparison.chart import draw
from comparison.result import HEADING, Result, line, machine, machine_line

GROUPS = ("attention", "carried", "decode", "avx2", "ring", "peer")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that everything runs")
    parser.add_argument("--only", metavar="REGEX", help='cases such as "attention: bf16 forward D=64 full, 2 threads"')
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the cases of one process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="also draw them there, as PNG")
    chosen = parser.parse_args(arguments)
    if min(chosen.threads) < 1:
        parser.error("--threads: expected positive numbers")
    try:
        re.compile(chosen.only or "")
    except re.error as error:
        parser.error(f"--only: {error}")
    return chosen


def full_name(case: cases.Case | ring.RingCase) -> str:
    """What --only is compared with."""
    return f"{case.group}: {case.name}, {case.threads} thread{'s' if case.threads > 1 else ''}"


def all_cases(sizes: local.Sizes, threads: list[int]) -> dict[str, list[Any]]:
    """By group, in the order in which they run."""
    each = {
        "attention": lambda count: cases.attention_cases(count, sizes.tokens),
        "carried": lambda count: cases.carried_cases(count, sizes.tokens),
        "decode": lambda count: cases.decode_cases(count, sizes.decode_keys),
        "avx2": lambda count: cases.restricted_cases(count, sizes.tokens),
    }
    local_cases = {group: [case for count in threads for case in make(count)] for group, make in each.items()}
    return local_cases | {"ring": list(ring.ring_cases(sizes)), "peer": list(ring.peer_cases(sizes))}


def run_group(group: str, chosen: list[Any], sizes: local.Sizes) -> Iterator[Result]:
    if group == "avx2":
        return restricted.results(chosen, sizes)
    return ring.results(chosen, sizes) if group in ("ring", "peer") else local.results(chosen, sizes)


def introduce(group: str) -> str | None:
    """Prints what belongs above the lines of a group. Returns why it cannot run; None if it can."""
    obstacle = ring.peer_obstacle() if group == "peer" else None
    if group == "avx2":
        if restricted.available():
            in_use = ", ".join(f"{name}: {set_}" for name, set_ in restricted.proof().items())
            print(f"restricted to AVX2; in use: {in_use}")
        else:
            obstacle = "this CPU has no AVX2"
    return obstacle


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    sizes = local.QUICK if options.quick else local.Sizes()
    facts = machine(options.threads)
    print(machine_line(facts))
    begin = time.monotonic()
    results: list[Result] = []
    skipped: dict[str, str] = {}
    for group, known in all_cases(sizes, options.threads).items():
        chosen = [case for case in known if re.search(options.only or "", full_name(case))]
        if not chosen:
            continue
        print(f"\n{group}")
        if reason := introduce(group):
            skipped[group] = reason
            print(f"skipped: {reason}")
            continue
        print(HEADING, flush=True)
        for result in run_group(group, chosen, sizes):
            results.append(result)
            print(line(result), flush=True)
    if not results and not skipped:
        raise SystemExit(f"attention.py: no case matches --only {options.only!r}")
    wrong = sum(result.wrong for result in results)
    print(f"\n{wrong} rows of our results were wrong; {len(results)} cases, {time.monotonic() - begin:.0f} s")
    if options.json:
        report = {"machine": facts, "sizes": sizes._asdict(), "skipped": skipped}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(report | {"results": [result.as_json() for result in results]}, indent=1) + "\n"
        )
    if options.chart:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        draw(results, f"B=1, H={cases.HEADS}, S={sizes.tokens}; {machine_line(facts)}", options.chart)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
