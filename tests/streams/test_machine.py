"""The machine itself: what torch does on it, and what of that is in the log."""

from __future__ import annotations

import torch
from torch import Tensor

from .machine import Rank, device, faults, fresh, history, native, run_ring, using
from .worker import on_the_machine


def kinds(*wanted: str) -> list[str]:
    return [f"{e.kind} {e.name}".strip() for e in native.entries() if e.kind in wanted]


@on_the_machine
def test_operators() -> None:
    fresh()
    x = torch.randn(4, 6)
    there = x.to(device(2))
    y = torch.cat([there.t().contiguous(), there.t() * 2], dim=1)[1:, ::2]
    y[:, 0].zero_()
    expected = torch.cat([x.t().contiguous(), x.t() * 2], dim=1)[1:, ::2]
    expected[:, 0].zero_()
    assert torch.equal(y.cpu(), expected)
    assert torch.equal(torch.where(there > 0, there, there.new_zeros(())).cpu(), x.relu())
    assert there[1, 2].item() == x[1, 2]
    assert there.sum(0).argmax().cpu() == x.sum(0).argmax()
    assert torch.empty(3, device=device(1)).isnan().all().item()
    assert there.device == device(2) and y.dtype == torch.float32
    assert not history().problems


@on_the_machine
def test_autograd_runs_on_a_thread_of_the_device() -> None:
    fresh()
    x = torch.randn(5, 5)
    there = x.to(device(1)).requires_grad_()
    (there @ there).sum().backward()
    here = x.clone().requires_grad_()
    (here @ here).sum().backward()
    assert torch.allclose(there.grad.cpu(), here.grad)
    threads = {e.thread for e in native.entries() if "mm" in e.name}
    assert len(threads) == 2
    assert not history().problems


@on_the_machine
def test_a_freed_block_goes_to_the_next_tensor_of_its_stream() -> None:
    fresh()
    first = torch.zeros(100, device=device())
    place = first.data_ptr()
    del first
    assert torch.empty(90, device=device()).data_ptr() == place
    with using(native.pool_stream(0)):
        second = torch.zeros(100, device=device())
        assert second.data_ptr() != place
    third = torch.zeros(1000, device=device())
    place = third.data_ptr()
    third.record_stream(torch.Stream(device=device()))
    del third
    assert torch.empty(1000, device=device()).data_ptr() != place
    assert not history().problems


@on_the_machine
def test_what_the_host_waits_for_is_in_the_log() -> None:
    fresh()
    x = torch.ones(3).to(device())
    native.reset()
    x.cpu()
    torch.empty(3).copy_(x, non_blocking=True)  # not pinned: the host waits all the same
    x.to("cpu", non_blocking=True)  # torch pins the result
    x.to(torch.float64).max().item()
    torch.ones(3).to(device())
    torch.ones(3).pin_memory().to(device(), non_blocking=True)
    assert kinds("host_wait") == ["host_wait copy to the host"] * 2 + ["host_wait item", "host_wait copy to the device"]


def exchange(group: str, rank: int, x: Tensor, y: Tensor, size: int) -> torch.distributed.Work:
    members = torch.distributed.distributed_c10d._resolve_process_group(group)
    members._start_coalescing(x.device)
    members.send([x], (rank + 1) % size, 0)
    members.recv([y], (rank - 1) % size, 0)
    return members._end_coalescing(x.device)


@on_the_machine
def test_messages_move_on_a_stream_of_their_own() -> None:
    def body(rank: Rank) -> Tensor:
        x = torch.full((4,), float(rank.rank), device=rank.device)
        y = torch.empty_like(x)
        exchange(rank.group, rank.rank, x, y, rank.size).wait()
        return y.cpu()

    for size in (1, 2, 5):
        fresh()
        got = run_ring(size, body)
        assert [int(y[0]) for y in got] == [(rank - 1) % size for rank in range(size)]
        assert not history().problems
        fresh()
        with faults(work_wait=0):
            run_ring(size, body)
        assert any("received" in race for race in history().races), history().races
        fresh()
        with faults(communication_wait=None):
            run_ring(size, body)
        assert history().races
