"""What is compared, and what was tried before settings were chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.learning.sweep import Run
from benchmarks.learning.world import Scale
from gossamer.bootstrap.manifests import outer_defaults

FULL = Scale()
LONGER = Scale(windows=67, steps=30)
"""As many steps in windows of 30, which manifests have by default."""
QUICK = Scale(workers=2, windows=4, steps=2, context=16, batch_size=2, eval_windows=8, points=4)

SEEDS = (0, 1, 2)

CALM = "4 workers, windows of 20 steps"
WEATHER = "Gossamer, int4, in rough weather"
THIRTY = "4 workers, windows of 30 steps"

DATA_PARALLEL = "data-parallel AdamW"
INT4 = "Gossamer, int4"
TOPK = "Gossamer, top-k"
RIVALS = ("DiLoCo, tuned", "DiLoCo, as published", "NoLoCo, as published")

PARTED = "two halves for half the run"
SPEEDS = "speeds 1, 1, 1/2, 1/4"
DEATHS = "5 % die a window"

TUNED_DILOCO = {"lr": 0.7, "momentum": 0.7}


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


CASES = [
    Case(group=CALM, label=DATA_PARALLEL, method="data-parallel"),
    Case(group=CALM, label=INT4, method="gossamer", settings=gossamer()),
    Case(group=CALM, label=TOPK, method="gossamer", settings=gossamer("topk")),
    Case(group=CALM, label=RIVALS[0], method="diloco", settings=TUNED_DILOCO),
    Case(group=CALM, label=RIVALS[1], method="diloco", seeds=(0,)),
    Case(group=CALM, label=RIVALS[2], method="noloco", seeds=(0,)),
    Case(group=CALM, label="one worker alone", method="alone", seeds=(0,)),
    Case(group=WEATHER, label="calm", method="gossamer", settings=gossamer()),
    Case(group=WEATHER, label=PARTED, method="gossamer", settings=gossamer(parted=[0.25, 0.75])),
    Case(group=WEATHER, label=SPEEDS, method="gossamer", settings=gossamer(speeds=[1.0, 1.0, 0.5, 0.25])),
    Case(group=WEATHER, label=DEATHS, method="gossamer", settings=gossamer(deaths=0.05)),
    Case(group=THIRTY, label=DATA_PARALLEL, method="data-parallel", seeds=(0,)),
    Case(group=THIRTY, label=INT4, method="gossamer", settings=gossamer(), scale=LONGER, seeds=(0,)),
    Case(group=THIRTY, label=TOPK, method="gossamer", settings=gossamer("topk"), scale=LONGER, seeds=(0,)),
    Case(group=THIRTY, label=RIVALS[0], method="diloco", settings=TUNED_DILOCO, scale=LONGER, seeds=(0,)),
]
