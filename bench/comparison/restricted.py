"""Our kernels and torch's, both restricted to AVX2: measured in a process of its own, which is started with the
variables that libraries read once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from .cases import Case
from .local import Sizes
from .result import Result

VARIABLES = {
    "RINGATTN_CPU": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
# What the libraries of torch say about themselves: oneDNN and MKL print it at their first call.
PROOF = """
import torch
import ringattn_ext
from comparison.result import instruction_set
print("ours", instruction_set())
print("torch", torch.backends.cpu.get_cpu_capability())
a = torch.ones(64, 64)
with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
    torch.mm(a, a)
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    torch.nn.functional.conv2d(torch.ones(2, 8, 16, 16), torch.ones(8, 8, 3, 3))
"""
MEASURE = """
import sys
from comparison.restricted import serve
serve(sys.stdin.read())
"""
BENCH = Path(__file__).resolve().parent.parent


def available() -> bool:
    from ringattn_ext._doctor.collect import _instruction_sets

    return "avx2" in _instruction_sets()


def _command(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCH)!r})\n{code}"]


def parse_proof(text: str) -> dict[str, str]:
    """Which instruction set is in use, by library, from what they print."""
    found = {name: set_ for name, set_ in re.findall(r"^(ours|torch) (\S+)$", text, re.MULTILINE)}
    if mkl := re.search(r"^MKL_VERBOSE .* for Intel\(R\) 64 architecture (.+?), \w+ [\d.]+GHz", text, re.MULTILINE):
        found["MKL"] = mkl[1]  # of CPUs of other makers it does not say more than "Intel(R) Architecture processors"
    if onednn := re.search(r"^onednn_verbose,.*?info,cpu,isa:(.+)$", text, re.MULTILINE):
        found["oneDNN"] = onednn[1]
    return found


def proof() -> dict[str, str]:
    """What took effect, by library."""
    done = subprocess.run(_command(PROOF), env=os.environ | VARIABLES, capture_output=True, text=True, timeout=100)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return parse_proof(done.stdout)


def serve(request: str) -> None:
    """In the child: prints a line of JSON for every case."""
    from . import local

    asked = json.loads(request)
    for result in local.results((Case(**case) for case in asked["cases"]), Sizes(**asked["sizes"])):
        print(json.dumps(asdict(result)), flush=True)


def results(cases: Iterable[Case], sizes: Sizes) -> Iterator[Result]:
    request = json.dumps({"cases": [asdict(case) for case in cases], "sizes": sizes._asdict()})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(_command(MEASURE), env=os.environ | VARIABLES, **pipes) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(request)
        child.stdin.close()
        for line in child.stdout:
            yield Result(**json.loads(line))
    if child.returncode != 0:
        raise RuntimeError(f"the process restricted to AVX2 ended with {child.returncode}")
