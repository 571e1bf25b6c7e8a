"""Virtual ranks share the threads of the process, and a rank that gets no thread is an error, not a wait."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

RUN_LIMIT = 120


def _run(script: str, **environment: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_are_shared():
    peak = _run(
        """
        import os, threading, torch
        import ringattn_ext as ra

        def threads():
            return len(os.listdir("/proc/self/task"))

        torch.set_num_threads(2)
        torch.randn(512, 512) @ torch.randn(512, 512)  # torch's own team is there
        query, key, value = torch.randn(3, 1, 4, 8192, 64)
        resting, peak, done = threads(), 0, threading.Event()

        def watch():
            global peak
            while not done.wait(0.001):
                peak = max(peak, threads())

        watcher = threading.Thread(target=watch)
        watcher.start()
        ra.virtual_ring_attention(query, key, value, world_size=8, window=(64, 64))
        done.set()
        watcher.join()
        print(peak - resting)
        """
    )
    # The watcher and eight ranks; a team of two for each rank would be eight more.
    assert int(peak) <= 9 + 1, peak


# A pthread_create that fails once a given number of threads has been made.
SHIM = """
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
static int left = -1;
void fail_after(int threads) { left = threads; }
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  typedef int (*Create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (left == 0) return EAGAIN;
  if (left > 0) --left;
  return ((Create)dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, start, argument);
}
"""


@pytest.mark.parametrize("made", [0, 1, 5])
def test_a_rank_without_a_thread(made: int, tmp_path: Path) -> None:
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    command = ["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, timeout=RUN_LIMIT)
    text = _run(
        f"""
        import ctypes, torch
        import ringattn_ext as ra

        torch.set_num_threads(1)
        inputs = torch.randn(3, 1, 1, 64, 8)
        expected = ra.virtual_ring_attention(*inputs, world_size=8)
        shim = ctypes.CDLL({str(library)!r})
        shim.fail_after({made})
        try:
            ra.virtual_ring_attention(*inputs, world_size=8)
        except ra.RingError as error:
            print(error)
        shim.fail_after(-1)
        assert torch.equal(ra.virtual_ring_attention(*inputs, world_size=8), expected)
        """,
        LD_PRELOAD=str(library),
    )
    assert f"no thread for virtual rank {made}" in text
