"""What is compared, and what was tried before settings were chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.learning.sweep import Run
from benchmarks.learning.world import Scale
from gossamer.bootstrap.manifests import outer_defaults

FULL = Scale()
QUICK = Scale(workers=2, windows=4, steps=2, context=16, batch_size=2, eval_windows=8, points=4)

SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of a table: the same run with several seeds."""

    group: str
    label: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    scale: Scale = FULL
    seeds: tuple[int, ...] = SEEDS

    def runs(self) -> Iterator[Run]:
        """One for each seed."""
        for seed in self.seeds:
            yield Run(method=self.method, settings=self.settings, scale=self.scale, seed=seed)


def gossamer(codec: str = "int4", outer: dict[str, float] | None = None, **weather: object) -> dict[str, Any]:
    """Settings of the method: the defaults that manifests are written with, written out."""
    settings: dict[str, Any] = {"codec": codec, "outer": {**outer_defaults(codec), **(outer or {})}}
    return {**settings, "weather": weather} if weather else settings


def cases(*, quick: bool) -> list[Case]:
    """All that are run; quickly, each with one seed at a size that teaches nothing."""
    if not quick:
        return CASES
    return [replace(case, scale=QUICK, seeds=(0,)) for case in CASES]


CALM = "4 workers, windows of 20 steps"
WEATHER = "Gossamer, int4, in rough weather"

CASES = [
    Case(group=CALM, label="data-parallel AdamW", method="data-parallel"),
    Case(group=CALM, label="Gossamer, int4", method="gossamer", settings=gossamer()),
    Case(group=CALM, label="Gossamer, top-k", method="gossamer", settings=gossamer("topk")),
    Case(group=CALM, label="DiLoCo, tuned", method="diloco", settings={"lr": 0.7, "momentum": 0.7}),
    Case(group=CALM, label="DiLoCo, as published", method="diloco"),
    Case(group=CALM, label="NoLoCo, as published", method="noloco"),
    Case(group=CALM, label="one worker alone", method="alone"),
    Case(group=WEATHER, label="calm", method="gossamer", settings=gossamer()),
    Case(
        group=WEATHER,
        label="two halves for half the run",
        method="gossamer",
        settings=gossamer(parted=[0.25, 0.75]),
    ),
    Case(
        group=WEATHER,
        label="speeds 1, 1, 1/2, 1/4",
        method="gossamer",
        settings=gossamer(speeds=[1.0, 1.0, 0.5, 0.25]),
    ),
    Case(group=WEATHER, label="5 % die a window", method="gossamer", settings=gossamer(deaths=0.05)),
]
