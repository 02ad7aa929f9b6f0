"""What bad updates do: held-out loss after training under attack, by averaging rule, and who gets named.

Hostile members train like the others and send their delta reversed and ten times as long, or claim a
thousand times their tokens. docs/benchmarks.md has the results and what they mean.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Lie, Scale, Swarm, build
from gossamer.models.corpus import Corpus
from gossamer.models.text import ByteTextTask, TextOptions
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.merge.contributions import Change, ContributionStats, RoundFigures, figures

FULL = Scale(workers=8, windows=24, steps=16, context=64, batch_size=4, eval_batches=64)
QUICK = Scale(workers=4, windows=3, steps=2, context=16, batch_size=2, eval_batches=1)

FLIPPED = Lie(factor=-10.0)
OVERSTATED = Lie(tokens=1000)
BOTH = Lie(factor=-10.0, tokens=1000)
STEPS = Lie(factor=-10_000.0, tokens=2**20, steps=2**17)
"""States so many steps that their square root excuses the length, and tokens for the full weight cap."""

OUTER = {"learning_rate": 0.5, "momentum": 0.7}
"""The settings that docs/benchmarks.md was measured with, and that manifests have where AdamW trains."""

NO_CLIP = {"clip": 0.0}
NO_CAP = {"weight_cap": 0.0}
ONE_FAST = (8.0, *[0.25] * 7)
"""Steps of honest members' windows, as multiples of the usual number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: the rule, settings that differ from the manifest's defaults, and what members do."""

    rule: str
    averaging: str = "rda"
    outer: dict[str, float] = field(default_factory=dict)
    lies: tuple[Lie, ...] = ()
    what: str = "calm"
    speeds: tuple[float, ...] = ()
    own_texts: bool = False


RULES = (
    Case(rule="mean, no clip", averaging="mean", outer=NO_CLIP),
    Case(rule="mean, clip 1.5", averaging="mean", outer={"clip": 1.5}),
    Case(rule="rda, clip 3", outer={"clip": 3.0}),
    Case(rule="rda, clip 1.5", outer={"clip": 1.5}),
    Case(rule="centered-clip", averaging="centered-clip"),
)


def cases() -> list[Case]:
    """All rules with 0, 1 and 2 members that reverse deltas; overstated tokens; unequal honest members."""
    flipped = [
        replace(rule, lies=(FLIPPED,) * count, what=f"{count} turned around, x10" if count else "calm")
        for rule in RULES
        for count in (0, 1, 2)
    ]
    overstated = [
        replace(rule, rule=rule.rule + words, outer={**rule.outer, **cap}, lies=(lie,), what=what)
        for rule in RULES[2:3]
        for words, cap in ((", weight cap 4", {}), (", no weight cap", NO_CAP))
        for lie, what in (
            (OVERSTATED, "1 overstates its tokens x1000"),
            (BOTH, "1 overstates them, turned around, x10"),
        )
    ]
    steps = [
        replace(rule, lies=(STEPS,), what="1 overstates its steps, turned around, x10,000")
        for rule in RULES[2:]
    ]
    differing = [
        replace(rule, what=what, speeds=speeds, own_texts=own_texts)
        for rule in RULES[2:4]
        for what, speeds, own_texts in (
            ("one 32 times as fast", ONE_FAST, False),
            ("texts of their own", (), True),
        )
    ]
    return flipped + overstated + steps + differing


@dataclass(slots=True)
class Seen:
    """What a run showed beside its loss."""

    rounds: list[RoundFigures] = field(default_factory=list)
    changes: list[tuple[int, Change]] = field(default_factory=list)

    def agreements(self, authors: Sequence[bytes]) -> list[float]:
        found = (figures.members[author].agreement for figures in self.rounds for author in authors)
        return [agreement for agreement in found if agreement is not None]

    def clipped(self, authors: Sequence[bytes]) -> list[float]:
        return [figures.members[author].clipped for figures in self.rounds for author in authors]

    def named(self, authors: Sequence[bytes]) -> list[int]:
        """The round of each author's first verdict, for authors that got one."""
        first: dict[bytes, int] = {}
        for round_, change in self.changes:
            first.setdefault(change.node_id, round_)
        return [first[author] for author in authors if author in first]


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Train every case, or a few if `quick`. Prints a line as each ends, and a table; returns its rows."""
    torch.set_num_threads(1)
    scale = QUICK if quick else FULL
    rows = []
    for case in cases()[::4] if quick else cases():
        rows.append(row := _row(case, scale))
        Console().print(f"{row['rule']}, {row['what']}: {row['loss']:.3f} ({row['cpu_s']:.0f} s)")
    _show(rows, scale)
    return rows


def _row(case: Case, scale: Scale) -> dict[str, Any]:
    begun = time.process_time()
    swarm = build(
        scale,
        averaging=case.averaging,
        outer={**OUTER, **case.outer},
        lies=case.lies,
        speeds=case.speeds,
        texts=_texts(scale) if case.own_texts else (),
    )
    loss, seen = _train(swarm)
    authors = [worker.author for worker in swarm.workers]
    hostile, honest = authors[: len(case.lies)], authors[len(case.lies) :]
    return {
        "rule": case.rule,
        "what": case.what,
        "loss": loss,
        "hostile": len(hostile),
        "hostile_named_at": seen.named(hostile),
        "honest_named_at": seen.named(honest),
        "honest_agreement_mean": float(np.mean(seen.agreements(honest) or [0.0])),
        "honest_agreement_min": min(seen.agreements(honest), default=0.0),
        "hostile_agreement_max": max(seen.agreements(hostile), default=None),
        "honest_clipped_max": max(seen.clipped(honest), default=1.0),
        "agreement": [figures.agreement for figures in seen.rounds],
        "cpu_s": time.process_time() - begun,
    }


def _train(swarm: Swarm) -> tuple[float, Seen]:
    """Train to the end. The held-out loss is infinite where Phi left the range of fixed point."""
    seen, stats = Seen(), ContributionStats()
    try:
        for number in range(1, swarm.scale.windows + 1):
            found = figures(swarm.round(number))
            seen.rounds.append(found)
            seen.changes += [(number, change) for change in stats.note(number, found)]
    except DivergedError:
        return inf, seen
    return swarm.evaluate(), seen


def _texts(scale: Scale) -> list[Corpus]:
    """A contiguous part of the corpus for each worker, with its own packages; the last one's is backwards."""
    corpus = ByteTextTask(TextOptions(context=scale.context)).corpus
    parts = np.array_split(corpus.train, scale.workers)
    parts[-1] = np.ascontiguousarray(parts[-1][::-1])
    return [Corpus(part, corpus.held_out) for part in parts]


def _show(rows: list[dict[str, Any]], scale: Scale) -> None:
    title = f"attacks, {scale.workers} members, {scale.windows} windows of {scale.steps} steps, int4"
    table = Table(title=title, title_justify="left")
    for column in ("rule", "members"):
        table.add_column(column)
    for column in ("held-out loss", "hostile named", "honest named", "honest agreement", "hostile at most"):
        table.add_column(column, justify="right")
    for row in rows:
        most = row["hostile_agreement_max"]
        table.add_row(
            row["rule"],
            row["what"],
            f"{row['loss']:.3f}",
            _named(row["hostile_named_at"], row["hostile"]),
            _named(row["honest_named_at"], scale.workers - row["hostile"]),
            f"{row['honest_agreement_mean']:.2f} ({row['honest_agreement_min']:.2f} at least)",
            f"{most:.2f}" if most is not None else "",
        )
    Console(width=150).print(table)


def _named(rounds: Sequence[int], members: int) -> str:
    if not members:
        return ""
    return f"{len(rounds)} of {members}" + (f", from round {max(rounds)}" if rounds else "")
