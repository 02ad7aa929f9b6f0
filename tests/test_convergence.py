"""What docs/convergence.md says of noisy quadratics, with the product's own outer loop, codecs and merge.

Each coordinate has one curvature h. A node's window is `STEPS` steps of noisy gradient descent, which take it
a part ``c = 1 - (1 - LR * h) ** STEPS`` of the way to its optimum, and ``a = learning_rate * c``. Runs are
drawn from the test's seed, which a failure prints with the command that replays it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, log, pi, sin, sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numpy.polynomial import polynomial as poly

from benchmarks.learning.replica import History, Record, Replica
from gossamer.node.trainer.outer import OuterLoop
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import ONE, to_fixed
from gossamer.protocol.merge.merge import Contribution, measure
from gossamer.protocol.payloads import Payload, TensorSpec, payload_length
from tests.protocol.builders import manifest as build_manifest
from tests.protocol.builders import one_rung

PAGE = Path(__file__).parents[1] / "docs" / "convergence.md"
STEPS, LR = 4, 0.5
Values = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small lose by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(kw_only=True)
class Swarm:
    """Nodes that train on one quadratic. The others' deltas reach a node `late` rounds late.

    With `turns`, each round is published by one node alone, and they take turns.
    """

    rng: np.random.Generator
    curvature: Values
    learning_rate: float
    momentum: float = 0.0
    ef_decay: float = 1.0
    codec: str = "exact"
    ladder: Sequence[dict[str, object]] = ()
    """Rungs that nodes use one after the other, five rounds each and not all the same; they take the place of
    `codec` and its settings."""
    rule: str = "mean"
    nodes: int = 4
    late: int = 0
    turns: bool = False
    steps: Sequence[int] = ()
    """Of each node's windows; `STEPS` if empty."""
    noise: float | Values = 1e-3
    """Of each gradient."""
    start: float | Values = 0.0
    optima: Values | None = None
    """Of each node, [nodes, n]; 0 if None."""
    phis: list[Values] = field(default_factory=list)
    """Phi after each round."""
    staleness: int = 0
    """Of the last record."""

    def __post_init__(self) -> None:
        names = ("learning_rate", "momentum", "ef_decay", "codec")
        outer = one_rung(**{name: getattr(self, name) for name in names})
        shape = self.curvature.shape
        self._manifest = build_manifest(
            (TensorSpec("x", shape, self.rule),),
            1,
            outer={"codecs": self.ladder, "momentum": self.momentum} if self.ladder else outer,
            pace={"every_steps": max(self.steps or [STEPS])},
        )
        self._history = History(self._manifest)
        self._swarm = Replica(self._history, to_fixed(np.broadcast_to(self.start, shape)))
        self._published: list[list[Record]] = [[]]
        self._replicas = [self._swarm.copy() for _ in range(self.nodes)]
        self.views = [torch.zeros(shape) for _ in range(self.nodes)]
        """The parameters that each node trains."""
        self._outers = [OuterLoop({"x": view}, self._manifest) for view in self.views]
        for outer_loop, replica in zip(self._outers, self._replicas, strict=True):
            outer_loop.apply(0, replica.view(0), 0, keep_progress=False)

    def run(self, rounds: int) -> Values:
        """Train; returns Phi after each of these rounds, [rounds, n]. Raises DivergedError."""
        for _ in range(rounds):
            round_ = len(self._published)
            publishers = [round_ % self.nodes] if self.turns else range(self.nodes)
            self._published.append([self._window(number, round_) for number in publishers])
            self._swarm.merge()
            self.phis.append(self._swarm.phi / ONE)
        return np.array(self.phis[-rounds:])

    def _window(self, number: int, round_: int) -> Record:
        """One window of one node: merge what has come, train, publish."""
        outer, replica, view = self._outers[number], self._replicas[number], self.views[number]
        since = max(0, round_ - 1 - self.late - (self.nodes if self.turns else 1))
        for records in self._published[since : max(0, round_ - self.late)]:
            for record in records:
                replica.hear(record)
        if replica.merge():
            outer.apply(0, replica.view(0), replica.merged_round(0))
        optimum = 0.0 if self.optima is None else self.optima[number]
        for _ in range(self.steps[number] if self.steps else STEPS):
            noise = self.noise * self.rng.standard_normal(view.shape)
            gradient = self.curvature * (view.numpy() - optimum) + noise
            view -= torch.from_numpy(LR * gradient)
            outer.step(100, 0.0)
        fragment, rungs = self._manifest.plan().fragments[0], self._manifest.outer.codecs
        codec = rungs[(round_ // 5 + number) % len(rungs)].name
        room = memoryview(bytearray(payload_length(CODECS[codec], fragment)))
        length, window = outer.publish(0, round_, room, codec)
        payload, record = Payload(codec, fragment, room[:length]), Record(round_, number)
        self.staleness, norms = round_ - window.base - 1, measure(payload).norms
        author = bytes([number]) * 32
        delta = Contribution(author, window.tokens, window.steps, self.staleness, norms, payload.section)
        self._history.add(record, delta)
        replica.hear(record)
        self._swarm.hear(record)
        return record

    def size_after(self, rounds: int) -> float:
        """Train, and tell how far the nodes are from the optimum 0 then; 64 if they have diverged."""
        try:
            self.run(rounds)
        except DivergedError:
            return 64.0
        return rms(np.array([view.numpy() for view in self.views]))


def rms(values: Values) -> float:
    """The root of the mean square."""
    return sqrt(np.mean(np.square(values)))


def share(curvature: float | Values, steps: int = STEPS) -> Values:
    """Of the way to its optimum, what a window takes."""
    return np.asarray(1.0 - (1.0 - LR * np.asarray(curvature)) ** steps)


def window_noise(curvature: float, noise: float) -> float:
    """The standard deviation of a window's progress."""
    return LR * noise * sqrt(sum((1.0 - LR * curvature) ** (2 * step) for step in range(STEPS)))


# -- the largest stable step


def growth(a: float, tau: int, mu: float, *, turns: bool) -> float:
    """The factor by which a deviation grows a round, in the long run: the largest root of the loop."""

    def times(factor: Values, by: int) -> Values:
        return np.concatenate([np.zeros(by), factor])

    def largest(coefficients: Values) -> float:
        return float(np.abs(poly.polyroots(coefficients)).max())

    period = tau + 1 if turns else 1
    pole = poly.polysub(times(np.ones(1), period), [mu])  # of the momentum; z**period - mu
    zero = poly.polysub(times(np.ones(1) * (1 + mu), period), [mu])
    late = tau if turns else 0
    common = largest(poly.polyadd(times(poly.polymul([-1.0, 1.0], pole), late), a * zero))
    if turns or not tau:
        return common
    apart = poly.polyadd(times(pole, tau), a * poly.polymul(np.ones(tau), zero))
    return max(common, largest(apart))


def bound(tau: int, mu: float, *, turns: bool) -> float:
    """The largest stable step."""
    low, high = 0.0, 2.1
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if growth(middle, tau, mu, turns=turns) < 1 else (low, middle)
    return low


def test_the_table_of_the_document_is_what_the_roots_say() -> None:
    rows = re.findall(r"^\| (\d+) ((?:\| [\d.]+ ){6})\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [tau for tau, _ in rows] == ["0", "1", "2", "4", "8"]
    for tau, cells in rows:
        found = [float(cell) for cell in cells.strip("| ").split("|")]
        wanted = [bound(int(tau), mu, turns=turns) for turns in (False, True) for mu in (0.0, 0.5, 0.7)]
        assert all(cell < value + 1e-4 < cell + 0.01 for cell, value in zip(found, wanted, strict=True))
        assert wanted[3] == pytest.approx(2 * sin(pi / (2 * (2 * int(tau) + 1))), abs=1e-4)


@pytest.mark.parametrize(
    ("tau", "mu", "turns", "codec", "rule", "part"),
    [
        (0, 0.7, False, "exact", "mean", 0.8),
        (1, 0.0, True, "exact", "mean", 0.8),
        (2, 0.5, False, "exact", "rda", 0.8),
        (2, 0.5, True, "exact", "mean", 0.8),
        (4, 0.7, False, "exact", "mean", 0.8),
        (8, 0.0, True, "exact", "mean", 0.8),
        (0, 0.5, False, "int4", "mean", 0.6),
        (1, 0.7, False, "int4", "rda", 0.6),
        (1, 0.7, True, "int4", "rda", 0.6),
        (4, 0.0, True, "int4", "mean", 0.6),
        (4, 0.5, False, "int4", "mean", 0.6),
    ],
)
def test_below_the_bound_it_contracts_to_the_noise_and_above_it_diverges(
    rng: np.random.Generator, tau: int, mu: float, turns: bool, codec: str, rule: str, part: float
) -> None:
    """That codec is stable at this part of the bound, and none is at 1.25 times the bound."""
    limit, sizes = bound(tau, mu, turns=turns), []
    for step in (part * limit, 1.25 * limit):
        rounds = ceil(5.0 / abs(log(growth(step, tau, mu, turns=turns)))) + 8 * (tau + 1)
        swarm = Swarm(
            rng=rng,
            curvature=np.full(128, 1.2),
            learning_rate=step / float(share(1.2)),
            momentum=mu,
            codec=codec,
            rule=rule,
            nodes=tau + 1 if turns else 2,
            late=tau,
            turns=turns,
            start=0.1,
        )
        sizes.append(swarm.size_after(rounds))
        assert swarm.staleness == (tau if turns else 0)
    below, above = sizes
    assert below < 0.02 and above > 0.06


@pytest.mark.parametrize(("late", "rule"), [(0, "mean"), (1, "rda")])
def test_topk_is_stable_while_what_its_residual_holds_is_no_step_too_long(
    rng: np.random.Generator, late: int, rule: str
) -> None:
    settings = {"codec": "topk", "ef_decay": 0.8, "rule": rule, "late": late, "nodes": 2, "start": 0.1}
    sizes = [
        Swarm(
            rng=rng, curvature=np.full(128, 1.2), learning_rate=step / float(share(1.2)), **settings
        ).size_after(150)
        for step in (0.5 * 2 * (1 - 0.8), 3 * 2 * (1 - 0.8))
    ]
    below, above = sizes
    assert below < 0.02 and above > 0.06


# -- where it ends


@pytest.mark.parametrize(("codec", "loud"), [("int4", 4), ("topk", 64)])
@pytest.mark.parametrize("rule", ["mean", "rda"])
def test_what_a_codec_leaves_out_is_lost_without_a_residual_and_arrives_with_one(
    rng: np.random.Generator, codec: str, loud: int, rule: str
) -> None:
    """One value of `loud` is noisy, and the others' progress is too small beside it to be sent."""
    is_quiet = np.arange(1024) % loud != 0
    left = []
    for ef_decay in (0.0, 1.0):
        swarm = Swarm(
            rng=rng,
            curvature=np.full(1024, 0.3),
            learning_rate=0.3,
            ef_decay=ef_decay,
            codec=codec,
            rule=rule,
            nodes=2,
            noise=np.where(is_quiet, 0.0, 0.2),
            start=np.where(is_quiet, 0.02, 0.0),
        )
        swarm.run(80)
        left.append(float(swarm.run(80)[:, is_quiet].mean()) / 0.02)
    without, with_one = left
    assert without > 0.9 and abs(with_one) < 0.4


@pytest.mark.parametrize(("rule", "momentum"), [("mean", 0.5), ("rda", 0.0)])
def test_with_unequal_steps_and_data_the_mean_and_the_geometric_median_are_weighted_by_steps(
    rng: np.random.Generator, rule: str, momentum: float
) -> None:
    steps = (8, 8, 4, 2)
    optima = rng.normal(0.0, 0.05, (4, 64))
    settings = {
        "curvature": np.full(64, 0.2),
        "learning_rate": 0.6 * (1 - momentum),
        "momentum": momentum,
        "rule": rule,
        "steps": steps,
    }
    apart, alike = (
        Swarm(rng=rng, optima=some, **settings) for some in (optima, np.broadcast_to(optima[0], optima.shape))
    )
    for swarm in (apart, alike):
        swarm.run(40)
    pulls = np.array(steps, dtype=float)
    if rule == "mean":
        wanted = (pulls * share(0.2, np.array(steps))) @ optima / (pulls @ share(0.2, np.array(steps)))
    else:
        wanted = optima.mean(0)
        for _ in range(200):  # Weiszfeld's iteration
            near = pulls / np.linalg.norm(optima - wanted, axis=1)
            wanted = near @ optima / near.sum()
    assert rms(optima.mean(0) - wanted) > 5e-3
    assert rms(apart.run(30).mean(0) - wanted) < 1e-3
    assert rms(alike.run(30).mean(0) - optima[0]) < 1e-3


@pytest.mark.parametrize(("rule", "momentum"), [("mean", 0.5), ("rda", 0.0)])
def test_a_change_of_codec_shows_in_no_step(rng: np.random.Generator, rule: str, momentum: float) -> None:
    rates = {"int4": 0.3, "topk8": 0.4, "topk16": 0.5, "topk": 0.9}
    ladder = [
        {"name": name, "learning_rate": rate * (1 - momentum), "ef_decay": 1.0 if name == "int4" else 0.8}
        for name, rate in rates.items()
    ]
    start = 0.1 * rng.standard_normal(4096)
    settings = {"curvature": np.full(4096, 0.3), "learning_rate": 1.0, "momentum": momentum, "rule": rule}
    swarm = Swarm(rng=rng, ladder=ladder, start=start, noise=1e-4, **settings)
    sizes = np.sqrt((swarm.run(80) ** 2).mean(1))
    assert sizes[-1] < 0.02 * sizes[0]
    assert (sizes[1:] < 1.02 * sizes[:-1])[: np.argmax(sizes < 0.05 * sizes[0])].all()


@pytest.mark.parametrize(
    ("codec", "rule", "momentum", "late"),
    [("exact", "mean", 0.0, 0), ("int4", "mean", 0.0, 2), ("int4", "mean", 0.5, 0), ("int4", "rda", 0.5, 2)],
)
def test_the_average_of_the_last_fifth_lies_below_the_live_model_and_depends_on_no_setting(
    rng: np.random.Generator, codec: str, rule: str, momentum: float, late: int
) -> None:
    curvature, learning_rate = 0.3, 0.5 * (1 - momentum)
    swarm = Swarm(
        rng=rng,
        curvature=np.full(256, curvature),
        learning_rate=learning_rate,
        momentum=momentum,
        codec=codec,
        rule=rule,
        late=late,
        nodes=3,
    )
    last = swarm.run(180)[-36:]
    progress = window_noise(curvature, swarm.noise) / sqrt(swarm.nodes)
    step = learning_rate * float(share(curvature))
    if rule == "mean" and not momentum:
        assert rms(last) == pytest.approx(learning_rate * progress / sqrt(step * (2 - step)), rel=0.2)
    assert rms(last.mean(0)) == pytest.approx(progress / share(curvature) / sqrt(len(last)), rel=0.25)
    assert rms(last.mean(0)) < 0.55 * rms(last)
