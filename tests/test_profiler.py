"""The profiler sees every step of a ring by name: which block, and what the mask leaves of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

import ringattn_ext as ra
from ringattn_ext._C import Layout, Mask, Visibility, backward_schedule, forward_schedule

N, D = 64, 8


def profiled(function) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as run:
        function()
    return Counter(event.name for event in run.events() if event.name.startswith("ring"))


def inputs(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(1, 2, tokens, D, requires_grad=True) for _ in range(3)]


def scope_names(layout: Layout, mask: Mask, rank: int, partial: str) -> Counter[str]:
    words = {Visibility.skip: "skipped", Visibility.full: "full", Visibility.partial: partial}
    names: Counter[str] = Counter()
    for title, make in (("ring", forward_schedule), ("ring backward", backward_schedule)):
        for number, step in enumerate(make(layout, layout, mask, rank)):
            names[f"{title} step {number}: block {step.block}, {words[step.visibility]}"] += 1
    return names


CALLS = [
    ({"is_causal": True}, {"right": 0}, "causal"),
    ({"window": (9, 3)}, {"left": 9, "right": 3}, "window"),
    ({"is_causal": True, "window": (20, 0)}, {"left": 20, "right": 0}, "causal, window"),
    ({"is_causal": True, "cu_seqlens": [0, 10, 41, N]}, {"right": 0, "documents": [0, 10, 41, N]}, "causal, documents"),
    ({}, {}, ""),
]


def attend(function, tokens: int, options: dict, **more) -> None:
    options = dict(options)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"])
    function(*inputs(tokens), **options, **more).sum().backward()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[2] or "full")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_virtual_ranks(call: tuple[dict, dict, str], layout: str, world_size: int) -> None:
    options, mask, partial = call
    found = profiled(lambda: attend(ra.virtual_ring_attention, N, options, world_size=world_size, layout=layout))
    whole = Layout(layout, world_size, N)
    expected: Counter[str] = Counter()
    for rank in range(world_size):
        expected += scope_names(whole, Mask(N, **mask), rank, partial)
    assert Counter({name: n for name, n in found.items() if " step " in name}) == expected


def steps_of_a_rank() -> Counter[str]:
    world_size = torch.distributed.get_world_size()
    return profiled(lambda: attend(ra.ring_attention, N // world_size, CALLS[0][0]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks(world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, steps_of_a_rank)):
        names = Counter({name: n for name, n in found.items() if " step " in name})
        assert names == scope_names(Layout("zigzag", world_size, N), Mask(N, right=0), rank, "causal")
