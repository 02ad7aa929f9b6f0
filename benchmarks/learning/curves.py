"""Curves of held-out loss as SVG: transparent, readable on light and dark, the same bytes every time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

INK = "#7d8590"
"""Of text and axes: legible on white and on black."""

COLOURS = ("#8b949e", "#3b82f6", "#e8590c", "#2f9e44", "#ae3ec9", "#d6336c", "#0c8599", "#b08900")


class Curve(NamedTuple):
    """One line of a plot; the band is from the least to the greatest of all seeds."""

    label: str
    x: Sequence[float]
    low: Sequence[float]
    middle: Sequence[float]
    high: Sequence[float]


def draw(curves: Sequence[Curve], file: Path, *, x_label: str, is_log: bool = False) -> None:
    """Write the plot. Needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "svg.hashsalt": "gossamer",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for curve, colour in zip(curves, COLOURS, strict=False):
            axes.plot(curve.x, curve.middle, color=colour, linewidth=1.8, label=curve.label)
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        axes.set(xlabel=x_label, ylabel="held-out loss, nats per byte")
        if is_log:
            axes.set_xscale("log")
        axes.grid(color=INK, alpha=0.2, linewidth=0.6)
        axes.legend(frameon=False)
        metadata = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)  # type: ignore[arg-type]
    # Matplotlib ends lines of paths with blanks.
    file.write_text("".join(line.rstrip() + "\n" for line in file.read_text().splitlines()))
