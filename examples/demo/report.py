"""What the demo shows at its end: a table of figures and a picture."""

import math
from pathlib import Path
from statistics import median
from typing import Any

from .proof import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Comparison

RING_COLOUR, DENSE_COLOUR, REST_COLOUR = "#1f6f8b", "#d1603d", "#cfd4d8"


def tokens_per_second(ring: dict[str, Any], seq_len: int) -> float:
    return seq_len / median(ring["seconds"])


def table(ring: dict[str, Any], dense: dict[str, Any], comparison: Comparison, seq_len: int) -> str:
    losses = ring["losses"]
    memory = [(f"rank {rank}", *row) for rank, row in enumerate(ring["memory"])]
    memory.append(("dense, one process", *dense["memory"]))
    rows = [
        ("loss", comparison.loss, LOSS_TOLERANCE),
        ("gradient, all parameters", comparison.all_gradients, GRADIENT_TOLERANCE),
        (f"gradient, worst: {comparison.worst_parameter}", comparison.worst_gradient, GRADIENT_TOLERANCE),
    ]
    lines = [
        "training",
        f"  {'loss in nats per byte, first step':<46}{losses[0]:>12.4f}",
        f"  {'loss in nats per byte, last step':<46}{losses[-1]:>12.4f}",
        f"  {'tokens/s, all ranks together':<46}{tokens_per_second(ring, seq_len):>12,.0f}",
        "",
        f"{'memory in MiB':<24}{'at rest':>12}{'peak':>12}{'increase':>12}",
        *(f"  {name:<22}{rest:>12.1f}{peak:>12.1f}{peak - rest:>12.1f}" for name, rest, peak in memory),
        "",
        f"{'exactness, ring against dense attention':<48}{'difference':>12}{'tolerance':>12}",
        *(f"  {name:<46}{difference:>12.1e}{tolerance:>12.0e}" for name, difference, tolerance in rows),
    ]
    return "\n".join(lines)


def write_png(path: Path, ring: dict[str, Any], dense: dict[str, Any], seq_len: int) -> None:
    """The loss of every step; beside it the memory of every rank and of the dense run."""
    from matplotlib.figure import Figure  # here, so that the ranks' memory does not count matplotlib

    losses, ranks = ring["losses"], len(ring["memory"])
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=130)
    figure.suptitle(f"Training on one context of {seq_len:,} tokens over {ranks} ranks", fontweight="bold")
    loss_axes, memory_axes = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for axes in (loss_axes, memory_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#e6e9eb")

    loss_axes.set_title(f"Loss, {tokens_per_second(ring, seq_len):,.0f} tokens/s", loc="left", fontsize=11)
    loss_axes.plot(range(1, len(losses) + 1), losses, color=RING_COLOUR, linewidth=2, marker="o", markersize=4)
    loss_axes.axhline(math.log(256), color="#8a939b", linewidth=1, linestyle="--")
    loss_axes.annotate(
        "every byte equally likely", (1, math.log(256)), (0, 4), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", fontsize=9, color="#6a737b",
    )  # fmt: skip
    loss_axes.set(xlabel="step, each on another window of the text", ylabel="nats per byte")
    loss_axes.xaxis.get_major_locator().set_params(integer=True)

    names = [f"rank {rank}" for rank in range(ranks)] + ["dense,\none process"]
    memory = [*ring["memory"], dense["memory"]]
    rests, increases = [rest for rest, _ in memory], [peak - rest for rest, peak in memory]
    memory_axes.set_title("Peak memory of a process", loc="left", fontsize=11)
    memory_axes.bar(names, rests, color=REST_COLOUR, width=0.66, label="at rest (Python, torch, weights)")
    colours = [RING_COLOUR] * ranks + [DENSE_COLOUR]
    label = "increase while training"
    bars = memory_axes.bar(names, increases, bottom=rests, color=colours, width=0.66, label=label)
    memory_axes.bar_label(bars, [f"+{increase:,.0f}" for increase in increases], padding=3, fontsize=10)
    memory_axes.set_ylabel("MiB")
    memory_axes.set_ylim(top=1.25 * max(peak for _, peak in memory))
    memory_axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path, format="png")
