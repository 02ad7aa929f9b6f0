"""Time to a given loss with nothing set, against fixed windows and codecs, on lines of many kinds.

Four hosts are network namespaces on one bridge, limited by `tc tbf` both ways once all have the model. Each
trains a byte-level GPT with the text task's own optimizer. **A step is mostly waiting**, as on a host whose
accelerator computes: it is padded to a fixed time. Two cores carry four hosts and their daemons only **in
slow motion**: steps take several times as long as named, lines carry as many times less, and times are
divided by that. A run in which other work on these cores kept hosts from their steps is made again.

The loss is that of the averaged model, held out. Who evaluates is this process and no host: it reads the
first host's folder every few seconds. The time to the target is interpolated between two evaluations. A run
with fixed choices is given up where the best one before it was as far in two thirds of the time.

Every run is kept in benchmarks/out/adaptive-LINES.json as it ends, and not made again while that file is
there. ``python -m benchmarks.adaptive LINES`` makes the runs on some lines only.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import plots
from benchmarks.goals import Goal
from benchmarks.lines import START_S, start, wait
from benchmarks.tables import Table
from gossamer.bootstrap import manifests
from gossamer.models.registry import build_task
from gossamer.models.task import named_tensors
from gossamer.node.daemon.phi.restore import averaged
from gossamer.node.home import Home
from gossamer.protocol.errors import StorageError
from gossamer.protocol.fixedpoint import to_float
from tests.net import hosts as namespaces
from tests.net.hosts import Hosts

why_not = namespaces.why_not
"""Why this benchmark cannot run here, if it cannot."""

OUT = Path(__file__).parent / "out"

Choice = tuple[str, int]
"""A codec and the steps of a window; ("", 0) where nothing is set."""

NOTHING_SET: Choice = ("", 0)
CHOICES: tuple[Choice, ...] = tuple((codec, n) for codec in ("int4", "topk") for n in (5, 10, 30, 100, 300))

Curve = list[tuple[Any, ...]]
"""Seconds, newest round and loss at each evaluation; steps in a window then; and of each host, in the order
of node ids, codec and lateness of its last delta, in thousandths of its window."""

Figures = dict[str, Any]


class Lines(NamedTuple):
    """The lines of a row: each host's rate both ways, Mbit/s."""

    words: str
    rates: tuple[int, ...]
    then: tuple[int, ...] = ()
    """Those from `Setting.fall_s` on."""


LINES = {
    "1000": Lines("1000", (1000,) * 4),
    "100": Lines("100", (100,) * 4),
    "10": Lines("10", (10,) * 4),
    "2": Lines("2", (2,) * 4),
    "falls": Lines("100, then 2", (100,) * 4, then=(2,) * 4),
    "unequal": Lines("100, 100, 100, 2", (100, 100, 100, 2)),
}


class Setting(NamedTuple):
    """What all runs have in common. All times are as if there were no slow motion."""

    lines: dict[str, Lines]
    choices: tuple[Choice, ...]
    options: dict[str, Any]
    slow: int
    """How many times slower all of it is in fact."""
    step_s: float
    target: float
    evaluate_s: float
    """Seconds from one evaluation to the next."""
    fall_s: float
    """When the lines that fall do."""
    patience_s: float
    """How long every run lasts at least, if it does not reach the target."""
    most_s: float
    made_min: float = 0.95
    """Which part of its steps the first host makes in time, in a run that counts."""


FULL = Setting(
    lines=LINES,
    choices=(NOTHING_SET, *CHOICES),
    options={"preset": "tiny", "batch_size": 2, "context": 64, "eval_batches": 64},
    slow=4,
    step_s=0.1,
    target=1.9,
    evaluate_s=2.5,
    fall_s=25.0,
    patience_s=20.0,
    most_s=90.0,
)
QUICK = Setting(
    lines={"falls": Lines("100, then 10", (100, 100), then=(10, 10))},
    choices=(NOTHING_SET, CHOICES[0]),
    options={"preset": "tiny", "batch_size": 2, "context": 32, "eval_batches": 2},
    slow=1,
    step_s=0.05,
    target=5.0,
    evaluate_s=0.5,
    fall_s=0.5,
    patience_s=20.0,
    most_s=20.0,
    made_min=0.0,
)

TRIES = 3


GIVE_UP = 2 / 3
"""A run with fixed choices is given up where the best one had its loss in this part of the time."""


def run(*, quick: bool) -> Figures:
    """Make all runs that are not kept."""
    torch.set_num_threads(1)
    setting = QUICK if quick else FULL
    rows = {name: list(row(name, setting, None if quick else OUT)) for name in setting.lines}
    return {"target": setting.target, "rows": rows}


def row(name: str, setting: Setting, out: Path | None) -> Iterator[Figures]:
    """The runs on some lines, each kept in the folder `out` as it ends."""
    kept = out / f"adaptive-{name}.json" if out else None
    runs: list[Figures] = json.loads(kept.read_text()) if kept and kept.exists() else []
    for choice in setting.choices:
        found = next((run for run in runs if run["choice"] == list(choice)), None)
        for _ in range(TRIES):
            if found and found["steps_made"] >= setting.made_min:
                break
            best = min((run for run in runs if run["seconds"] and run["choice"][0]), key=_time, default=None)
            found = _train(setting.lines[name], choice, setting, best["curve"] if best else [])
            print(
                f"{name}, {_in_words(choice)}: {_cell(found)}, {found['steps_made']:.2f} of its steps",
                flush=True,
            )
        assert found
        runs = [*(run for run in runs if run["choice"] != list(choice)), found]
        if kept:
            kept.parent.mkdir(exist_ok=True)
            kept.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
        yield found


def _train(lines: Lines, choice: Choice, setting: Setting, best: Curve) -> Figures:
    """Make one run. Raises TimeoutError, with the end of a log, if the hosts do not begin."""
    codec, every_steps = choice
    fixed: Any = {"codec": codec, "every_steps": every_steps} if codec else {}
    with tempfile.TemporaryDirectory(prefix="gossamer-") as name, Hosts() as hosts:
        folder = Path(name)
        manifest, _ = manifests.create(name="adaptive", task="text", options=setting.options, seed=0, **fixed)
        manifests.write(manifest, folder / "swarm.toml")
        for _ in lines.rates:
            hosts.add()
        step_s = setting.step_s * setting.slow
        start(hosts, folder, len(lines.rates), way="swarm", options=setting.options, step_s=step_s)
        for rank in range(len(lines.rates)):
            wait(folder, f"ready{rank}", START_S)
        _shape(hosts, lines.rates, setting.slow)
        curve = _curve(hosts, folder, lines, setting, best if codec else [])
        (folder / "stop").touch()
        result = json.loads(wait(folder, "result.json", START_S).read_text())
    return {
        "choice": list(choice),
        "seconds": _reached(curve, setting.target),
        "curve": curve,
        "steps_made": result["steps"] * step_s / result["seconds"],
        "slow": setting.slow,
        "bytes_sent_per_step": result["bytes_sent"] / result["steps"],
    }


def _shape(hosts: Hosts, rates: tuple[int, ...], slow: int) -> None:
    for n, rate in enumerate(rates, 1):
        hosts.shape_both_ways(n, f"{rate * 1000 // slow}kbit")


def _curve(hosts: Hosts, folder: Path, lines: Lines, setting: Setting, best: Curve) -> Curve:
    """What evaluations find until the target is reached, or the run is to be given up."""
    task = build_task("text", setting.options, ())
    model = task.build_model(0)
    curve: Curve = [(0.0, 0, task.evaluate(model), 0, [])]
    begun, seconds, fall_s = time.monotonic(), 0.0, setting.fall_s if lines.then else inf
    while True:
        loss = curve[-1][2]
        is_behind = seconds >= setting.patience_s and (_reached(best, loss) or inf) < seconds * GIVE_UP
        if loss <= setting.target or is_behind or seconds >= setting.most_s:
            return curve
        due = begun + min(seconds + setting.evaluate_s, fall_s) * setting.slow
        time.sleep(max(0.0, due - time.monotonic()))
        seconds = (time.monotonic() - begun) / setting.slow
        if seconds >= fall_s:
            _shape(hosts, lines.then, setting.slow)
            fall_s = inf
        with suppress(StorageError):  # the host may be between two snapshots
            newest, values, said = _state(folder / "node0")
            with torch.no_grad():
                for name, parameter in named_tensors(model):
                    parameter.copy_(torch.from_numpy(values[name]).view_as(parameter))
            curve.append((seconds, newest, task.evaluate(model), *said))


def _state(folder: Path) -> tuple[int, dict[str, Any], tuple[int, list[tuple[str, int]]]]:
    """A node's newest round, its averaged model by tensor, float32, and what `Curve` has at the end."""
    manifest, state, mean = averaged(Home(folder))
    newest, layout = state.newest_round, manifest.plan()
    _, rounds = state.prefix(layout.of_round(newest), newest)
    last = {delta.author: delta.body for round_ in sorted(rounds) for delta in rounds[round_]}
    hosts = [(last[a].codec, 1000 * last[a].late // max(1, last[a].took)) for a in sorted(last)]
    values = {spec.name: to_float(part) for spec, part in layout.tensors(mean)}
    return newest, values, (state.window(newest), hosts)


def _reached(curve: Curve, target: float) -> float | None:
    """When a curve crosses the target, between two evaluations; None if it does not."""
    for (before, _, above, *_), (after, _, below, *_) in pairwise(curve):
        if below <= target:
            return float(before + (after - before) * (above - target) / (above - below))
    return None


# -- what is shown


def _in_words(choice: Any) -> str:
    codec, steps = choice
    return f"{codec}, {steps} steps" if codec else "nothing set"


def _cell(run: Figures | None) -> str:
    return f"{run['seconds']:.1f} s" if run and run["seconds"] else "-" if run else ""


def _time(run: Figures) -> float:
    return float(run["seconds"] or inf)


def _of(runs: list[Figures], choice: Choice) -> Figures | None:
    return next((run for run in runs if tuple(run["choice"]) == choice), None)


def _ratio(runs: list[Figures], choice: Choice) -> float:
    """Its time over that of the best fixed choice on these lines: 1.5 if it was given up, nan if not run."""
    best = min(_time(run) for run in runs if run["choice"][0])
    own = _of(runs, choice)
    return min(_time(own) / best, 1 / GIVE_UP) if own else nan


def _worst(figures: Figures, choice: Choice) -> float:
    """Its largest ratio on any lines."""
    ratios = [_ratio(runs, choice) for runs in figures["rows"].values()]
    return max(ratio for ratio in ratios if not isnan(ratio))


def _choices(figures: Figures) -> list[Choice]:
    return sorted({tuple(run["choice"]) for runs in figures["rows"].values() for run in runs})


def tables(figures: Figures) -> list[Table]:
    """Times by choice and lines."""
    rows = figures["rows"]
    lines = []
    for choice in _choices(figures):
        cells = [_cell(_of(runs, choice)) for runs in rows.values()]
        lines.append([_in_words(choice), *cells, f"{_worst(figures, choice):.2f}"])
    columns = ["Mbit/s", *(LINES[name].words for name in rows), "at worst, of the best fixed"]
    title = f"time to a held-out loss of {figures['target']}, averaged; -: 1.5 times the best one's, or more"
    traces = [[LINES[name].words, *_trace(_of(runs, NOTHING_SET) or runs[0])] for name, runs in rows.items()]
    columns_of_traces = (
        "Mbit/s",
        *(f"steps in a window after {second} s" for second in SECONDS),
        *AT_THE_END,
    )
    return [Table(title, columns, lines), Table("nothing set: what it became", columns_of_traces, traces)]


SECONDS = (5, 15, 30, 45)
AT_THE_END = ("codecs at the end", "kB sent by the first host a step")


def _trace(run: Figures) -> list[str]:
    """Its cells of the second table."""
    windows = [[point[3] for point in run["curve"][1:] if point[0] <= second][-1:] for second in SECONDS]
    codecs = Counter(codec for codec, _ in run["curve"][-1][4])
    named = ", ".join(f"{count} {codec}" for codec, count in codecs.most_common())
    return [
        *(str(found[0]) if found else "-" for found in windows),
        named,
        f"{run['bytes_sent_per_step'] / 1e3:.1f}",
    ]


GOALS = (
    Goal(
        what="to a loss with nothing set, where that does worst, against the best fixed choice there",
        measured=lambda figures: _worst(figures, NOTHING_SET),
        at_most=1.1,
        unit="times",
        reason="the lines that fall. For 20 s after the fall the loss does not fall: what waits goes first,"
        " and is late for all. By then windows are 20 to 27 steps long and codecs two rungs down, so"
        " that most of the lines is unused, and neither comes back within the run. On all other lines"
        " it is ahead of the best fixed choice, or 2 % behind it",
    ),
    Goal(
        what="to a loss with the fixed choice that suits all lines best, where that does worst",
        measured=lambda figures: min(_worst(figures, c) for c in _choices(figures) if c != NOTHING_SET),
        at_least=1.1,
        unit="times",
    ),
)


WINDOWS = (5, 10, 20, 40)
"""Steps in a window that the plot has a line for."""


def plot(figures: Figures, folder: Path) -> None:
    """Time over the best fixed one's, and how long windows become with nothing set."""
    figure, (ratios, windows) = plots.axes(2, height=4.0)
    rows = figures["rows"]
    best = sorted(_choices(figures), key=lambda choice: (choice != NOTHING_SET, _worst(figures, choice)))
    for choice in best[: len(plots.COLOURS)]:
        ratios.plot(
            [LINES[name].words.replace(", ", "\n") for name in rows],
            [_ratio(runs, choice) for runs in rows.values()],
            marker="o",
            linewidth=2.5 if choice == NOTHING_SET else 1,
            label=_in_words(choice),
        )
    ratios.axhline(1.1, color=plots.INK, linestyle=":", linewidth=1)
    ratios.set(xlabel="lines, Mbit/s", ylabel="time, of the best fixed choice", ylim=(0.85, 2.0))
    for name, runs in rows.items():
        points = (_of(runs, NOTHING_SET) or runs[0])["curve"][1:]
        windows.plot([point[0] for point in points], [point[3] for point in points], label=LINES[name].words)
    windows.set(
        xlabel="seconds",
        ylabel="steps in a window, nothing set",
        yscale="log",
        yticks=WINDOWS,
        yticklabels=WINDOWS,
    )
    windows.minorticks_off()
    for axes in (ratios, windows):
        axes.legend(fontsize="small", loc="upper left")
    plots.save(figure, folder / "adaptive.svg")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for lines_name in sys.argv[1:]:
        for _ in row(lines_name, FULL, OUT):
            pass
