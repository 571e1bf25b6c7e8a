"""What each rank does: train on its own tokens of every window, then leave loss and gradients for the proof."""

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import ringattn_ext as ra

from .model import build_model, share_of_loss
from .processes import PeakMemory
from .text import tokens_and_labels, window_offsets

LAYOUT = "zigzag"
LEARNING_RATE = 5e-3
WARMUP_STEPS = 4
GROUP_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Job:
    text: Path
    folder: Path  # shared by the processes: rendezvous, results
    ranks: int
    seq_len: int
    steps: int
    seed: int


def train_rank(rank: int, job: Job) -> None:
    """One rank of the ring. Rank 0 shows the progress and writes the results to ring.pt."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(job.folder / "rendezvous"), job.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=GROUP_TIMEOUT)

    positions = ra.positions(job.seq_len, layout=LAYOUT)
    attention = partial(ra.ring_attention, layout=LAYOUT, seq_len=job.seq_len, is_causal=True, enable_gqa=True)
    model = build_model(job.seed)
    optimizer = build_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_factor, steps=job.steps))

    def loss_and_gradients(offset: int) -> float:
        tokens, labels = tokens_and_labels(job.text, offset, job.seq_len, positions)
        optimizer.zero_grad()
        loss = share_of_loss(model(tokens, positions, attention), labels, job.seq_len)
        loss.backward()
        return sum_over_ranks(loss.detach(), model)

    *training, proof = window_offsets(job.text, job.seq_len, job.steps + 1, job.seed)
    losses, seconds = [], []
    memory = PeakMemory()
    tqdm.set_lock(threading.RLock())  # its own lock is a semaphore that outlives a process that is ended
    with tqdm(training, desc="training", unit="step", disable=rank != 0) as bar:
        for offset in bar:
            start = time.perf_counter()
            losses.append(loss_and_gradients(offset))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seconds.append(time.perf_counter() - start)
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, {job.seq_len / seconds[-1]:,.0f} tokens/s")
    peaks = gather_rows(torch.tensor([memory.resting, memory.peak()]), job.ranks)
    check_same_on_all_ranks(nn.utils.parameters_to_vector(model.parameters()).detach())

    proof_loss = loss_and_gradients(proof)
    if rank == 0:
        result = {
            "losses": losses,
            "seconds": seconds,
            "memory": peaks.tolist(),
            "offset": proof,
            "weights": model.state_dict(),
            "loss": proof_loss,
            "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        }
        torch.save(result, job.folder / "ring.pt")
    dist.barrier()
    dist.destroy_process_group()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))


def learning_rate_factor(step: int, steps: int) -> float:
    """A linear rise over the first steps, then a linear fall to a tenth."""
    return min((step + 1) / WARMUP_STEPS, 1.0) * (1 - 0.9 * step / steps)


def sum_over_ranks(loss: Tensor, model: nn.Module) -> float:
    """Adds up the ranks' gradients in place and returns the sum of their losses; one message carries both."""
    gradients = [parameter.grad for parameter in model.parameters()]
    total = torch.cat([gradient.flatten() for gradient in gradients] + [loss[None]])
    dist.all_reduce(total)
    parts = total[:-1].split([gradient.numel() for gradient in gradients])
    for gradient, summed in zip(gradients, parts, strict=True):
        gradient.copy_(summed.view_as(gradient))
    return total[-1].item()


def gather_rows(row: Tensor, ranks: int) -> Tensor:
    rows = [torch.empty_like(row) for _ in range(ranks)]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def check_same_on_all_ranks(weights: Tensor) -> None:
    """Every rank has made the same updates, so the weights must agree in every bit."""
    first = weights.clone()
    dist.broadcast(first, src=0)
    if not torch.equal(first, weights):
        raise RuntimeError(f"after training the weights of rank {dist.get_rank()} differ from those of rank 0")
