"""init and release_workspace, and groups that have no backend for the CPU.

A backend for CUDA alone is played by gloo under another name: the ranks compare their calls on a side group, and refuse
tensors that the group cannot carry.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_call import attempt, prove, small_call

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(120)


def calls() -> int:
    return torch.ops.ringattn.calls(dist.group.WORLD.group_name)


def init_then_prove() -> None:
    before = calls()
    assert ra.init() is None
    ra.init("0" if dist.group.WORLD.group_name == "0" else None, device="cpu")
    assert calls() == (before + 2 if dist.get_world_size() > 1 else 0)
    prove()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_init_is_a_call_of_all_ranks(world_size: int) -> None:
    run_ranks(world_size, init_then_prove)


def test_init_without_a_group() -> None:
    assert ra.init() is None


def init_for_other_devices() -> list[Any]:
    device = torch.device("meta") if dist.get_rank() == 1 else torch.device("cpu")
    answers = [attempt(ra.init, device=device)]
    prove()
    answers.append(attempt(ra.init, device=torch.device("meta")))
    prove()
    return answers


@pytest.mark.parametrize("world_size", [2, 3])
def test_init_for_a_device_that_the_group_does_not_carry(world_size: int) -> None:
    answers = run_ranks(world_size, init_for_other_devices)
    text = "device: expected a device whose tensors the group can carry, got meta; it has no backend for meta"
    for rank, (one, all_of_them) in enumerate(answers):
        assert one[0] == ("ValueError" if rank == 1 else "RingError") and text in one[1], one
        assert all_of_them[0] == "ValueError" and text in all_of_them[1]


def init_against_a_pass() -> tuple[str, str]:
    if dist.get_rank() == 0:
        answer = attempt(ra.init)
    else:
        answer = attempt(ra.ring_attention, **small_call(dist.get_rank(), dist.get_world_size()))
    prove()
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
def test_init_disagrees_with_another_operator(world_size: int) -> None:
    others = "rank 1 has" if world_size == 2 else "ranks 1 and 2 have"
    text = f"ring: ranks disagree on the operator: rank 0 has init, {others} ring_forward"
    assert set(run_ranks(world_size, init_against_a_pass)) == {("RingError", text)}


def other_sizes_and_released() -> None:
    """What is kept fits larger, smaller and other calls, and may be given back at any time."""
    for round_ in range(3):
        prove()
        whole = torch.arange(37 * (round_ + 1))
        assert torch.equal(ra.unshard(ra.shard(whole, 0), 0, seq_len=len(whole)), whole)
        assert ra.release_workspace() is None
        prove()
        ra.unshard(ra.shard(torch.randn(3, 100), 1), 1, seq_len=100)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_release_workspace(world_size: int) -> None:
    run_ranks(world_size, other_sizes_and_released)


# --- a group without a backend for the CPU ---

TIMEOUT = timedelta(seconds=30)


def make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def compare_on_the_side(rank: int, world_size: int) -> None:
    """In a group whose only backend is for cuda."""
    name = dist.group.WORLD.group_name
    assert torch.ops.ringattn.lacks_side_group(name)
    call = small_call(rank, world_size)
    try:
        torch.ops.ringattn.init(torch.zeros(1, dtype=torch.int64), name, torch.device("cpu"))
        raise AssertionError("an operator went on without a way for the headers")
    except ValueError as error:
        assert "ringattn_ext.init(group)" in str(error) or "whose tensors the group can carry" in str(error)

    # The first call of a Python function makes the side group; every rank refuses tensors of the CPU, and says so.
    answer = attempt(ra.ring_attention, **call)
    assert (
        answer[0] == "ValueError" and "query: expected a device whose tensors the group can carry, got cpu" in answer[1]
    )
    assert not torch.ops.ringattn.lacks_side_group(name)
    # One rank's bad argument reaches the others through it.
    answer = attempt(ra.ring_attention, **(call | {"scale": -1.0} if rank == world_size - 1 else call))
    assert answer[0] == "ValueError" and ("scale" in answer[1]) == (rank == world_size - 1)
    other = dist.new_group(list(range(world_size)), backend="gloo", timeout=TIMEOUT)
    prove(other)
    alone = [dist.new_group([r], backend="gloo", timeout=TIMEOUT) for r in range(world_size)][rank]
    try:
        torch.ops.ringattn.use_side_group(name, alone.group_name)
        raise AssertionError("a side group of other ranks was taken")
    except ValueError as error:
        assert f"is rank {rank} of {world_size}" in str(error)


def refuse_on_the_side(group: dist.ProcessGroup) -> None:
    """All ranks of the group compare their call and hear of the last one's bad scale."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    call = small_call(rank, size) | ({"scale": -1.0} if rank == size - 1 else {})
    answer = attempt(ra.ring_attention, **call, group=group)
    assert answer[0] == "ValueError", answer
    assert torch.ops.ringattn.calls(group.group_name) == 1
    assert not torch.ops.ringattn.lacks_side_group(group.group_name)


def ranks_that_know_other_groups(rank: int, world_size: int) -> None:
    """The members of a ring have been in different groups before, and go on to make others."""
    dist.new_group([0], backend="gpu_only", use_local_synchronization=True)
    ring = dist.new_group([0, 1], backend="gpu_only")
    if rank < 2:
        refuse_on_the_side(ring)
    everyone = dist.new_group(list(range(world_size)), backend="gloo")
    prove(everyone)


def ranks_in_another_order(rank: int, world_size: int) -> None:
    order = [1, 0, *range(2, world_size)]
    ring = dist.distributed_c10d._new_group_with_tag(order, backend="gpu_only", sort_ranks=False, pg_tag="")
    assert dist.get_rank(ring) == order.index(rank)
    refuse_on_the_side(ring)


def groups_come_and_go(rank: int, world_size: int) -> None:
    """A side group ends with its group."""
    threads = Path("/proc/self/task")
    counts = []
    for _ in range(4):
        group = dist.new_group(list(range(world_size)), backend="gpu_only")
        refuse_on_the_side(group)
        dist.destroy_process_group(group)
        del group
        prove(dist.new_group(list(range(world_size)), backend="gloo"))
        if threads.exists():
            counts.append(len(list(threads.iterdir())))
    assert len(set(b - a for a, b in zip(counts, counts[1:], strict=False))) <= 1, counts


def serve(rank: int, world_size: int, store: str, body: Callable[[int, int], None], answers: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.Backend.register_backend("gpu_only", make_gloo, devices=["cuda"])
        dist.init_process_group(
            "gpu_only", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        body(rank, world_size)
        answers.put((rank, None))
    except BaseException:
        answers.put((rank, traceback.format_exc()))


BODIES = [compare_on_the_side, ranks_that_know_other_groups, ranks_in_another_order, groups_come_and_go]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_that_serves_gpus_alone(world_size: int, body: Callable[[int, int], None]) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [context.Process(target=serve, args=(r, world_size, store, body, answers)) for r in range(world_size)]
        for rank in ranks:
            rank.start()
        found = [answers.get(timeout=90) for _ in ranks]
        for rank in ranks:
            rank.join(20)
            rank.kill()
    assert sorted(found) == [(rank, None) for rank in range(world_size)], "\n".join(str(text) for _, text in found)
