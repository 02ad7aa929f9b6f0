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
TRIED = "Tried with one seed, after 25 windows of 20 steps"
REAL = "Gossamer, int4, simulated and for real"

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
    """All that are run; quickly, each with one seed at a size that teaches nothing, and no processes."""
    if not quick:
        return CASES
    return [replace(case, scale=QUICK, seeds=(0,)) for case in CASES if case.method != "processes"]


OLD = {"learning_rate": 0.5, "momentum": 0.7, "ef_decay": 1.0}
OLD_TOPK = {"learning_rate": 1.0, "momentum": 0.0, "ef_decay": 0.9}
"""What manifests were written with before this was measured."""


def _calm() -> Iterator[Case]:
    yield Case(group=CALM, label=DATA_PARALLEL, method="data-parallel")
    yield Case(group=CALM, label=INT4, method="gossamer", settings=gossamer())
    yield Case(group=CALM, label=TOPK, method="gossamer", settings=gossamer("topk"))
    yield Case(group=CALM, label=RIVALS[0], method="diloco", settings=TUNED_DILOCO)
    yield Case(group=CALM, label=RIVALS[1], method="diloco", seeds=(0,))
    yield Case(group=CALM, label=RIVALS[2], method="noloco", seeds=(0,))
    yield Case(group=CALM, label="one worker alone", method="alone", seeds=(0,))


def _weather() -> Iterator[Case]:
    yield Case(group=WEATHER, label="calm", method="gossamer", settings=gossamer())
    yield Case(group=WEATHER, label=PARTED, method="gossamer", settings=gossamer(parted=[0.25, 0.75]))
    speeds = gossamer(speeds=[1.0, 1.0, 0.5, 0.25])
    yield Case(group=WEATHER, label=SPEEDS, method="gossamer", settings=speeds)
    yield Case(group=WEATHER, label=DEATHS, method="gossamer", settings=gossamer(deaths=0.05))


def _thirty() -> Iterator[Case]:
    yield Case(group=THIRTY, label=DATA_PARALLEL, method="data-parallel", seeds=(0,))
    for label, method, settings in (
        (INT4, "gossamer", gossamer()),
        (TOPK, "gossamer", gossamer("topk")),
        (RIVALS[0], "diloco", TUNED_DILOCO),
    ):
        yield Case(group=THIRTY, label=label, method=method, settings=settings, scale=LONGER, seeds=(0,))


def _real() -> Iterator[Case]:
    yield Case(group=REAL, label="simulated", method="gossamer", settings=gossamer())
    yield Case(group=REAL, label="node processes", method="processes", settings=gossamer(), seeds=(0,))


def _tried() -> Iterator[Case]:
    """A quarter of a run each: what the settings above were chosen from."""

    def case(label: str, method: str, settings: dict[str, Any], **scale: Any) -> Case:
        short = replace(FULL, windows=25, points=5, **scale)
        return Case(group=TRIED, label=label, method=method, settings=settings, scale=short, seeds=(0,))

    yield case("data-parallel, inner lr 1e-3", "data-parallel", {})
    for lr in (5e-4, 2e-3):
        yield case(f"data-parallel, inner lr {lr:g}", "data-parallel", {}, lr=lr)
    for lr, momentum in ((0.7, 0.3), (0.7, 0.5), (0.7, 0.7), (1.0, 0.5)):
        yield case(f"DiLoCo, {lr} / {momentum}", "diloco", {"lr": lr, "momentum": momentum})
    for lr, momentum in ((0.7, 0.5), (0.7, 0.3), (0.5, 0.5)):
        yield case(f"NoLoCo, {lr} / {momentum}", "noloco", {"lr": lr, "momentum": momentum})
    for lr, momentum in ((0.5, 0.4), (0.5, 0.5), (0.5, 0.6), (0.5, 0.7), (0.6, 0.4), (0.6, 0.5)):
        settings = gossamer(outer={"learning_rate": lr, "momentum": momentum})
        yield case(f"int4, {lr} / {momentum}", "gossamer", settings)
    for fragments in (4, 8):
        yield case(f"int4, {fragments} fragments", "gossamer", {**gossamer(), "fragments": fragments})
    yield case("int4, not late", "gossamer", gossamer(late=0))
    for lr, decay in ((1.0, 0.9), (2.0, 0.8), (2.5, 0.8), (2.5, 0.9), (3.0, 0.8)):
        settings = gossamer("topk", outer={"learning_rate": lr, "ef_decay": decay})
        yield case(f"top-k, lr {lr}, decay {decay}", "gossamer", settings)
    for workers in (1, 2):
        for lr, decay in ((1.0, 0.9), (2.5, 0.8)):
            settings = gossamer("topk", outer={"learning_rate": lr, "ef_decay": decay})
            label = f"top-k, lr {lr}, decay {decay}, {workers} worker{'s' * (workers > 1)}"
            yield case(label, "gossamer", settings, workers=workers)


CASES = [*_calm(), *_weather(), *_thirty(), *_real(), *_tried()]
