"""What a pass promises beside being right: communication runs under compute, and the host waits for nothing."""

from __future__ import annotations

from typing import Any

from cases import Case

from ringattn_ext._C import NONE, Layout, Mask, Visibility, backward_schedule, forward_schedule

from .checker import History

KERNELS = ("forward", "backward")


def mask_of(case: Case) -> Mask:
    left, right = case.window or (-1, -1)
    bounds = None if case.cu_seqlens is None else list(case.cu_seqlens)
    return Mask(case.S, left, 0 if case.is_causal else right, bounds)


def planned(case: Case, layout: str, P: int, rank: int, direction: str) -> list[tuple[bool, bool]]:
    """For each step: is there an exchange, is there a kernel?"""
    place = Layout(layout, P, case.S)
    if direction == "forward":
        forward = forward_schedule(place, place, mask_of(case), rank)
        return [(s.next_block != NONE, s.visibility != Visibility.skip or s.finalize) for s in forward]
    backward = backward_schedule(place, place, mask_of(case), rank)
    return [(s.next_block != NONE or s.outgoing_gradient != NONE, s.visibility != Visibility.skip) for s in backward]


def steps_of(history: History, device: int, direction: str, plan: list[tuple[bool, bool]]) -> list[tuple[Any, Any]]:
    """For each step the entries of its exchange and of its kernel, or None. Raises if they are not as planned."""
    entries = iter([
        i
        for i in history.section(device, direction)
        if history.entries[i].kind == "operation" and history.entries[i].name in ("exchange", *KERNELS)
    ])  # fmt: skip
    steps = []
    for has_exchange, has_kernel in plan:
        exchange, kernel = next(entries) if has_exchange else None, next(entries) if has_kernel else None
        for entry, names in ((exchange, ("exchange",)), (kernel, KERNELS)):
            found = None if entry is None else history.entries[entry].name
            assert found is None or found in names, f"device {device} enqueues {found} instead of one of {names}"
        steps.append((exchange, kernel))
    assert next(entries, None) is None, f"device {device} enqueues more than its steps"
    return steps


def check_pass(history: History, device: int, direction: str, plan: list[tuple[bool, bool]]) -> None:
    """A pass of one rank: exchange before kernel in every step, in no order on the device, and nobody else waits."""
    steps = steps_of(history, device, direction, plan)
    for exchange, kernel in steps:
        if exchange is None or kernel is None:
            continue
        assert not history.comes_before(kernel, exchange), f"{direction}: an exchange waits for the kernel of its step"
        assert not history.comes_before(exchange, kernel), f"{direction}: a kernel waits for the exchange of its step"
    busy = [entry for step in steps for entry in step if entry is not None]
    for i in history.section(device, direction):
        entry = history.entries[i]
        assert entry.kind not in ("host_wait", "query"), f"{direction}: the host waits for {entry.name}"
        inside = bool(busy) and busy[0] < i < busy[-1]
        assert not (inside and entry.kind == "allocate"), f"{direction}: memory is taken inside the loop"
