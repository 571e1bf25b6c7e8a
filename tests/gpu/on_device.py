"""What the GPU tests share: where they run, and how results there are compared with exact ones."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
from cases import LAYOUTS, Case, random_mask
from reference import TOLERANCE, Result, dense, half_precision_ratios, relative_errors
from torch import Tensor

import ringattn_ext as ra

DEVICE = os.environ.get("RINGATTN_GPU_TESTS_ON") or "cuda"
HALVES = (torch.bfloat16, torch.float16)


def no_gpu() -> str:
    """Why these tests cannot run on a GPU; "" if they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return str(error).split("\n")[0]
        return "torch.cuda.is_available() is False"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("ringattn::virtual_ring_forward", "CUDA"):
        return "this build of ringattn_ext has no CUDA kernels"
    try:
        torch.ones(1, device="cuda").add_(1).cpu()
    except RuntimeError as error:
        return f"{torch.cuda.get_device_name()} does not work: {str(error).splitlines()[0]}"
    return ""


def half_case(kind: str, dtype: torch.dtype, D: int, **fields: Any) -> Case:
    """A case in half precision with at least 4096 elements in every tensor, the mask of that kind, grouped or not."""
    S = fields.pop("S", None) or random.randint(130, 400)
    Hkv = random.choice((1, 2))
    mask = random_mask(kind, S)
    if "window" in mask:  # some keys at least for most queries
        mask["window"] = (random.randint(20, S), random.choice((-1, 0, 17)))
    drawn = {"B": random.choice((1, 2)), "Hkv": Hkv, "Hq": Hkv * random.choice((1, 2, 4)), "S": S, **mask}
    return Case(dtype=dtype, D=D, **{**drawn, **fields})


def random_layout() -> str:
    return random.choice(LAYOUTS)


def to(device: torch.device | str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.to(device) for t in tensors)


def gradients(out: Tensor, inputs: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, grad_out)


def attend(inputs: list[Tensor], grad_out: Tensor, case: Case, **options: Any) -> Result:
    """Forward and backward of virtual_ring_attention if world_size is among the options, else of ring_attention."""
    call = ra.virtual_ring_attention if "world_size" in options else ra.ring_attention
    out, lse = call(*inputs, return_lse=True, **case.options(), **options)
    return Result(out.detach(), lse.detach(), *gradients(out, inputs, grad_out))


def check(got: Result, tensors: tuple[Tensor, ...], case: Case, note: object = "") -> None:
    """Errors of at most 1.5 times those of the flash backend or of rounding once; tensors as of Case.tensors.

    The flash backend of CUDA has the full and the causal mask; for other masks it is that of the CPU.
    """
    plain = case.window is None and case.cu_seqlens is None
    where = got.out.device if plain else torch.device("cpu")
    got, tensors, mask = Result(*to(where, got)), to(where, tensors), case.mask.to(where)
    for name in Result._fields:
        assert bool(getattr(got, name).isnan().logical_not().all()), f"NaN in {name} {note} {case}"
    ratios = half_precision_ratios(got, tensors, mask, case.scale)
    limits = {name: 1.5 + 12 / getattr(got, name).numel() ** 0.5 for name in ratios}
    limits |= {name: 1.5 for name in ratios if getattr(got, name).numel() >= 4096}
    assert all(ratios[name] <= limits[name] for name in ratios), f"{ratios} {note} {case}"
    error = relative_errors(got, dense(tensors, mask, case.scale), {})["lse"]
    assert error <= TOLERANCE[torch.float32], f"lse is off by {error} {note} {case}"
