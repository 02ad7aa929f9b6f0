"""The text task as a trainer uses it: it builds, draws, learns, evaluates, schedules and writes."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.models import TaskError
from gossamer.models.corpus import Corpus
from gossamer.models.gpt import GPT, decode_characters
from gossamer.models.muon import InnerOptimizer, Muon
from gossamer.models.task import DataStream, named_tensors
from gossamer.models.text import ByteTextTask, TextOptions

STREAM = DataStream(seed=0, node_id=b"node")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        lines = [f"the {i % 7} quick brown foxes jump over {j} lazy dogs\n" for j in range(40)]
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def task(folder: Path) -> ByteTextTask:
    return ByteTextTask(TextOptions(batch_size=4, context=32, eval_batches=4), [folder])


def test_the_swarm_s_samples_are_the_windows_that_follow_each_other(task: ByteTextTask) -> None:
    count, digest = task.shared_data()
    text = task.corpus.train
    assert count == (text.size - 1) // 32
    assert bytes.fromhex(digest) == hashlib.sha256(text.tobytes()).digest()
    samples = iter([0, count - 1, 5, 7])
    inputs, targets = next(task.batches(replace(STREAM, samples=samples)))
    for row, sample in enumerate((0, count - 1, 5, 7)):
        assert inputs[row].tolist() == text[32 * sample :][:32].tolist()
        assert targets[row].tolist() == text[32 * sample + 1 :][:32].tolist()


def test_loss_falls_and_evaluation_agrees(task: ByteTextTask) -> None:
    model = task.build_model(0)
    optimizer = InnerOptimizer(task.build_optimizer(model))
    before = task.evaluate(model)
    for batch in itertools.islice(task.batches(STREAM), 30):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    after = task.evaluate(model)
    assert 4.5 < before < 6.0
    assert after < 2.5
    assert task.evaluate(model) == after


def test_what_it_trains_on_in_words(folder: Path) -> None:
    task = ByteTextTask(TextOptions(batch_size=4, context=32), [folder])
    train, held_out = task.corpus
    assert task.data_in_words() == f"{folder}: {train.size:,} bytes, and {held_out.size:,} held out"
    usual = ByteTextTask(TextOptions(batch_size=4, context=32))
    usual.corpus = task.corpus
    assert usual.data_in_words().startswith("the source of Python's standard library (no --data): ")


def test_held_out_text_is_never_trained_on(folder: Path) -> None:
    task = ByteTextTask(TextOptions(batch_size=4, context=32), [folder])
    held_out = task.corpus.held_out.tobytes()
    train = task.corpus.train.tobytes()
    assert held_out not in train
    for inputs_BL, targets_BL in itertools.islice(task.batches(STREAM), 20):
        for row in torch.cat([inputs_BL, targets_BL[:, -1:]], 1).tolist():
            assert bytes(row) in train


def test_evaluate_is_the_mean_over_windows_whatever_the_batch_size(folder: Path) -> None:
    losses = []
    for batch_size, batches in ((4, 3), (12, 1), (5, 12)):
        task = ByteTextTask(TextOptions(batch_size=batch_size, context=32, eval_batches=batches), [folder])
        losses.append(task.evaluate(task.build_model(0)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=0.05)


def test_in_an_evaluation_a_window_of_a_short_batch_counts_like_any_other() -> None:
    text = np.random.default_rng(0).integers(0, 256, 32 + 3, dtype=np.uint8)
    losses = []
    for batch_size in (3, 2):
        task = ByteTextTask(TextOptions(batch_size=batch_size, context=32))
        task.corpus = Corpus(text, text)  # of three windows
        losses.append(task.evaluate(task.build_model(0)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_averaging_of_the_gpt(task: ByteTextTask) -> None:
    model = task.build_model(0)
    assert {task.averaging(model, name, parameter) for name, parameter in named_tensors(model)} == {"mean"}
    with_adamw = ByteTextTask(replace(task.options, optimizer="adamw"))
    rules = {name: with_adamw.averaging(model, name, parameter) for name, parameter in named_tensors(model)}
    assert rules["model.embed_tokens.weight"] == "mean"
    assert {rules[name] for name in rules if name.endswith("norm.weight")} == {"mean"}
    assert {rules[name] for name in rules if name.endswith("_proj.weight")} == {"rda"}


def test_muon_has_the_matrices_inside_and_adamw_the_rest(task: ByteTextTask) -> None:
    model = task.build_model(0)
    muon, adamw = task.build_optimizer(model)
    (matrices,) = muon.param_groups
    embedding, vectors = adamw.param_groups
    assert isinstance(muon, Muon) and matrices["lr"] == 3 * task.options.lr
    assert {p.ndim for p in matrices["params"]} == {2} and matrices["weight_decay"] == 0.1
    assert [id(p) for p in embedding["params"]] == [id(model.model.embed_tokens.weight)]
    assert {p.ndim for p in vectors["params"]} == {1} and vectors["weight_decay"] == 0.0
    assert embedding["lr"] == vectors["lr"] == task.options.lr and embedding["betas"] == (0.9, 0.95)
    shared = [p for group in (matrices, embedding, vectors) for p in group["params"]]
    assert {id(p) for p in shared} == {id(p) for p in model.parameters()}
    assert len(shared) == len(list(model.parameters()))


def test_adamw_alone_decays_matrices_only() -> None:
    task = ByteTextTask(TextOptions(optimizer="adamw"))
    (adamw,) = task.build_optimizer(task.build_model(0))
    matrices, vectors = adamw.param_groups
    assert {p.ndim for p in matrices["params"]} == {2} and matrices["weight_decay"] == 0.1
    assert {p.ndim for p in vectors["params"]} == {1} and vectors["weight_decay"] == 0.0


def test_lr_scale_is_constant_without_a_horizon_and_a_cosine_with_one() -> None:
    assert ByteTextTask().lr_scale(0) == ByteTextTask().lr_scale(10**15) == 1.0
    scale = ByteTextTask(TextOptions(horizon_tokens=1000)).lr_scale
    assert scale(0) == 1.0
    assert scale(500) == pytest.approx(0.55)
    assert scale(1000) == scale(10**15) == pytest.approx(0.1)
    assert all(scale(a) > scale(a + 50) for a in range(0, 1000, 50))


def test_zeros_stand_for_the_presets_own_values() -> None:
    options = TextOptions(preset="small", lr=0.5).resolved()
    assert (options.context, options.lr) == (256, 0.5)
    assert options.batch_size > 0
    assert options.resolved() == options
    assert ByteTextTask(TextOptions(context=32)).config.context == 32


def test_missing_data_is_said_when_it_is_first_needed(tmp_path: Path) -> None:
    task = ByteTextTask(data=[tmp_path / "missing"])
    model = task.build_model(0)
    with pytest.raises(TaskError, match="missing does not exist"):
        next(task.batches(STREAM))
    with pytest.raises(TaskError, match="missing does not exist"):
        task.evaluate(model)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt", ["", "the ", "héllo — " * 20, "\udc80"])
def test_sample_yields_the_length_asked_for(task: ByteTextTask, temperature: float, prompt: str) -> None:
    model = task.build_model(0)
    texts = [
        "".join(task.sample(model, prompt, 20, temperature=temperature, seed=seed)) for seed in (1, 1, 2)
    ]
    assert [len(text) for text in texts] == [20, 20, 20]
    assert texts[0] == texts[1]
    assert (texts[0] == texts[2]) == (temperature == 0)
    assert model.training


def test_next_to_no_temperature_is_as_good_as_none(task: ByteTextTask) -> None:
    model = task.build_model(0)
    texts = ["".join(task.sample(model, "a", 10, temperature=t, seed=1)) for t in (0.0, 1e-9, 5e-324)]
    assert texts[0] == texts[1] == texts[2]


def test_sample_comes_in_pieces_and_leaves_the_global_generator(task: ByteTextTask) -> None:
    state = torch.get_rng_state()
    pieces = list(task.sample(task.build_model(0), "a", 10, temperature=1.0, seed=0))
    assert len(pieces) > 1
    assert torch.equal(torch.get_rng_state(), state)
    assert list(task.sample(task.build_model(0), "a", 0, temperature=1.0, seed=0)) == []


def test_sample_refuses_impossible_arguments_at_the_call(task: ByteTextTask) -> None:
    model = GPT(task.config)
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(TaskError, match="^temperature is .*: choose 0 or more$"):
            task.sample(model, "", 1, temperature=temperature, seed=0)


def test_characters_are_whole_and_broken_bytes_replaced() -> None:
    data = "aé—😀".encode() + b"\xff\xe2\x28z"
    assert list(decode_characters(data, 5)) == ["a", "é", "—", "😀", "\ufffd"]
    assert "".join(decode_characters(data, 8)) == "aé—😀\ufffd\ufffd(z"
    assert "".join(decode_characters(data, 6)) == "aé—😀\ufffd\ufffd"
