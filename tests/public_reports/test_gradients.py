"""Reports 1, 7 and 25: gradients of the inputs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, MASKS, Case, leaves
from ranks import run_ranks
from reference import Result, dense, same_bits
from small_call import attempt, prove
from torch import Tensor

import ringattn_ext as ra

from .common import RANKS_TIMEOUT, SIZES, assert_close, check, own_part, small_case

pytestmark = pytest.mark.timeout(120)

# --- 1: a stale block in backward ---


@pytest.mark.parametrize("P", SIZES)
def test_01_backward_sees_every_block(P: int) -> None:
    for layout in LAYOUTS:
        check(P, Case(S=8, D=4), layout)
        for kind in ("full", random.choice(MASKS)):
            check(P, small_case(kind), layout)


def graphs_at_once(cases: list[Case], seed: int, layout: str, order: list[int]) -> None:
    """Several forward passes, then their backward passes in another order, each of them twice."""
    calls = []
    for i, case in enumerate(cases):
        tensors = case.tensors(seed + i)
        parts = own_part(case, tensors, layout)
        inputs = leaves(tuple(parts))
        results = ra.ring_attention(*inputs, layout=layout, seq_len=case.S, return_lse=True, **case.options())
        calls.append((inputs, results, parts[3:], own_part(case, dense(tensors, case.mask, case.scale), layout)))
    first: dict[int, tuple[Tensor, ...]] = {}
    for i in order + order[::-1]:
        inputs, results, gradients, expected = calls[i]
        found = torch.autograd.grad(results, inputs, gradients, retain_graph=True)
        for got, wanted in zip((*results, *found), expected, strict=True):
            assert_close(got, wanted, (i, layout))
        assert all(same_bits(a, b) for a, b in zip(found, first.setdefault(i, found), strict=True)), (i, layout)


@pytest.mark.parametrize("P", SIZES)
def test_01_graphs_keep_what_is_theirs(P: int) -> None:
    """What a call leaves in the memory that calls share is no part of another call's backward pass."""
    cases = [small_case(kind) for kind in ("full", "causal", random.choice(MASKS))]
    order = random.sample(range(3), 3)
    run_ranks(P, graphs_at_once, cases, random.randrange(2**30), random.choice(LAYOUTS), order, timeout=RANKS_TIMEOUT)


# --- 7: arguments and gradients ---

LENGTH = 24
ARGUMENTS: dict[str, dict[str, Any]] = {  # the fields of the case, where it is not the default one
    "group": {},
    "layout": {},
    "seq_len": {},
    "key_seq_len": {},
    "is_causal": {"is_causal": True},
    "window": {"window": (4, 2)},
    "cu_seqlens": {"cu_seqlens": (0, 5, 5, LENGTH)},
    "scale": {"scale": 0.7},
    "enable_gqa": {"Hq": 4},
    "deterministic": {},
    "return_lse": {},
}
OF_A_RING = {"group", "seq_len", "key_seq_len"}


def arguments(names: set[str]) -> tuple[Case, dict[str, Any]]:
    """A case, and the call for it with these arguments alone."""
    fields: dict[str, Any] = {}
    for name in names:
        fields |= ARGUMENTS[name]
    case = Case(S=LENGTH, D=4, **fields)
    values = case.options() | {
        "group": dist.group.WORLD if dist.is_initialized() else None,
        "layout": "striped",
        "seq_len": LENGTH,
        "key_seq_len": LENGTH,
        "deterministic": False,
        "return_lse": True,
    }
    return case, {name: values[name] for name in names}


def backward_with_arguments(function: Callable[..., Any], names: set[str], seed: int, **more: Any) -> None:
    """Every tensor that may have a gradient gets its right one from .backward()."""
    case, call = arguments(names)
    tensors = case.tensors(seed, lse_gradient="return_lse" in names)
    expected = dense(tensors, case.mask, case.scale)
    layout = call.get("layout", "zigzag")
    part = (lambda ts: list(ts)) if more else (lambda ts: own_part(case, ts, layout))
    inputs, gradients = leaves(tuple(part(tensors))), part(tensors)[3:]
    results = function(*inputs, **call, **more)
    torch.autograd.backward(results, gradients if "return_lse" in names else gradients[:1])
    found = (*(results if "return_lse" in names else (results, None)), *(t.grad for t in inputs))
    for what, got, wanted in zip(Result._fields, found, part(expected), strict=True):
        if got is not None:
            assert_close(got, wanted, (what, names))
    assert all(t.grad is not None for t in inputs)


def backward_of_the_rest() -> None:
    """shard, unshard and rotary with every argument."""
    x = torch.randn(2, 3, LENGTH, 4, requires_grad=True)
    group = dist.group.WORLD if dist.is_initialized() else None
    for options in ({}, {"group": group}, {"layout": "striped"}, {"group": group, "layout": "contiguous"}):
        for lengths in ({}, {"seq_len": LENGTH}):
            part = ra.shard(x, 2, **options)
            whole = ra.unshard(ra.rotary(part, ra.positions(LENGTH, **options), base=500.0), 2, **options, **lengths)
            weights = torch.linspace(-1, 1, whole.numel()).view_as(whole)
            (got,) = torch.autograd.grad(whole, x, weights)
            (wanted,) = torch.autograd.grad(ra.rotary(x, torch.arange(LENGTH), base=500.0), x, weights)
            assert_close(got, wanted, options, 1e-5)


def every_argument(some: list[set[str]], seed: int) -> None:
    for names in some:
        backward_with_arguments(ra.ring_attention, names, seed)
    backward_of_the_rest()


def test_07_backward_with_every_argument() -> None:
    """Each alone, all together, and a random half. An argument that is new must be added to ARGUMENTS."""

    def optional(function: Callable[..., Any]) -> set[str]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name for p in parameters if p.default is not inspect.Parameter.empty}

    names = set(ARGUMENTS)
    assert optional(ra.ring_attention) == names and optional(ra.virtual_ring_attention) == names - OF_A_RING
    assert optional(ra.shard) == {"group", "layout"} and optional(ra.unshard) == {"group", "layout", "seq_len"}
    assert optional(ra.rotary) == {"base"}
    half = set(random.sample(sorted(names), len(names) // 2))
    some = [set(), *({name} for name in sorted(names)), names, half]
    for P in SIZES:
        run_ranks(P, every_argument, some, random.randrange(2**30), timeout=RANKS_TIMEOUT)
    for chosen in some:
        if not chosen & OF_A_RING or len(chosen) > 1:
            backward_with_arguments(ra.virtual_ring_attention, chosen - OF_A_RING, 1, world_size=3)
    every_argument(some, random.randrange(2**30))


# --- 25: second derivatives ---


def second_derivatives() -> list[tuple[str, str]]:
    x = [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
    answers = []
    for return_lse in (False, True):
        found = ra.ring_attention(*x, is_causal=True, return_lse=return_lse)
        for loss in (lambda t: t.sum(), lambda t: t.square().sum()):
            total = sum(loss(t) for t in (found if return_lse else (found,)))
            first = torch.autograd.grad(total, x, create_graph=True)
            answers.append(attempt(sum(g.square().sum() for g in first).backward))
    for loss in (lambda t: t.square().sum(),):
        whole = ra.unshard(ra.shard(x[0], 2), 2, seq_len=6)
        (first,) = torch.autograd.grad(loss(whole), x[0], create_graph=True)
        answers.append(attempt(first.square().sum().backward))
    prove()
    return answers


@pytest.mark.parametrize("P", SIZES)
def test_25_second_derivatives_are_refused_by_every_rank(P: int) -> None:
    answers = run_ranks(P, second_derivatives, timeout=RANKS_TIMEOUT)
    assert all(answer == answers[0] for answer in answers)
    assert {name for name, _ in answers[0]} == {"RuntimeError"}
    assert all("twice" in text or "once_differentiable" in text for _, text in answers[0]), answers[0]
