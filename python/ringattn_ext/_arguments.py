"""Arguments of the public functions, converted to the types of the operators' schemas.

Types alone: values are checked in C++, for every door. Raises TypeError, or ValueError where a number has no room.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch import Tensor


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type_name(value)}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got {value.layout}")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type_name(value)}")
    if not value.isprintable():
        raise ValueError(f"{name}: expected printable text, got {value!r}")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type_name(value)}")
    return value


def integer(name: str, value: Any) -> int:
    """An int, or what can be used as one (numpy's, say)."""
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type_name(value)}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected a number that fits into 64 bits, got {number}")
    return number


def optional_integer(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value)


def real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a float, got {type_name(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got one that is too large for a float") from None
