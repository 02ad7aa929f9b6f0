"""`gossamer.node.adapters.lightning`: real fits by `Trainer`, with a peer that only remembers."""

from __future__ import annotations

import importlib
import signal
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from gossamer.node.trainer.data import linear
from gossamer.protocol.errors import ConfigError
from tests.node.adapters.fake_peer import Fakes

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    """Imported where a test wants it."""
    pytest.importorskip("lightning.pytorch")
    return importlib.import_module("tests.node.adapters.lightning_fits")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_each_step_of_the_optimizer_is_told_once_with_its_samples_and_its_loss(
    lightning: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    module = lightning.Regression()
    swarm = lightning.GossamerCallback(name="one", schedule=linear(1000))
    trainer = lightning.fit(tmp_path, module, swarm, max_epochs=2, accumulate_grad_batches=2)
    assert fakes.peer.model is module and fakes.peer.optimizers == trainer.optimizers
    first, second, third, *_ = module.losses
    tokens, losses = zip(*fakes.peer.steps, strict=True)
    assert tokens == (8, 2) * 2
    assert losses[:2] == pytest.approx([(first + second) / 2, third])
    assert fakes.peer.rates == pytest.approx([1e-2, 0.9e-2, 0.8e-2, 0.7e-2])
    assert trainer.callback_metrics["gossamer/swarm_tokens"] == 400
    assert fakes.peer.ends == ["finish", "leave"]
    assert all((parameter == 1).all() for parameter in module.parameters()), "the swarm's own model"


def test_a_loader_made_before_draws_as_the_peer_says(
    lightning: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    forwards, backwards = lightning.Regression(), lightning.Regression()
    lightning.fit(tmp_path, forwards, lightning.GossamerCallback(), max_epochs=1)
    first = forwards.losses[0]
    fakes.made.clear()
    lightning.fit(tmp_path, backwards, lightning.GossamerCallback(), max_epochs=1, shards=True)
    assert [tokens for tokens, _ in fakes.peer.steps] == [4, 4, 2]
    assert backwards.losses[0] != pytest.approx(first), "the last samples come first"


def test_it_stops_with_the_node(lightning: ModuleType, fakes: Fakes, tmp_path: Path) -> None:
    fakes.stop_after = 4
    trainer = lightning.fit(
        tmp_path, lightning.Regression(), lightning.GossamerCallback(tokens=lambda batch: 7), max_epochs=9
    )
    assert trainer.global_step == 4
    assert [tokens for tokens, _ in fakes.peer.steps] == [7] * 4
    assert fakes.peer.ends == ["finish", "leave"]


def test_optimizers_that_the_module_steps_itself(lightning: ModuleType, fakes: Fakes, tmp_path: Path) -> None:
    lightning.fit(tmp_path, lightning.TwoOptimizers(), lightning.GossamerCallback(finish=False), max_epochs=1)
    assert len(fakes.peer.optimizers) == 2
    assert [tokens for tokens, _ in fakes.peer.steps] == [4, 4, 2], "once a batch, however many stepped"
    assert fakes.peer.ends == ["leave"]


def test_an_error_ends_it_and_the_next_fit_is_a_new_peer(
    lightning: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    module, swarm = lightning.Regression(), lightning.GossamerCallback()
    module.raises = RuntimeError("as asked")
    with pytest.raises(RuntimeError, match="as asked"):
        lightning.fit(tmp_path, module, swarm, max_epochs=1)
    module.raises = None
    lightning.fit(tmp_path, module, swarm, max_epochs=1)
    first, second = fakes.made
    assert first.ends[0] == "RuntimeError" and len(first.steps) == 2
    assert len(second.steps) == 3 and second.ends == ["finish", "leave"]


@pytest.mark.parametrize(
    ("kind", "norm"),
    [
        ("EMAWeightAveraging", nn.Identity()),
        ("StochasticWeightAveraging", nn.Identity()),
        ("StochasticWeightAveraging", nn.BatchNorm1d(3)),  # another epoch, without steps
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_averages_of_a_callback_listed_before_are_no_progress(
    lightning: ModuleType, fakes: Fakes, tmp_path: Path, kind: str, norm: nn.Module
) -> None:
    options = {"swa_lrs": 1e-2, "swa_epoch_start": 1} if kind.startswith("S") else {"decay": 0.9}
    if not hasattr(lightning.pl.callbacks, kind):
        pytest.skip(f"this release of Lightning has no {kind}")
    module, swarm = lightning.Normed(fakes, norm), lightning.GossamerCallback()
    trainer = lightning.fit(
        tmp_path, module, swarm, [getattr(lightning.pl.callbacks, kind)(**options)], max_epochs=3
    )
    assert len(fakes.peer.steps) == 9 and fakes.peer.ends == ["finish", "leave"]
    assert all(map(torch.equal, fakes.peer.left_with, module.trained))
    assert any((parameter != 1).any() for parameter in module.parameters()), "the averages, at the end"
    count = len(trainer.callbacks)
    swarm.setup(trainer, module, "fit")
    assert len(trainer.callbacks) == count, "however often it trains"


@pytest.mark.parametrize("fails", [False, True])
def test_validations_are_of_the_average_and_nothing_else_is(
    lightning: ModuleType, fakes: Fakes, tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Three of them: the first finds no average yet, and the last may fail."""
    module, saves = lightning.Validated(), lightning.Saves()
    module.fails = fails
    swarm = lightning.GossamerCallback(evaluate_average=True, finish=False)
    with pytest.raises(RuntimeError, match="as asked") if fails else nullcontext():
        lightning.fit(tmp_path, module, swarm, [saves], max_epochs=3, num_sanity_val_steps=0)
    assert module.averaged == [False, True, True]
    assert "the live model is validated: still fetching" in caplog.text
    assert all(weight.any() for weight in [*saves.saved, module.layer.weight])
    assert torch.equal(module.layer.weight, saves.saved[-1]) is not fails
    assert fakes.peer.averages == 3 and len(fakes.peer.steps) == 9
    lightning.pl.Trainer(logger=False, accelerator="cpu", devices=1, callbacks=[swarm]).validate(
        module, lightning.samples(10)
    )
    assert fakes.peer.averages == 3, "this one is asked for by itself"


def test_a_batch_that_the_module_passes_over_counts_nothing(
    lightning: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    module = lightning.PassesOver()
    lightning.fit(tmp_path, module, lightning.GossamerCallback(), max_epochs=1)
    first, second = module.losses
    assert [tokens for tokens, _ in fakes.peer.steps] == [4, 1, 2], "a step is at least one"
    assert [loss for _, loss in fakes.peer.steps] == pytest.approx([first, first, second])


def test_sigterm_is_an_interrupt(lightning: ModuleType, fakes: Fakes, tmp_path: Path) -> None:
    """Lightning has a handler of its own by the time of the attach, and raises a SystemExit."""
    swarm = lightning.GossamerCallback(tokens=lambda batch: signal.raise_signal(signal.SIGTERM) or 1)
    with pytest.raises(SystemExit):
        lightning.fit(tmp_path, lightning.Regression(), swarm, max_epochs=1)
    assert len(fakes.peer.steps) == 1
    assert fakes.peer.ends == ["SIGTERMException"]


def test_a_module_with_a_scheduler_of_its_own(lightning: ModuleType, fakes: Fakes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out schedule="):
        lightning.fit(
            tmp_path,
            lightning.WithScheduler(),
            lightning.GossamerCallback(schedule=linear(1000)),
            max_epochs=1,
        )
    assert not fakes.made, "before anything was started"
