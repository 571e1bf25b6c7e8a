"""What the attention tests are run on: random shapes, masks, tensors and memory layouts; and how a case is run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from reference import Result, visible
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringattn_ext as ra

LAYOUTS = ("contiguous", "zigzag", "striped")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASKS = (
    "full",
    "causal",
    "window",
    "causal_window",
    "documents",
    "causal_documents",
    "window_documents",
    "causal_window_documents",
)


@dataclass(frozen=True)
class Case:
    """One call on whole tensors."""

    B: int = 1
    Hq: int = 2
    Hkv: int = 2
    S: int = 16
    Skv: int | None = None  # None: as S
    D: int = 8
    dtype: torch.dtype = torch.float64
    is_causal: bool = False
    window: tuple[int, int] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    scale: float | None = None

    @property
    def key_len(self) -> int:
        return self.S if self.Skv is None else self.Skv

    @property
    def mask(self) -> Tensor:
        return visible(self.S, self.key_len, self.is_causal, self.window, self.cu_seqlens)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call that say what is computed."""
        return {
            "is_causal": self.is_causal,
            "window": self.window,
            "cu_seqlens": None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens),
            "scale": self.scale,
            "enable_gqa": self.Hq != self.Hkv,
        }

    def tensors(self, seed: int, *, lse_gradient: bool = True) -> tuple[Tensor, ...]:
        """query, key, value, grad_out, grad_lse; the same for the same seed in every process."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        q, do = (normal(self.B, self.Hq, self.S, self.D) for _ in range(2))
        k, v = (normal(self.B, self.Hkv, self.key_len, self.D) for _ in range(2))
        dlse = normal(self.B, self.Hq, self.S).to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        return q, k, v, do, dlse if lse_gradient else torch.zeros_like(dlse)


def random_mask(kind: str, S: int) -> dict[str, Any]:
    """The mask fields of a Case. Documents may be empty, also the first, the last and several in a row."""
    fields: dict[str, Any] = {"is_causal": "causal" in kind}
    if "window" in kind:
        left, right = (random.choice((-1, 0, random.randint(0, 3), random.randint(0, S))) for _ in range(2))
        fields["window"] = (left, right)
    if "documents" in kind:
        cuts = [random.choice((0, S, random.randint(0, S), random.randint(0, S))) for _ in range(random.randint(0, 7))]
        cuts += random.sample(cuts, len(cuts) // 3)
        fields["cu_seqlens"] = (0, *sorted(cuts), S)
    return fields


def random_case(kind: str, **fields: Any) -> Case:
    """A case with that kind of mask; what `fields` does not give is drawn. Lengths around tiles of 64, or tiny."""
    S = fields.pop("S", None) or random.choice((random.randint(1, 9), random.randint(10, 90), random.randint(91, 150)))
    Hkv = fields.get("Hkv") or random.choice((1, 1, 2, 3))
    drawn = {
        "B": random.choice((1, 1, 2, 3)),
        "Hq": Hkv * random.choice((1, 1, 2, 3, 4)),
        "Hkv": Hkv,
        "S": S,
        "D": random.choice((1, 8, 40, 64, 80, 128, 256)),
        "scale": random.choice((None, None, 0.05, 1.0)),
    }
    case = Case(**(drawn | random_mask(kind, S) | fields))
    if case.B * case.Hq * case.D > 1024:  # one such dimension at a time
        case = replace(case, B=fields.get("B", 1), D=fields.get("D", random.choice((1, 8, 40))))
    return case


# --- memory layouts -------------------------------------------------------------------------------------------------

STRIDES = ("transposed", "packed", "padded", "stepping")


def restride(x: Tensor, how: str) -> Tensor:
    """The same values in other memory. What lies between and around them is NaN."""
    if how == "transposed":  # [B, S, H, D]
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    B, H, S, D = x.shape
    if how == "packed":  # a chunk of [B, S, 3, H, D]
        room = x.new_full((B, S, 3, H, D), torch.nan)
        view = room[:, :, 1].transpose(1, 2)
    elif how == "padded":  # a slice of something larger in every dimension
        room = x.new_full((B + 2, H + 1, S + 3, D + 5), torch.nan)
        view = room[1 : B + 1, :H, 2 : S + 2, 3 : D + 3]
    elif how == "stepping":  # every other element of the last dimension too
        room = x.new_full((B, H, 2 * S + 1, 2 * D), torch.nan)
        view = room[:, :, 1::2, 1::2]
    else:
        return x.clone(memory_format=torch.contiguous_format)
    view.copy_(x)
    return view


# --- running a case -------------------------------------------------------------------------------------------------


def leaves(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """query, key, value as leaves that want gradients; strides stay."""
    return [t.detach().requires_grad_() for t in tensors[:3]]


def run_virtual(case: Case, tensors: tuple[Tensor, ...], P: int, layout: str) -> Result:
    inputs = leaves(tensors)
    out, lse = ra.virtual_ring_attention(*inputs, world_size=P, layout=layout, return_lse=True, **case.options())
    gradients = torch.autograd.grad((out, lse), inputs, tensors[3:5])
    return Result(out.detach(), lse.detach(), *gradients)


_groups: dict[str, object] = {}


def group_of(form: str) -> object:
    """A way to name a group that this rank is in; every rank of the world must ask for it. Made once per process."""
    if form not in _groups:
        _groups[form] = _make_group(form)
    return _groups[form]


def _make_group(form: str) -> object:
    rank, size = dist.get_rank(), dist.get_world_size()
    if form == "none":
        return None
    if form == "world":
        return dist.group.WORLD
    if form == "name":
        return dist.group.WORLD.group_name
    if form == "new":
        return dist.new_group()
    if form == "mesh":
        return init_device_mesh("cpu", (size,))
    if form == "reversed":
        return dist.new_group(list(reversed(range(size))), sort_ranks=False)
    if form == "reordered mesh":
        return DeviceMesh("cpu", torch.arange(size).roll(1))
    if form == "halves":  # two groups at work at the same time, their ranks not neighbours
        groups = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
        return groups[rank % 2]
    if form == "local":  # made by its members alone
        members = [size - 1, 0] if rank in (0, size - 1) else [rank]
        return dist.new_group(members, use_local_synchronization=True)
    if form == "mesh of two dimensions":
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))["cp"]
    if form == "all but one":
        group = dist.new_group(list(range(1, size)))
        return group if rank > 0 else dist.new_group([0], use_local_synchronization=True)
    raise ValueError(form)


def process_group(group: object) -> dist.ProcessGroup:
    if group is None:
        return dist.group.WORLD
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group.get_group() if isinstance(group, DeviceMesh) else group


@dataclass(frozen=True)
class Call:
    """How ranks call: everything that must not change the result."""

    layout: str = "zigzag"
    form: str = "none"
    seq_len: bool = True  # given or left out
    strides: str = "contiguous"
    threads: int = 1


def run_on_rank(case: Case, seed: int, call: Call) -> tuple[tuple[int, ...], int, Result]:
    """On every rank: the members of its group, its rank in it, and its part of the result.

    Each group works on tensors of its own: those of seed + its first member.
    """
    group = group_of(call.form)
    members = tuple(dist.get_process_group_ranks(process_group(group)))
    rank = process_group(group).rank()
    own, own_keys = (
        ra.positions(n, layout=call.layout, rank=rank, world_size=len(members)) for n in (case.S, case.key_len)
    )
    q, k, v, do, dlse = case.tensors(seed + members[0])
    tensors = [restride(t[:, :, own], call.strides) for t in (q, do)]
    keys = [restride(t[:, :, own_keys], call.strides) for t in (k, v)]
    inputs = leaves((tensors[0], *keys))
    lengths = {"seq_len": case.S, "key_seq_len": case.key_len} if call.seq_len else {}
    torch.set_num_threads(call.threads)
    try:
        out, lse = ra.ring_attention(
            *inputs, group=group, layout=call.layout, return_lse=True, **lengths, **case.options()
        )
        gradients = torch.autograd.grad((out, lse), inputs, (tensors[1], dlse[:, :, own]))
    finally:
        torch.set_num_threads(1)
    return members, rank, Result(out.detach(), lse.detach(), *gradients)


def assemble(case: Case, layout: str, parts: list[Result]) -> Result:
    """The whole tensors from the parts in ring order."""
    whole = []
    for name in Result._fields:
        tensors = [getattr(part, name) for part in parts]
        length = case.key_len if name in ("dk", "dv") else case.S
        shape = list(tensors[0].shape)
        shape[2] = length
        out = tensors[0].new_full(shape, torch.nan)
        for rank, tensor in enumerate(tensors):
            out[:, :, ra.positions(length, layout=layout, rank=rank, world_size=len(parts))] = tensor
        whole.append(out)
    return Result(*whole)


def by_group(case: Case, layout: str, answers: list) -> dict[tuple[int, ...], Result]:
    """What run_on_rank gave on all ranks, as members of a group -> its whole result."""
    groups: dict[tuple[int, ...], dict[int, Result]] = {}
    for members, rank, result in answers:
        groups.setdefault(members, {})[rank] = result
    return {
        members: assemble(case, layout, [parts[rank] for rank in range(len(members))])
        for members, parts in groups.items()
    }


def fewer_keys(case: Case) -> Case:
    """Cross attention: a key sequence of another length, and the full mask."""
    lengths = (0, 1, random.randint(1, 20), random.randint(20, 150))
    return replace(case, Skv=random.choice(lengths), is_causal=False, window=None, cu_seqlens=None)
