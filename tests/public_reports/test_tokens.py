"""Reports 2, 3, 18, 20 and 21: which tokens a rank has, and what belongs to them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import LAYOUTS, MASKS, Call, Case, by_group, leaves, run_on_rank
from ranks import run_ranks
from reference import assert_exact, attention, same_bits
from small_call import attempt, prove
from torch import Tensor

import ringattn_ext as ra

from .common import RANKS_TIMEOUT, SIZES, assert_close, check, packed, small_case

pytestmark = pytest.mark.timeout(120)

# --- 2 and 3: lengths that the number of ranks does not divide ---


@pytest.mark.parametrize("P", SIZES)
def test_02_packed_lengths_are_not_rounded(P: int) -> None:
    for layout in LAYOUTS:
        odd = [random.randrange(1, 40, 2) for _ in range(random.randint(2, 6))]
        for is_causal in (False, True):
            for lengths in ([7], [3, 5], [1, 6, 0, 1], odd):
                check(P, packed(*lengths, D=4, is_causal=is_causal), layout)


@pytest.mark.parametrize("P", SIZES)
def test_03_lengths_that_no_ring_divides(P: int) -> None:
    for layout in LAYOUTS:
        for S in (29, 2 * P - 1, random.choice((11, 31, 59, 101, 149))):
            check(P, small_case(random.choice(("full", "causal")), S=S), layout)


def test_03_as_reported() -> None:
    check(4, Case(Hq=1, Hkv=1, S=2999, D=4, dtype=torch.float32, is_causal=True), "zigzag")


def unequal_parts(S: int, layout: str) -> tuple[str, str]:
    x = torch.randn(1, 2, len(ra.positions(S, layout=layout)), 4)
    answer = attempt(ra.ring_attention, x, x, x, layout=layout)
    assert attempt(ra.unshard, x, 2, layout=layout)[0] == answer[0]
    prove()
    out = ra.ring_attention(x, x, x, layout=layout, seq_len=S)
    assert out.shape == x.shape
    return answer


@pytest.mark.parametrize("P", [2, 3, 4])
def test_03_unequal_parts_without_a_length(P: int) -> None:
    """Without seq_len every rank says that the lengths do not fit; with it the call is right."""
    for layout in LAYOUTS:
        S = P * random.randint(2, 20) + random.randrange(1, P)
        for name, text in run_ranks(P, unequal_parts, S, layout, timeout=RANKS_TIMEOUT):
            assert name in ("RingError", "ValueError") and ("seq_len" in text or "tokens" in text), text


# --- 18: labels ---

IGNORED = -100


def shifted(tokens: Tensor, bounds: tuple[int, ...] = ()) -> Tensor:
    """The label of each token [S]: the next one, and none at the end of the sequence and of a document."""
    labels = torch.cat((tokens[1:], tokens.new_tensor([IGNORED])))
    labels[[bound - 1 for bound in bounds if bound > 0]] = IGNORED
    return labels


LABELS = {
    "contiguous": [[2, 3, 4, 5], [6, 7, 8, IGNORED]],
    "zigzag": [[2, 3, 8, IGNORED], [4, 5, 6, 7]],
    "striped": [[2, 4, 6, 8], [3, 5, 7, IGNORED]],
}


def labels_of_a_rank(layout: str) -> tuple[list[int], list[int]]:
    """By shard, and by the positions of the rank's tokens."""
    tokens = torch.arange(1, 9)
    labels = ra.shard(shifted(tokens), 0, layout=layout)
    next_places = ra.positions(8, layout=layout) + 1
    return labels.tolist(), F.pad(tokens, (0, 1), value=IGNORED)[next_places].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_18_labels_across_shards(layout: str) -> None:
    for rank, (by_shard, by_position) in enumerate(run_ranks(2, labels_of_a_rank, layout, timeout=RANKS_TIMEOUT)):
        assert by_shard == by_position == LABELS[layout][rank]


def sum_of_losses(S: int, layout: str, bounds: tuple[int, ...], seed: int) -> tuple[float, int]:
    """The summed loss and the number of labels of this rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (S,), generator=generator)
    logits = torch.randn(S, 11, generator=generator, dtype=torch.float64)
    own, labels = ra.positions(S, layout=layout), ra.shard(shifted(tokens, bounds), 0, layout=layout)
    loss = F.cross_entropy(logits[own], labels, reduction="sum", ignore_index=IGNORED)
    whole = F.cross_entropy(logits, shifted(tokens, bounds), reduction="sum", ignore_index=IGNORED)
    count = torch.stack((loss.detach(), (labels != IGNORED).sum().double()))
    dist.all_reduce(count)
    torch.testing.assert_close(count[0], whole)
    return float(count[0]), int(count[1])


@pytest.mark.parametrize("P", SIZES)
def test_18_loss_over_shards(P: int) -> None:
    """No label is lost or counted twice, whatever the length, with documents and without."""
    for layout in LAYOUTS:
        S = random.randint(1, 50)
        for bounds in ((), (0, S // 3, S // 3, S // 2, S)):
            answers = run_ranks(P, sum_of_losses, S, layout, bounds, random.randrange(2**30), timeout=RANKS_TIMEOUT)
            ends = {bound for bound in (*bounds, S) if bound > 0}
            assert {count for _, count in answers} == {S - len(ends)}


# --- 20: documents ---


@dataclass(frozen=True)
class OneDocument(Case):
    """The tensors of one document are always the same, those of the others depend on `noise`; only the results of the
    one are differentiated."""

    document: int = 0
    noise: int = 0

    @property
    def tokens(self) -> slice:
        assert self.cu_seqlens is not None
        return slice(self.cu_seqlens[self.document], self.cu_seqlens[self.document + 1])

    def tensors(self, seed: int, *, lse_gradient: bool = True) -> tuple[Tensor, ...]:
        tensors, others = super().tensors(seed), super().tensors(seed + 1 + self.noise)
        mixed = [t.clone() if i < 3 else torch.zeros_like(t) for i, t in enumerate(others)]
        for to, t in zip(mixed, tensors, strict=True):
            to[:, :, self.tokens] = t[:, :, self.tokens]
        if self.noise == 2:
            for t in mixed[:3]:
                t[:, :, : self.tokens.start] = t[:, :, self.tokens.stop :] = math.nan
        return tuple(mixed)


@pytest.mark.parametrize("P", SIZES)
def test_20_documents_do_not_see_each_other(P: int) -> None:
    """Five of them: what the others hold, NaN too, changes no bit of one; no gradient crosses over."""
    for layout in LAYOUTS:
        lengths = [random.randint(1, 30) for _ in range(5)]
        bounds = packed(*lengths).cu_seqlens
        assert bounds is not None
        drawn = small_case("full", S=bounds[-1], dtype=torch.float32, is_causal=random.random() < 0.5)
        fields = vars(drawn) | {"cu_seqlens": bounds, "document": random.randrange(5)}
        case, seed = OneDocument(**fields), random.randrange(2**30)
        results = []
        for noise in range(3):
            one = replace(case, noise=noise)
            answers = run_ranks(P, run_on_rank, one, seed, Call(layout), timeout=RANKS_TIMEOUT)
            ((_, result),) = by_group(one, layout, answers).items()
            if noise < 2:
                assert_exact(result, one.tensors(seed), one.mask, one.scale, (one, layout))
                outside = [
                    t[:, :, i] for t in result[2:] for i in (slice(case.tokens.start), slice(case.tokens.stop, None))
                ]
                assert not any(bool(t.any()) for t in outside), (one, layout)
            results.append([t[:, :, case.tokens].contiguous() for t in result])
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True)), (case, layout)


# --- 21: positions ---


def positions_of_a_rank() -> dict[str, list[int]]:
    return {layout: ra.positions(16, layout=layout).tolist() for layout in LAYOUTS}


def test_21_positions_of_every_layout() -> None:
    for rank, found in enumerate(run_ranks(4, positions_of_a_rank, timeout=RANKS_TIMEOUT)):
        assert found == {
            "contiguous": [4 * rank, 4 * rank + 1, 4 * rank + 2, 4 * rank + 3],
            "zigzag": [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank],
            "striped": [rank, rank + 4, rank + 8, rank + 12],
        }


def rotated(case: Case, seed: int, layout: str) -> None:
    """Rotary at the positions of the rank's tokens, then the ring: dense rotary, then dense attention."""
    own = ra.positions(case.S, layout=layout)
    q, k, v, do, _ = case.tensors(seed)
    inputs = leaves((q[:, :, own], k[:, :, own], v[:, :, own]))
    heads = [ra.rotary(x, own) for x in inputs[:2]]
    out = ra.ring_attention(*heads, inputs[2], layout=layout, seq_len=case.S, **case.options())
    found = (out, *torch.autograd.grad(out, inputs, do[:, :, own]))

    whole = leaves((q, k, v))
    # By complex numbers: position p turns pair i by p * 10000 ** (-2i / D).
    angles = torch.arange(case.S)[:, None] * 10000.0 ** (-torch.arange(0, case.D, 2, dtype=torch.float64) / case.D)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.complex(first.contiguous(), second.contiguous()) * turn
        return torch.cat((turned.real, turned.imag), -1)

    scale = case.D**-0.5 if case.scale is None else case.scale
    exact, _ = attention(rotate(whole[0]), rotate(whole[1]), whole[2], case.mask, scale)
    for got, wanted in zip(found, (exact, *torch.autograd.grad(exact, whole, do)), strict=True):
        assert_close(got, wanted[:, :, own], (case, layout))


@pytest.mark.parametrize("P", SIZES)
def test_21_rotary_before_a_ring(P: int) -> None:
    for layout in LAYOUTS:
        for case in (Case(S=16, D=8, is_causal=True), small_case(random.choice(MASKS), D=random.choice((2, 8, 40)))):
            run_ranks(P, rotated, case, random.randrange(2**30), layout, timeout=RANKS_TIMEOUT)
