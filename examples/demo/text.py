"""The training text as a file of bytes, and the windows that are cut from it.

A token is a byte. Every rank reads the window of a step from the file (one byte per token); what a rank computes on
are only its own tokens of it, picked by their global positions.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = {".py", ".rst", ".txt"}


def write_python_text(path: Path) -> None:
    """Writes the text files of this Python's standard library, one after the other in sorted order, to `path`."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(
        file
        for file in root.rglob("*")
        if file.suffix in SUFFIXES and file.is_file() and not {"site-packages", "dist-packages"} & set(file.parts)
    )
    with path.open("wb") as out:
        for source in sources:
            out.write(source.read_bytes())


def window_offsets(text: Path, seq_len: int, count: int, seed: int) -> list[int]:
    """Where in the text the `count` windows of seq_len + 1 bytes begin: random, the same on every rank."""
    choices = text.stat().st_size - seq_len
    if choices < 1:
        raise ValueError(
            f"{text} has {text.stat().st_size} bytes; a context of {seq_len} tokens and the label of its last one need "
            f"{seq_len + 1}. Take a longer text or a smaller --seq-len."
        )
    return torch.randint(choices, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens_and_labels(text: Path, offset: int, seq_len: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at these global positions of a window and their labels, both int64 [1, S_local].

    The label of global position p is byte p + 1 of the window. At the end of a rank's chunk that byte belongs to
    another rank: shifting the rank's own tokens by one would give it a wrong label.
    """
    with text.open("rb") as file:
        file.seek(offset)
        window = torch.frombuffer(bytearray(file.read(seq_len + 1)), dtype=torch.uint8).long()
    return window[positions][None], window[positions + 1][None]
