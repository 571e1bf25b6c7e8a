"""ring_attention over real NCCL ranks, two and three on one GPU, against dense attention.

NCCL allows several ranks on one GPU from 2.30 on (NCCL_MULTI_RANK_GPU_ENABLE, which ranks.py sets); with as many GPUs
as ranks, each rank has its own. With RINGATTN_GPU_TESTS_ON=cpu, gloo takes NCCL's place.
"""

from __future__ import annotations

import random

import pytest
import torch
from cases import LAYOUTS, Case, assemble
from ranks import RankFailure, RankPool, pool_of
from reference import Result

from . import nccl_ranks
from .on_device import DEVICE, HALVES, check, half_case

pytestmark = pytest.mark.timeout(300)
BACKENDS = (
    {"pure": "nccl", "mixed": "cpu:gloo,cuda:nccl"} if DEVICE == "cuda" else {"pure": "gloo", "mixed": "cpu:gloo"}
)
_refused: dict[tuple[int, str], str] = {}


@pytest.fixture(params=[2, 3])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return BACKENDS[request.param]


@pytest.fixture
def ranks(size: int, backend: str) -> RankPool:
    """A pool whose ranks can talk to each other, else a skip with NCCL's reason."""
    if DEVICE == "cuda" and torch.cuda.device_count() < size:
        version = torch.cuda.nccl.version()
        if version < (2, 30):
            pytest.skip(f"NCCL {'.'.join(map(str, version))} takes one rank for each GPU; 2.30 takes several")
    if (size, backend) not in _refused:
        try:
            pool_of(size, backend).run(nccl_ranks.talk, timeout=90)
            _refused[size, backend] = ""
        except RankFailure as failure:
            lines = [line for line in str(failure).splitlines() if line.strip()]
            _refused[size, backend] = next((line for line in lines if "NCCL" in line or "nccl" in line), lines[0])
    if _refused[size, backend]:
        assert DEVICE == "cuda", _refused[size, backend]
        pytest.skip(f"{size} ranks of {backend} on {torch.cuda.device_count()} GPUs: {_refused[size, backend]}")
    return pool_of(size, backend)


def check_parts(answers: list, case: Case, seed: int, layout: str, note: object) -> None:
    """The whole result that the members of a group gave, as (rank, part) or None."""
    parts = dict(answer for answer in answers if answer is not None)
    whole = assemble(case, layout, [parts[rank] for rank in range(len(parts))])
    tensors = case.tensors(seed, lse_gradient=False)
    check(Result(*whole), tensors, case, (note, layout, seed))


def drawn(kind: str) -> tuple[Case, int]:
    return half_case(kind, random.choice(HALVES), random.choice((64, 128))), random.randrange(2**31)


@pytest.mark.parametrize("kind", ["full", "causal", "causal_window", "documents"])
def test_against_dense(ranks: RankPool, kind: str) -> None:
    for layout in LAYOUTS:
        case, seed = drawn(kind)
        check_parts(ranks.run(nccl_ranks.one_pass, case, seed, layout), case, seed, layout, kind)


def test_more_tokens_than_messages_hold_at_once(ranks: RankPool) -> None:
    case = Case(Hq=8, Hkv=8, S=4096 if DEVICE == "cuda" else 512, D=128, dtype=torch.bfloat16, is_causal=True)
    seed = random.randrange(2**31)
    check_parts(ranks.run(nccl_ranks.one_pass, case, seed, "zigzag"), case, seed, "zigzag", "long")


@pytest.mark.parametrize("form", ["new", "pair"])
def test_groups(ranks: RankPool, form: str) -> None:
    """A group beside the world, and two of the ranks in reverse order."""
    case, seed = drawn("causal")
    check_parts(ranks.run(nccl_ranks.one_pass, case, seed, "zigzag", form), case, seed, "zigzag", form)


def test_few_tokens(ranks: RankPool) -> None:
    for S in (1, 2, 5):
        case = Case(Hq=2, Hkv=2, S=S, D=64, dtype=torch.bfloat16, is_causal=True)
        seed = random.randrange(2**31)
        check_parts(ranks.run(nccl_ranks.one_pass, case, seed, "contiguous"), case, seed, "contiguous", S)


def test_bits_from_run_to_run(ranks: RankPool) -> None:
    case, seed = drawn("causal")
    assert all(ranks.run(nccl_ranks.twice, case, seed, "zigzag"))


def test_beside_other_collectives(ranks: RankPool) -> None:
    case, seed = drawn("causal")
    check_parts(ranks.run(nccl_ranks.while_computing, case, seed, "zigzag"), case, seed, "zigzag", "beside others")


def test_disagreement(backend: str, size: int) -> None:
    """The first call of a group compares headers: all ranks raise the same error."""
    if DEVICE == "cuda" and _refused.get((size, backend), "not asked"):
        pytest.skip(f"no ranks of {backend}: {_refused.get((size, backend), 'the tests before did not run')}")
    pool = RankPool(size, backend)  # one whose group has made no call
    try:
        pool.run(nccl_ranks.talk, timeout=90)
        texts = pool.run(nccl_ranks.disagree, *drawn("causal"))
    finally:
        pool.close()
    assert len(set(texts)) == 1 and "scale" in texts[0], texts


def test_graphs(ranks: RankPool) -> None:
    if DEVICE != "cuda":
        pytest.skip("needs CUDA graphs")
    case, seed = drawn("causal")
    reasons = set(ranks.run(nccl_ranks.graph, case, seed))
    if reasons != {""}:
        ranks.close()  # a failed capture may show in the next collective
        pytest.skip("; ".join(sorted(reasons - {""})))
