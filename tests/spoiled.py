"""One field of the header that is not what the other ranks have, in a configuration that is right by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from cases import DTYPES, LAYOUTS, Case, process_group
from configurations import Configuration, play
from small_call import attempt

import ringattn_ext as ra

# What is spoiled -> how the error names it; a length, or the only head, does not change alone.
FIELDS = {
    "op": ("the operator",),
    "backward": ("the operator",),
    "dtype": ("dtype",),
    "layout": ("layout",),
    "seq_len": ("seq_len", "key_seq_len"),
    "B": ("the batch size",),
    "Hq": ("the number of query heads",),
    "Hkv": ("the number of key/value heads", "the number of query heads"),
    "D": ("head_dim",),
    "is_causal": ("is_causal",),
    "window": ("window (left)",),
    "documents": ("the number of documents in cu_seqlens",),
    "scale": ("scale",),
    "deterministic": ("deterministic",),
    "needs_grad": ("which inputs need gradients",),
}
REFUSED = {"scale": -1.0, "window": (-2, 0), "layout": "spiral", "is_causal": 1}


def fields_of(configuration: Configuration) -> list[str]:
    """Those in which a rank can differ from the others; only the full mask is there for unequal lengths.

    A sequence without tokens has no documents, whatever cu_seqlens says.
    """
    case, left_out = configuration.case, set()
    if case.key_len == 0:
        left_out.add("documents")
    if case.key_len != case.S:
        left_out |= {"is_causal", "window", "documents"}
    if not configuration.is_differentiated:
        left_out.add("backward")
    return [field for field in FIELDS if field not in left_out]


def spoil_case(case: Case, field: str) -> Case:
    """Another case that is right too, and that differs in this field (and in those that must follow)."""
    changes: dict[str, Any] = {}
    if field == "dtype":
        changes["dtype"] = DTYPES[(DTYPES.index(case.dtype) + 1) % len(DTYPES)]
    elif field == "seq_len":
        changes["S"] = case.S + 1
        if case.cu_seqlens is not None:
            changes["cu_seqlens"] = (*case.cu_seqlens[:-1], case.S + 1)
    elif field == "Hkv":
        changes = {"Hq": case.Hq, "Hkv": case.Hq if case.Hkv != case.Hq else 1}
        if case.Hq == 1:
            changes = {"Hq": 2, "Hkv": 2}
    elif field == "Hq":
        changes["Hq"] = 2 * case.Hq
    elif field == "B":
        changes["B"] = case.B + 1
    elif field == "D":
        changes["D"] = case.D - 1 if case.D > 1 else 2
    elif field == "is_causal":
        changes["is_causal"] = not case.is_causal
    elif field == "window":
        changes["window"] = (3, 2) if case.window is None else (case.window[0] + 1, case.window[1])
    elif field == "documents":
        changes["cu_seqlens"] = (0, *(case.cu_seqlens or (case.S,)))
    elif field == "scale":
        changes["scale"] = 1.5 * (case.D**-0.5 if case.scale is None else case.scale)
    return replace(case, **changes)


def spoil(configuration: Configuration, field: str) -> Configuration:
    if field == "layout":
        return replace(configuration, layout=LAYOUTS[(LAYOUTS.index(configuration.layout) + 1) % len(LAYOUTS)])
    if field == "needs_grad":
        query, *others = configuration.needs_grad
        return replace(configuration, needs_grad=(not query, *others))
    return replace(configuration, case=spoil_case(configuration.case, field))


def disagree(configuration: Configuration, field: str, odd: int, group: Any = None) -> dict[str, Any]:
    """A call in which rank `odd` has another value of this field: the error, as {} if there is none."""
    rank = process_group(group).rank()
    calls = {"deterministic": lambda: play(configuration, group, deterministic=rank != odd)}
    if field == "op":
        calls["op"] = lambda: ra.unshard(torch.ones(1), 0, group=group) if rank == odd else play(configuration, group)
    elif field == "backward":
        calls["backward"] = lambda: play_without_backward(configuration, group, forward_again=rank == odd)
    elif field not in calls:
        calls[field] = lambda: play(spoil(configuration, field) if rank == odd else configuration, group)
    return error_of(calls[field])


def play_without_backward(configuration: Configuration, group: Any, forward_again: bool) -> None:
    """Forward on all ranks, then forward again on one and backward on the others."""
    if not forward_again:
        play(configuration, group)
        return
    only_forward = replace(configuration, outputs=(False, False))
    play(only_forward, group)
    play(only_forward, group)


def refuse(configuration: Configuration, argument: str, bad: int, group: Any = None) -> dict[str, Any]:
    """A call in which rank `bad` has an argument that is wrong by itself."""
    rank = process_group(group).rank()
    if rank != bad:
        return error_of(lambda: play(configuration, group))
    answer = attempt(
        lambda: ra.ring_attention(*(torch.ones(1, 1, 0, 1),) * 3, **{argument: REFUSED[argument]}, group=group)
    )
    return {"type": answer[0], "text": answer[1]}


def error_of(call: Any) -> dict[str, Any]:
    try:
        call()
    except ra.RingError as error:
        attributes = {name: getattr(error, name) for name in ("rank", "peer", "group", "call", "hop")}
        return {"type": "RingError", "text": str(error)} | attributes
    return {}


def assert_disagreement(answers: list[dict[str, Any]], field: str, odd: int) -> None:
    """Every rank got the same RingError, which names the field and, among three or more, the odd rank."""
    assert {answer.get("type") for answer in answers} == {"RingError"}, (field, answers)
    assert len({answer["text"] for answer in answers}) == 1, answers
    assert any(answers[0]["text"].startswith(f"ring: ranks disagree on {name}: ") for name in FIELDS[field]), answers
    assert f"rank {odd} has" in answers[0]["text"], answers
    for rank, answer in enumerate(answers):
        assert answer["rank"] == rank and answer["hop"] is None, answers
        assert len(answers) == 2 or answer["peer"] == odd, answers
    assert len({(answer["group"], answer["call"]) for answer in answers}) == 1, answers


def assert_refusal(answers: list[dict[str, Any]], bad: int) -> None:
    others = [answer for rank, answer in enumerate(answers) if rank != bad]
    assert answers[bad]["type"] in ("ValueError", "TypeError"), answers
    assert {answer["text"] for answer in others} == {f"ring: rank {bad} refused: {answers[bad]['text']}"}, answers
    assert all(answer["peer"] == bad for answer in others), answers
