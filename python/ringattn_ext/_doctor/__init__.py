"""python -m ringattn_ext doctor: what is installed, what is there, whether they fit, and what mends them if not.

Works where the library does not load, and where torch is missing or broken. The exit status is 0 if there is no problem
and 1 otherwise. With --json, one object on stdout and nothing else:

package     version, folder, installed ("editable", "wheel", "not installed": only on sys.path)
build       null if not built; torch, torch_minor, cuda (of that torch), archs (GPU architectures with machine code, as
            in 90; [] if CPU only), ptx, nvcc, no_cuda (why CPU only)
library     file, other_files (for other Pythons), loaded, error
python      version, tag, executable
torch       version (null if it cannot be imported), missing, error, cuda, cuda_usable, cuda_error, nccl, gloo, threads,
            gpus [{index, name, arch, memory in bytes}], no_peer_access (pairs of GPUs)
driver      version, library (whether libcuda.so.1 loads), cuda (the newest it can run)
gpus        found [as torch.gpus, from nvidia-smi if torch has none], on_bus (NVIDIA GPUs among the PCI devices),
            links [{first, second, kind as in nvidia-smi topo -m}], visible (CUDA_VISIBLE_DEVICES)
cpu         cores, instruction_sets (the best comes last), requested (RINGATTN_CPU)
network     loopback_error, interfaces, gloo_interface (GLOO_SOCKET_IFNAME)
commands    reinstall, fit, replace, torch, replace_torch: what mends an installation of this kind
self_tests  [{name, passed, seconds, text}]
verdicts    [{status ("ok", "warning", "problem"), subject, text, command}]; a problem always has a command
healthy     whether there is no problem
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ringattn_ext._doctor import collect, self_test
from ringattn_ext._doctor.report import describe, summary
from ringattn_ext._doctor.verdicts import gpu_to_test, hindrance, judge


def run(*, as_json: bool) -> int:
    """Prints the report, or one JSON object; returns the exit status."""
    facts = collect.collect()
    if not as_json:
        print(describe(facts), flush=True)
    if hindrance(facts) is None:
        gpu = gpu_to_test(facts)
        facts.self_tests.append(self_test.over_gloo())
        if gpu is not None:
            facts.self_tests.append(self_test.on_gpu(gpu.index))
    verdicts = judge(facts)
    healthy = all(verdict.status != "problem" for verdict in verdicts)
    if as_json:
        said = {"verdicts": [asdict(verdict) for verdict in verdicts], "healthy": healthy}
        print(json.dumps(asdict(facts) | said, indent=2))
    else:
        print(summary(verdicts))
    return 0 if healthy else 1
