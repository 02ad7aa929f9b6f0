"""`checkpointreader`: what fits is taken up; what is damaged, or of something else, is left alone."""

import signal

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from gossamer.models.task import named_tensors
from gossamer.node.trainer import checkpoint as checkpointreader
from gossamer.node.trainer.checkpoint import (
    CHECKSUM,
    CheckpointWriter,
    Progress,
    checksum,
    checksums_of,
    restore,
)
from gossamer.node.trainer.outer import OuterLoop
from tests.node.checkpoints import make, metadata_of, saved_in, train, trained, without
from tests.node.optimizers import Around
from tests.protocol import builders


@pytest.fixture
def saved(tmp_path):
    return saved_in(tmp_path)


def test_a_residual_of_an_older_delta_is_left_out(saved):
    path, outer, _ = saved
    _, again, fresh = make(seed=1)
    again.fragments[0].last_published = outer.fragments[0].last_published
    again.fragments[1].last_published = outer.fragments[1].last_published + 2
    assert restore(path, again, [fresh]) is not None
    assert any(residual.any() for residual in again.fragments[0].residual)
    assert not any(residual.any() for residual in again.fragments[1].residual)


@pytest.mark.parametrize("moment", ["checksums_of", "restore_inner"])
def test_a_watchdog_that_barks_meanwhile_is_not_taken_for_damage(saved, moment, monkeypatch, caplog):
    path, _, _ = saved
    _, again, fresh = make(seed=1)
    run = getattr(checkpointreader, moment)

    def bark(*_):
        raise TimeoutError("no model for an hour")

    def barked(*arguments):
        signal.raise_signal(signal.SIGALRM)
        return run(*arguments)

    monkeypatch.setattr(checkpointreader, moment, barked)
    handler = signal.signal(signal.SIGALRM, bark)
    try:
        with pytest.raises(TimeoutError, match="no model for an hour"):
            restore(path, again, [fresh])
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert fresh.state and not caplog.text


def test_who_has_done_no_step_is_as_fresh_as_before(tmp_path):
    """Its learning rate is warmed up, as that of any other joiner is."""
    _, outer, optimizer = make()
    for progress in (Progress(0, 0), Progress(1, 8)):
        CheckpointWriter(tmp_path / "t").save(outer, [optimizer], progress)
        _, again, fresh = make(seed=1)
        assert restore(tmp_path / "t", again, [fresh]) == (progress, progress.steps > 0)


@pytest.mark.parametrize(
    "damage", ["missing", "torn", "garbage", "a flipped bit", "another model", "another version"]
)
def test_what_does_not_fit_changes_nothing(saved, damage, monkeypatch, caplog):
    path, _, _ = saved
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "garbage":
        path.write_bytes(b"\x00" * 100)
    elif damage == "a flipped bit":
        data = bytearray(path.read_bytes())
        data[-5] ^= 0x40
        path.write_bytes(data)
    elif damage == "another version":
        monkeypatch.setattr(checkpointreader, "VERSION", "0")
    _, outer, optimizer = make(seed=1)
    if damage == "another model":
        wider = nn.Sequential(nn.Linear(6, 7))
        tensors = tuple((name, tuple(p.shape), "mean") for name, p in named_tensors(wider))
        outer = OuterLoop(dict(named_tensors(wider)), builders.manifest(tensors=tensors))
        optimizer = torch.optim.AdamW(wider.parameters())
    assert restore(path, outer, [optimizer]) is None
    assert not any(residual.any() for state in outer.fragments for residual in state.residual)
    assert optimizer.state_dict()["state"] == {}
    assert (f"cannot use {path}" in caplog.text) == (damage != "missing")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rounds", "7"),
        ("rounds", "null"),
        ("inner", "[1]"),
        ("inner", '{"0/step": 1, "x": 2}'),
        ("inner", "[" * 100_000),
        ("steps", "many"),
        ("dtypes", "7"),
    ],
)
def test_metadata_that_was_never_written_changes_nothing(saved, tmp_path, key, text):
    whole, _, _ = saved
    path = tmp_path / "damaged.safetensors"
    tensors, changed = load_file(whole), {**metadata_of(whole), key: text}
    del changed[CHECKSUM]
    path.write_bytes(save(tensors, {**changed, CHECKSUM: checksum(checksums_of(tensors), changed)}))
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) is None
    assert fresh.state_dict()["state"] == {}


@pytest.mark.parametrize("change", ["another class", "a parameter less", "another order, without names"])
def test_other_optimizers_begin_afresh_and_the_rest_comes_back(saved, change):
    path, outer, _ = saved
    model, again, _ = make(seed=1)
    first, *others = model.parameters()
    optimizer = {
        "another class": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "a parameter less": torch.optim.AdamW(others),
        "another order, without names": torch.optim.AdamW([*others, first]),
    }[change]
    if "without names" in change:
        without(path, "names")
    for state, known in zip(again.fragments, outer.fragments, strict=True):
        state.last_published = known.last_published
    assert restore(path, again, [optimizer]) == (Progress(8, 16), False)
    assert not optimizer.state_dict()["state"]
    assert any(residual.any() for state in again.fragments for residual in state.residual)


ALIKE = [f"{place}.weight" for place in range(4)]


def alike(names=ALIKE):
    """A model of layers of one shape: nothing but their names tells whose a state is."""
    torch.manual_seed(0)
    layers = {name.split(".")[0]: nn.Linear(3, 3, bias=False) for name in names}
    model = nn.ModuleDict(layers)
    tensors = tuple((name, tuple(p.shape), "mean") for name, p in named_tensors(model))
    return model, OuterLoop(dict(named_tensors(model)), builders.manifest(tensors=tensors))


@pytest.mark.parametrize("change", ["reversed groups", "shuffled", "split in two", "one of another model"])
def test_a_state_goes_to_the_parameters_of_its_name(tmp_path, change):
    """A set of parameters has another order in each process, and groups are edited."""

    def of_another_model():
        return nn.Parameter(torch.full((3, 3), 7.0))

    model, outer = alike()
    others = [of_another_model()] if change == "one of another model" else []
    optimizer = torch.optim.AdamW([{"params": [p]} for p in (*model.parameters(), *others)])
    for place, parameter in enumerate((*model.parameters(), *others)):
        parameter.grad = torch.full_like(parameter, 10.0**-place)
    optimizer.step()
    expected = {p: optimizer.state[p]["exp_avg"] for p in (*model.parameters(), *others)}
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    again, outer = alike()
    a, b, c, d = again.parameters()
    mine = [of_another_model()] if others else []
    optimizers = {
        "reversed groups": lambda: [torch.optim.AdamW([{"params": [p]} for p in (d, c, b, a)])],
        "shuffled": lambda: [torch.optim.AdamW([c, a, d, b])],
        "split in two": lambda: [torch.optim.AdamW([d, b]), torch.optim.AdamW([a, c])],
        "one of another model": lambda: [torch.optim.AdamW([*mine, c, a, d, b])],
    }[change]()
    assert restore(tmp_path / "t", outer, optimizers) == (Progress(1, 2), True)
    state = {p: kept["exp_avg"] for optimizer in optimizers for p, kept in optimizer.state.items()}
    for known, parameter in zip(expected, (a, b, c, d, *mine), strict=True):
        assert torch.equal(state[parameter], expected[known])


def test_a_state_of_parameters_of_other_names_begins_afresh_with_a_line(tmp_path, caplog):
    def made(*left_out):
        model, outer = alike([*ALIKE, "4.weight"])
        trained = [p for name, p in named_tensors(model) if name not in left_out]
        return outer, torch.optim.AdamW(trained), trained

    outer, optimizer, trained = made("1.weight")
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    for left_out, comes_back in (("1.weight", True), ("0.weight", False)):
        assert not caplog.messages
        outer, fresh, _ = made(left_out)
        assert restore(tmp_path / "t", outer, [fresh]) == (Progress(1, 2), comes_back)
    assert ["different parameters" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (torch.optim.AdamW, {}, {"amsgrad": True}),
        (torch.optim.RMSprop, {}, {"centered": True}),
        (torch.optim.RMSprop, {}, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}),
    ],
)
def test_a_state_of_other_options_begins_afresh_with_a_line(tmp_path, caplog, kind, before, after):
    """torch would look for what is not in it, and end training at the first step of every start."""
    model, outer, _ = make()
    optimizer = kind(model.parameters(), lr=0.1, **before)
    train(model, outer, optimizer, 2)
    path = tmp_path / "t"
    CheckpointWriter(path).save(outer, [optimizer], Progress(2, 4))
    for options, comes_back in (({**before, "lr": 0.01, "weight_decay": 0.1}, True), (after, False)):
        assert not caplog.messages
        again, again_outer, _ = make(seed=1)
        fresh = kind(again.parameters(), **{"lr": 0.1, **options})
        assert restore(path, again_outer, [fresh]) == (Progress(2, 4), comes_back)
        train(again, again_outer, fresh, 1)
    assert ["different options" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("keys", [["options"], ["names"], ["names", "options", "dtypes"]])
def test_a_state_as_earlier_releases_wrote_it_is_taken_up(saved, keys):
    path, _, _ = saved
    without(path, *keys)
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) == (Progress(8, 16), True)


def test_an_inner_optimizer_that_diverged_begins_afresh_with_a_line(tmp_path, caplog):
    _, outer, optimizer = trained()
    next(iter(optimizer.state.values()))["exp_avg"][0] = float("nan")
    path = tmp_path / "trainer.safetensors"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) == (Progress(8, 16), False)
    assert not fresh.state_dict()["state"]
    assert "saved state is not finite: it starts afresh" in caplog.text


def test_a_state_that_was_saved_within_a_first_step_begins_afresh_with_a_line(tmp_path, caplog):
    """As earlier releases did where Ctrl-C came; others have no state yet, as unused ones."""
    model, outer, optimizer = make()
    train(model, outer, optimizer, 1)
    _, second, *others = model.parameters()
    for other in others:
        del optimizer.state[other]
    optimizer.state[second].pop("exp_avg_sq")
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    _, again, fresh = make()
    assert restore(tmp_path / "t", again, [fresh]) == (Progress(1, 2), True), "they have other dimensions"
    third = others[0]
    optimizer.state[third] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(third)}
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    _, again, fresh = make()
    assert restore(tmp_path / "t", again, [fresh]) == (Progress(1, 2), False)
    assert not fresh.state and "saved state is torn: it starts afresh" in caplog.text


def test_a_wrappers_state_as_earlier_releases_wrote_it_is_taken_up(tmp_path):
    """They wrote down the wrapper, whose state was that of the optimizer in it, and no names."""
    model, outer, _ = make()
    optimizer = Around(model.parameters())
    train(model, outer, optimizer, 2)
    path = tmp_path / "t"
    CheckpointWriter(path).save(outer, [optimizer], Progress(2, 4))
    metadata = metadata_of(path)
    for key in (CHECKSUM, "names"):
        del metadata[key]
    metadata["optimizers"] = metadata["optimizers"].replace("AdamW", "Around")
    tensors = load_file(path)
    path.write_bytes(save(tensors, {**metadata, CHECKSUM: checksum(checksums_of(tensors), metadata)}))
    model, outer, _ = make(seed=1)
    fresh = Around(model.parameters())
    assert restore(path, outer, [fresh]) == (Progress(2, 4), True)
    assert len(fresh.optimizer.state) == 4


def test_a_state_of_another_class_begins_afresh_with_a_line_if_there_is_one(tmp_path, caplog):
    path = tmp_path / "t"
    for momentum in (0.0, 0.9):
        model, outer, fresh = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        train(model, outer, optimizer, 1)
        CheckpointWriter(path).save(outer, [optimizer], Progress(1, 2))
        assert restore(path, outer, [fresh]) == (Progress(1, 2), False)
        assert bool(caplog.messages) == bool(momentum)
    assert "different classes or shapes than its saved state: it starts afresh" in caplog.text
