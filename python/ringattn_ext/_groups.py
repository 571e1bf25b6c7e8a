"""Groups, as the public functions take them and as the operators want them: by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


def constant_in_compiled_code(function: Callable[..., _T]) -> Callable[..., _T]:
    """As torch.compiler.assume_constant_result, which would import the compiler, some seconds for every process."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def group_name(group: object) -> str:
    """The name of the process group that `group` stands for; "" is a ring of one.

    group: None (the world group, or a ring of one if torch.distributed is not initialised), a ProcessGroup, the name of
    one, or a one-dimensional DeviceMesh.

    Raises TypeError for anything else, ValueError for a group that this process is not in and for a mesh of more
    dimensions.
    """
    if isinstance(group, str):
        if group == "":
            raise ValueError("group: expected the name of a group, got an empty string; None is the world group")
        return group
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return ""
        group = dist.group.WORLD
    if dist.is_available():
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: expected a group that this process is in, got one that it is not in")
        if isinstance(group, dist.ProcessGroup):
            return group.group_name
        if isinstance(group, dist.device_mesh.DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"group: expected a DeviceMesh of one dimension, got {group.ndim}; pick one: mesh['cp']"
                )
            if group.get_coordinate() is None:
                raise ValueError("group: expected a DeviceMesh that this process is in, got one that it is not in")
            return group.get_group().group_name
    raise TypeError(
        "group: expected None, a ProcessGroup, a group name or a one-dimensional DeviceMesh, "
        f"got {type(group).__name__}"
    )


@constant_in_compiled_code
def rank_and_size(name: str) -> tuple[int, int]:
    """This process's rank in the group of that name, and the group's size. Raises ValueError for an unknown name."""
    if name == "":
        return 0, 1
    try:
        group = dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError:
        raise ValueError(
            f"group: expected the name of a process group that this process is in, got {name!r}, which is unknown "
            "here, destroyed, or has other members"
        ) from None
    return group.rank(), group.size()


@constant_in_compiled_code
def prepare(name: str) -> None:
    """Gives the group of that name a side group for headers, if it lacks a backend for the CPU; before its first call.

    All ranks of the group come here with their first call, and no others need to.
    """
    if name == "" or not torch.ops.ringattn.lacks_side_group(name):
        return
    group = dist.distributed_c10d._resolve_process_group(name)
    side = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout(group),
        backend="gloo",
        use_local_synchronization=True,
        group_desc="ringattn_headers",
    )
    torch.ops.ringattn.use_side_group(name, side.group_name)


def _timeout(group: dist.ProcessGroup) -> object:
    """The group's own, so that a lost rank is noticed at the same time on both."""
    backend = group._get_backend(group._device_types[0])
    return getattr(backend.options, "_timeout", None)


def payload_device(name: str) -> torch.device:
    """Where the tensors of a group's calls are expected: the current GPU if it has a backend for one, else the CPU."""
    types = {device.type for device in dist.distributed_c10d._resolve_process_group(name)._device_types}
    if "cuda" in types and torch.cuda.is_available():
        backend = dist.distributed_c10d._resolve_process_group(name)._get_backend(torch.device("cuda"))
        if backend.supports_coalescing:
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
