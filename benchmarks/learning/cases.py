"""The runs that are compared, and those that were tried before settings were chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.learning.experts import ExpertsScale
from benchmarks.learning.sweep import Run
from benchmarks.learning.world import Scale
from gossamer.bootstrap.manifests import FRAGMENTS, outer_defaults

FULL = Scale(bfloat16=True)
THIRTIES = replace(FULL, windows=67, steps=30)
"""As many steps, in windows of 30, the default of manifests."""
FIFTIES = replace(FULL, windows=40, steps=50)
HUNDREDS = replace(FULL, windows=20, steps=100)
DECAYING = replace(FULL, decays=True)
EIGHT = replace(FULL, windows=50, workers=8)
WITH_MUON = replace(FULL, optimizer="muon")
JOB = replace(
    WITH_MUON, windows=40, steps=30, batch_size=8, context=128, decays=True, eval_windows=256, points=4
)
"""The task that `make swarm` trains."""

CROWD = Scale(workers=128, windows=32, steps=5, context=32, batch_size=2, points=8)
"""As many tokens as 16 workers make in windows eight times as many."""

MIXTURE = ExpertsScale(windows=30, steps=10, batch_size=2, eval_windows=128, points=3)

STEADY = replace(FULL, points=10)
FIVES = replace(STEADY, windows=400, steps=5)

EXACT = Scale()
"""The same in float32 throughout, as everything was trained at first."""
THIRTIES_EXACT = replace(EXACT, windows=67, steps=30)
CLOSER = replace(EXACT, windows=25, points=5)
QUICK = Scale(workers=2, windows=4, steps=2, context=16, batch_size=2, eval_windows=8, points=4)

SEEDS = (0, 1, 2)
SIX = tuple(range(6))
"""Seeds for cases whose effect is about as large as chance."""

CALM = "4 workers, windows of 20 steps"
WEATHER = "Gossamer, int4, in rough weather"
THIRTY = "4 workers, windows of 30 steps"
LONG = "4 workers, windows of 50 steps"
LONGEST = "4 workers, windows of 100 steps"
MANY = "8 workers, windows of 20 steps"
DECAY = "4 workers, windows of 20 steps, an inner learning rate that falls"
MUON = "4 workers, windows of 20 steps, Muon for the matrices"
MUON_DECAY = "4 workers, windows of 20 steps, Muon and a learning rate that falls"
STEADY_ADAMW = "Averaged at a constant learning rate, windows of 5 unless named: AdamW"
STEADY_MUON = "Averaged at a constant learning rate, windows of 5 unless named: Muon for the matrices"
EXPERTS = "A mixture of experts: 4 workers, windows of 10 steps"
TURNS = "128 workers, windows of 5 steps"
MAIN = "The job of `make swarm`, simulated"
PRECISION = "The same in float32 and with bfloat16 products"
TRIED = "Tried with one seed: int4, outer learning rate / momentum"
TRIED_MUON = "Tried with one seed: Muon in windows of 30, outer learning rate / decay of the residual"
TRIED_SHORT = "Tried with one seed: rivals after 25 windows, outer learning rate / momentum"
TRIED_TOPK = "Tried with one seed: top-k in windows of 30, outer learning rate / decay of the residual"
AVERAGED = (STEADY_ADAMW, STEADY_MUON)
COMPARED = (CALM, WEATHER, THIRTY, DECAY, MUON, MUON_DECAY, EXPERTS, TURNS)
REAL = "Gossamer, int4 in one fragment, simulated and for real"

DATA_PARALLEL = "data-parallel AdamW"
INT4 = "Gossamer, int4"
INT4_WHOLE = "Gossamer, int4, in one fragment"
INT4_MEAN = "Gossamer, int4, mean, 0.7 / 0.5"
INT2 = "Gossamer, int2"
TOPK = "Gossamer, top-k"
NOLOCO = "NoLoCo, as published"
ALONE = "one worker alone"
EVERY_STEP = ("data-parallel", "data-parallel, falling")
FALLING = "Gossamer, int4, windows of 20, falling"
SHORT_INT4 = "Gossamer, int4, mean, 1.0 / 0"
SHORT_TOPK = "Gossamer, top-k, mean, 4.5 / 0"
RIVALS = ("DiLoCo, tuned", "DiLoCo, as published", NOLOCO)

PARTED = "two halves for half the run"
SPEEDS = "speeds 1, 1, 1/2, 1/4"
DEATHS = "5 % die a window"

TOPK_TRIED = ((2.5, 0.8), (3.0, 0.8), (3.5, 0.8), (3.0, 0.9))
"""Pairs of outer learning rate and decay of the residual."""

TUNED_INT4 = {"learning_rate": 0.4, "momentum": 0.5, "ef_decay": 1.0}
PUBLISHED_DILOCO = {"lr": 0.7, "momentum": 0.9}
PUBLISHED_NOLOCO = {"lr": 0.7, "momentum": 0.5}
TUNED_DILOCO = {"lr": 0.7, "momentum": 0.5}


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
        """One run for each seed."""
        for seed in self.seeds:
            yield Run(method=self.method, settings=self.settings, scale=self.scale, seed=seed)


def gossamer(
    codec: str = "int4", outer: dict[str, float] | None = None, fragments: int = FRAGMENTS, **weather: object
) -> dict[str, Any]:
    """Settings of the method: for int4 tuned to this world, as for rivals; otherwise those of manifests."""
    chosen = TUNED_INT4 if codec == "int4" else outer_defaults(codec)
    settings: dict[str, Any] = {"codec": codec, "outer": {**chosen, **(outer or {})}}
    if fragments > 1:
        settings["fragments"] = fragments
    return {**settings, "weather": weather} if weather else settings


def whole(codec: str = "int4", outer: dict[str, float] | None = None) -> dict[str, Any]:
    """The same with the model in one fragment."""
    return gossamer(codec, outer, fragments=1)


def cases(*, quick: bool) -> list[Case]:
    """All cases; if `quick`, only those compared, with one seed and at a size that shows nothing."""
    compared = [*_calm(), *_weather(), *_thirty(), *_wider(), *_decaying(), *_with_muon()]
    compared += [*_with_muon_decaying(), *_steady()]
    if quick:
        return [replace(case, scale=QUICK, seeds=(0,)) for case in compared]
    return [*compared, *_experts(), *_turns(), *_main_job(), *_precision(), *_real(), *_tried()]


def _calm() -> Iterator[Case]:
    exact: dict[str, Any] = {"group": CALM, "scale": EXACT}
    yield Case(label=DATA_PARALLEL, method="data-parallel", seeds=(0, 2), **exact)
    yield Case(group=CALM, label=INT4, method="gossamer", settings=gossamer())
    yield Case(label=INT4_WHOLE, method="gossamer", settings=whole(), **exact)
    yield Case(group=CALM, label=TOPK, method="gossamer", settings=gossamer("topk"), seeds=(0, 2))
    yield Case(label=RIVALS[0], method="diloco", settings=TUNED_DILOCO, seeds=(0, 1), **exact)
    yield Case(label=RIVALS[1], method="diloco", settings=PUBLISHED_DILOCO, seeds=(0,), **exact)
    yield Case(group=CALM, label=NOLOCO, method="noloco", settings=PUBLISHED_NOLOCO, seeds=(0,))
    yield Case(label=ALONE, method="alone", seeds=(0,), **exact)


def _weather() -> Iterator[Case]:
    yield Case(group=WEATHER, label="calm", method="gossamer", settings=gossamer(), seeds=SIX)
    for label, weather, seeds in (
        (PARTED, {"parted": [0.25, 0.75]}, SIX),
        (SPEEDS, {"speeds": [1.0, 1.0, 0.5, 0.25]}, (0,)),
        (DEATHS, {"deaths": 0.05}, (0,)),
    ):
        yield Case(group=WEATHER, label=label, method="gossamer", settings=gossamer(**weather), seeds=seeds)


def _thirty() -> Iterator[Case]:
    yield Case(group=THIRTY, label=DATA_PARALLEL, method="data-parallel", scale=EXACT, seeds=(0, 2))
    one: dict[str, Any] = {"group": THIRTY, "scale": THIRTIES}
    for label, codec, seeds in ((INT4, "int4", (0,)), (INT2, "int2", (0,)), (TOPK, "topk", (0, 2))):
        yield Case(label=label, method="gossamer", settings=gossamer(codec), seeds=seeds, **one)
    one["seeds"] = (0,)
    yield Case(label=RIVALS[0], method="diloco", settings=TUNED_DILOCO, **one)
    one["scale"] = THIRTIES_EXACT
    yield Case(label=INT4_WHOLE, method="gossamer", settings=whole(), **one)


def _wider() -> Iterator[Case]:
    """Longer windows and more workers, with as many tokens."""
    for group, scale in ((LONG, FIFTIES), (LONGEST, HUNDREDS), (MANY, EIGHT)):
        one: dict[str, Any] = {"group": group, "scale": scale, "seeds": (0,)}
        yield Case(label=INT4, method="gossamer", settings=gossamer(), **one)
        yield Case(label=RIVALS[0], method="diloco", settings=TUNED_DILOCO, **one)


def _decaying() -> Iterator[Case]:
    """A falling inner learning rate: with the settings tuned to a constant one, and with more momentum."""
    one: dict[str, Any] = {"group": DECAY, "scale": DECAYING, "seeds": (0,)}
    usual = outer_defaults("int4")
    yield Case(label=DATA_PARALLEL, method="data-parallel", **one)
    yield Case(label=f"{INT4}, 0.4 / 0.5", method="gossamer", settings=gossamer(), **one)
    more = {**one, "seeds": SEEDS}
    yield Case(label=f"{INT4}, 0.5 / 0.7", method="gossamer", settings=gossamer(outer=usual), **more)
    yield Case(label="DiLoCo, 0.7 / 0.5", method="diloco", settings=TUNED_DILOCO, **more)
    yield Case(label="DiLoCo, 0.7 / 0.7", method="diloco", settings={"lr": 0.7, "momentum": 0.7}, **one)
    parted = gossamer(parted=[0.25, 0.75])
    yield Case(label=f"{INT4}, 0.4 / 0.5, {PARTED}", method="gossamer", settings=parted, **one)


def by_mean(momentum: float = 0.5, *, fragments: int = FRAGMENTS, **weather: object) -> dict[str, Any]:
    """Settings with Muon inside: averaged by `mean`, otherwise as in manifests except for the momentum."""
    outer = {**outer_defaults("int4", by_mean=True), "momentum": momentum}
    return {**gossamer(outer=outer, fragments=fragments, **weather), "averaging": "mean"}


def _with_muon() -> Iterator[Case]:
    """Muon inside: averaged as in DiLoCo, as manifests have it, and with settings tuned for AdamW inside."""
    one: dict[str, Any] = {"group": MUON, "scale": WITH_MUON, "seeds": (0,)}
    yield Case(label="data-parallel Muon", method="data-parallel", **one)
    yield Case(label=INT4_MEAN, method="gossamer", settings=by_mean(), **{**one, "seeds": (0, 1)})
    for momentum in (0.6, 0.7):
        label = f"{INT4}, mean, 0.7 / {momentum}"
        yield Case(label=label, method="gossamer", settings=by_mean(momentum), **one)
    yield Case(label=f"{INT4}, rda, 0.4 / 0.5", method="gossamer", settings=gossamer(), **one)
    usual = gossamer(outer=outer_defaults("int4"))
    yield Case(label=f"{INT4}, rda, 0.5 / 0.7", method="gossamer", settings=usual, **one)
    yield Case(label=RIVALS[0], method="diloco", settings=TUNED_DILOCO, **{**one, "seeds": (0, 1)})
    more = {"lr": 0.7, "momentum": 0.7}
    yield Case(label="DiLoCo, 0.7 / 0.7", method="diloco", settings=more, **one)
    parted = by_mean(parted=[0.25, 0.75])
    yield Case(label=f"{INT4_MEAN}, {PARTED}", method="gossamer", settings=parted, **one)


def _with_muon_decaying() -> Iterator[Case]:
    one: dict[str, Any] = {"group": MUON_DECAY, "scale": replace(WITH_MUON, decays=True), "seeds": (0,)}
    yield Case(label="data-parallel Muon", method="data-parallel", **one)
    for momentum in (0.7, 0.6, 0.5):
        label = f"{INT4}, mean, 0.7 / {momentum}"
        yield Case(label=label, method="gossamer", settings=by_mean(momentum), **one)
    usual = gossamer(outer=outer_defaults("int4"))
    yield Case(label=f"{INT4}, rda, 0.5 / 0.7", method="gossamer", settings=usual, **one)


def plain(codec: str, rule: str, lr: float, momentum: float = 0.0, late: int = 1) -> dict[str, Any]:
    """Settings for short windows in one fragment, which the others merge so many steps later."""
    outer = {"learning_rate": lr, "momentum": momentum, "ef_decay": outer_defaults(codec)["ef_decay"]}
    settings = whole(codec, outer) | {"weather": {"late": late}}
    return settings if rule == "rda" else {**settings, "averaging": rule}


def _steady() -> Iterator[Case]:
    """No horizon: a constant rate and short windows, beside a rate that falls."""
    falling_swarms = (gossamer(outer=outer_defaults("int4")), SEEDS), (by_mean(0.6), (0,))
    for group, (settings, seeds) in zip(AVERAGED, falling_swarms, strict=True):
        optimizer = "muon" if group == STEADY_MUON else "adamw"
        one: dict[str, Any] = {"group": group, "scale": replace(STEADY, optimizer=optimizer), "seeds": (0,)}
        falling = {**one, "scale": replace(DECAYING, optimizer=optimizer)}
        fives = {**one, "scale": replace(FIVES, optimizer=optimizer), "method": "gossamer"}
        several = SEEDS if group == STEADY_ADAMW else SEEDS[:2]
        yield Case(label=EVERY_STEP[0], method="data-parallel", **{**one, "seeds": several})
        yield Case(label=EVERY_STEP[1], method="data-parallel", **{**falling, "seeds": several})
        yield Case(label=FALLING, method="gossamer", settings=settings, **{**falling, "seeds": seeds})
        fives["seeds"] = several
        yield Case(label=SHORT_INT4, settings=plain("int4", "mean", 1.0), **fives)
        fives["seeds"] = several if group == STEADY_ADAMW else (0,)
        yield Case(label=SHORT_TOPK, settings=plain("topk", "mean", 4.5), **fives)
    one["group"], one["scale"] = STEADY_ADAMW, STEADY
    long = {**gossamer(outer={"learning_rate": 1.0, "momentum": 0.0}), "averaging": "mean"}
    yield Case(label=f"{SHORT_INT4}, windows of 20, 4 fragments", method="gossamer", settings=long, **one)
    one["scale"] = replace(STEADY, windows=200, steps=10)
    tens = plain("topk", "mean", 4.5, late=2)
    yield Case(label=f"{SHORT_TOPK}, windows of 10", method="gossamer", settings=tens, **one)
    fives["group"], fives["scale"] = STEADY_ADAMW, FIVES
    yield Case(label=f"{INT4}, rda, 1.0 / 0", settings=plain("int4", "rda", 1.0), **fives)
    yield Case(label=f"{INT4}, mean, 0.22 / 0.84", settings=plain("int4", "mean", 0.224, 0.84), **fives)
    fives["scale"] = replace(FIVES, lr=1.5e-3)
    yield Case(label=f"{SHORT_INT4}, inner rate 1.5e-3", settings=plain("int4", "mean", 1.0), **fives)
    for lr in (7e-4, 5e-4):
        fives["scale"] = replace(FIVES, lr=lr)
        yield Case(label=f"{SHORT_TOPK}, inner rate {lr:g}", settings=plain("topk", "mean", 4.5), **fives)


def _experts() -> Iterator[Case]:
    """Settings as in manifests."""
    one: dict[str, Any] = {"group": EXPERTS, "scale": MIXTURE}
    yield Case(label=DATA_PARALLEL, method="data-parallel", **one)
    usual = gossamer(outer=outer_defaults("int4", every_steps=MIXTURE.steps))
    yield Case(label=f"{INT4}, rda, 1.0 / 0", method="gossamer", settings=usual, **one)
    yield Case(label=SHORT_INT4, method="gossamer", settings={**usual, "averaging": "mean"}, **one)
    yield Case(label=ALONE, method="alone", **one)


def _turns() -> Iterator[Case]:
    """Sortition beside what it costs and what it saves; the last row sends as many bytes as with it."""
    one: dict[str, Any] = {"group": TURNS, "method": "gossamer"}
    usual = plain("int4", "mean", 1.0) | {"contributors": 0}
    long = replace(CROWD, windows=CROWD.windows // 8, steps=8 * CROWD.steps)
    yield Case(label="all contribute to a round", settings=usual, scale=CROWD, **one)
    yield Case(label="16 of them do", settings=usual | {"contributors": 16}, scale=CROWD, **one)
    yield Case(label="all, windows of 40", settings=usual, scale=long, **one)
    few = replace(CROWD, workers=16, windows=8 * CROWD.windows)
    yield Case(label="16 workers, 8 times as many steps", settings=usual, scale=few, **one)


def _main_job() -> Iterator[Case]:
    usual = outer_defaults("int4")
    one: dict[str, Any] = {"group": MAIN, "method": "gossamer", "seeds": (0,)}
    for momentum in (0.7, 0.6, 0.5):
        label = f"Muon, 1 fragment, mean, 0.7 / {momentum}"
        yield Case(label=label, settings=by_mean(momentum, fragments=1), scale=JOB, **one)
    yield Case(label="Muon, 1 fragment, rda, 0.5 / 0.7", settings=whole(outer=usual), scale=JOB, **one)
    adamw = replace(JOB, optimizer="adamw")
    yield Case(label="AdamW alone, 1 fragment", settings=whole(outer=usual), scale=adamw, **one)
    yield Case(label="AdamW alone, 4 fragments", settings=gossamer(outer=usual), scale=adamw, **one)


def _precision() -> Iterator[Case]:
    for label, method, settings in (
        (DATA_PARALLEL, "data-parallel", {}),
        (INT4_WHOLE, "gossamer", whole()),
    ):
        for precision, scale in (("float32", EXACT), ("bfloat16 products", FULL)):
            name = f"{label}, {precision}"
            yield Case(group=PRECISION, label=name, method=method, settings=settings, scale=scale, seeds=(0,))


def _real() -> Iterator[Case]:
    yield Case(group=REAL, label="simulated", method="gossamer", settings=whole(), scale=EXACT)
    yield Case(
        group=REAL, label="node processes", method="processes", settings=whole(), scale=EXACT, seeds=(0,)
    )


def _tried() -> Iterator[Case]:
    """The runs that settings were chosen from, one seed each: coarsely first, then finer with whole runs."""

    def case(
        group: str, label: str, settings: dict[str, Any], scale: Scale, method: str = "gossamer"
    ) -> Case:
        return Case(group=group, label=label, method=method, settings=settings, scale=scale, seeds=(0,))

    for lr, decay in TOPK_TRIED:
        settings = gossamer("topk", outer={"learning_rate": lr, "ef_decay": decay})
        yield case(TRIED_TOPK, f"{lr} / {decay}", settings, THIRTIES)
    for lr, momentum in ((0.7, 0.5), (0.7, 0.7), (1.0, 0.5)):
        settings = {"lr": lr, "momentum": momentum}
        yield case(TRIED_SHORT, f"DiLoCo, {lr} / {momentum}", settings, CLOSER, "diloco")
    yield case(TRIED_SHORT, "NoLoCo, 0.7 / 0.5, as published", PUBLISHED_NOLOCO, CLOSER, "noloco")
    yield case(TRIED_SHORT, INT4, whole(), CLOSER)
    for lr, momentum in ((0.3, 0.5), (0.4, 0.4), (0.4, 0.5), (0.5, 0.5)):
        settings = whole(outer={"learning_rate": lr, "momentum": momentum})
        yield case(TRIED, f"{lr} / {momentum}", settings, EXACT)
    four = gossamer(outer={"learning_rate": 0.5})
    yield case(TRIED, "0.5 / 0.5, 4 fragments", four, EXACT)
    mean = {**whole(outer={"learning_rate": 0.7}), "averaging": "mean"}
    yield case(TRIED, "0.7 / 0.5, averaged by mean", mean, EXACT)
    mean = {**gossamer(outer={"learning_rate": 0.7}), "averaging": "mean"}
    yield case(TRIED, "0.7 / 0.5, averaged by mean, 4 fragments", mean, FULL)
    for codec in ("topk", "int2"):
        for rule in ("mean", "rda"):
            outer = outer_defaults(codec, by_mean=rule == "mean")
            settings = {**gossamer(codec, outer), **({"averaging": "mean"} if rule == "mean" else {})}
            label = f"{codec}, {rule}, {outer['learning_rate']} / {outer['ef_decay']}"
            yield case(TRIED_MUON, label, settings, replace(THIRTIES, optimizer="muon"))
