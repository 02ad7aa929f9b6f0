"""The simulated swarm is one: replicas agree, whatever the weather, and interrupted sweeps go on."""

from dataclasses import replace
from functools import partial
from math import isfinite

import numpy as np
import pytest
import torch

from benchmarks import learning, report
from benchmarks.learning import gossamer, sweep
from benchmarks.learning.cases import Case, cases
from benchmarks.learning.experts import ExpertsScale
from benchmarks.learning.figures import best_loss, bytes_ratio, bytes_until, outcome_of, row_of
from benchmarks.learning.sweep import Outcome, Results, Run
from benchmarks.learning.world import Point, Scale, World

SMALL = Scale(workers=4, windows=6, steps=2, context=16, batch_size=1, eval_windows=8, points=2)


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small lose by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def advanced(steps, **settings):
    """A swarm after some time."""
    swarm = gossamer.found(World(SMALL, seed=1), **settings)
    for _ in range(steps):
        swarm.advance()
    return swarm


@pytest.mark.parametrize(
    "weather",
    [
        {"late": 0},
        {"late": 3, "speeds": [1.0, 1.0, 0.5, 0.25]},
        {"parted": [0.25, 0.5]},
        {"deaths": 0.3},
    ],
    ids=["calm", "speeds", "parted", "deaths"],
)
def test_replicas_of_the_same_records_are_the_same(weather):
    swarm = advanced(12, fragments=2, weather=weather)
    for node in swarm.nodes:
        for _, number, record in swarm.travelling:
            if number == node.worker.number:
                node.replica.hear(record)
        node.replica.merge()
    swarm.observer.merge()
    here = [node for node in swarm.nodes if node.absent_until <= 12]
    assert here and all(np.array_equal(node.replica.phi, swarm.observer.phi) for node in here)
    assert np.any(swarm.observer.phi != advanced(0, fragments=2).observer.phi), "and they have moved"
    assert (swarm.deaths > 0) == ("deaths" in weather)


def test_halves_do_not_hear_each_other_until_they_are_healed():
    swarm = advanced(5, weather={"late": 1, "parted": [0.0, 0.5]})
    one, other = swarm.nodes[0], swarm.nodes[3]
    assert one.replica.last_round(1) > 0 and one.replica.last_round(3) == 0
    for _ in range(7):
        swarm.advance()
    assert one.replica.last_round(3) > 0 and other.replica.last_round(0) > 0


@pytest.mark.parametrize("method", sorted(sweep.METHODS.keys() - {"processes"}))
def test_all_methods_use_the_same_tokens_and_repeat_exactly(method):
    training = Run(method=method, settings={}, scale=SMALL, seed=3)
    outcome = sweep.train(training)
    assert outcome.curve[-1].tokens == SMALL.tokens / (SMALL.workers if method == "alone" else 1)
    assert outcome.loss < outcome.curve[0].loss
    assert sweep.train(training).curve == outcome.curve
    assert isfinite(outcome.curve[-1].averaged) == (method in ("gossamer", "data-parallel"))


def test_the_averaged_model_is_kept_with_the_live_one(tmp_path):
    case = Case(group="", label="", method="data-parallel", scale=replace(SMALL, windows=17), seeds=(0,))
    (training,) = case.runs()
    outcome = Results(tmp_path / "out.json").of(training)
    again = Results(tmp_path / "out.json").of(training)
    assert again.curve[-1].averaged == pytest.approx(outcome.curve[-1].averaged, abs=1e-4)
    found = row_of(case, training, again)
    assert found["averaged"][-1] != found["loss"][-1] and outcome_of(found).curve == again.curve
    assert best_loss([found]) == min(found["averaged"][-1], found["loss"][-1])


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    file = tmp_path / "out" / "learning.json"
    training = Run(method="alone", settings={}, scale=SMALL, seed=0)
    first = Results(file).of(training)
    monkeypatch.setattr(sweep, "train", lambda _: pytest.fail("trained again"))
    again = Results(file).of(training)
    assert again.loss == pytest.approx(first.loss, abs=1e-4)
    with pytest.raises(pytest.fail.Exception):
        Results(file).of(replace(training, seed=1))


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """One case, and its recorded row in documents of which nothing else is left."""
    case = Case(group="a group", label="one alone", method="alone", scale=SMALL, seeds=(0,))
    (training,) = case.runs()
    row = row_of(case, training, sweep.train(training))
    (tmp_path / "benchmarks").mkdir()
    report.record("learning", [row], tmp_path)
    monkeypatch.setattr(learning, "cases", lambda quick: [case])
    monkeypatch.setattr(learning, "KEPT", tmp_path / "out" / "learning.json")
    monkeypatch.setattr(report, "recorded", partial(report.recorded, docs=tmp_path))
    return row


def test_what_was_recorded_is_not_trained_again(recorded, monkeypatch):
    monkeypatch.setattr(sweep, "train", lambda _: pytest.fail("trained again"))
    assert learning.run(quick=False) == [recorded]
    with pytest.raises(pytest.fail.Exception):
        learning.run(quick=False, anew=True)


def test_what_was_trained_anew_comes_before_the_record(recorded, monkeypatch):
    outcome = Outcome([Point(0, 0.0, 0.0, 5.0), Point(8, 0.0, 0.0, 3.0)], 1.0, "another")
    monkeypatch.setattr(sweep, "train", lambda _: outcome)
    (row,) = learning.run(quick=False, anew=True)
    assert row["loss"] == [5.0, 3.0] and row["processor"] == "another"
    assert learning.run(quick=False) == [row]


def test_every_row_of_the_record_is_the_run_that_its_case_is_now():
    found = report.recorded("learning")
    assert found is not None
    runs = {(c.group, c.label, r.seed): r.key for c in cases(quick=False) for r in c.runs()}
    for row in found["figures"]:
        assert runs[row["group"], row["case"], row["seed"]] == row["run"], row["case"]


def row(losses, published, seed=0):
    return {"seed": seed, "loss": losses, "published": published}


def test_bytes_until_a_loss_lie_on_the_curve():
    curve = row([5.0, 2.0, 1.0, 1.5], [0, 100, 200, 300])
    assert bytes_until(curve, 2.0) == 100
    assert bytes_until(curve, 1.75) == 125
    assert bytes_until(curve, 6.0) == 0
    assert bytes_until(curve, 0.9) is None


def test_bytes_are_compared_at_the_same_seeds_and_never_where_one_did_not_get_there():
    large, small = [row([3.0, 1.0], [0, 4000], seed) for seed in (0, 1)], [row([3.0, 2.0], [0, 10])]
    assert bytes_ratio(small, large, 2.0) == 200
    assert bytes_ratio(small, large, 1.5) == 0


def test_a_mixture_learns_and_experts_without_bytes_stay_as_they_are():
    scale = ExpertsScale(workers=2, windows=4, steps=2, context=16, batch_size=1, eval_windows=8, points=1)
    outcome = sweep.train(Run(method="gossamer", settings={"averaging": "mean"}, scale=scale, seed=0))
    assert outcome.loss < outcome.curve[0].loss
    world = World(scale, seed=0)
    worker = world.worker(0)
    world.step(worker)
    experts = [p for name, p in worker.model.named_parameters() if "experts" in name]
    assert 0 < sum(p.grad is None for p in experts) < len(experts)
