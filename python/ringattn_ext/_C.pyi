"""Layouts, masks and schedules of ringattn_ext's core."""

from collections.abc import Callable
from enum import Enum

OWN_TENSORS: int
NONE: int

class Segment:
    def __init__(self, start: int, stride: int, length: int) -> None: ...
    @property
    def start(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def length(self) -> int: ...

class Layout:
    def __init__(self, layout: str, world_size: int, seq_len: int) -> None: ...
    def segments(self, rank: int) -> list[Segment]: ...
    def length(self, rank: int) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...

class Mask:
    def __init__(self, key_count: int, left: int = -1, right: int = -1, documents: list[int] | None = None) -> None: ...
    def interval(self, position: int) -> tuple[int, int]: ...

class Visibility(Enum):
    skip = 0
    partial = 1
    full = 2

class Source(Enum):
    kept = 0
    received = 1
    own = 2

class ForwardStep:
    block: int
    visibility: Visibility
    finalize: bool
    read_buffer: int
    next_block: int
    write_buffer: int
    send_to: int
    receive_from: int

class BackwardStep:
    block: int
    visibility: Visibility
    source: Source
    read_buffer: int
    send_to: int
    receive_from: int
    next_block: int
    write_buffer: int
    local_gradient: int
    outgoing_gradient: int
    incoming_gradient: int
    outgoing_block: int

def visibility(queries: Segment, keys: Segment, mask: Mask) -> Visibility: ...
def visible_pairs(queries: Segment, keys: Segment, mask: Mask) -> int: ...
def reach(queries: Layout, keys: Layout, mask: Mask) -> int: ...
def forward_schedule(queries: Layout, keys: Layout, mask: Mask, rank: int) -> list[ForwardStep]: ...
def backward_schedule(queries: Layout, keys: Layout, mask: Mask, rank: int) -> list[BackwardStep]: ...

class TileShape:
    queries: int
    keys: int
    score_columns: int
    warps: int
    tiles_per_warp: int
    column_warps: int
    stages: int
    blocks: int

def tile_shape(kernel: str, arch: int, head_dim: int) -> TileShape: ...
def tile_shared_bytes(kernel: str, arch: int, head_dim: int) -> int: ...
def main_thread_is(identifier: int) -> None: ...
def host_in_python(error_type: type[RuntimeError], is_inherited: Callable[[str], bool]) -> None: ...
def register_kernels(device_type: int, table: int) -> None: ...
