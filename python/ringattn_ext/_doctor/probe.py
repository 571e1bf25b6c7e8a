"""Run by the doctor in child processes. "torch": asks the driver and torch; "library": imports ringattn_ext as a user
would. Each answer is written before the next step, which may crash.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from pathlib import Path
from typing import Any


def driver() -> dict[str, Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"library": False}
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:  # as in 13000; needs no cuInit
        return {"library": True}
    return {"library": True, "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}


def torch_facts() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except BaseException as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return {"missing": missing, "error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "threads": torch.get_num_threads(),
    }
    if torch.version.cuda is not None and dist.is_available() and dist.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def cuda_facts() -> dict[str, Any]:
    """Those of torch's facts that need its CUDA to be initialised."""
    import torch

    facts: dict[str, Any] = {}
    if torch.version.cuda is None:
        return facts
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        facts["gpus"] = [_gpu(index, torch.cuda.get_device_properties(index)) for index in range(count)]
        facts["no_peer_access"] = [
            list(pair)
            for pair in itertools.combinations(range(count), 2)
            if not torch.cuda.can_device_access_peer(*pair)
        ]
        facts["cuda_usable"] = count > 0
    except Exception as error:
        facts["cuda_error"] = str(error).strip().partition("\n")[0]
    return facts


def _gpu(index: int, properties: Any) -> dict[str, Any]:
    arch = 10 * properties.major + properties.minor
    return {"index": index, "name": properties.name, "arch": arch, "memory": properties.total_memory}


def library_facts() -> dict[str, Any]:
    try:
        import ringattn_ext  # noqa: F401
    except Exception as error:
        guarded = isinstance(error, ImportError) and error.name is None  # its text says all
        return {"loaded": False, "error": str(error) if guarded else f"{type(error).__name__}: {error}"}
    return {"loaded": True}


def main() -> None:
    with Path(sys.argv[3]).open("a") as file:

        def answer(**facts: object) -> None:
            print(json.dumps(facts), file=file, flush=True)

        if sys.argv[4] == "library":
            answer(library=library_facts())
        else:
            answer(driver=driver())
            found = torch_facts()
            answer(torch=found)
            if "version" in found:
                answer(cuda=cuda_facts())


if __name__ == "__main__":
    main()
