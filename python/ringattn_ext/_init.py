"""What a group can be told before its first call and after its last."""

from __future__ import annotations

import torch

from ringattn_ext._groups import group_name, payload_device
from ringattn_ext._ops import order, ring_call


def init(group: object = None, *, device: torch.device | str | int | None = None) -> None:
    """Sets up a group for ring attention, so that its first step is as fast as any other. Every rank must call it.

    One hop in each direction opens the connections between neighbours, which NCCL otherwise does inside the first
    step. For a group without a backend for the CPU it also makes a gloo group of the same ranks, on which the ranks
    compare their calls, so that no host ever waits for a GPU; without init the first call makes it. Needed before
    torch.compile and before a CUDA graph is captured.

    Args:
        group: as for `ring_attention`.
        device: the device of the tensors that will travel. Default: the current GPU if the group has a backend for
            GPUs, else the CPU.

    Raises ValueError if the group cannot carry tensors of that device, RingError if communication fails.
    """
    name = group_name(group)
    if name == "":
        return
    where = payload_device(name) if device is None else torch.device(device)
    ring_call(name, lambda: torch.ops.ringattn.init(order(), name, where), where)


def release_workspace(group: object = None) -> None:
    """Gives back the memory that the calls on a group keep for the next ones; the next call takes it again.

    Args:
        group: as for `ring_attention`.

    On GPUs the memory goes back to torch's allocator; torch.cuda.empty_cache() gives it to others.
    """
    torch.ops.ringattn.release_workspace(group_name(group))
