"""What ranks do in some cases after their pass: each a function of the rank and the case. Answers are data for JSON."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import small_call
import torch

import ringattn_ext as ra
from faults import inject
from faults.cases import Case, moment
from faults.census import resident_kib, what_a_process_holds

CHILD_LIMIT = 5  # s
BATCHES = 6
ROUNDS = 24


def _call(rank: int, P: int) -> dict[str, Any]:
    start = time.monotonic()
    error = None
    try:
        ra.ring_attention(**small_call.small_call(rank, P))
    except Exception as caught:
        error = {"type": type(caught).__name__, "text": str(caught)}
    return {"error": error, "seconds": time.monotonic() - start}


def forked_child(rank: int, case: Case) -> Any:
    """A forked child of the victim makes a call on the group."""
    answer = None
    if rank == case.victim:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(CHILD_LIMIT)  # the child ends, if it should wait for others
            os.write(write, json.dumps(_call(rank, case.P)).encode())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        answer = json.loads(text) if text else {"error": None, "seconds": CHILD_LIMIT, "status": status}
    small_call.prove()
    return answer


def many_failures(rank: int, case: Case) -> dict[str, Any]:
    """Groups that break, one after the other: what the process holds after some of them, and after all."""
    notice = inject.Notice()
    census: list[dict[str, int]] = []
    for number in range(ROUNDS):
        group = torch.distributed.new_group(range(case.P))
        victim, phase = number % case.P, ("first", "middle", "last", "backward")[number % 4]
        if rank == victim:
            inject.arm("raise", moment(phase, case.P), 0.0, notice)
        error = None
        try:
            small_call.prove(group)
        except RuntimeError as caught:
            error = caught
        assert error is not None and (rank == victim or isinstance(error, ra.RingError)), error
        assert "injected" in str(error) or rank != victim, error
        error = None
        torch.distributed.destroy_process_group(group)
        if number in (ROUNDS // 4, ROUNDS - 1):
            time.sleep(0.1)
            census.append(what_a_process_holds() | {"KiB": resident_kib()})
    small_call.prove()
    return {"early": census[0], "late": census[1]}


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def loader_with_workers(rank: int, case: Case) -> None:
    """Workers are forked by a process that has made calls, and live beside more of them."""
    loader = torch.utils.data.DataLoader(_Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for number, batch in enumerate(loader):
        small_call.prove(seed=number)
        assert torch.equal(batch[:, 0], torch.tensor([2.0 * number, 2.0 * number + 1])), batch


def second_thread(rank: int, case: Case) -> Any:
    """A second thread of the victim makes a call while the first one waits in its own."""
    if rank != case.victim:
        time.sleep(1.5)
        _call(rank, case.P)
        small_call.prove()
        return None
    first: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: first.append(_call(rank, case.P)))
    thread.start()
    time.sleep(0.5)
    second = _call(rank, case.P)
    thread.join()
    assert first[0]["error"] is None, first
    small_call.prove()
    return second
