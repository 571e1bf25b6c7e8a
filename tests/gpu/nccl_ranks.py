"""What the ranks of test_nccl.py do; every function runs in each process of a pool and returns CPU tensors or text."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import Case, leaves, process_group
from reference import Result, same_bits

import ringattn_ext as ra

from .on_device import DEVICE, attend, to

_groups: dict[str, Any] = {}


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")


def group_of(form: str) -> Any:
    """world: all ranks; pair: ranks 1 and 0 in that order, None for others; new: all, a communicator of its own."""
    if form not in _groups:
        members = {"world": None, "new": list(range(dist.get_world_size())), "pair": [1, 0]}[form]
        group = None if members is None else dist.new_group(members, sort_ranks=False)
        _groups[form] = (group, members is None or dist.get_rank() in members)
        if _groups[form][1] and hasattr(ra, "init"):  # a collective of the group
            ra.init(group)
    return _groups[form]


def talk() -> str:
    """Whether the ranks can talk at all: a sum, and one message round the ring."""
    device, rank, size = here(), dist.get_rank(), dist.get_world_size()
    total = torch.ones(4, device=device)
    dist.all_reduce(total)
    given, got = torch.full((4,), float(rank), device=device), torch.empty(4, device=device)
    messages = [
        dist.P2POp(dist.isend, given, (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert total.tolist() == [size] * 4 and got.tolist() == [(rank - 1) % size] * 4
    return str(device)


def shards(case: Case, seed: int, layout: str, rank: int, size: int) -> tuple[torch.Tensor, ...]:
    """This rank's query, key, value and grad_out, on its device."""
    own = ra.positions(case.S, layout=layout, rank=rank, world_size=size)
    return to(here(), tuple(t[:, :, own] for t in case.tensors(seed)[:4]))


def one_pass(case: Case, seed: int, layout: str, form: str = "world", **options: Any) -> tuple[int, Result] | None:
    """(rank in the group, this rank's part of the result), None for ranks outside the group."""
    group, member = group_of(form)
    if not member:
        return None
    ring = process_group(group)
    rank, size = ring.rank(), ring.size()
    query, key, value, grad_out = shards(case, seed, layout, rank, size)
    inputs = leaves((query, key, value))
    got = attend(inputs, grad_out, case, group=group, layout=layout, seq_len=case.S, **options)
    return rank, Result(*[t.cpu() for t in got])


def twice(case: Case, seed: int, layout: str) -> bool:
    """Whether two passes have the same bits."""
    first, second = (one_pass(case, seed, layout) for _ in range(2))
    assert first is not None and second is not None
    return all(same_bits(a, b) for a, b in zip(first[1], second[1], strict=True))


def while_computing(case: Case, seed: int, layout: str) -> tuple[int, Result] | None:
    """One pass on a stream of its own whose inputs come late, while other collectives are under way."""
    group, _ = group_of("new")
    noise = torch.ones(1 << 20, device=here())
    work = dist.all_reduce(noise, async_op=True)
    if DEVICE == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            result = one_pass(case, seed, layout, "new")
        stream.synchronize()
    else:
        result = one_pass(case, seed, layout, "new")
    work.wait()
    assert bool((noise == dist.get_world_size()).all())
    return result


def disagree(case: Case, seed: int) -> str:
    """The text of the error when the last rank passes another scale."""
    group, _ = group_of("new")
    rank, size = dist.get_rank(), dist.get_world_size()
    query, key, value, _ = shards(case, seed, "zigzag", rank, size)
    options = {"is_causal": True, "enable_gqa": True, "seq_len": case.S, "scale": 0.5 if rank == size - 1 else 0.25}
    try:
        ra.ring_attention(query, key, value, group=group, **options)
    except ra.RingError as error:
        return str(error)
    return ""


def graph(case: Case, seed: int) -> str:
    """Captures a pass, replays it with other inputs, and compares with passes outside the graph; why not, or ""."""
    group, _ = group_of("world")
    rank, size = dist.get_rank(), dist.get_world_size()
    query, key, value, grad_out = (t.clone() for t in shards(case, seed, "zigzag", rank, size))
    inputs = leaves((query, key, value))

    def step() -> Result:
        return attend(inputs, grad_out, case, group=group, seq_len=case.S)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    captured_graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured_graph, capture_error_mode="thread_local"):
            captured = step()
    except RuntimeError as error:
        return f"capture failed: {str(error).splitlines()[0]}"
    for turn in range(3):
        with torch.no_grad():
            for to_, from_ in zip(
                (*inputs, grad_out), shards(case, seed + turn + 1, "zigzag", rank, size), strict=True
            ):
                to_.copy_(from_)
        captured_graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        for name, a, b in zip(Result._fields, replayed, step(), strict=True):
            assert same_bits(a, b), (name, turn)
    return ""
