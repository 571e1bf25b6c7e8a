"""Forward where it is easy to be wrong: rows and tiles that see nothing, cuts into calls, extreme scores, no tokens,
offsets beyond 2^31."""

from __future__ import annotations

import math
import mmap
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import Case
from torch import Tensor

from .block import NAMES, Device, kernel_module, launch, native, pointer, rows
from .ring import Pass, check_pass, cut, random_device
from .tensors import assert_same

DTYPES = tuple(NAMES)


def any_seed() -> int:
    return random.randrange(2**31)


def one_call(case: Case, tensors: tuple[Tensor, ...], device: Device | None = None, store: bool = False) -> Pass:
    q, k, v = tensors[:3]
    one = Pass(case, q, [(0, 1, case.S)], device or random_device())
    one.absorb(k, v, [(0, 1, case.key_len)], load=False, store=store, finalize=True)
    return one


# --- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_calls_cut_on_a_tile_give_the_bits_of_one(D: int, arch: int) -> None:
    tile = native.shape("forward", arch, 64 if D == 64 else 128 if D <= 128 else 256)["keys"]
    S = random.randint(2 * tile + 1, 4 * tile)
    masks = ({}, {"is_causal": True}, {"window": (S // 2, 5)}, {"cu_seqlens": (0, S // 3, S)})
    for fields in random.sample(masks, 2):
        case = Case(Hq=2, Hkv=1, S=S, D=D, dtype=random.choice(DTYPES), scale=random.choice((None, 0.5)), **fields)
        q, k, v, *_ = tensors = case.tensors(any_seed())
        device = random_device((arch,))
        one = one_call(case, tensors, device, store=True)
        check_pass(one, tensors, case.mask, case)
        every = list(range(0, S, tile))[1:]
        for cuts in ([random.choice(every)], every):
            many = Pass(case, q, [(0, 1, S)], device)
            for i, (first, last) in enumerate(zip((0, *cuts), (*cuts, S), strict=True)):
                keys = cut([(0, 1, S)], first, last)
                many.absorb(k[:, :, first:last], v[:, :, first:last], keys, load=i > 0, store=True, finalize=last == S)
            assert_same(many.state[0], one.state[0], (case, cuts))
            assert_same(many.state[1], one.state[1], (case, cuts))
            torch.testing.assert_close(many.state[2], one.state[2], rtol=1e-6, atol=0)
            torch.testing.assert_close(many.lse, one.lse, rtol=1e-6, atol=1e-6)
            finalized = Pass(case, q, [(0, 1, S)], device)
            finalized.state = many.state
            finalized.finalize()
            assert_same(finalized.out, many.out, case)
            assert_same(finalized.lse, many.lse, case)


# --- nothing to see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [64, 128, 256])
def test_rows_that_see_nothing(D: int) -> None:
    """Causal queries from 0 on, keys from 70 on: rows of one tile, and whole tiles, see nothing."""
    case = Case(Hq=2, Hkv=1, S=300, D=D, dtype=random.choice(DTYPES), is_causal=True)
    q, k, v, *_ = case.tensors(any_seed())
    first = random.choice((1, 70, 128, 200))
    one = Pass(case, q, [(0, 1, 300)], random_device())
    one.absorb(k[:, :, first:], v[:, :, first:], [(first, 1, 300 - first)], load=False, store=True, finalize=True)
    mask = case.mask.clone()
    mask[:, :first] = False
    check_pass(one, (q, k, v), mask, (case, first))
    o, m, l = one.state  # noqa: E741
    assert bool((o[:, :, :first] == 0).all()) and bool((l[:, :, :first] == 0).all())
    assert bool((m[:, :, :first] == -math.inf).all())
    # The rest of the keys: the state of rows that had seen nothing is a good start.
    rest = k[:, :, :first], v[:, :, :first]
    one.absorb(*rest, [(0, 1, first)], load=True, store=False, finalize=True)
    check_pass(one, (q, k, v), case.mask, (case, first))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_tiles_that_see_nothing_leave_the_state_alone(D: int) -> None:
    case = Case(S=260, D=D, dtype=random.choice(DTYPES), is_causal=True)
    q, k, v, *_ = case.tensors(any_seed())
    poison = torch.full_like(k, torch.nan)
    state = [torch.randn(t) for t in ((1, 2, 260, D), (1, 2, 260), (1, 2, 260))]
    state[0][0, 0, 3] = torch.nan
    for keys, values, segments in (
        (poison, poison, [(260, 1, 260)]),  # all keys lie after the queries
        (k[:, :, :0], v[:, :, :0], []),
    ):
        one = Pass(replace(case, Skv=520), q, [(0, 1, 260)], random_device())
        one.state = tuple(t.clone() for t in state)
        one.absorb(keys, values, segments, load=True, store=True, finalize=False)
        for a, b in zip(one.state, state, strict=True):
            assert_same(a, b, segments)
        assert all(r.global_write.bytes == 0 and r.matrix_flops == 0 for r in one.reports)
    # Finalizing in such a call does happen.
    one = Pass(replace(case, Skv=520), q, [(0, 1, 260)], random_device())
    one.state = (torch.randn(1, 2, 260, D), torch.randn(1, 2, 260), torch.rand(1, 2, 260) + 1)
    one.absorb(poison, poison, [(260, 1, 260)], load=True, store=False, finalize=True)
    finished = Pass(replace(case, Skv=520), q, [(0, 1, 260)], random_device())
    finished.state = one.state
    finished.finalize()
    assert_same(one.out, finished.out)
    assert_same(one.lse, finished.lse)


def test_no_tokens() -> None:
    for dtype in DTYPES:
        for shape in ((0, 2, 8), (1, 0, 8), (1, 2, 0)):  # B, Hq, Sq
            B, H, S = shape
            case = Case(B=B, Hq=H, Hkv=H, S=S, Skv=10, D=64, dtype=dtype)
            assert one_call(case, case.tensors(0)).reports == []
        case = Case(S=70, Skv=0, D=64, dtype=dtype)
        one = one_call(case, case.tensors(0), store=True)
        assert bool((one.out == 0).all()) and bool((one.lse == -math.inf).all())
        assert bool((one.state[0] == 0).all()) and bool((one.state[1] == -math.inf).all())
        assert bool((one.state[2] == 0).all())


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("Skv", [1, 63, 65])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_scores_far_below_zero(D: int, Skv: int) -> None:
    """Keys past the end count as score 0 if the mask is forgotten: beside these, they would be all."""
    case = Case(S=40, Skv=Skv, D=D, dtype=random.choice(DTYPES), scale=1.0)
    q, k, v, *rest = case.tensors(any_seed())
    q, k = q.abs() + 0.5, -(k.abs() + 0.5)
    one = one_call(case, (q, k, v, *rest))
    assert float(one.lse.max()) < -8
    check_pass(one, (q, k, v, *rest), case.mask, case)


@pytest.mark.parametrize("scale", [1e-4, 0.01, 0.2, 1.0, 3.0, 10.0])
def test_scales(scale: float) -> None:
    for D in (64, 128):
        case = Case(Hq=2, S=random.choice((130, 300)), D=D, dtype=random.choice(DTYPES), scale=scale)
        tensors = case.tensors(any_seed())
        ratio = check_pass(one_call(case, tensors), tensors, case.mask, case)
        print(f"scale {scale}, {case.dtype}: {ratio:.3f} times the error of others")


@pytest.mark.parametrize("size", [1e4, -1e4, 1e-4])
@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_huge_and_tiny_scores(size: float, order: str) -> None:
    """Scores around ±1e4 before scaling, whose maximum comes first, last, or anywhere."""
    for dtype in DTYPES:
        case = Case(Hq=2, S=200, D=64, dtype=dtype, scale=random.choice((1.0, 0.125)))
        q, k, v, *rest = case.tensors(any_seed())
        # One column makes the large part of the scores, the same for all queries, in steps that the type can hold.
        steps = torch.arange(200).double() if order != "random" else torch.randperm(200).double()
        if order == "falling":
            steps = steps.flip(0)
        big = math.sqrt(abs(size))
        q[..., 0] = math.copysign(big, size)
        k[..., 0] = big * (1 + steps / 256).to(dtype)
        tensors = (q, k, v, *rest)
        one = one_call(case, tensors)
        assert bool(one.out.isfinite().all()) and bool(one.lse.isfinite().all())
        largest = float((q.double() @ k.double().transpose(2, 3)).abs().max())
        check_pass(one, tensors, case.mask, (case, size, order), noise=8 * 2**-24 * largest * case.scale)


@pytest.mark.parametrize("size", [1e4, 1e9, 1e30])
def test_scores_so_large_that_their_products_are_rounded(size: float) -> None:
    """The references are then wrong by many powers of two; no exponential may outgrow them for ever."""
    case = Case(Hq=1, Hkv=1, S=70, Skv=200, D=64, dtype=torch.bfloat16, scale=1.0)
    q, k = torch.zeros(1, 1, 70, 64), torch.zeros(1, 1, 200, 64)
    q[..., 0] = size
    k[0, 0, :, 0] = torch.randperm(200).float()
    v = torch.randn(1, 1, 200, 64)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    one = one_call(case, (q, k, v))
    largest = int(k[0, 0, :, 0].argmax())
    assert_same(one.out, v[:, :, largest : largest + 1].expand_as(one.out).contiguous(), (case, size))


def test_nan_stays_in_its_row() -> None:
    """A NaN or infinity in a query reaches that row alone, and does reach it."""
    case = Case(S=150, D=64, Hq=2, Hkv=2, dtype=torch.bfloat16, is_causal=True)
    q, k, v, *rest = case.tensors(any_seed())
    expected = one_call(case, (q, k, v), Device())
    for x in (math.nan, math.inf):
        spoiled = q.clone()
        spoiled[0, 1, 77, 5] = x
        one = one_call(case, (spoiled, k, v), Device())
        assert bool(one.out[0, 1, 77].isnan().all()) and bool(one.lse[0, 1, 77].isnan())
        for a, b in ((one.out, expected.out), (one.lse, expected.lse)):
            a[0, 1, 77] = b[0, 1, 77]
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)  # the warp may take other references


# --- offsets --------------------------------------------------------------------------------------------------------


def sparse(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory of which only the pages that are touched exist."""
    size = elements * torch.empty(0, dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        room = mmap.mmap(-1, size, flags=flags)
    except OSError as refusal:
        pytest.skip(f"{size} bytes of address space: {refusal}")
    return torch.from_numpy(np.frombuffer(room, np.uint8)).view(dtype)


def spread(x: Tensor, dimension: int) -> Tensor:
    """x in 6 GiB, so that the last offsets along one dimension exceed 2^31 elements."""
    room = sparse(3 * 2**30, x.dtype)
    strides = [0, 0, 0, 1]
    small = x.shape[3]
    for d in range(3):
        if d != dimension:
            strides[d] = small
            small *= x.shape[d]
    strides[dimension] = (2**31 + 2**29) // (x.shape[dimension] - 1) // 8 * 8
    view = torch.as_strided(room, x.shape, strides)
    view.copy_(x)
    assert sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True)) > 2**31
    return view


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_strides_beyond_int32(dimension: int) -> None:
    case = Case(B=2, Hq=2, Hkv=2, S=70, D=64, dtype=random.choice(DTYPES), is_causal=True)
    q, k, v, *_ = tensors = case.tensors(any_seed())
    one = Pass(case, spread(q, dimension), [(0, 1, 70)], random_device())
    one.out = spread(torch.full_like(q, torch.nan), dimension)
    one.absorb(spread(k, dimension), spread(v, dimension), [(0, 1, 70)], load=False, store=True, finalize=True)
    check_pass(one, tensors, case.mask, (case, dimension))
    expected = one.out.clone()
    one.out.fill_(torch.nan)
    one.finalize()
    assert_same(one.out, expected)
    delta = torch.full((2, 2, 70), torch.nan)
    launch(
        "delta",
        one.device,
        **{
            **one.fields(),
            "grad_out": one.query,
            "minus_lse_log2": delta.clone(),
            "minus_delta": delta.clone(),
            "delta": delta,
        },
    )
    torch.testing.assert_close(delta, (q.float() * expected.float()).sum(-1), rtol=1e-4, atol=1e-4)


def test_a_state_beyond_int32() -> None:
    """The last tile of 2^25 + 64 queries: its o lies 2^31 elements from the start. Tiles are taken from the last on."""
    S, D, device = 2**25 + 64, 64, Device()
    q = torch.randn(1, 1, 1, D).bfloat16()
    k, v = torch.randn(2, 1, 1, 128, D).bfloat16()
    o, m, l = sparse(S * D, torch.float32), sparse(S, torch.float32), sparse(S, torch.float32)  # noqa: E741
    fields = {
        "dtype": "bf16", "B": 1, "Hq": 1, "Hkv": 1, "Sq": S, "Skv": 128, "D": D, "scale": 0.125, "key_count": 128,
        "query_segments": [(0, 1, S)], "key_segments": [(0, 1, 128)], "query": (pointer(q), 0, 0, 0),
        "key": rows(k), "value": rows(v), "o": pointer(o), "m": pointer(m), "l": pointer(l), "store_state": True,
    }  # fmt: skip
    ((kernel, grid, threads, shared, parameters),) = native.plan("forward", device.arch, fields)
    assert grid > 2**17
    module = kernel_module(kernel.removeprefix("ringattn_"), device.arch)
    module.launch(kernel, grid=1, block=threads, shared_bytes=shared, args=[parameters])
    scores = 0.125 * (q[0, 0].double() @ k[0, 0].double().T)
    expected = torch.softmax(scores, -1) @ v[0, 0].double()
    got = o.view(S, D)[-64:].double() / l[-64:, None].double()
    torch.testing.assert_close(got, expected.expand(64, D), rtol=1e-2, atol=1e-2)
