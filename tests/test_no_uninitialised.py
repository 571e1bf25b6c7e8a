"""No byte that nobody wrote leaves an operator: fresh memory is poisoned, and so is memory that is used again.

torch fills the memory of torch.empty with NaN where it is asked to, also for the C++ of this package; what the kernels
take from malloc is filled by the C library; and buffers that stay between calls are filled by calls on NaN. Rows that
see no key give exact zeros, a log-sum of minus infinity and gradients of zero, whatever lay in their memory before.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import DTYPES, LAYOUTS, MASKS, Call, Case, by_group, random_case, run_on_rank, run_virtual
from ranks import run_ranks
from reference import Result, same_bits
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import ringattn_ext as ra
from ringattn_ext._C import Layout

pytestmark = pytest.mark.timeout(120)

ops = torch.ops.ringattn
RANKS_TIMEOUT = 90.0
SIZES = [1, 2, 3, 4]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty is full of NaN, and of the largest number for whole numbers; so are workspaces, which begin as bytes
    of 255."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # use_deterministic_algorithms imports the compiler
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert bool(torch.empty(3).isnan().all()) and torch.empty(3, dtype=torch.uint8).tolist() == [255] * 3
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch._C._set_deterministic_algorithms(False)


def small_case(kind: str, **fields: object) -> Case:
    drawn = {"dtype": random.choice(DTYPES), "S": random.choice((1, 3, 9, 30, 70)), "D": random.choice((1, 8, 40))}
    return random_case(kind, **(drawn | fields))


def empty_cases() -> list[Case]:
    """Nothing to do, fewer tokens than ranks, empty documents, no keys at all."""
    return [
        Case(B=0, S=13, is_causal=True),
        Case(B=2, S=0),
        Case(S=1, Hq=4, dtype=torch.bfloat16, is_causal=True),
        Case(S=2, dtype=torch.float32, window=(0, 0)),
        Case(S=9, cu_seqlens=(0, 0, 0, 4, 4, 9, 9), dtype=torch.float16, is_causal=True),
        Case(S=40, cu_seqlens=(0, 0, 40, 40), window=(2, 0)),
        *(Case(B=2, Hq=4, S=21, Skv=0, dtype=dtype) for dtype in DTYPES),
        Case(S=70, Skv=1, dtype=torch.float32),
        Case(S=1, Skv=70),
    ]


def all_cases() -> list[Case]:
    return [small_case(kind) for kind in MASKS] + empty_cases()


def assert_same(got: Result, expected: Result, note: object) -> None:
    different = [name for name in Result._fields if not same_bits(getattr(got, name), getattr(expected, name))]
    assert not different, (different, note)


def assert_clean(result: Result, case: Case, note: object) -> None:
    """No NaN; and where nothing is seen, and by whom nothing is seen, exact zeros."""
    for name, tensor in result._asdict().items():
        assert not bool(tensor.isnan().any()), (name, note)
        assert name == "lse" or bool(tensor.isfinite().all()), (name, note)
    empty, unseen = ~case.mask.any(1), ~case.mask.any(0)
    zeros = [result.out[:, :, empty], result.dq[:, :, empty], result.dk[:, :, unseen], result.dv[:, :, unseen]]
    assert all(bool((tensor == 0).all()) for tensor in zeros), note
    assert torch.equal(result.lse == -math.inf, empty.expand_as(result.lse)), note


# --- fresh memory ---


def clean_cases_on_rank(jobs: list[tuple[Case, int, Call]]) -> list[Result]:
    """With poisoned memory the bits are those without. The workspace of the group is fresh in every call."""
    expected, got = [], []
    for job in jobs:
        expected.append(run_on_rank(*job))
        ra.release_workspace()
        with poisoned_memory():
            got.append(run_on_rank(*job))
        ra.release_workspace()
    for a, b, job in zip(got, expected, jobs, strict=True):  # at the end: the ranks stay in step
        assert_same(a[2], b[2], job)
    return got


@pytest.mark.parametrize("P", SIZES)
def test_ranks(P: int) -> None:
    jobs = [
        (case, random.randrange(2**30), Call(random.choice(LAYOUTS), strides=random.choice(("contiguous", "padded"))))
        for case in all_cases()
    ]
    answers = run_ranks(P, clean_cases_on_rank, jobs, timeout=RANKS_TIMEOUT)
    for (case, _, call), parts in zip(jobs, zip(*answers, strict=True), strict=True):
        ((_, result),) = by_group(case, call.layout, list(parts)).items()
        assert_clean(result, case, (case, call))


@pytest.mark.parametrize("P", SIZES)
def test_virtual_ranks(P: int) -> None:
    for case in all_cases():
        tensors, layout = case.tensors(random.randrange(2**31)), random.choice(LAYOUTS)
        expected = run_virtual(case, tensors, P, layout)
        with poisoned_memory():
            got = run_virtual(case, tensors, P, layout)
        assert_same(got, expected, (case, layout))
        assert_clean(got, case, (case, layout))


def operator_options(case: Case) -> tuple:
    """What the raw operators take behind the layout, with all gradients wanted."""
    window = None if case.window is None else list(case.window)
    return case.is_causal, window, case.options()["cu_seqlens"], case.scale, case.Hq != case.Hkv, True, [True] * 3


def kept_on_rank(jobs: list[tuple[Case, str, int]]) -> None:
    """All that the raw operators return, and what unshard and shard make of parts of any length, in both passes."""
    found = []
    for case, layout, seed in jobs:
        own, own_keys = (ra.positions(n, layout=layout) for n in (case.S, case.key_len))
        q, k, v, *_ = case.tensors(seed)
        with poisoned_memory():
            name = torch.distributed.group.WORLD.group_name
            results = ops.ring_forward(
                q[:, :, own], k[:, :, own_keys], v[:, :, own_keys], torch.zeros(1, dtype=torch.int64), name, layout,
                case.S, case.key_len, *operator_options(case),
            )  # fmt: skip
            whole = q.detach().requires_grad_()
            part = ra.shard(whole, 2, layout=layout)
            again = ra.unshard(part, 2, layout=layout, seq_len=case.S)
            (gradient,) = torch.autograd.grad(again, whole, q)
        ra.release_workspace()
        found.append((results, (part, q[:, :, own]), (again, q), (gradient, q)))
    for job, (results, *pairs) in zip(jobs, found, strict=True):
        assert not any(bool(t.isnan().any()) for t in results), job
        assert all(same_bits(a, b) for a, b in pairs), job


@pytest.mark.parametrize("P", SIZES)
def test_kept_blocks_and_sharding(P: int) -> None:
    """The block that forward keeps has room for the longest shard: what the block does not fill is cleared."""
    lengths = (0, 1, P + 1, 2 * P + 1, random.randint(10, 60))
    jobs = [
        (small_case(random.choice(MASKS), S=S) if S else Case(S=S), layout, random.randrange(2**30))
        for S in lengths
        for layout in LAYOUTS
    ]
    run_ranks(P, kept_on_rank, jobs, timeout=RANKS_TIMEOUT)
    for case, layout, seed in jobs:
        q, k, v, *_ = case.tensors(seed)
        with poisoned_memory():
            results = ops.virtual_ring_forward(q, k, v, P, layout, *operator_options(case))
        assert not any(bool(t.isnan().any()) for t in results), (case, layout)


def check_empty_blocks(dtype: torch.dtype) -> None:
    """The building blocks where some rows or all see nothing: twelve queries from position 4, nine keys from 8."""
    case = Case(B=2, Hq=4, Hkv=2, S=12, Skv=9, D=8, dtype=dtype)
    q, k, v, do, dlse = case.tensors(random.randrange(2**31))
    accumulation = dlse.dtype
    places = ([4, 1, 12], [8, 1, 9], 20, True, None, None, 0.5)  # causal: queries 4 to 7 see no key
    empty = torch.arange(12) < 4

    def state() -> tuple[Tensor, Tensor, Tensor]:
        return (
            q.new_zeros(q.shape, dtype=accumulation),
            dlse.new_full(dlse.shape, -math.inf),
            dlse.new_zeros(dlse.shape),
        )

    with poisoned_memory():
        one, two = state(), state()
        out, lse = ops.block_forward_(*one, q, k, v, *places, True)
        ops.merge_(*two, *state(), 0.5)  # nothing and nothing
        ops.merge_(*two, *one, 0.5)
        merged = ops.finalize(*two, 0.5, dtype)
        delta = ops.delta(out, do, None)
        gradients = [q.new_zeros(t.shape, dtype=accumulation) for t in (q, k, v)]
        ops.block_backward_(*gradients, do, q, k, v, lse, delta, *places, True)
        nothing = ops.finalize(*state(), 0.5, dtype)
    for tensor, row_sum in ((out, lse), merged):
        assert bool((tensor[:, :, empty] == 0).all()) and bool(tensor.isfinite().all())
        assert torch.equal(row_sum == -math.inf, empty.expand_as(row_sum)) and not bool(row_sum.isnan().any())
    assert bool((nothing[0] == 0).all()) and bool((nothing[1] == -math.inf).all())
    assert all(bool(t.isfinite().all()) for t in (delta, *gradients))
    assert bool((delta[:, :, empty] == 0).all()) and bool((gradients[0][:, :, empty] == 0).all())
    unseen = torch.arange(8, 17) > 15  # keys behind the last query
    assert all(bool((t[:, :, unseen] == 0).all()) for t in gradients[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks(dtype: torch.dtype) -> None:
    check_empty_blocks(dtype)


def allocations(function: Callable[[], object]) -> tuple[int, int]:
    """How many tensors with room the operators of this package make, and how many of these torch fills."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        function()
    made = filled = 0
    for event in run.events():
        above = event.cpu_parent
        while above is not None and not above.name.startswith("ringattn::"):
            above = above.cpu_parent
        if above is None or event.name != "aten::empty" or 0 in event.concrete_inputs[0]:
            continue
        made += 1
        filled += any(child.name == "aten::fill_" for child in event.cpu_children)
    return made, filled


def allocations_of_passes() -> list[tuple[int, int]]:
    """Of forward, backward and unshard: without poison, and with it."""
    x = torch.randn(1, 2, 40, 8, requires_grad=True)

    def call() -> None:
        ra.unshard(ra.ring_attention(x, x, x, is_causal=True), 2).square().sum().backward()
        ra.release_workspace()

    plain = allocations(call)
    with poisoned_memory():
        return [plain, allocations(call)]


@pytest.mark.parametrize("P", [1, 3])
def test_the_poison_reaches_the_tensors_that_operators_make(P: int) -> None:
    for (made, none), (again, filled) in run_ranks(P, allocations_of_passes, timeout=RANKS_TIMEOUT):
        assert made == again == filled > 3 * P and none == 0


# --- memory of the C library, which kernels work in ---

FINGERPRINT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_no_uninitialised import fingerprint
print(fingerprint(int(sys.argv[2])))
"""


def fingerprint(seed: int) -> str:
    """Of the bits of many results on virtual ranks; the same for the same seed in every process."""
    random.seed(seed)
    torch.set_num_threads(1)
    total = hashlib.sha256()
    cases = all_cases() + [small_case(kind, S=random.randint(100, 200), D=64, B=1) for kind in MASKS]
    for case in cases:
        P, layout = random.choice(SIZES), random.choice(LAYOUTS)
        result = run_virtual(case, case.tensors(random.randrange(2**31)), P, layout)
        assert_clean(result, case, (seed, case, P, layout))
        for tensor in result:
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def test_bits_do_not_depend_on_what_malloc_gives() -> None:
    """Fresh memory full of floats of -2e38, freed memory full of NaN, or neither."""
    seed, folder = random.randrange(2**31), str(Path(__file__).parent)
    runs = []
    for filling in (None, "1", "255"):
        environment = {key: value for key, value in os.environ.items() if key != "MALLOC_PERTURB_"}
        if filling is not None:
            environment["MALLOC_PERTURB_"] = filling
        command = [sys.executable, "-c", FINGERPRINT, folder, str(seed)]
        runs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        texts = [run.communicate(timeout=90)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0] * 3
    assert texts[0] and texts == [texts[0]] * 3


# --- memory that is used again ---


def larger(case: Case) -> Case:
    """One whose calls use at least as much memory of every kind."""
    return replace(case, S=2 * case.S + 50, Skv=None, cu_seqlens=None, B=case.B + 1)


def after_calls_on_nan(jobs: list[tuple[Case, int, Call]]) -> None:
    """The workspace and the kernels' scratch hold the NaN of the call before."""
    expected, got = [], []
    for case, seed, call in jobs:
        expected.append(run_on_rank(case, seed, call)[2])
        inputs = [torch.full_like(t, math.nan).requires_grad_() for t in larger(case).tensors(seed)[:3]]
        out = ra.ring_attention(*inputs, layout=call.layout, enable_gqa=True)
        out.backward(torch.full_like(out, math.nan))
        assert all(t.grad is not None and bool(t.grad.isnan().all()) for t in inputs)
        got.append(run_on_rank(case, seed, call)[2])
    for a, b, job in zip(got, expected, jobs, strict=True):
        assert_same(a, b, job)


@pytest.mark.parametrize("P", SIZES)
def test_a_call_on_nan_leaves_nothing_behind(P: int) -> None:
    jobs = [(case, random.randrange(2**30), Call(random.choice(LAYOUTS))) for case in all_cases()]
    run_ranks(P, after_calls_on_nan, jobs, timeout=RANKS_TIMEOUT)


@pytest.mark.parametrize("P", [1, 3])
def test_a_virtual_call_on_nan_leaves_nothing_behind(P: int) -> None:
    for case in all_cases():
        tensors, layout = case.tensors(random.randrange(2**31)), random.choice(LAYOUTS)
        expected = run_virtual(case, tensors, P, layout)
        large = larger(case)
        run_virtual(large, tuple(torch.full_like(t, math.nan) for t in large.tensors(0)), P, layout)
        assert_same(run_virtual(case, tensors, P, layout), expected, (case, layout))


@pytest.mark.parametrize("P", [2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_capacity_is_more_than_a_block(layout: str, P: int) -> None:
    """The cases above do have room that no block fills: else the test of the kept block would prove nothing."""
    whole = Layout(layout, P, 2 * P + 1)
    assert any(whole.length(rank) < whole.capacity for rank in range(P))
