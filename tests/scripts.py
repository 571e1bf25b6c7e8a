"""Scripts that run as processes of their own, one for each rank, for tests of what a process does in its whole life."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

# Before the body of a script that makes groups: init makes the world group, each time from a store of its own.
INIT = """
import datetime, os
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch, torch.distributed as dist
import ringattn_ext as ra
from small_call import attempt, prove, prove_at, small_call, INPUTS
rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
def init(round, timeout=20):
    store = dist.FileStore(f"{folder}/store{round}", world_size)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
"""


def run_script(body: str, tmp_path: Path, world_size: int, timeout: float = 60) -> list[str]:
    """The body, as a program in fresh processes, one per rank (sys.argv: rank, world size, folder); what they print."""
    script = tmp_path / "program.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{body}")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world_size), tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        deadline = time.monotonic() + timeout
        texts = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world_size, "\n---\n".join(texts)
    return texts
