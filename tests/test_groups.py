"""Groups: every way to name one, several at once, made anew, shared by threads, and a ring of one.

A group is proved by a causal call on it, forward and backward, against dense attention.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scripts import INIT, run_script
from small_call import INPUTS, attempt, prove, prove_at, small_call
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(90)

RANKS_TIMEOUT = 30.0
SIZES = [1, 2, 3, 4]


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# --- names for a group ---


def every_name_of_the_world() -> None:
    rank, world_size = world()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    for group in (
        None,
        dist.group.WORLD,
        dist.group.WORLD.group_name,
        mesh,
        mesh["cp"],
        mesh.get_group(),
        DeviceMesh("cpu", range(world_size)),
    ):
        prove_at(rank, world_size, group)
        assert torch.equal(ra.positions(12, group=group), ra.positions(12, rank=rank, world_size=world_size))
        assert torch.equal(
            ra.unshard(ra.shard(torch.arange(11), 0, group=group), 0, group=group, seq_len=11), torch.arange(11)
        )


@pytest.mark.parametrize("world_size", SIZES)
def test_every_name(world_size: int) -> None:
    run_ranks(world_size, every_name_of_the_world, timeout=RANKS_TIMEOUT)


def slices_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row, column = divmod(dist.get_rank(), 2)
    for _ in range(3):  # rings of both dimensions, interleaved; those of one dimension run at the same time
        prove_at(column, 2, mesh["cp"], seed=row)
        prove_at(row, 2, mesh["dp"], seed=10 + column)
    answer = attempt(ra.ring_attention, **small_call(0, 1), group=mesh)
    assert answer == ("ValueError", "group: expected a DeviceMesh of one dimension, got 2; pick one: mesh['cp']")
    prove()


def test_slices_of_a_mesh() -> None:
    run_ranks(4, slices_of_a_mesh, timeout=RANKS_TIMEOUT)


def reordered() -> None:
    rank, world_size = world()
    reverse = dist.new_group(list(reversed(range(world_size))), use_local_synchronization=False)
    ring_rank = dist.get_group_rank(reverse, rank)
    prove_at(ring_rank, world_size, reverse)
    whole = torch.arange(10.0)
    assert torch.equal(
        ra.shard(whole, 0, group=reverse), whole[ra.positions(10, rank=ring_rank, world_size=world_size)]
    )
    dist.destroy_process_group(reverse)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reordered(world_size: int) -> None:
    run_ranks(world_size, reordered, timeout=RANKS_TIMEOUT)


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: "nobody", ValueError, "group: expected the name of a process group that this process is in, got 'nobody'"),
    (
        lambda: 3,
        TypeError,
        "group: expected None, a ProcessGroup, a group name or a one-dimensional DeviceMesh, got int",
    ),
    (
        lambda: [0, 1],
        TypeError,
        "group: expected None, a ProcessGroup, a group name or a one-dimensional DeviceMesh, got list",
    ),
    (
        lambda: dist.GroupMember.NON_GROUP_MEMBER,
        ValueError,
        "group: expected a group that this process is in, got one that it is not in",
    ),
]


@pytest.mark.parametrize("door", ["ring_attention", "shard", "unshard", "positions"])
@pytest.mark.parametrize("group, error, message", WRONG, ids=["unknown", "int", "list", "not_a_member"])
def test_wrong_group(group: Callable[[], Any], error: type[Exception], message: str, door: str) -> None:
    calls = {
        "ring_attention": lambda group: ra.ring_attention(**small_call(0, 1), group=group),
        "shard": lambda group: ra.shard(torch.ones(3), 0, group=group),
        "unshard": lambda group: ra.unshard(torch.ones(3), 0, group=group),
        "positions": lambda group: ra.positions(3, group=group),
    }
    with pytest.raises(error) as caught:
        calls[door](group())
    assert str(caught.value).startswith(message)


def a_group_of_others() -> None:
    """Rank 0 is not in the group and says so; the others' ring goes on without it."""
    rank, world_size = world()
    group = dist.new_group(range(1, world_size))
    names = [None] * world_size
    dist.all_gather_object(names, None if rank == 0 else group.group_name)
    if rank == 0:
        assert attempt(ra.ring_attention, **small_call(0, 1), group=group)[0] == "ValueError"
        name, text = attempt(ra.ring_attention, **small_call(0, 1), group=names[1])
        assert name == "ValueError" and "got '" + names[1] + "'" in text
        for function in (ra.shard, ra.unshard):
            assert attempt(function, torch.ones(3), 0, group=group)[0] == "ValueError"
    else:
        prove_at(rank - 1, world_size - 1, group)
    prove()
    if rank > 0:
        dist.destroy_process_group(group)
        assert attempt(ra.ring_attention, **small_call(0, 1), group=names[1])[0] == "ValueError"
    prove()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_group_of_others(world_size: int) -> None:
    run_ranks(world_size, a_group_of_others, timeout=RANKS_TIMEOUT)


# --- several groups ---


def many_groups(rounds: int) -> None:
    """The world, pairs, a triple and single ranks in turn; calls on one group do not count on another."""
    rank, world_size = world()
    members = [(0, 1), (2, 3), (1, 2), (3, 0), (0, 1, 3), (3, 2, 1), (0,), (3,)]
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in members]
    for i in range(rounds):
        for ranks, group in groups:
            if rank in ranks:
                prove_at(dist.get_group_rank(group, rank), len(ranks), group, seed=i)
        prove(seed=i)
    for ranks, group in groups:
        if rank in ranks:
            dist.destroy_process_group(group)


def test_many_groups() -> None:
    run_ranks(4, many_groups, 3, timeout=60)


def at_the_same_time() -> None:
    """Two disjoint rings whose ranks take unequal times, beside collectives of the world."""
    rank, _ = world()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    for i in range(5):
        time.sleep(0.02 * ((rank + i) % 3))
        prove_at(rank // 2, 2, mine, seed=rank % 2 * 100 + i)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((3,), 4.0))
    dist.destroy_process_group(mine)


def test_disjoint_rings_at_the_same_time() -> None:
    run_ranks(4, at_the_same_time, timeout=RANKS_TIMEOUT)


def graphs_of_two_groups() -> None:
    """Backward passes run on the group of their forward pass."""
    rank, world_size = world()
    sub = dist.new_group([world_size - 1, 0]) if world_size > 2 else dist.new_group([1, 0])
    inner = rank in (0, world_size - 1)
    ring_rank = dist.get_group_rank(sub, rank) if inner else 0
    losses = []
    for group, place in ((None, (rank, world_size)), (sub, (ring_rank, 2))):
        if group is None or inner:
            call = small_call(*place, group=group, is_causal=True)
            leaves = [call[name].requires_grad_() for name in INPUTS]
            losses.append((ra.ring_attention(**call).square().sum(), leaves, call, place))
    for loss, leaves, call, place in reversed(losses):
        gradients = torch.autograd.grad(loss, leaves)
        whole = [torch.cat([small_call(r, place[1])[name] for r in range(place[1])], 2) for name in INPUTS]
        sizes = [torch.cat([ra.positions(call["seq_len"], rank=r, world_size=place[1]) for r in range(place[1])])]
        whole = [x[:, :, sizes[0].argsort()].requires_grad_() for x in whole]
        virtual = ra.virtual_ring_attention(*whole, world_size=place[1], is_causal=True, enable_gqa=True)
        expected = torch.autograd.grad(virtual.square().sum(), whole)
        own = ra.positions(call["seq_len"], rank=place[0], world_size=place[1])
        assert all(torch.equal(a, b[:, :, own]) for a, b in zip(gradients, expected, strict=True))
    if inner:
        dist.destroy_process_group(sub)


@pytest.mark.parametrize("world_size", [2, 3])
def test_graphs_of_two_groups(world_size: int) -> None:
    run_ranks(world_size, graphs_of_two_groups, timeout=RANKS_TIMEOUT)


# --- groups that come and go ---


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_destroyed_and_made_anew(world_size: int, tmp_path: Path) -> None:
    body = """
prove()                                    # no group yet: a ring of one
for round in range(4):
    init(round)
    name = dist.group.WORLD.group_name
    for _ in range(round + 1):             # as many calls as no other round
        prove()
    call = small_call(rank, world_size, is_causal=True)
    leaves = [call[x].requires_grad_() for x in INPUTS]
    loss = ra.ring_attention(**call).sum()
    dist.destroy_process_group()
    prove()                                # a ring of one again
    error, text = attempt(ra.ring_attention, **small_call(0, 1), group=name)
    assert error == "ValueError" and text.startswith("group: "), (error, text)
    error, text = attempt(loss.backward)   # the graph's ring is gone
    assert error == "ValueError" and text.startswith("group: "), (error, text)
print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, world_size) == ["done\n"] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_backward_on_a_group_made_anew(world_size: int, tmp_path: Path) -> None:
    """Graphs are of the group of their forward pass, whoever has its name now."""
    body = """
def graphs():
    call = small_call(rank, world_size, is_causal=True)
    leaves = [call[x].requires_grad_() for x in INPUTS]
    whole = torch.ones(6 * world_size, 2, requires_grad=True)
    return ra.ring_attention(**call).sum(), ra.shard(whole, 0).sum()
init(0)
old = graphs()
dist.destroy_process_group()
init(1)
new = graphs()
for graph in old:
    for _ in range(2):
        error, text = attempt(graph.backward, retain_graph=True)
        assert error == "RingError" and "another one than that of the forward pass" in text, (error, text)
for graph in new:
    graph.backward()
if rank == 0:                              # one rank alone
    error, text = attempt(old[0].backward)
    assert error == "RingError" and "another one" in text, (error, text)
else:
    error, text = attempt(prove)
    assert error == "RingError" and "rank 0 refused: " in text, (error, text)
prove()
dist.destroy_process_group()
if rank > 0:                               # fewer ranks
    rank, world_size = rank - 1, world_size - 1
    init(2)
    error, text = attempt(old[0].backward)
    assert error in ("RingError", "ValueError"), (error, text)
    error, text = attempt(old[1].backward)
    assert error in ("RingError", "ValueError"), (error, text)
    prove()
print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, world_size) == ["done\n"] * world_size


BY_HAND = """
def by_hand(name, meeting, ranks, timeout=20):
    \"\"\"A group of two ranks, whose connections are made at a place of their own in the store.\"\"\"
    store = dist.distributed_c10d._get_default_store()
    group = dist.ProcessGroup(store, rank, 2)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo", lazy_init=False)]
    options._timeout = datetime.timedelta(seconds=timeout)
    options.global_ranks_in_group = ranks
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(dist.PrefixStore(meeting, store), rank, 2, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(name)
    dist.distributed_c10d._register_process_group(name, group)
    return group                               # nobody else keeps it
"""


def test_a_group_that_failed_in_its_first_call(tmp_path: Path) -> None:
    """Does not speak for the next one, which has its name and its store."""
    body = """
import time
init(0)
for life in range(3):
    group = by_hand("again", f"life {life}", [0, 1], timeout=20 if life else 2)
    if rank == 1:
        time.sleep(1.5 if life else 4)     # the other looks for reports
    error, text = attempt(ra.ring_attention, **small_call(rank, 2), group="again")
    assert error == ("" if life else "RingError"), (life, error, text)
    dist.distributed_c10d._unregister_process_group("again")
    dist.barrier()
print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + BY_HAND + body, tmp_path, 2) == ["done\n"] * 2


def test_members_that_differ(tmp_path: Path) -> None:
    """Two ranks that take each other for members of groups that are not the same."""
    body = """
init(0)
alike = by_hand("alike", "alike", [4, 7])
prove_at(rank, 2, "alike")
odd = by_hand("odd", "odd", [4, 7] if rank == 0 else [4, 6])
error, text = attempt(ra.ring_attention, **small_call(rank, 2), group="odd")
assert error == "RingError", (error, text)
assert "disagree on the hash of the members of the group: rank 0 has " in text, text
print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + BY_HAND + body, tmp_path, 2) == ["done\n"] * 2


def test_groups_made_anew_while_others_stay(tmp_path: Path) -> None:
    body = """
init(0)
kept = dist.new_group([0, 1])
for round in range(5):
    group = dist.new_group([0, 1])
    prove_at(rank, 2, group)
    prove_at(rank, 2, kept)
    dist.destroy_process_group(group)
    prove()
print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, 2) == ["done\n"] * 2


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    prove()
    with pytest.raises(ValueError, match="group: expected the name of a group, got an empty string"):
        prove_at(0, 1, "")
    assert torch.equal(ra.positions(5), torch.arange(5))
    assert torch.equal(ra.unshard(ra.shard(torch.arange(5), 0), 0), torch.arange(5))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_layouts_are_one_in_a_ring_of_one(layout: str) -> None:
    call = small_call(0, 1, is_causal=True)
    assert torch.equal(ra.ring_attention(**call | {"layout": layout}), ra.ring_attention(**call))
    assert torch.equal(ra.positions(7, layout=layout), torch.arange(7))


# --- threads ---


def test_threads_in_a_ring_of_one() -> None:
    """Nothing is shared there, so nothing is refused."""
    call = small_call(0, 1)
    expected = ra.ring_attention(**call)
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(torch.equal(ra.ring_attention(**call), expected)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def second_caller() -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """On rank 0 a second thread calls while the first one waits for rank 1 in its call."""
    rank, world_size = world()
    group = dist.new_group(range(world_size))
    prove(group)
    call = small_call(rank, world_size)
    if rank > 0:
        time.sleep(1.5)
        answers = (attempt(ra.ring_attention, **call, group=group),) * 3
    else:
        first: list[tuple[str, str]] = []
        thread = threading.Thread(target=lambda: first.append(attempt(ra.ring_attention, **call, group=group)))
        thread.start()
        time.sleep(0.5)
        start = time.monotonic()
        second = attempt(ra.ring_attention, **call, group=group)
        bad = attempt(ra.ring_attention, **call | {"scale": "1"}, group=group)
        assert time.monotonic() - start < 0.5, "waited for the other thread"
        thread.join()
        answers = (first[0], second, bad)
    prove(group)
    dist.destroy_process_group(group)
    prove()
    return answers


@pytest.mark.parametrize("world_size", [2, 3])
def test_second_caller(world_size: int) -> None:
    answers = run_ranks(world_size, second_caller, timeout=RANKS_TIMEOUT)
    first, second, bad = answers[0]
    text = "another thread of this process, or what this one has interrupted, is in a call on this group"
    busy = ("RingError", f"ring: {text}; one call at a time")
    assert first == ("", "")
    assert second == busy
    assert bad[0] in ("TypeError", "RingError"), bad  # its own error, or that the group is busy
    assert set(answers[1:]) == {(("", ""),) * 3}


def threads_on_two_groups(rounds: int) -> None:
    """One thread per group, at the same time."""
    rank, world_size = world()
    groups = [dist.new_group(range(world_size)) for _ in range(2)]
    failures: list[str] = []

    def work(i: int) -> None:
        try:
            for round in range(rounds):
                prove_at(rank, world_size, groups[i], seed=100 * i + round)
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_on_two_groups(world_size: int) -> None:
    run_ranks(world_size, threads_on_two_groups, 10, timeout=RANKS_TIMEOUT)


def test_threads_of_virtual_rings() -> None:
    call = {name: value for name, value in small_call(0, 1).items() if name != "seq_len"}
    expected = ra.virtual_ring_attention(**call, world_size=5)
    results: list[bool] = []
    work = lambda: results.append(torch.equal(ra.virtual_ring_attention(**call, world_size=5), expected))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


# --- beside other traffic ---


def messages_of_the_user() -> None:
    """Under way during a call, and after one in which the ranks had to wait."""
    rank = dist.get_rank()
    tags = [*range(120), 255, 256, 4095, 65535]
    tensors = [torch.full((600,), float(tag)) if rank == 0 else torch.zeros(600) for tag in tags]
    work = [dist.isend(t, 1, tag=tag) for t, tag in zip(tensors, tags, strict=True)] if rank == 0 else []
    prove()
    if rank == 1:
        time.sleep(1.3)
    prove()
    if rank == 1:
        for tensor, tag in zip(tensors, tags, strict=True):
            dist.recv(tensor, 0, tag=tag)
            assert bool((tensor == tag).all()), tag
    for item in work:
        item.wait()
    for tensor, tag in zip(tensors, tags, strict=True):
        dist.recv(tensor, 1, tag=tag) if rank == 0 else dist.send(tensor + 1, 0, tag=tag)
        assert rank == 1 or bool((tensor == tag + 1).all()), tag
    prove()


def test_messages_of_the_user_on_the_same_group() -> None:
    run_ranks(2, messages_of_the_user, timeout=RANKS_TIMEOUT)


# --- a ring of one touches no transport ---


def test_ring_of_one_has_no_transport(tmp_path: Path) -> None:
    """A group of one whose backend, written in Python, raises whatever is asked of it."""
    body = """
class Deaf(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 1)
    def getBackendName(self):
        return "deaf"
    def size(self):
        return 1
    def rank(self):
        return 0
touched = []
def refuse(name):
    def method(self, *args, **kwargs):
        touched.append(name)
        raise AssertionError(name)
    return method
for name in ("send", "recv", "recv_anysource", "allgather", "allreduce", "broadcast", "barrier", "alltoall",
             "alltoall_base", "_allgather_base", "gather", "scatter", "reduce", "_start_coalescing", "_end_coalescing"):
    setattr(Deaf, name, refuse(name))
deaf = Deaf()
torch._C._distributed_c10d._register_process_group("deaf", deaf)
prove_at(0, 1, "deaf")
assert torch.equal(ra.unshard(ra.shard(torch.arange(5), 0, group="deaf"), 0, group="deaf"), torch.arange(5))
x = torch.ones(5, requires_grad=True)
ra.unshard(ra.shard(x, 0, group="deaf"), 0, group="deaf").sum().backward()
error, text = attempt(ra.ring_attention, **small_call(0, 1, scale=-1.0), group="deaf")
assert error == "ValueError"
assert not touched, touched
try:                                   # the trap works
    deaf.send([torch.ones(1)], 0, 0)
except AssertionError:
    print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, 1) == ["done\n"]
