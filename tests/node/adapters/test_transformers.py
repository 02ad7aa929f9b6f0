"""`gossamer.node.adapters.transformers`: real trainings by `Trainer`, with a peer that only remembers."""

from __future__ import annotations

import asyncio
import copy
import importlib
import io
import json
import logging
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from gossamer.bootstrap.manifests import describe
from gossamer.node.trainer.data import linear
from gossamer.node.trainer.genesis import parameters
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.errors import ConfigError
from tests.node.adapters.fake_peer import Fakes
from tests.node.leading import leading
from tests.node.trainer_side import daemon_at, link_to, until


def mistaken(batch: Any) -> int:
    raise RuntimeError("as asked")


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    """Imported where a test wants it."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return importlib.import_module("tests.node.adapters.transformers_runs")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_each_step_of_the_optimizer_is_told_once_with_its_tokens_and_its_loss(
    runs: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    fakes.folder = tmp_path
    trainer = runs.trainer_of(tmp_path, runs.GossamerCallback(name="one"), max_steps=4)
    trainer.train()
    told = fakes.peer.steps
    assert [tokens for tokens, _ in told] == [2 + 3 + 4 + 5, 6 + 7 + 8 + 2, 3 + 4, 2 + 3 + 4 + 5]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [loss for _, loss in told] == pytest.approx([entry["loss"] for entry in logged], abs=1e-4)
    assert [entry["gossamer/round"] for entry in logged] == [1, 2, 3, 4]
    (optimizer,) = fakes.peer.optimizers
    assert type(optimizer) is AdamW, "as it is without what Accelerate wraps around it"
    assert fakes.peer.ends == ["finish", "leave"]
    assert all((parameter == 1).all() for parameter in trainer.model.parameters()), "the swarm's own model"
    kept = json.loads((tmp_path / "pretrained" / "config.json").read_text())
    assert kept["architectures"] == ["LlamaForCausalLM"] and kept["hidden_size"] == 8
    assert sorted(path.name for path in (tmp_path / "pretrained").iterdir()) == [
        "config.json",
        "frozen.json",
        "generation_config.json",
    ]


def test_it_stops_with_the_node_and_does_not_mistake_the_best_model_for_progress(
    runs: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    fakes.stop_after = 3
    rates, swarm = runs.Rates(), runs.GossamerCallback(name="one", schedule=linear(1000))
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = runs.trainer_of(
        tmp_path, swarm, callbacks=[rates], max_steps=9, load_best_model_at_end=True, **every_step
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert [tokens for tokens, _ in fakes.peer.steps] == [2 + 3 + 4 + 5, 6 + 7 + 8 + 2, 3 + 4]
    assert fakes.peer.ends == ["finish", "leave"]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 3 and min(evaluated) == evaluated[1], "the last one is that of all ones"
    assert trainer.state.best_global_step == 2
    assert any((parameter != 1).any() for parameter in trainer.model.parameters()), "the best one is back"
    assert rates.seen == pytest.approx([1e-2, 1e-2, 0.9e-2]), "by the swarm's tokens as of the step before"


def test_the_average_is_evaluated_beside_the_live_model_and_may_be_what_is_best(
    runs: ModuleType, fakes: Fakes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[dict[str, float]] = []

    class Hears(runs.TrainerCallback):
        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            seen.append(metrics)

    trainer = runs.trainer_of(
        tmp_path,
        runs.GossamerCallback(finish=False),
        callbacks=[Hears()],
        kind=runs.Averaging,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="loss_average",
        greater_is_better=False,
    )
    trainer.evaluate()
    assert "eval_loss_average" not in seen.pop(), "there is no swarm yet"
    with caplog.at_level(logging.WARNING, "gossamer.peer"):
        trainer.train()
    assert "is not evaluated: still fetching" in caplog.text
    uniform = pytest.approx(math.log(16))
    assert [metrics["eval_loss_average"] for metrics in seen] == [
        pytest.approx(math.nan, nan_ok=True),
        uniform,
        uniform,
    ]
    assert all(metrics["eval_loss"] != uniform for metrics in seen), "of the live model"
    assert trainer.state.best_metric == uniform and trainer.state.best_global_step == 2
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert ["eval_loss_average" in entry for entry in logged] == [True] * 3, "once a step"
    trainer.predict(runs.Rows(2))
    assert fakes.peer.averages == 3, "predictions are the live model's alone"


def test_a_trainer_that_goes_around_the_model_is_warned_once(
    runs: ModuleType, fakes: Fakes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = runs.trainer_of(tmp_path, runs.GossamerCallback(), kind=runs.GoesAround, max_steps=4)
    with caplog.at_level(logging.WARNING, "gossamer.peer"):
        trainer.train()
    assert [tokens for tokens, _ in fakes.peer.steps] == [1] * 4
    (record,) = caplog.records
    assert "does not call the model itself in train mode" in record.getMessage()


def test_copies_of_the_model_are_made_while_it_trains_and_count_nothing(
    runs: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    """As a DataLoader pickles it whose workers are spawned, and whose collator holds the model."""
    saved: list[io.BytesIO] = []

    class Copies(runs.TrainerCallback):
        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            saved.append(io.BytesIO())
            torch.save(kwargs["model"], saved[-1])
            model = copy.deepcopy(kwargs["model"])
            model.train()(**{name: row.unsqueeze(0) for name, row in runs.Rows(1)[0].items()})

    runs.trainer_of(tmp_path, runs.GossamerCallback(), callbacks=[Copies()], max_steps=2).train()
    assert [tokens for tokens, _ in fakes.peer.steps] == [2 + 3 + 4 + 5, 6 + 7 + 8 + 2]
    assert len(saved) == 2


@pytest.mark.slow
def test_a_loss_that_the_model_does_not_return_is_the_one_last_logged(
    runs: ModuleType, fakes: Fakes, tmp_path: Path
) -> None:
    trainer = runs.trainer_of(
        tmp_path, runs.GossamerCallback(finish=False), max_steps=3, label_smoothing_factor=0.1
    )
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    first, *others = [loss for _, loss in fakes.peer.steps]
    assert math.isnan(first) and others == pytest.approx(logged[:-1])
    assert fakes.peer.ends == ["leave"]


@pytest.mark.slow
def test_training_again_after_an_error(runs: ModuleType, fakes: Fakes, tmp_path: Path) -> None:
    def fails(batch: Any) -> int:
        if len(fakes.made) == 1 and len(fakes.peer.steps) == 1:
            raise RuntimeError("as asked")
        return 5

    swarm = runs.GossamerCallback(tokens=fails)
    trainer = runs.trainer_of(tmp_path, swarm, max_steps=2)
    with pytest.raises(RuntimeError, match="as asked"):
        trainer.train()
    assert fakes.peer.ends == []
    trainer.train()
    first, second = fakes.made
    assert first.ends == ["abandon"]
    assert [tokens for tokens, _ in second.steps] == [10, 10], "counted once: no hook was left behind"
    with pytest.raises(RuntimeError, match="in the with"), swarm:
        raise RuntimeError("in the with")
    assert second.ends == ["finish", "leave", "RuntimeError"]


@pytest.mark.slow
def test_a_scheduler_that_no_schedule_can_steer(runs: ModuleType, fakes: Fakes, tmp_path: Path) -> None:
    swarm = runs.GossamerCallback(schedule=linear(1000))
    trainer = runs.trainer_of(
        tmp_path, swarm, max_steps=2, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"
    )
    with pytest.raises(ConfigError, match="cannot steer a ReduceLROnPlateau"):
        trainer.train()
    assert not fakes.made, "before anything was started"


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (0, "started 2 ranks, and each trains on its own"),
        (2, "over 2 GPUs by DataParallel.*or set CUDA_VISIBLE_DEVICES"),
    ],
)
def test_processes_that_are_not_one_trainer(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, message: str
) -> None:
    """As torchrun without GPUs and without `use_cpu`, and as several GPUs in one process."""
    two = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr("gossamer.node.adapters.transformers.dist", two)
    args = runs.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    args._n_gpu = gpus
    kept = dict.fromkeys(("model", "optimizer", "lr_scheduler"))
    with pytest.raises(ConfigError, match=message):
        runs.GossamerCallback().on_train_begin(args, *runs.unstarted(), **kept)


def test_an_optimizer_is_in_train_mode_before_it_gets_its_state(
    runs: ModuleType, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ScheduleFree moves the model when its mode changes. The trainer changes it within its first step."""
    args = runs.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    model, attached = runs.small_llama(), []
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(optimizer, "train", lambda: attached.append(len(fakes.made)), raising=False)
    kept = {"model": model, "optimizer": optimizer, "lr_scheduler": None}
    runs.GossamerCallback().on_train_begin(args, *runs.unstarted(), **kept)
    assert attached == [0] and fakes.peer


def test_the_best_model_is_not_published_where_nothing_said_that_training_would_end(
    runs: ModuleType, fakes: Fakes
) -> None:
    swarm, model = runs.GossamerCallback(), nn.Linear(1, 1)
    swarm._attach(model, [AdamW(model.parameters())])
    ends_with_the_best = SimpleNamespace(load_best_model_at_end=True)
    swarm.on_train_end(ends_with_the_best, *runs.unstarted())
    assert fakes.peer.ends == ["abandon"]


def test_an_argument_that_attach_does_not_have(runs: ModuleType) -> None:
    for wrong in ({"tokens": 5}, {"schedule": 0.5}):
        with pytest.raises(TypeError, match="takes a function of"):
            runs.GossamerCallback(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="jion"):
        runs.GossamerCallback(jion=["host:1"])  # type: ignore[call-arg]


async def test_adapters_on_a_frozen_model_are_all_that_is_shared(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real peer: the head is tied to the embedding, and of the layer only a low-rank part is trained."""
    model = runs.small_llama()
    model.model.layers[0].requires_grad_(False)
    projection = model.model.layers[0].self_attn
    projection.q_proj = nn.Sequential(projection.q_proj, runs.LowRank(8, 2))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    manifest = describe(model, name="t", codec="exact", every_steps=2, fragments=1)
    assert {spec.name: spec.averaging for spec in manifest.layout.tensors} == {
        "model.embed_tokens.weight": "mean",
        "model.norm.weight": "mean",
        "model.layers.0.self_attn.q_proj.1.up": "rda",
        "model.layers.0.self_attn.q_proj.1.down": "rda",
    }
    phi = parameters(model, manifest.plan())
    async with daemon_at(tmp_path, manifest) as daemon, link_to(daemon) as link:

        def attach(model: nn.Module, optimizers: Any) -> Peer:
            peer = leading(model, optimizers, manifest, link, tmp_path / "c")
            assert peer.begin()
            return peer

        monkeypatch.setattr(Peer, "attach", attach)
        await daemon.offer(0, phi)
        trainer = runs.trainer_of(tmp_path, runs.GossamerCallback(finish=False), model=model, max_steps=3)
        await asyncio.to_thread(trainer.train)
        await until(lambda: daemon.seen[:1] == [1])  # a delta after two steps
    assert all(torch.equal(dict(model.named_parameters())[name], was) for name, was in frozen.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not np.array_equal(parameters(model, manifest.plan()), phi)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"activation_checkpointing": True},
        {"optim": "adafactor"},
        {"optim": "sgd", "max_grad_norm": 0.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_the_trainer_does(
    runs: ModuleType, fakes: Fakes, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = runs.trainer_of(tmp_path, runs.GossamerCallback(), max_steps=6, **options)
    trainer.train()
    assert [tokens for tokens, _ in fakes.peer.steps] == [14, 23, 7] * 2
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [loss for _, loss in fakes.peer.steps] == pytest.approx(logged)
    assert logged[-3] < logged[0]
