"""Exact attention over sequences that no single device can hold.

The tokens are cut over the ranks of a torch.distributed group. Queries stay where they are, key/value blocks travel
round a ring, and an online-softmax state absorbs each one; the backward ring brings the gradients home. The operators
are in torch.ops.ringattn.
"""

from ringattn_ext._load import load, runs_as_command
from ringattn_ext._version import __version__

if not runs_as_command():  # else __main__ loads what its command needs, which is nothing for the doctor
    load()  # before anything else: refuses a torch that the library was not built for

    from ringattn_ext import _fakes  # noqa: F401  registers them
    from ringattn_ext._attention import ring_attention, virtual_ring_attention
    from ringattn_ext._init import init, release_workspace
    from ringattn_ext._ops import RingError
    from ringattn_ext._rotary import rotary
    from ringattn_ext._sharding import positions, shard, unshard

__all__ = [
    "RingError",
    "__version__",
    "init",
    "positions",
    "release_workspace",
    "ring_attention",
    "rotary",
    "shard",
    "unshard",
    "virtual_ring_attention",
]
