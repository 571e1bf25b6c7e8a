"""Whole configurations of a call: a case, the ring it runs on, odd data, odd strides, and which gradients are wanted.

Used with whatever draws them: hypothesis (strategies.py) or a program (soak.py). All that a rank needs is in the
configuration, so that a printed one is a reproduction: play_virtual(Configuration(...)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cases import Case, process_group, restride
from torch import Tensor

import ringattn_ext as ra

DATA = ("normal", "times 30", "constant", "one-hot", "alternating", "zero", "denormal")
DENORMAL = {torch.float64: 3e-310, torch.float32: 3e-39, torch.bfloat16: 3e-39, torch.float16: 3e-6}
NORMAL, CONTIGUOUS = ("normal",) * 4, ("contiguous",) * 4


class Found(NamedTuple):
    """What a call gave, as a reference's Result; gradients that were not wanted are None."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


@dataclass(frozen=True)
class Configuration:
    """One call on whole tensors, and how ranks make it."""

    case: Case
    P: int = 2
    layout: str = "zigzag"
    data: tuple[str, ...] = NORMAL  # of query, key, value, grad_out
    strides: tuple[str, ...] = CONTIGUOUS  # of the same
    needs_grad: tuple[bool, ...] = (True, True, True)  # query, key, value
    outputs: tuple[bool, ...] = (True, True)  # whether out, and lse, have a gradient
    seed: int = 0

    @property
    def is_differentiated(self) -> bool:
        return any(self.needs_grad) and any(self.outputs)

    @property
    def scale(self) -> float:
        return self.case.D**-0.5 if self.case.scale is None else self.case.scale

    def tensors(self) -> tuple[Tensor, ...]:
        """query, key, value, grad_out, grad_lse; whole, and the same in every process. Zeros where no gradient is."""
        case, generator = self.case, torch.Generator().manual_seed(self.seed)
        queries, keys = (case.B, case.Hq, case.S, case.D), (case.B, case.Hkv, case.key_len, case.D)
        q, k, v, do = (
            fill(mode, shape, case.dtype, generator)
            for mode, shape in zip(self.data, (queries, keys, keys, queries), strict=True)
        )
        dlse = torch.randn(queries[:3], generator=generator, dtype=torch.float64)
        dlse = dlse.to(torch.float64 if case.dtype == torch.float64 else torch.float32)
        with_gradient = [x if given else torch.zeros_like(x) for x, given in zip((do, dlse), self.outputs, strict=True)]
        return q, k, v, *with_gradient


def fill(mode: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if mode == "times 30":
        x = 30 * x
    elif mode == "constant":
        x = torch.randn((), generator=generator, dtype=torch.float64).expand(shape)
    elif mode == "one-hot":
        x = torch.zeros_like(x).scatter(-1, torch.randint(shape[-1], (*shape[:-1], 1), generator=generator), 1.0)
    elif mode == "alternating":  # from token to token
        x = x.abs() * (1 - 2 * (torch.arange(shape[2]) % 2)).double()[:, None]
    elif mode == "zero":  # of both signs
        x = torch.zeros_like(x).copysign(x)
    elif mode == "denormal":
        x = DENORMAL[dtype] * x
    return x.to(dtype)


def differentiate(configuration: Configuration, tensors: tuple[Tensor, ...], call: Callable[..., Any]) -> Found:
    """Forward, and backward for the gradients that are wanted. call: gives out and lse for query, key, value."""
    inputs = [t.detach().requires_grad_(need) for t, need in zip(tensors, configuration.needs_grad, strict=False)]
    out, lse = call(*inputs)
    gradients = iter(())
    if configuration.is_differentiated:
        pairs = [
            p for p, given in zip(((out, tensors[3]), (lse, tensors[4])), configuration.outputs, strict=True) if given
        ]
        wanted = [x for x in inputs if x.requires_grad]
        gradients = iter(torch.autograd.grad([p[0] for p in pairs], wanted, [p[1] for p in pairs]))
    found = [next(gradients) if x.requires_grad and configuration.is_differentiated else None for x in inputs]
    return Found(out.detach(), lse.detach(), *found)


def with_strides(configuration: Configuration, tensors: list[Tensor]) -> list[Tensor]:
    return [restride(t, how) for t, how in zip(tensors, configuration.strides, strict=True)]


def parts_of(configuration: Configuration, rank: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One rank's parts of the whole tensors, in the strides of the configuration."""
    place = {"layout": configuration.layout, "rank": rank, "world_size": configuration.P}
    own, keys = (ra.positions(n, **place) for n in (configuration.case.S, configuration.case.key_len))
    parts = [t[:, :, keys if i in (1, 2) else own] for i, t in enumerate(tensors)]
    return *with_strides(configuration, parts[:4]), parts[4]


def play(configuration: Configuration, group: Any = None, **changes: Any) -> Found:
    """This rank's part of the call on a group of configuration.P ranks. changes: of the keyword arguments."""
    case = configuration.case
    options = {
        "group": group,
        "layout": configuration.layout,
        "seq_len": case.S,
        "key_seq_len": case.key_len,
        "return_lse": True,
        **case.options(),
        **changes,
    }
    parts = parts_of(configuration, process_group(group).rank(), configuration.tensors())
    return differentiate(configuration, parts, lambda q, k, v: ra.ring_attention(q, k, v, **options))


def play_all(configurations: list[Configuration]) -> list[Found]:
    """Several calls on the world group, one after another."""
    assert {c.P for c in configurations} <= {dist.get_world_size()}
    return [play(configuration) for configuration in configurations]


def play_virtual(configuration: Configuration, tensors: tuple[Tensor, ...] | None = None) -> Found:
    """The whole call on virtual ranks in this process. tensors: other ones than the configuration's."""
    whole = configuration.tensors() if tensors is None else tensors
    strided = (*with_strides(configuration, list(whole[:4])), whole[4])
    options = {"world_size": configuration.P, "layout": configuration.layout, "return_lse": True}
    options |= configuration.case.options()
    return differentiate(configuration, strided, lambda q, k, v: ra.virtual_ring_attention(q, k, v, **options))


def assemble(configuration: Configuration, parts: list[Found]) -> Found:
    """The whole result from those of all ranks, in their order."""
    whole: list[Tensor | None] = []
    for name in Found._fields:
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is None:
            assert not any(t is not None for t in tensors), name
            whole.append(None)
            continue
        length = configuration.case.key_len if name in ("dk", "dv") else configuration.case.S
        shape = list(tensors[0].shape)
        shape[2] = length
        result = tensors[0].new_full(shape, torch.nan)
        for rank, tensor in enumerate(tensors):
            own = ra.positions(length, layout=configuration.layout, rank=rank, world_size=configuration.P)
            result[:, :, own] = tensor
        whole.append(result)
    return Found(*whole)
