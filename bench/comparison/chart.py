"""The chart of the README: how many times faster than torch, and how close to the matrix product."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .result import Result

COLOURS = {"forward": "#1f6f8b", "backward": "#d1603d"}
BAR_COLOUR, LINE_COLOUR = "#20262b", "#8a939b"


def draw(results: Sequence[Result], caption: str, path: Path) -> None:
    """A PNG with a row per case that is compared with torch, of the largest number of threads; without any, nothing."""
    from matplotlib.figure import Figure  # it is needed here alone

    compared = [result for result in results if result.group == "attention"]
    if not compared:
        return
    threads = max(result.threads for result in compared)
    rows = [result for result in compared if result.threads == threads]
    figure = Figure(figsize=(9.6, 1.6 + 0.24 * len(rows)), layout="constrained", dpi=100)
    ratios, shares = figure.subplots(1, 2, sharey=True, width_ratios=(1.3, 1))
    places = range(len(rows))
    colours = [COLOURS["backward" if "backward" in result.name else "forward"] for result in rows]

    _style(ratios, f"times torch's speed, {threads} thread{'s' if threads > 1 else ''}")
    ratios.barh(places, [result.ratio for result in rows], color=colours, height=0.7)
    for place, result in zip(places, rows, strict=True):
        ratios.text(max(result.ratio, result.bar or 0) * 1.06, place, f"{result.ratio:.2f}", va="center", fontsize=8)
    _marks(ratios, [result.bar for result in rows])
    ratios.axvline(1, color=LINE_COLOUR, linewidth=1)
    ratios.set_xscale("log")
    ratios.set_xlim(min(0.5, *(result.ratio for result in rows)), 1.35 * max(result.ratio for result in rows))
    ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16, 32) if ratios.get_xlim()[0] <= tick <= ratios.get_xlim()[1]]
    ratios.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    ratios.minorticks_off()
    ratios.set_yticks(places, [result.name for result in rows], fontsize=8)
    ratios.invert_yaxis()

    _style(shares, "share of the matrix product's rate in %")
    shares.barh(places, [100 * (result.share or 0) for result in rows], color=colours, height=0.7)
    _marks(shares, [None if result.share_bar is None else 100 * result.share_bar for result in rows])
    figure.supxlabel("\n".join(textwrap.wrap(f"{caption}. Black marks: the bars set beforehand.", 150)), fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """With a palette, which makes it a third as large; the README's pictures are small."""
    from PIL import Image  # matplotlib brings it

    whole = io.BytesIO()
    figure.savefig(whole, format="png")
    with Image.open(whole) as image:
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e6e9eb")


def _marks(axes: Any, bars: Sequence[float | None]) -> None:
    """A short line across the row of every number that has a bar to reach."""
    for place, bar in enumerate(bars):
        if bar is not None:
            axes.plot([bar, bar], [place - 0.42, place + 0.42], color=BAR_COLOUR, linewidth=1.6)
