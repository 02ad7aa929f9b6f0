"""Plots that read well on light and dark pages, and have the same bytes for the same figures."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("svg")

INK = "#7a828c"
"""The colour of text and axes: as far from white as from black."""

COLOURS = ("#3b8eea", "#e5853b", "#3fa66b", "#c2569b", "#8a7be0", "#b59b1f")

STYLE = {
    "svg.hashsalt": "gossamer",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def axes(count: int = 1, *, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure of `count` plots side by side, 8 inches wide."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, height))
        return figure, list(figure.subplots(1, count, squeeze=False)[0])


def save(figure: Figure, path: Path) -> None:
    """Write an SVG without a date, on a transparent background."""
    with mpl.rc_context(STYLE):
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Matplotlib leaves spaces at the ends of lines of path data.
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", "utf-8")
