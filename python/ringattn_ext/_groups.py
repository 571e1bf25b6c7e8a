"""Groups, as the public functions take them and as the operators want them: by name."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringattn_ext._C import main_thread_is
from ringattn_ext._error import RingError

_T = TypeVar("_T")

# The groups of the process that this one was forked from: the connections are its.
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def _be_a_child() -> None:
    main_thread_is(threading.get_ident())
    if dist.is_available() and dist.is_initialized():
        _inherited.update(dist.distributed_c10d._world.pg_map)


main_thread_is(threading.main_thread().ident or 0)
os.register_at_fork(after_in_child=_be_a_child)


def is_inherited(name: str) -> bool:
    """Whether the group of that name is one of the process that this one was forked from."""
    return len(_inherited) > 0 and dist.distributed_c10d._resolve_process_group(name) in _inherited


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


class _Side:
    """What this process knows of the side group of a group while it has none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failure: str | None = None


_sides: weakref.WeakKeyDictionary[Any, _Side] = weakref.WeakKeyDictionary()


@constant_in_compiled_code
def prepare(name: str) -> None:
    """Gives the group of that name a side group for headers, if it lacks a backend for the CPU; before its first call.

    All ranks of the group come here with their first call, and no others need to. Raises RingError if one does not
    within the group's timeout; from then on always.
    """
    if name == "" or not torch.ops.ringattn.lacks_side_group(name):
        return
    group = dist.distributed_c10d._resolve_process_group(name)
    side = _sides.setdefault(group, _Side())
    with side.lock:
        if side.failure is None and torch.ops.ringattn.lacks_side_group(name):
            side.failure = "its making was interrupted"
            try:
                _attach(name, _interruptible(lambda: _make_side_group(group)))
                side.failure = None
            except Exception as error:
                side.failure = str(error)
    if side.failure is not None:
        raise RingError(
            f"ring: group '{name}' has no side group on which the ranks could compare their calls; destroy it and make "
            f"a new one. What went wrong: {side.failure}",
            rank=group.rank(),
            group=name,
        )


def _interruptible(function: Callable[[], _T]) -> _T:
    """function() in a thread of its own, so that this one hears of Ctrl-C while it waits. The thread then goes on, and
    what it returns is lost."""
    outcomes: queue.SimpleQueue[tuple[list[_T], BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put(([function()], None))
        except BaseException as error:
            outcomes.put(([], error))

    threading.Thread(target=run, name="ringattn_side", daemon=True).start()
    results, error = outcomes.get()
    if error is not None:
        raise error
    return results[0]


def _make_side_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    # By hand, over the group's own store: dist.new_group names a group by how many others this process has made, which
    # the members of this one need not agree on, and it sorts the ranks.
    rank, size = group.rank(), group.size()
    store = dist.PrefixStore("ringattn_headers", group.get_group_store())
    side = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, _timeout(group))
    side._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    side._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return side


def _attach(name: str, side: dist.ProcessGroup) -> None:
    side_name = f"{name}/ringattn_headers"
    side._set_group_name(side_name)
    dist.distributed_c10d._register_process_group(side_name, side)
    try:
        torch.ops.ringattn.use_side_group(name, side_name)  # keeps it
    finally:
        dist.distributed_c10d._unregister_process_group(side_name)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """The group's own, so that a lost rank is noticed at the same time on both."""
    options = group._get_backend(group._device_types[0]).options
    return getattr(options, "_timeout", None) or dist.default_pg_timeout


def payload_device(name: str) -> torch.device:
    """Where the tensors of a group's calls are expected: the current GPU if it has a backend for one, else the CPU.

    Raises ValueError for an unknown name.
    """
    if rank_and_size(name)[1] > 1 and torch.cuda.is_available():
        group = dist.distributed_c10d._resolve_process_group(name)
        if any(device.type == "cuda" for device in group._device_types):
            device = torch.device("cuda", torch.cuda.current_device())
            if group._get_backend(device).supports_coalescing:
                return device
    return torch.device("cpu")
