"""One rank alone fails outside the checks of the operators: the others must hear of it, and the group go on."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, run_ranks
from small_call import attempt, prove, small_call
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ringattn_ext as ra


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]


def _saved_tensor_is_changed(odd: int) -> tuple[str, str]:
    tensors = _inputs()
    out = ra.ring_attention(*tensors, is_causal=True)
    if dist.get_rank() == odd:
        with torch.no_grad():
            tensors[1].mul_(2.0)
    answer = attempt(out.sum().backward)
    prove()
    return answer


def _graph_is_freed(odd: int) -> tuple[str, str]:
    tensors = _inputs()
    out = ra.ring_attention(*tensors, is_causal=True)
    torch.autograd.grad(out.sum(), tensors, retain_graph=dist.get_rank() != odd)
    answer = attempt(out.sum().backward)
    prove()
    return answer


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize(
    "job, reason",
    [(_saved_tensor_is_changed, "modified by an inplace operation"), (_graph_is_freed, "a second time")],
)
def test_backward_that_cannot_start(job, reason, P):
    for odd in range(P):
        answers = run_ranks(P, job, odd)
        name, text = answers.pop(odd)
        assert name == "RuntimeError" and reason in text
        assert {answer[0] for answer in answers} == {"RingError"}
        assert all(f"rank {odd} refused: " in answer[1] for answer in answers)


def _under_a_default_device(odd: int) -> None:
    with torch.device("meta" if dist.get_rank() == odd else "cpu"):
        assert ra.positions(4).device.type == "cpu"
        prove_inputs = [torch.ones(1, 2, 6, 8, device="cpu") for _ in range(3)]
        out = ra.ring_attention(*prove_inputs, is_causal=True)
        assert out.device.type == "cpu" and torch.equal(out, torch.ones_like(out, device="cpu"))
        whole = ra.unshard(prove_inputs[0], 2)
        assert torch.equal(whole, torch.ones(1, 2, 12, 8, device="cpu"))


def test_default_device_does_not_matter():
    run_ranks(2, _under_a_default_device, 1)


def _equal_products() -> tuple[str, str]:
    shape = (2, 3, 4) if dist.get_rank() == 0 else (3, 2, 4)
    answer = attempt(ra.unshard, torch.zeros(shape), 2)
    prove()
    return answer


def test_parts_of_other_shape_and_equal_size():
    answers = run_ranks(2, _equal_products)
    assert answers[0] == answers[1]
    assert answers[0][0] == "RingError" and "the sizes other than dim" in answers[0][1]


def _numbers_of_dimensions() -> tuple[str, str]:
    shape = (6, 4) if dist.get_rank() == 0 else (2, 3, 4)
    return attempt(ra.unshard, torch.zeros(shape), -1 if dist.get_rank() == 0 else 2)


def test_parts_of_other_number_of_dimensions():
    answers = run_ranks(2, _numbers_of_dimensions)
    assert answers[0] == answers[1] and answers[0][0] == "RingError"


def _recomputation_fails(odd: int, after: bool) -> tuple[str, str]:
    """User code that raises where a backward pass unpacks its inputs by computing them again, with a ring call of their
    own that has just gone well or has not been made."""
    inputs = _inputs()
    passes = []

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        passes.append(len(passes))
        fails = len(passes) == 2 and dist.get_rank() == odd
        if fails and not after:
            raise ValueError("the user's")
        out = ra.ring_attention(*tensors)
        if fails:
            raise ValueError("the user's")
        return out

    with set_checkpoint_early_stop(False):
        out = checkpoint(layer, *inputs, use_reentrant=False)
        answer = attempt(out.sum().backward)
    prove()
    return answer


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("after", [False, True])
def test_recomputation_that_fails(after, P):
    answers = run_ranks(P, _recomputation_fails, P - 1, after)
    assert answers[-1] == ("ValueError", "the user's")
    assert all(name == "RingError" and f"rank {P - 1} refused: " in text for name, text in answers[:-1]), answers


@contextmanager
def _no_threads() -> Iterator[None]:
    """No room for the stack of another thread; and those of threads that have ended are taken."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), usual[1]))
    leave = threading.Event()
    threads = []
    try:
        with pytest.raises(RuntimeError, match="new thread"):
            while True:
                thread = threading.Thread(target=leave.wait)
                thread.start()
                threads.append(thread)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
        leave.set()
        for thread in threads:
            thread.join()


def _first_call_without_threads(odd: int) -> tuple[str, str]:
    rank, P = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=20))
    call = small_call(rank, P) | {"group": group}
    with _no_threads() if rank == odd else nullcontext():
        answer = attempt(ra.ring_attention, **call)
    again = attempt(ra.ring_attention, **call)
    assert again[0] == "RingError" and "is broken" in again[1], again
    dist.destroy_process_group(group)
    prove()
    return answer


@pytest.mark.parametrize("P", [2, 3])
def test_no_thread_to_wait_in(P):
    """Threads that wait are kept, so it is only the first call that may lack one: in processes of its own."""
    pool = RankPool(P)
    try:
        answers = pool.run(_first_call_without_threads, P - 1)
    finally:
        pool.close()
    assert answers[P - 1][0] == "RuntimeError" and "no thread" in answers[P - 1][1], answers
    for name, text in answers[:-1]:
        assert name == "RingError" and f"rank {P - 1} " in text, answers
