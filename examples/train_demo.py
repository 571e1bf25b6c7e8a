"""Trains a small byte-level transformer on one long context that is cut over several ranks, and proves it exact.

    python examples/train_demo.py [--text FILE] [--ranks 4] [--seq-len 8192] [--steps 24] [--output demo.png]

Every step takes another window of the text. Each rank embeds, normalises and projects its own tokens only; in attention
the key/value blocks travel around the ring. At the end the same weights and one more window go through dense attention
in one process, and the command fails if loss or gradients differ by more than rounding.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import torch
from demo import report
from demo.processes import RankFailure, launch
from demo.proof import compare, dense_run
from demo.text import window_offsets, write_python_text
from demo.training import LAYOUT, Job, train_rank


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small transformer with ring attention and proves the result exact.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--text", help="any file; without it the sources of Python's standard library")
    parser.add_argument("--ranks", type=positive, default=4, help="processes that share the context")
    parser.add_argument("--seq-len", type=positive, default=8192, help="tokens (bytes) of the context")
    parser.add_argument("--steps", type=positive, default=24, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the choice of windows")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="picture of the loss and the memory")
    return parser.parse_args()


def run(arguments: argparse.Namespace, folder: Path) -> bool:
    """The whole demo; `folder` is for what the processes share. Returns whether the ring was exact."""
    if arguments.seq_len < 2:
        raise ValueError("--seq-len must be at least 2: one token attends to itself alone, which no gradient can check")
    if not arguments.output.absolute().parent.is_dir():
        raise ValueError(f"the folder of --output {arguments.output} does not exist")
    if arguments.text and not Path(arguments.text).is_file():
        raise ValueError(f"--text {arguments.text} is not a file")
    text = Path(arguments.text or folder / "text")
    if not arguments.text:
        write_python_text(text)
    seq_len = arguments.seq_len
    window_offsets(text, seq_len, 1, arguments.seed)  # raises before any process starts if the text is too short
    job = Job(text, folder, arguments.ranks, seq_len, arguments.steps, arguments.seed)

    name = arguments.text or "Python's own sources"
    print(f"{seq_len:,} tokens of {name} ({text.stat().st_size:,} bytes) over {job.ranks} gloo ranks, {LAYOUT} layout")
    launch(train_rank, job.ranks, folder, job)
    print("proof: the same weights and one more window in one process, dense attention", flush=True)
    launch(dense_run, 1, folder, job)

    ring, dense = torch.load(folder / "ring.pt"), torch.load(folder / "dense.pt")
    comparison = compare(ring, dense)
    print("", report.table(ring, dense, comparison, seq_len), "", sep="\n")
    report.write_png(arguments.output, ring, dense, seq_len)
    print(f"picture: {arguments.output}")
    return comparison.exact


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended too
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="ringattn-demo-") as folder:
            exact = run(arguments, Path(folder))
    except (RankFailure, OSError, ValueError) as error:
        print(f"\ntrain_demo: {error}", file=sys.stderr)  # the progress bar may have left an open line
        return 1
    except KeyboardInterrupt:
        print("\ntrain_demo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    if not exact:
        print("train_demo: NOT EXACT: ring and dense attention differ by more than the tolerance", file=sys.stderr)
        return 1
    print("exact: loss and gradients of the ring agree with dense attention")
    return 0


if __name__ == "__main__":
    sys.exit(main())
