"""Calls of ring operators: their error, their order in compiled code, and the refusal of calls that fail early."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ringattn_ext._C import host_in_python
from ringattn_ext._error import RingError
from ringattn_ext._groups import is_inherited, payload_device, prepare

_T = TypeVar("_T")


host_in_python(RingError, is_inherited)


@dataclass
class _Begun:
    group: str
    calls: int  # that the group has had without the one that is meant


class _Calls(threading.local):
    """Those that this thread is in, one in the other where a backward pass computes a forward pass again."""

    def __init__(self) -> None:
        self.stack: list[_Begun] = []


_calls = _Calls()
_ORDER = torch.zeros(1, dtype=torch.int64, device="cpu")


def order() -> Tensor:
    """A tensor for a ring operator to write the mark of its call to.

    In compiled code it is the same for all calls of the process, which keeps them in program order, whatever group they
    are on; so compiled calls belong on one thread. Otherwise it is a new one: threads have nothing in common.
    """
    return _ORDER if torch.compiler.is_compiling() else torch.zeros(1, dtype=torch.int64, device="cpu")


def ring_call(group: str, function: Callable[[], _T], example: object = None) -> _T:
    """function(), which prepares and makes one call of an operator on the group of that name ("" if on none).

    example: a tensor of the call, if it is one, or its device: where those of the other ranks are expected.

    If the call fails before its kernel runs (in Python, or because the dispatcher cannot convert an argument), the
    group's call is refused, so that the other ranks raise too instead of waiting.
    """
    if torch.compiler.is_compiling():
        prepare(group)
        return function()
    if group and is_inherited(group):
        raise RingError(
            f"ring: group '{group}' belongs to the process that this one was forked from; make a group in this process",
            group=group,
        )
    prepare(group)
    stack, begun = _calls.stack, _Begun(group, torch.ops.ringattn.calls(group))
    stack.append(begun)
    try:
        return function()
    except Exception as error:
        if not isinstance(error, RingError) and torch.ops.ringattn.calls(group) == begun.calls:
            payload = example.device if isinstance(example, Tensor) else example
            refuse(group, str(error), payload if isinstance(payload, torch.device) else payload_device(group))
        raise
    finally:
        stack.pop()
        for outer in stack:
            if outer.group == group:
                outer.calls += torch.ops.ringattn.calls(group) - begun.calls


def refuse(group: str, reason: str, payload: torch.device) -> None:
    """Takes part in the group's next call, whose tensors are on such a device, by refusing it."""
    with contextlib.suppress(RuntimeError):  # the caller raises the reason itself, whether or not the others hear of it
        torch.ops.ringattn.refuse(order(), group, reason, payload)
