"""Reports 11 and 17: gradients of weights, which are summed over the ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import LAYOUTS
from ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ringattn_ext as ra

from .common import RANKS_TIMEOUT, SIZES, assert_close

pytestmark = pytest.mark.timeout(120)


class Layer(torch.nn.Module):
    """Attention of projections, on all tokens or on a rank's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.maps = torch.nn.ModuleList(torch.nn.Linear(width, width, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """x [B, S, width], two heads."""
        heads = [map(x).unflatten(-1, (2, -1)).transpose(1, 2) for map in self.maps[:3]]
        return x + self.maps[3](attend(*heads, is_causal=True).transpose(1, 2).flatten(-2))


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, attend)
        return x


def tokens_and_targets(S: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2, S, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def share_of_loss(found: Tensor, wanted: Tensor, S: int) -> Tensor:
    """What a part of the tokens adds to the mean over all of them."""
    return (found - wanted).square().sum() / S


def dense_gradients(S: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    model, (x, y) = Model(seed), tokens_and_targets(S, seed)
    loss = share_of_loss(model(x, F.scaled_dot_product_attention), y, S)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def ring_on(layout: str, S: int) -> Callable[..., Tensor]:
    return lambda *heads, **options: ra.ring_attention(*heads, layout=layout, seq_len=S, **options)


def all_reduce_in_hooks(S: int, layout: str, seed: int, steps: int) -> None:
    """Every gradient of a weight is summed as soon as it is there, while the ring turns for the layers below."""
    P, own = dist.get_world_size(), ra.positions(S, layout=layout)
    other = dist.new_group(list(range(P)))
    (x, y), (_, expected) = tokens_and_targets(S, seed), dense_gradients(S, seed)
    for group in (None, other):
        model = Model(seed)
        for step in range(steps):
            works: list[Any] = []

            def hook(weight: Tensor, works: list = works, group: Any = group, wait: bool = step % 2 == 0) -> None:
                work = dist.all_reduce(weight.grad, group=group, async_op=True)
                if wait:
                    work.wait()
                works.append(work)

            handles = [weight.register_post_accumulate_grad_hook(hook) for weight in model.parameters()]
            model.zero_grad()
            share_of_loss(model(x[:, own], ring_on(layout, S)), y[:, own], S).backward()
            for work in works:
                work.wait()
            for handle in handles:
                handle.remove()
            assert len(works) == len(expected)
            for weight, wanted in zip(model.parameters(), expected, strict=True):
                assert_close(weight.grad, wanted, (layout, step))
    dist.destroy_process_group(other)


@pytest.mark.parametrize("P", [2, 3, 4])
def test_11_all_reduce_in_hooks_of_a_ring_backward(P: int) -> None:
    S, layout = random.randint(P, 40), random.choice(LAYOUTS)
    run_ranks(P, all_reduce_in_hooks, S, layout, random.randrange(2**30), 10, timeout=RANKS_TIMEOUT)


def averaged_by_torch(S: int, layout: str, seed: int) -> None:
    """torch's own module sums in hooks as well, and takes the mean: as many times smaller as there are ranks."""
    own, (x, y), (_, expected) = ra.positions(S, layout=layout), tokens_and_targets(S, seed), dense_gradients(S, seed)
    averaged = DistributedDataParallel(Model(seed), bucket_cap_mb=1e-4)
    for _ in range(5):
        averaged.zero_grad()
        share_of_loss(averaged(x[:, own], ring_on(layout, S)), y[:, own], S).backward()
        for weight, wanted in zip(averaged.parameters(), expected, strict=True):
            assert_close(weight.grad, wanted / dist.get_world_size(), layout)


def test_11_hooks_of_torch_itself() -> None:
    S, layout = random.randint(2, 40), random.choice(LAYOUTS)
    run_ranks(2, averaged_by_torch, S, layout, random.randrange(2**30), timeout=RANKS_TIMEOUT)


def all_reduce_beside(S: int, layout: str, seed: int, steps: int) -> None:
    """One thread sums on a group of its own, without a pause, while the other goes round the ring."""
    P, own = dist.get_world_size(), ra.positions(S, layout=layout)
    other = dist.new_group(list(range(P)))
    (x, y), (_, expected) = tokens_and_targets(S, seed), dense_gradients(S, seed)
    sums: list[float] = []

    def work() -> None:
        for i in range(20 * steps):
            ones = torch.full((1 + i % 7 * 1000,), float(i))
            dist.all_reduce(ones, group=other)
            sums.append(float(ones.mean()))

    thread = threading.Thread(target=work)
    thread.start()
    model = Model(seed)
    try:
        for _ in range(steps):
            model.zero_grad()
            share_of_loss(model(x[:, own], ring_on(layout, S)), y[:, own], S).backward()
            for weight, wanted in zip(model.parameters(), expected, strict=True):
                dist.all_reduce(weight.grad)
                assert_close(weight.grad, wanted, layout)
    finally:
        thread.join()
    assert sums == [float(i * P) for i in range(20 * steps)]
    dist.destroy_process_group(other)


@pytest.mark.parametrize("P", [2, 3, 4])
def test_11_all_reduce_in_another_thread(P: int) -> None:
    S, layout = random.randint(P, 40), random.choice(LAYOUTS)
    run_ranks(P, all_reduce_beside, S, layout, random.randrange(2**30), 10, timeout=RANKS_TIMEOUT)


def gradients_have_one_scale(S: int, layout: str, seed: int) -> None:
    """The sum over the ranks is the dense gradient, however the loss is put together."""
    own, (x, y) = ra.positions(S, layout=layout), tokens_and_targets(S, seed)
    dense_loss, expected = dense_gradients(S, seed)

    def check_sum(loss: Tensor, model: Model, whole_loss: Tensor) -> None:
        assert_close(whole_loss, dense_loss)
        for got, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
            if dist.is_initialized():
                dist.all_reduce(got)
            assert_close(got, wanted, layout, 1e-6)

    # Each rank has the share of its own tokens; the shares add up to the loss.
    model = Model(seed)
    share = share_of_loss(model(x[:, own], ring_on(layout, S)), y[:, own], S)
    total = share.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    check_sum(share, model, total)

    # Each rank has the whole loss, of the outputs that unshard gave it: no factor, though all ranks have it.
    model = Model(seed)
    whole = ra.unshard(model(x[:, own], ring_on(layout, S)), 1, layout=layout, seq_len=S)
    loss = share_of_loss(whole, y, S)
    check_sum(loss, model, loss.detach())

    # What shard cut has its whole gradient on every rank: that one is not summed.
    model, leaf, same = Model(seed), x.clone().requires_grad_(), x.clone().requires_grad_()
    found = model(ra.shard(leaf, 1, layout=layout), ring_on(layout, S))
    (got,) = torch.autograd.grad(share_of_loss(found, y[:, own], S), leaf)
    loss = share_of_loss(model(same, F.scaled_dot_product_attention), y, S)
    assert_close(got, torch.autograd.grad(loss, same)[0], layout, 1e-6)


@pytest.mark.parametrize("P", SIZES)
def test_17_gradients_have_one_scale(P: int) -> None:
    for layout in LAYOUTS:
        S = random.randint(1, 40)
        run_ranks(P, gradients_have_one_scale, S, layout, random.randrange(2**30), timeout=RANKS_TIMEOUT)
