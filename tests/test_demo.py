"""The demo as a command, and its proof: that it passes, and that it fails when a gradient is wrong."""

import dataclasses
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ringattn_ext as ra

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_demo  # noqa: E402
from demo.proof import compare  # noqa: E402
from demo.text import tokens_and_labels, window_offsets, write_python_text  # noqa: E402

NUMBER = r"([\d,.]+(?:e[-+]\d+)?)"


def demo_command(*options: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / "train_demo.py"), *map(str, options)]


def run_demo(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(demo_command(*options), capture_output=True, text=True, timeout=300)


@pytest.mark.timeout(300)
def test_small_demo_passes_and_reports(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    done = run_demo("--text", __file__, "--seq-len", 511, "--steps", 5, "--ranks", 3, "--output", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")

    def figures(label: str) -> list[float]:
        line = re.search(rf"^ *{label}[^\n]*$", done.stdout, re.MULTILINE)
        assert line, f"no line {label!r} in\n{done.stdout}"
        return [float(number.replace(",", "")) for number in re.findall(rf"\s{NUMBER}(?=\s|$)", line[0])]

    (first,), (last,) = figures("loss in nats per byte, first step"), figures("loss in nats per byte, last step")
    assert 5 < first < 6.5 and last < first
    assert figures("tokens/s")[0] > 0
    for process in ("rank 0", "rank 1", "rank 2", "dense, one process"):
        rest, peak, increase = figures(process)[-3:]
        assert 0 < rest <= peak and increase == pytest.approx(peak - rest, abs=0.11)
    for row in ("loss  ", "gradient, all", "gradient, worst"):
        difference, tolerance = figures(row)
        assert 0 <= difference <= tolerance


@pytest.mark.timeout(300)
def test_demo_refuses_unusable_input_before_it_starts(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 64)
    done = run_demo("--text", short, "--seq-len", 64)
    assert done.returncode == 1 and "has 64 bytes" in done.stderr and "need 65" in done.stderr
    done = run_demo("--seq-len", 1)
    assert done.returncode == 1 and "at least 2" in done.stderr
    done = run_demo("--text", tmp_path / "missing.txt")
    assert done.returncode == 1 and "missing.txt is not a file" in done.stderr
    done = run_demo("--output", tmp_path / "missing" / "demo.png")
    assert done.returncode == 1 and "does not exist" in done.stderr


@pytest.mark.timeout(300)
def test_command_fails_when_a_gradient_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch_and_spoil(work: Callable[..., None], processes: int, folder: Path, *args: object) -> None:
        launch(work, processes, folder, *args)
        if work is train_demo.train_rank:
            ring = torch.load(folder / "ring.pt")
            gradient = ring["gradients"]["layers.1.value.weight"]
            gradient[0, 0] += 1e-3 * gradient.norm()
            torch.save(ring, folder / "ring.pt")

    launch = train_demo.launch
    monkeypatch.setattr(train_demo, "launch", launch_and_spoil)
    options = ["--text", __file__, "--seq-len", 100, "--steps", 1, "--ranks", 2, "--output", tmp_path / "demo.png"]
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *map(str, options)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert train_demo.main() == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    shown = capsys.readouterr()
    assert "NOT EXACT" in shown.err
    assert re.search(r"gradient, worst: layers\.1\.value\.weight +1\.0e-03 ", shown.out)


def make_result() -> dict:
    gradients = {"small": torch.full((4,), 1e-3), "large": torch.full((4, 4), 10.0)}
    return {"loss": 2.5, "gradients": gradients}


def test_comparison_accepts_rounding() -> None:
    ring = make_result()
    ring["loss"] *= 1 + 1e-6
    ring["gradients"]["large"] *= 1 + 1e-6
    comparison = compare(ring, make_result())
    assert comparison.exact and comparison.worst_parameter == "large"


@pytest.mark.parametrize("factor", [1 + 2e-4, 1 - 2e-4, 0.0, float("nan"), float("inf")])
def test_comparison_fails_on_one_wrong_gradient(factor: float) -> None:
    """Also where the parameter is too small to show in the gradient of all parameters."""
    ring = make_result()
    ring["gradients"]["small"] *= factor
    comparison = compare(ring, make_result())
    assert not comparison.exact and comparison.worst_parameter == "small"


@pytest.mark.parametrize("loss", [2.5 * (1 + 2e-5), float("nan")])
def test_comparison_fails_on_a_wrong_loss(loss: float) -> None:
    assert not compare({**make_result(), "loss": loss}, make_result()).exact


def test_comparison_fails_where_the_dense_gradient_is_zero_and_the_rings_is_not() -> None:
    dense = make_result()
    dense["gradients"]["small"].zero_()
    assert not compare(make_result(), dense).exact
    assert compare(dense, dense).exact


def test_comparison_refuses_different_parameters() -> None:
    ring = make_result()
    del ring["gradients"]["small"]
    with pytest.raises(ValueError, match="different parameters"):
        compare(ring, make_result())


@pytest.mark.parametrize(("seq_len", "ranks"), [(64, 4), (61, 3), (5, 4)])
def test_labels_follow_global_positions(tmp_path: Path, seq_len: int, ranks: int) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(200)))
    seen = {}
    for rank in range(ranks):
        positions = ra.positions(seq_len, layout="zigzag", rank=rank, world_size=ranks)
        tokens, labels = tokens_and_labels(text, 7, seq_len, positions)
        assert tokens.shape == labels.shape == (1, len(positions))
        seen |= zip(tokens[0].tolist(), labels[0].tolist(), strict=True)
    assert seen == {byte: byte + 1 for byte in range(7, 7 + seq_len)}


def test_python_text_is_the_standard_library(tmp_path: Path) -> None:
    write_python_text(tmp_path / "text")
    text = (tmp_path / "text").read_bytes()
    assert len(text) > 1_000_000
    assert Path(dataclasses.__file__).read_bytes() in text


def test_windows_stay_inside_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(70))
    offsets = window_offsets(text, 64, 100, seed=3)
    assert set(offsets) == set(range(6))  # the last window ends with the last byte as a label
    assert offsets == window_offsets(text, 64, 100, seed=3) != window_offsets(text, 64, 100, seed=4)


FAILING_RANK = """
import os, signal, sys, tempfile, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from demo.processes import RankFailure, launch

def work(rank, how):
    if rank != 1:
        time.sleep(1000)
    if how == "raise":
        raise ValueError("this one is broken")
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(work, 3, Path(folder), sys.argv[2])
        except RankFailure as error:
            print(error)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "message"), [("raise", "rank 1 failed:"), ("kill", "rank 1 was ended by SIGKILL")], ids=["raise", "kill"]
)
def test_one_failing_rank_ends_all_with_its_error(tmp_path: Path, how: str, message: str) -> None:
    script = tmp_path / "failing_rank.py"
    script.write_text(FAILING_RANK)
    command = [sys.executable, str(script), str(EXAMPLES), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)  # the other ranks sleep for 1000 s
    assert done.stdout.startswith(message), done.stdout + done.stderr
    assert how != "raise" or "ValueError: this one is broken" in done.stdout


def heed_interrupts() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and Python leaves it at that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(300)
def test_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    command = demo_command("--text", __file__, "--seq-len", 512, "--steps", 100000, "--ranks", 2)
    errors = tmp_path / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, preexec_fn=heed_interrupts) as demo,
    ):
        try:
            while "tokens/s" not in errors.read_text():
                assert demo.poll() is None, errors.read_text()
                time.sleep(0.2)
            ranks = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
            assert len(ranks) >= 2
            demo.send_signal(signal.SIGINT)
            assert demo.wait(60) == 130
        finally:
            demo.kill()
    assert "interrupted" in errors.read_text()
    deadline = time.monotonic() + 30  # the resource tracker of multiprocessing ends a moment after its parent
    while left := [rank for rank in ranks if Path(f"/proc/{rank}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.1)
