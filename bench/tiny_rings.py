"""Tiny rings of virtual ranks, forward and backward, for tools that slow a program down a hundred times.

    compute-sanitizer python bench/tiny_rings.py [--device cuda]

Every mask and layout, lengths that end inside tiles, both ways to sum dQ; results are compared with float64.
"""

from __future__ import annotations

import argparse
import itertools

import torch

import ringattn_ext as ra

MASKS = (
    {},
    {"is_causal": True},
    {"window": (19, 5)},
    {"is_causal": True, "cu_seqlens": torch.tensor([0, 31, 31, 77, 150])},
)
TOKENS = 150


def allowed(mask: dict, device: torch.device) -> torch.Tensor:
    place = torch.arange(TOKENS, device=device)
    distance = place[None] - place[:, None]  # of a key from its query
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device)
    if mask.get("is_causal"):
        seen &= distance <= 0
    if "window" in mask:
        left, right = mask["window"]
        seen &= (distance >= -left) & (distance <= right)
    if "cu_seqlens" in mask:
        document = torch.bucketize(place, mask["cu_seqlens"].to(device), right=True)
        seen &= document[None] == document[:, None]
    return seen


def check(device: torch.device, world_size: int, layout: str, head_dim: int, mask: dict, deterministic: bool) -> None:
    query, key, value, grad = (
        torch.randn(1, heads, TOKENS, head_dim, device=device, dtype=torch.bfloat16) for heads in (2, 1, 1, 2)
    )
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = ra.virtual_ring_attention(
        *leaves, world_size=world_size, layout=layout, enable_gqa=True, deterministic=deterministic, **mask
    )
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    scores = exact_leaves[0] @ exact_leaves[1].transpose(-1, -2) * head_dim**-0.5
    exact_out = scores.masked_fill(~allowed(mask, device), -torch.inf).softmax(-1) @ exact_leaves[2]
    expected = [exact_out, *torch.autograd.grad(exact_out, exact_leaves, grad.double())]
    for name, one, right in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        error = float((one.detach().double() - right).norm() / right.norm())
        assert error < 1e-2, (name, error, world_size, layout, head_dim, mask, deterministic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    cases = list(itertools.product((1, 3), ("zigzag", "striped"), (64, 128, 256), MASKS))
    for number, (world_size, layout, head_dim, mask) in enumerate(cases):
        check(device, world_size, layout, head_dim, mask, deterministic=number % 2 == 0)
    print(f"{len(cases)} rings are right")


if __name__ == "__main__":
    main()
