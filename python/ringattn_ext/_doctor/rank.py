"""Run by the doctor's self-test in child processes: small ring attention against dense attention in float64.

Arguments: "gloo", rank, world size, the file of the store, a timeout of the group in seconds; or "virtual" and a
device. The answer: the relative errors of the output and of the three gradients, norm of the difference over norm of
the reference, with what is tolerated; or the error that was raised. A first one says that all is imported.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ringattn_ext as ra

QUANTITIES = ("output", "gradient of query", "gradient of key", "gradient of value")


def inputs(seq_len: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """query [1, 4, S, D], key and value [1, 2, S, D], gradient of the output; the same on every rank."""
    generator = torch.Generator().manual_seed(20231005)
    shapes = [(1, heads, seq_len, head_dim) for heads in (4, 2, 2, 4)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """softmax(Q K^T / sqrt(D)) V under a causal mask and its three gradients, in float64 over the whole sequence."""
    query, key, value = (x.detach().double().requires_grad_() for x in (query, key, value))
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ keys.transpose(2, 3)) * query.shape[3] ** -0.5
    out = scores.masked_fill(later, -torch.inf).softmax(3) @ values
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), gradient.double())]


def measured(results: list[Tensor], expected: list[Tensor], tolerance: float) -> list[dict[str, Any]]:
    dtype = str(results[0].dtype).removeprefix("torch.")
    errors = [float((x.double() - e).norm() / e.norm()) for x, e in zip(results, expected, strict=True)]
    return [
        {"what": f"{dtype} {quantity}", "error": error, "tolerance": tolerance}
        for quantity, error in zip(QUANTITIES, errors, strict=True)
    ]


def over_gloo(rank: int, world_size: int, store: str, timeout: float) -> list[dict[str, Any]]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    seq_len, errors = 130, []
    mine = ra.positions(seq_len)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        whole = inputs(seq_len, 32, dtype, "cpu")
        query, key, value, gradient = (x[:, :, mine].clone() for x in whole)
        shards = [x.requires_grad_() for x in (query, key, value)]
        out = ra.ring_attention(*shards, seq_len=seq_len, is_causal=True, enable_gqa=True)
        assert isinstance(out, Tensor)
        results = [out.detach(), *torch.autograd.grad(out, shards, gradient)]
        errors += measured(results, [x[:, :, mine] for x in dense(*whole)], tolerance)
    dist.destroy_process_group()
    return errors


def on_virtual_ranks(device: str) -> list[dict[str, Any]]:
    """Two. Rounding P and the results to bfloat16 costs some 3e-3; 2e-2 tells a wrong result from that."""
    whole = inputs(520, 128, torch.bfloat16, device)
    *tensors, gradient = whole
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = ra.virtual_ring_attention(*leaves, world_size=2, is_causal=True, enable_gqa=True)
    assert isinstance(out, Tensor)
    results = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    return measured(results, dense(*whole), 2e-2)


def give(file: str, **answer: object) -> None:
    with Path(file).open("a") as end:
        print(json.dumps(answer), file=end)


def main() -> None:
    answers, kind, *arguments = sys.argv[3:]
    give(answers, ready=True)
    try:
        if kind == "gloo":
            rank, world_size, store, timeout = arguments
            errors = over_gloo(int(rank), int(world_size), store, float(timeout))
        else:
            errors = on_virtual_ranks(*arguments)
    except Exception as error:
        give(answers, raised=f"{type(error).__name__}: {error}")
        os._exit(1)  # the other rank may be gone: no goodbye
    give(answers, errors=errors)


if __name__ == "__main__":
    main()
