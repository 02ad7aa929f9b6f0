"""Goodput under failures, a model: what part of the chips' time trains, by how many learners share them.

The method of Decoupled DiLoCo (arXiv 2604.21428), as far as it is published: every chip is interrupted once a
year on average, independently, and an interruption stops whatever works in lock step with it: all chips in
data-parallel training, one learner where learners are decoupled. It is a simulation of interruptions only: no
stragglers, no network, no chips that stay away, and every learner of the same size.

A group of chips that is interrupted needs `restart` (and to rejoin, `rejoin`) undisturbed seconds before it
trains again; an interruption meanwhile begins them anew. The restart times are fitted: they reproduce the
published figures at 2.4 M chips, and the elastic one is then used for ours.

Goodput, as it is published, is the time in which chips train. What an interruption costs beside that, the
work since a learner's last delta, is charged in a row of its own.
"""

from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import plots
from benchmarks.goals import Goal
from benchmarks.tables import Table

YEAR_S = 365.25 * 86_400
CHIPS = (1_200_000, 2_400_000)
LEARNERS = (2, 8, 16, 64, 256)

PLAIN_RESTART_S = 17.2
"""Fitted to 27 % at 2.4 M chips: all chips restart."""
ELASTIC_RESTART_S = 7.2
"""Fitted to 58 % at 2.4 M chips: those left go on without the slice that was interrupted."""
REJOIN_S = 6.7
"""Fitted to 88 % with 8 learners and 93 % with 16, after the elastic restart of one of them."""

OWN_REJOIN_S = 7.0
"""A killed node of a local swarm is back and training after this (`make swarm ARGS=--chaos`): its processes
started, its folder read, what it missed fetched and merged. Of thousands of chips nobody knows yet."""
OWN_WINDOW_S = 10.0
"""A learner that is interrupted loses what it did since its last delta; so much, at most."""


class Method(NamedTuple):
    """What an interruption costs whom."""

    name: str
    undisturbed_s: float
    """Seconds until the group trains again."""
    decoupled: bool = True
    """Whether the chips are divided into learners that do not wait for each other."""
    window_s: float = 0.0
    """Work counts in whole windows of this length; 0 where none is lost."""


METHODS = (
    Method("data-parallel", PLAIN_RESTART_S, decoupled=False),
    Method("elastic data-parallel", ELASTIC_RESTART_S, decoupled=False),
    Method("Decoupled DiLoCo, fitted", ELASTIC_RESTART_S + REJOIN_S),
    Method("Gossamer", ELASTIC_RESTART_S + OWN_REJOIN_S),
    Method("Gossamer, open windows lost", ELASTIC_RESTART_S + OWN_REJOIN_S, window_s=OWN_WINDOW_S),
)
PUBLISHED = {
    ("data-parallel", 2): 0.27,
    ("elastic data-parallel", 2): 0.58,
    ("Decoupled DiLoCo, fitted", 8): 0.88,
    ("Decoupled DiLoCo, fitted", 16): 0.93,
}
"""At 2.4 M chips; the number of learners says nothing of the first two."""


def simulate(method: Method, chips: int, learners: int, interruptions: int, seed: int = 0) -> float:
    """The part of time that trains, over so many interruptions of one group of chips."""
    group = chips / learners if method.decoupled else chips
    gaps = np.random.default_rng(seed).exponential(YEAR_S / group, interruptions)
    useful = np.maximum(gaps - method.undisturbed_s, 0.0)
    if method.window_s:
        useful = np.floor(useful / method.window_s) * method.window_s
    return float(useful.sum() / gaps.sum())


def expected(method: Method, chips: int, learners: int) -> float:
    """The same in closed form: ``exp(-r c)`` at a rate `r`, times ``r w / (exp(r w) - 1)`` in windows `w`."""
    rate = (chips / learners if method.decoupled else chips) / YEAR_S
    whole = rate * method.window_s
    return exp(-rate * method.undisturbed_s) * (whole / (exp(whole) - 1.0) if whole else 1.0)


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Simulate every method with every number of chips and learners: one row each."""
    interruptions = 20_000 if quick else 2_000_000
    return [
        {
            "method": method.name,
            "chips": chips,
            "learners": learners,
            "undisturbed_s": method.undisturbed_s,
            "window_s": method.window_s,
            "goodput": simulate(method, chips, learners, interruptions),
            "expected": expected(method, chips, learners),
            "published": PUBLISHED.get((method.name, learners)) if chips == CHIPS[-1] else None,
        }
        for method in METHODS
        for chips in CHIPS
        for learners in (LEARNERS if method.decoupled else LEARNERS[:1])
    ]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Goodput by method and number of learners, a table for each number of chips."""
    found = []
    for chips in CHIPS:
        lines = []
        for method in METHODS:
            of = {r["learners"]: r for r in rows if (r["method"], r["chips"]) == (method.name, chips)}
            cells = [_cell(of.get(n if method.decoupled else LEARNERS[0])) for n in LEARNERS]
            lines.append((method.name, f"{method.undisturbed_s:g} s", *cells))
        columns = ("method", "interrupted for", *(f"{n} learners" for n in LEARNERS))
        title = f"goodput at {chips / 1e6:g} M chips (published)"
        found.append(Table(title, columns, lines))
    return found


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    published = f" ({row['published']:.0%})" if row["published"] else ""
    return f"{row['goodput']:.1%}{published}"


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Goodput over learners."""
    figure, both = plots.axes(len(CHIPS))
    for axes, chips in zip(both, CHIPS, strict=True):
        for method, colour in zip(METHODS, plots.COLOURS, strict=False):
            of = [r for r in rows if (r["method"], r["chips"]) == (method.name, chips)]
            if method.decoupled:
                axes.plot([r["learners"] for r in of], [r["goodput"] for r in of], "o-", label=method.name)
            else:
                axes.axhline(of[0]["goodput"], color=colour, linestyle="--", label=method.name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(LEARNERS, [str(n) for n in LEARNERS])
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("learners")
        axes.set_title(f"{chips / 1e6:g} M chips", fontsize=10, color=plots.INK)
    both[0].set_ylabel("goodput")
    both[1].legend(loc="lower right", fontsize=8)
    plots.save(figure, folder / "goodput.svg")


def _ours(learners: int, rows: list[dict[str, Any]]) -> float:
    of = ("Gossamer", CHIPS[-1], learners)
    return 100 * next(float(r["goodput"]) for r in rows if (r["method"], r["chips"], r["learners"]) == of)


_REASON = (
    f"ours rejoins in {OWN_REJOIN_S:g} s, as measured of small nodes that are started anew; the published"
    f" figures are fitted with {REJOIN_S:g} s"
)
GOALS = (
    Goal(
        what="goodput at 2.4 M chips with 8 learners, where 88 % is published",
        at_least=88,
        unit="%",
        measured=lambda rows: _ours(8, rows),
        reason=_REASON,
    ),
    Goal(
        what="goodput at 2.4 M chips with 16 learners, where 93 % is published",
        at_least=93,
        unit="%",
        measured=lambda rows: _ours(16, rows),
        reason=_REASON,
    ),
)
