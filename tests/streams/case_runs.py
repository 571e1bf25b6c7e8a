"""Cases of tests/cases.py on the machine: every rank with its own part, or one device with virtual ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import MASKS, Case, random_mask
from reference import Result, dense, relative_errors, term_norms
from torch import Tensor

import ringattn_ext as ra

from .machine import Rank, device, native, run_ring, using

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
TOKEN_DIM = 2


def small_case(kind: str | None = None, **fields: Any) -> Case:
    """A case that the kernels of the machine take. Its grad_lse is used too."""
    kind = kind or random.choice(MASKS)
    S = fields.pop("S", None) or random.randint(9, 70)
    Hkv = random.choice((1, 2))
    drawn = {
        "B": random.choice((1, 2)), "Hq": Hkv * random.choice((1, 2)), "Hkv": Hkv, "S": S, "D": random.choice((8, 16)),
        "dtype": random.choice((torch.bfloat16, torch.float16)),
    }  # fmt: skip
    return Case(**(drawn | random_mask(kind, S) | fields))


def own_tokens(layout: str, P: int, S: int, rank: int) -> list[int]:
    return ra.positions(S, layout=layout, rank=rank, world_size=P).tolist()


@dataclass
class RingRun:
    """Forward and backward of a case on a ring, and what came out on each rank."""

    case: Case
    P: int
    layout: str
    tensors: tuple[Tensor, ...] = ()
    has_cpu: bool = True
    around: Callable[[Rank, Callable[[], None]], None] | None = None  # runs the call of a rank, perhaps several times
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = self.tensors or self.case.tensors(random.randrange(2**31))

    def run(self) -> Result:
        parts = run_ring(self.P, self.body, has_cpu=self.has_cpu)
        owners = [own_tokens(self.layout, self.P, self.case.S, rank) for rank in range(self.P)]
        whole = []
        for name in Result._fields:
            pieces = [getattr(part, name) for part in parts]
            joined = torch.cat(pieces, dim=TOKEN_DIM)
            back = torch.tensor([p for own in owners for p in own]).argsort()
            whole.append(joined.index_select(TOKEN_DIM, back))
        return Result(*whole)

    def inputs(self, rank: Rank) -> list[Tensor]:
        own = own_tokens(self.layout, self.P, self.case.S, rank.rank)
        return [t[:, :, own].to(rank.device) for t in self.tensors]

    def attend(self, rank: Rank, tensors: list[Tensor], group: str | None = None) -> tuple[Tensor, Tensor]:
        return ra.ring_attention(
            *tensors[:3], group=group or rank.group, layout=self.layout, seq_len=self.case.S, return_lse=True,
            **self.case.options(), **self.options,
        )  # fmt: skip

    def body(self, rank: Rank) -> Result:
        tensors = self.inputs(rank)
        for t in tensors[:3]:
            t.requires_grad_()
        found: list[Tensor] = []
        streams: list[Any] = []

        def call() -> None:
            streams.append(native.current_stream(rank.device.index))
            with rank.section("forward"):
                out, lse = self.attend(rank, tensors)
            with rank.section("backward"):
                found[:] = [out, lse, *torch.autograd.grad((out, lse), tensors[:3], tensors[3:])]

        if self.around is None:
            call()
        else:
            self.around(rank, call)
        # On the stream that they were made on: threads of autograd may free them, who know of no other.
        with using(streams[-1]):
            return Result(*(t.detach().cpu() for t in found))

    def check(self, got: Result) -> None:
        check_result(self.case, self.tensors, got, (self.case, self.P, self.layout))


def check_result(case: Case, tensors: tuple[Tensor, ...], got: Result, note: object) -> None:
    mask = case.mask
    exact = dense(tensors, mask, case.scale)
    errors = relative_errors(got, exact, term_norms(tensors, mask, case.scale))
    assert max(errors.values()) <= TOLERANCE[case.dtype], f"{errors}\n{note}"


def run_virtual(case: Case, P: int, layout: str, tensors: tuple[Tensor, ...], calls: int = 1) -> Result:
    """The same on one device."""
    inputs = [t.to(device()) for t in tensors]
    for t in inputs[:3]:
        t.requires_grad_()
    for _ in range(calls):
        out, lse = ra.virtual_ring_attention(
            *inputs[:3], world_size=P, layout=layout, return_lse=True, **case.options()
        )
        found = (out, lse, *torch.autograd.grad((out, lse), inputs[:3], inputs[3:]))
    return Result(*(t.detach().cpu() for t in found))
