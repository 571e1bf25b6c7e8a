"""Virtual ranks share the threads of the process, and a rank that gets no thread is an error, not a wait."""

import subprocess
import sys
import textwrap

RUN_LIMIT = 120


def _run(script: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT)
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


def test_a_rank_without_a_thread():
    text = _run(
        """
        import resource, torch
        import ringattn_ext as ra

        inputs = torch.randn(3, 1, 1, 256, 8)
        # Stacks that do not fit: the fortieth thread or so cannot be made, whoever the user is.
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 320 * 2**20, resource.RLIM_INFINITY))
        try:
            ra.virtual_ring_attention(*inputs, world_size=256)
        except ra.RingError as error:
            print(error)
        """
    )
    assert "no thread for virtual rank" in text
