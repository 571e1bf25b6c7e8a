"""What Python does for a ring that waits: signals, the log, forks, and its own end."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import INIT, run_script

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("end", ["lost", "refused", "well"])
def test_python_ends_while_a_thread_waits(end: str, tmp_path: Path) -> None:
    """A daemon thread in a call is no reason to crash, however its call ends when Python is already at its end."""
    body = """
import threading, time
init(0)
prove()
if rank == 0:
    call = lambda: attempt(ra.ring_attention, **small_call(rank, 2))
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.5)
    class Late:                            # is deleted when Python is nearly gone
        def __del__(self, sleep=time.sleep):
            sleep(1.5)
    sys.kept = Late()
    print("ends", flush=True)
else:
    time.sleep(1.2)                        # so that it is while the other one is at it
    if END != "lost":
        attempt(ra.ring_attention, **small_call(rank, 2, scale=-1.0 if END == "refused" else None))
    os._exit(0)
"""
    assert run_script(f"END = {end!r}\n" + INIT + body, tmp_path, 2) == ["ends\n", ""]


def test_interrupt_while_a_warning_is_logged(tmp_path: Path) -> None:
    body = """
import logging, signal, time
os.environ["RINGATTN_WARN_SEC"] = "0.5"
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow(logging.Handler):
    def emit(self, record):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(20)
import threading
logging.getLogger("ringattn_ext").addHandler(Slow())
init(0)
prove()
if rank == 0:
    begin = time.monotonic()
    try:
        ra.ring_attention(**small_call(rank, 2))
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - begin < 4, flush=True)
else:
    time.sleep(3)
    error, text = attempt(ra.ring_attention, **small_call(rank, 2))
    assert error == "RingError", (error, text)
    print("noticed", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, 2) == ["interrupted True\n", "noticed\n"]


def test_handler_of_the_log_that_fails(tmp_path: Path) -> None:
    """Is no reason to stop waiting."""
    body = """
import logging, time
os.environ["RINGATTN_WARN_SEC"] = "0.5"
logging.raiseExceptions = False
class Bad(logging.Handler):
    def handle(self, record):
        raise OSError("the disk is full")
logging.getLogger("ringattn_ext").addHandler(Bad())
init(0)
if rank == 1:
    time.sleep(1.5)
prove()
print("done", flush=True)
os._exit(0)
"""
    first, second = run_script(INIT + body, tmp_path, 2)
    assert "the disk is full" in first and first.endswith("done\n") and second == "done\n"


def test_forked_child_of_a_process_without_calls(tmp_path: Path) -> None:
    """Through operators too, and on a group that the parent has made and not used; the parent then uses it."""
    body = """
import time
init(0)
if rank == 0:
    pid = os.fork()
    if pid == 0:
        order = torch.zeros(1, dtype=torch.int64)
        begin = time.monotonic()
        for call in (
            lambda: torch.ops.ringattn.gather(torch.ones(3), order, 0, "0", "contiguous", None),
            lambda: ra.ring_attention(**small_call(rank, 2)),
        ):
            error, text = attempt(call)
            assert error == "RingError" and "forked from" in text, (error, text)
        assert time.monotonic() - begin < 5
        dist.distributed_c10d._world.pg_map.clear()     # its own group, of the same name
        dist.distributed_c10d._world.pg_names.clear()
        dist.distributed_c10d._unregister_all_process_groups()
        dist.distributed_c10d.GroupMember.WORLD = None
        world_size = 1
        init(7)
        prove()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
prove()
print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, 2) == ["done\n"] * 2


def test_death_beside_a_rank_that_is_late(tmp_path: Path) -> None:
    """Those that wait for the late one need not wait for it to notice."""
    body = """
import threading, time
init(0, timeout=40)
prove()
dist.barrier()
if rank == 1:
    time.sleep(14)
if rank == 3:
    threading.Timer(1.0, os._exit, (0,)).start()     # in the middle of its call
begin = time.monotonic()
try:
    ra.ring_attention(**small_call(rank, 4))
except ra.RingError as error:
    took = time.monotonic() - begin
    assert error.peer == 3 and took < 11, (error, error.peer, took)
    print("noticed", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, 4) == ["noticed\n", "noticed\n", "noticed\n", ""]


def test_handlers_that_take_their_time(tmp_path: Path) -> None:
    """While one runs, the other rank comes, does its part and leaves: its messages have arrived. And a call that a
    handler makes on the same group is refused, and changes nothing."""
    body = """
import signal, threading, time
answers = []
def handler(number, frame):
    if number == signal.SIGUSR1:
        time.sleep(2.0)
    else:
        answers.append(attempt(ra.ring_attention, **small_call(rank, 2)))
signal.signal(signal.SIGUSR1, handler)
signal.signal(signal.SIGUSR2, handler)
init(0)
prove()
if rank == 0:                                  # refuses, and is asked in the middle of it
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGUSR2)).start()
else:
    time.sleep(1.0)
error, text = attempt(ra.ring_attention, **small_call(rank, 2, scale=-1.0 if rank == 0 else None))
assert error == ("ValueError" if rank == 0 else "RingError"), (error, text)
prove()
if rank == 0:
    (error, text), = answers
    assert error == "RingError" and "what this one has interrupted" in text, (error, text)
    threading.Timer(0.35, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    ra.unshard(torch.ones(3), 0)
else:
    time.sleep(0.8)
    ra.unshard(torch.ones(3), 0)
    dist.destroy_process_group()
print("done", flush=True)
os._exit(0)
"""
    assert run_script(INIT + body, tmp_path, 2) == ["done\n"] * 2


# --- groups without a backend for the CPU, which get one on the side ---

WITHOUT_CPU = INIT.replace('"gloo"', '"cuda:gloo"')


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_does_not_come_to_the_side_group(world_size: int, tmp_path: Path) -> None:
    body = """
import time
init(0, timeout=3)
if rank > 0:
    for text_of_first in ("", None):
        begin = time.monotonic()
        error, text = attempt(ra.ring_attention, **small_call(rank, world_size))
        took = time.monotonic() - begin
        assert error == "RingError" and "has no side group" in text, (error, text)
        assert took < (8 if text_of_first == "" else 0.2), took
        first = text if text_of_first == "" else first
        assert text == first
    print("done", flush=True)
else:
    time.sleep(9)
os._exit(0)
"""
    assert run_script(WITHOUT_CPU + body, tmp_path, world_size)[1:] == ["done\n"] * (world_size - 1)


def test_interrupt_while_the_side_group_is_made(tmp_path: Path) -> None:
    body = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
init(0, timeout=20)
if rank == 1:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        ra.ring_attention(**small_call(rank, 2))
    except KeyboardInterrupt:
        assert time.monotonic() - begin < 2
    error, text = attempt(ra.ring_attention, **small_call(rank, 2))
    assert error == "RingError" and "interrupted" in text, (error, text)
    print("done", flush=True)
else:
    time.sleep(4)
os._exit(0)
"""
    assert run_script(WITHOUT_CPU + body, tmp_path, 2)[1] == "done\n"


def test_first_calls_of_two_threads_on_one_group(tmp_path: Path) -> None:
    """One side group is made, and one of the threads is told of the other, or comes after it."""
    body = """
import threading
init(0, timeout=15)
answers = []
def call():
    answers.append(attempt(ra.init, device="cpu"))
threads = [threading.Thread(target=call) for _ in range(2 if rank == 0 else 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
expected = "expected a device whose tensors the group can carry"      # in what all ranks say once
crossed = "another thread"
assert all(expected in text or crossed in text or "refused" in text for _, text in answers), answers
assert any(expected in text for _, text in answers), answers
print("done", flush=True)
os._exit(0)
"""
    assert run_script(WITHOUT_CPU + body, tmp_path, 2) == ["done\n"] * 2
