"""A checkpoint is written while training goes on; what fits comes back, and the rest begins afresh."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.models.muon import InnerOptimizer
from gossamer.node.files import UNFINISHED_S
from gossamer.node.trainer import checkpoint
from gossamer.node.trainer.checkpoint import CheckpointWriter, Progress, restore
from tests.node.checkpoints import make, outer_of, saved_in, train, trained
from tests.node.optimizers import Around, Counting, FindsItsRate, Tree

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_each_device")


@pytest.fixture
def saved(tmp_path):
    return saved_in(tmp_path)


def steps_until_written(writer, path, outer, optimizers, between=lambda: None):
    """Call the writer after each step, as a loop does, until the file is there. Returns how many it took."""
    deadline, steps = time.monotonic() + 60, 0
    while not path.exists():
        assert time.monotonic() < deadline
        writer.step(outer, optimizers, Progress(8, 16))
        while (writing := writer._writing) is not None and not writing.is_ready:
            time.sleep(0.001)
        between()
        steps += 1
    return steps


def same(ours, theirs):
    """Whether two trees hold the same."""
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


def came_back(path, before, after):
    """Whether an optimizer's state comes back with the model of another process."""
    model, outer, _ = make(seed=1)
    fresh = after(model)
    restored = restore(path, outer, [fresh])
    assert restored is not None and restored[0] == Progress(2, 4)
    is_same = same(list(fresh.state.values()), list(before.state.values()))
    assert is_same if restored[1] else not fresh.state
    return restored[1]


# -- what comes back


def test_all_of_it_comes_back(saved, tmp_path):
    path, outer, optimizer = saved
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]
    _, again, fresh = make(seed=1)
    for state, known in zip(again.fragments, outer.fragments, strict=True):
        state.last_published = known.last_published
    assert restore(path, again, [fresh]) == (Progress(8, 16), True)
    for state, known in zip(again.fragments, outer.fragments, strict=True):
        assert all(map(same, state.saved.values(), known.saved.values()))
        assert any(residual.any() for residual in known.saved["residual"])
    assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_residual_of_an_older_delta_is_left_out(saved):
    path, outer, _ = saved
    _, again, fresh = make(seed=1)
    again.fragments[0].last_published = outer.fragments[0].last_published
    again.fragments[1].last_published = outer.fragments[1].last_published + 2
    assert restore(path, again, [fresh]) is not None
    assert any(residual.any() for residual in again.fragments[0].saved["residual"])
    assert not any(residual.any() for residual in again.fragments[1].saved["residual"])


def test_who_has_done_no_step_is_as_fresh_as_before(tmp_path):
    """Its learning rate is warmed up, as that of any other joiner is."""
    _, outer, optimizer = make()
    for progress in (Progress(0, 0), Progress(1, 8)):
        CheckpointWriter(tmp_path / "t").save(outer, [optimizer], progress)
        _, again, fresh = make(seed=1)
        assert restore(tmp_path / "t", again, [fresh]) == (progress, progress.steps > 0)


@pytest.mark.parametrize(
    "damage", ["missing", "torn", "empty", "garbage", "a flipped bit", "a model", "a version"]
)
def test_what_does_not_fit_changes_nothing(saved, damage, monkeypatch, caplog):
    path, _, _ = saved
    data = bytearray(path.read_bytes())
    data[100] ^= 0x40
    damages = {"torn": data[:-10], "empty": b"", "garbage": bytes(100), "a flipped bit": data}
    if damage == "missing":
        path.unlink()
    elif damage == "a version":
        monkeypatch.setattr(checkpoint, "VERSION", 0)
    elif damage in damages:
        path.write_bytes(damages[damage])
    _, outer, optimizer = make(seed=1)
    if damage == "a model":
        wider = nn.Sequential(nn.Linear(6, 7))
        outer, optimizer = outer_of(wider), torch.optim.AdamW(wider.parameters())
    assert restore(path, outer, [optimizer]) is None
    assert not any(residual.any() for state in outer.fragments for residual in state.saved["residual"])
    assert optimizer.state_dict()["state"] == {}
    assert (f"cannot use {path}" in caplog.text) == (damage != "missing")


# -- inner optimizers


@pytest.mark.parametrize(
    "made",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
        lambda model: Tree(model.parameters()),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ],
)
def test_a_tree_of_tensors_and_plain_values_comes_back(tmp_path, made):
    model, outer, _ = make()
    train(model, outer, optimizer := made(model), 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    assert came_back(tmp_path / "t", optimizer, made)


class Quantised(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        (1, 2),
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(2).as_subclass(Quantised),
    ],
)
def test_what_is_neither_a_tensor_nor_a_plain_value_begins_afresh_with_a_line(tmp_path, value, caplog):
    model, outer, optimizer = make()
    train(model, outer, optimizer, 2)
    next(iter(optimizer.state.values()))["more"] = value
    writer = CheckpointWriter(tmp_path / "t")
    for _ in range(2):
        writer.save(outer, [optimizer], Progress(2, 4))
    (line,) = caplog.messages
    assert line == "the inner optimizer's state cannot be saved: after a restart it starts afresh"
    assert not came_back(
        tmp_path / "t", optimizer, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    )


class Lookahead(torch.optim.AdamW):
    """As wrappers around another optimizer save its state beside theirs."""

    def state_dict(self):
        inner = super().state_dict()
        return {"fast_state": inner["state"], "slow_state": {}, "param_groups": inner["param_groups"]}


class NeverSaved(torch.optim.AdamW):
    def state_dict(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("before", "after", "comes_back"),
    [
        (Lookahead, Lookahead, False),
        (NeverSaved, NeverSaved, False),
        (Around, Around, False),
        (torch.optim.AdamW, lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.1), True),
        (torch.optim.AdamW, lambda p: torch.optim.AdamW(p, amsgrad=True), False),
        (torch.optim.RMSprop, lambda p: torch.optim.RMSprop(p, momentum=0.9), False),
        (torch.optim.AdamW, lambda p: torch.optim.SGD(p, momentum=0.9), False),
        (torch.optim.AdamW, lambda p: torch.optim.AdamW(list(p)[1:]), False),
    ],
)
def test_other_optimizers_begin_afresh_with_a_line(tmp_path, caplog, before, after, comes_back):
    """torch would look for what is not in a state, and end training at the first step of every start."""
    model, outer, _ = make()
    train(model, outer, optimizer := before(model.parameters()), 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    assert came_back(tmp_path / "t", optimizer, lambda model: after(model.parameters())) == comes_back
    assert [line.endswith("it starts afresh") for line in caplog.messages] == [True] * (not comes_back)


def test_a_state_goes_to_the_parameters_of_its_name(tmp_path):
    """A set of parameters has another order in each process, and groups are edited."""

    def alike():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
        return model, outer_of(model), nn.Parameter(torch.full((3, 3), 7.0))

    model, outer, other = alike()
    optimizer = torch.optim.AdamW([{"params": [p]} for p in (*model.parameters(), other)])
    for place, parameter in enumerate((*model.parameters(), other)):
        parameter.grad = torch.full_like(parameter, 10.0**-place)
    optimizer.step()
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    expected = [state["exp_avg"] for state in optimizer.state.values()]
    again, outer, other = alike()
    a, b, c, d = again.parameters()
    optimizers = [torch.optim.AdamW([d, b]), torch.optim.AdamW([other, a, c])]
    assert restore(tmp_path / "t", outer, optimizers) == (Progress(1, 2), True)
    states = {**optimizers[0].state, **optimizers[1].state}
    assert same([states[p]["exp_avg"] for p in (a, b, c, d, other)], expected)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("laid_out", ["channels last", "transposed"])
def test_a_fused_optimizer_goes_on_as_it_was_whatever_the_parameters_layout(tmp_path, kind, laid_out):
    """It does not look at where its moments lie: a restart would permute them."""

    def build():
        values = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(7))
        channels_last = values.to(memory_format=torch.channels_last)
        parameter = nn.Parameter(values.transpose(0, 1) if laid_out == "transposed" else channels_last)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return parameter, kind([parameter], lr=0.1, fused=True, **options)

    def step(parameter, optimizer):
        (parameter * torch.arange(1.0, 1 + parameter.numel()).view(parameter.shape)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    _, outer, _ = make()
    parameter, optimizer = build()
    step(parameter, optimizer)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 1))
    again, fresh = build()
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(1, 1), True)
    again.data.copy_(parameter.data)
    step(parameter, optimizer)
    step(again, fresh)
    assert torch.equal(again, parameter)


def test_a_schedule_goes_on_with_the_groups_that_it_holds(saved):
    path, _, _ = saved
    _, outer, optimizer = make(seed=1)
    held = optimizer.param_groups[0]
    inner = InnerOptimizer(optimizer)
    assert restore(path, outer, inner.parts) == (Progress(8, 16), True)
    assert optimizer.param_groups[0] is held
    inner.scale_lr(0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5e-2


def in_groups(model, count=2, **options):
    parameters = list(model.parameters())
    share = len(parameters) // count
    groups = [{"params": parameters[i : i + share]} for i in range(0, len(parameters), share)]
    return FindsItsRate(groups, **options)


def test_what_an_optimizer_learns_in_its_groups_comes_back_and_the_rest_is_as_the_script_says(tmp_path):
    """With the tensors alone Prodigy would learn nothing more; a bias correction that began at 1 again would
    take old momenta for new ones."""
    model, outer, _ = make()
    optimizer = in_groups(model)
    train(model, outer, optimizer, 2)
    optimizer.param_groups[1]["k"] = 7
    optimizer.param_groups[0].update(lr=0.1, initial_lr=0.1)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    fresh = in_groups(model, lr=0.5, d0=0.25)
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(2, 4), True)
    first, second = fresh.param_groups
    assert [first["d"], first["k"], second["d"], second["k"]] == [0.28125, 2, 0.28125, 7]
    assert [first["lr"], first["d0"], first["train_mode"], first["step"]] == [0.5, 0.25, False, 2]
    assert "initial_lr" not in first


@pytest.mark.parametrize("best", [[0.3], torch.tensor(0.3)])
def test_without_what_an_optimizer_learnt_in_its_groups_all_of_it_begins_afresh(tmp_path, best):
    model, outer, _ = make()
    optimizer = in_groups(model)
    train(model, outer, optimizer, 2)
    optimizer.param_groups[0]["best"] = best
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    assert not came_back(tmp_path / "t", optimizer, in_groups)


def test_an_inner_optimizer_that_diverged_begins_afresh_with_a_line(tmp_path, caplog):
    _, outer, optimizer = trained()
    next(iter(optimizer.state.values()))["exp_avg"][0] = float("nan")
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(8, 16))
    _, again, fresh = make(seed=1)
    assert restore(tmp_path / "t", again, [fresh]) == (Progress(8, 16), False)
    assert not fresh.state_dict()["state"]
    assert "saved state is not finite: it starts afresh" in caplog.text


# -- while training goes on


def test_each_tensor_names_the_round_of_its_residual(tmp_path, monkeypatch):
    """Fragments are published in between."""
    monkeypatch.setattr(checkpoint, "SHARE_BYTES", 64)
    model, outer, optimizer = trained()
    path, out, round_ = tmp_path / "t", memoryview(bytearray(10_000)), 3
    residuals = {
        (slot.spec.name, state.last_published): state.saved["residual"][i].clone()
        for state in outer.fragments
        for i, slot in enumerate(state.fragment.slots)
    }

    def between():
        nonlocal round_
        train(model, outer, optimizer, 1)
        state = outer.fragments[round_ % len(outer.fragments)]
        outer.publish(state.fragment.index, round_, out)
        residuals.update(
            {
                (slot.spec.name, round_): state.saved["residual"][i].clone()
                for i, slot in enumerate(state.fragment.slots)
            }
        )
        round_ += 1

    steps_until_written(CheckpointWriter(path), path, outer, [optimizer], between)
    assert round_ > 5
    with open(path, "rb") as file:
        labelled = checkpoint._Saved(file)
        for name, _, _, last, _, place in labelled.outer:
            assert torch.equal(labelled.tensor(place), residuals[name, last].cpu())


def test_each_strip_of_a_tensor_comes_back(tmp_path):
    """A tensor in both fragments: its residual is of two deltas."""
    outers = [outer_of(nn.Linear(500, 300)) for _ in range(2)]
    for outer in outers:
        assert [slot.is_cut for state in outer.fragments for slot in state.fragment.slots] == [
            True,
            True,
            False,
        ]
        for last, state in enumerate(outer.fragments, 5):
            state.last_published = last
    for state in outers[0].fragments:
        for kept in (kept for kind in state.saved.values() for kept in kind):
            kept.copy_(torch.randint(1, 100, kept.shape))
    path = tmp_path / "trainer.checkpoint"
    CheckpointWriter(path).save(outers[0], [], Progress(8, 16))
    outers[1].fragments[0].last_published = 7
    assert restore(path, outers[1], []) is not None
    stale, fresh = (state.saved for state in outers[1].fragments)
    saved_first, saved_second = (state.saved for state in outers[0].fragments)
    assert not stale["residual"][0].any(), "the residual of an older delta is left out"
    assert torch.equal(stale["momentum"][0], saved_first["momentum"][0])
    assert all(map(torch.equal, fresh["residual"], saved_second["residual"]))
    assert all(map(torch.equal, fresh["momentum"], saved_second["momentum"]))


def test_what_is_kept_of_one_parameter_is_of_one_step(tmp_path, monkeypatch):
    """A variance of before a large gradient, with the momentum of after it, is a huge step."""
    monkeypatch.setattr(checkpoint, "SHARE_BYTES", 64)
    shapes = ((37, 3), (1, 5), (2, 41), (3, 1))
    optimizer = Counting([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    optimizer.step()
    _, outer, _ = make()
    path = tmp_path / "t"
    steps_until_written(CheckpointWriter(path), path, outer, [optimizer], optimizer.step)
    fresh = Counting([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    assert restore(path, make()[1], [fresh]) == (Progress(8, 16), True)
    counts = [state["plain"] for state in fresh.state.values()]
    for count, state in zip(counts, fresh.state.values(), strict=True):
        assert all((state[key] == count).all() for key in ("wide", "half", "whole"))
    assert len(set(counts)) > 1, "training went on in between"


def test_it_is_written_every_few_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "INTERVAL_MIN_S", 100.0)
    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    steps_until_written(writer, path, outer, [optimizer])
    path.unlink()
    for _ in range(10):
        writer.step(outer, [optimizer], Progress(8, 16))
        time.sleep(0.005)
    assert not path.exists()
    monkeypatch.setattr(writer, "_due_at", 0.0)
    steps_until_written(writer, path, outer, [optimizer])
    writer.close()


def test_after_an_error_in_a_share_another_checkpoint_is_begun(tmp_path, monkeypatch):
    """What was copied for that share is not in the file."""
    monkeypatch.setattr(checkpoint, "INTERVAL_MIN_S", 0.0)
    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, "_groups", lambda *_: signal.raise_signal(signal.SIGINT))
        writer.step(outer, [optimizer], Progress(8, 16))
    steps_until_written(writer, path, outer, [optimizer])
    writer.close()
    assert list(tmp_path.iterdir()) == [path]
    _, fresh, again = make()
    assert restore(path, fresh, [again]) == (Progress(8, 16), True)


def test_it_is_written_where_the_main_thread_has_ended_and_while_the_interpreter_exits(tmp_path):
    """A script may train in a thread, and another never leave its peer: pools take no more work then."""
    script = f"""
import atexit, threading, time
from pathlib import Path
from gossamer.node.trainer.checkpoint import CheckpointWriter, Progress
from tests.node.checkpoints import trained

folder = Path({str(tmp_path)!r})
_, outer, optimizer = trained()

def loop():
    threading.main_thread().join()
    path = folder / "ended"
    writer = CheckpointWriter(path)
    while not path.exists():
        writer.step(outer, [optimizer], Progress(8, 16))
        time.sleep(0.001)

writer = CheckpointWriter(folder / "exits")
writer.step(outer, [optimizer], Progress())
atexit.register(lambda: writer.save(outer, [optimizer], Progress(9, 17)))
threading.Thread(target=loop).start()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200, cwd=ROOT)
    _, outer, optimizer = make(seed=1)
    assert restore(tmp_path / "ended", outer, [optimizer]) == (Progress(8, 16), True)
    assert restore(tmp_path / "exits", outer, [optimizer]) == (Progress(9, 17), True)
    assert {path.name for path in tmp_path.iterdir()} == {"ended", "exits"}, "nothing is left behind"


def test_a_disk_that_takes_no_more_is_a_log_line(tmp_path, caplog):
    path = tmp_path / "t"
    _, outer, optimizer = trained()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        writer = CheckpointWriter(path)
        writer.save(outer, [optimizer], Progress())
        for _ in range(50):
            writer.step(outer, [optimizer], Progress())
            time.sleep(0.002)
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot save the trainer's state") == 1
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    _, outer, optimizer = make(seed=1)
    assert restore(path, outer, [optimizer]) == (Progress(8, 16), True)


def test_what_killed_trainers_left_unfinished_is_removed(tmp_path):
    """As large as the checkpoint itself, and one for each time."""
    path = tmp_path / "trainer.checkpoint"
    stale, fresh = (tmp_path / f".{path.name}-{name}" for name in ("stale_01", "fresh_01"))
    for file in (stale, fresh):
        file.write_bytes(b"half")
    long_ago = time.time() - 2 * UNFINISHED_S
    os.utime(stale, (long_ago, long_ago))
    _, outer, optimizer = trained()
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    assert path.exists() and fresh.exists() and not stale.exists()
