"""What a node keeps of its own training across restarts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from gossamer.models.inner_optimizer import InnerOptimizer
from gossamer.models.task import named_tensors
from gossamer.node.storage.wholefile import UNFINISHED_S
from gossamer.node.training import checkpointreader, checkpointwriter
from gossamer.node.training.checkpoint import CHECKSUM, Progress, checksum, checksums_of
from gossamer.node.training.checkpointreader import restore
from gossamer.node.training.checkpointwriter import CheckpointWriter
from gossamer.node.training.innerstate import state_keepers
from gossamer.node.training.outer import OuterLoop
from tests.protocol import builders

ROOT = Path(__file__).parents[2]


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    tensors = tuple((name, tuple(p.shape), "mean") for name, p in named_tensors(model))
    manifest = builders.manifest(tensors=tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, OuterLoop(dict(named_tensors(model)), manifest), optimizer


def train(model, outer, optimizer, steps):
    for step in range(steps):
        loss = model(torch.full((2, 6), 0.1 * step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step(tokens=2, loss=loss.detach())


def trained():
    model, outer, optimizer = make()
    out = memoryview(bytearray(10_000))
    train(model, outer, optimizer, 5)
    outer.publish(1, 1, out)
    train(model, outer, optimizer, 3)
    outer.publish(0, 2, out)
    return model, outer, optimizer


def metadata_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.fixture
def saved(tmp_path):
    _, outer, optimizer = trained()
    path = tmp_path / "trainer.safetensors"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    return path, outer, optimizer


def test_a_state_copied_in_shares_names_the_round_of_each_fragment(tmp_path, monkeypatch):
    """Training goes on in between; a fragment's residual is that of the round it is labelled with."""
    monkeypatch.setattr(checkpointwriter, "SHARE_BYTES", 64)
    model, outer, optimizer = trained()
    path = tmp_path / "t"
    writer, out, round_ = CheckpointWriter(path), memoryview(bytearray(10_000)), 3
    residuals = {state.last_published: [r.clone() for r in state.residual] for state in outer.fragments}
    writer.begin(outer, [optimizer])
    steps = 0
    while not path.exists():
        writer.advance(Progress(9, 18), wait=True)
        train(model, outer, optimizer, 1)
        steps += 1
        if steps % 5 == 0:
            outer.publish(round_ % len(outer.fragments), round_, out)
            residuals[round_] = [r.clone() for r in outer.fragments[round_ % len(outer.fragments)].residual]
            round_ += 1
    assert round_ > 5, "fragments were published meanwhile"
    labelled = json.loads(metadata_of(path)["rounds"])
    _, again, fresh = make(seed=1)
    for state, last in zip(again.fragments, labelled, strict=True):
        state.last_published = last
    assert restore(path, again, [fresh]) == (Progress(9, 18), True)
    for state, last in zip(again.fragments, labelled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state.residual, residuals[last], strict=True))


class Counting(torch.optim.Optimizer):
    """Sets all that it keeps of a parameter, of several dtypes and orders, to its count of steps."""

    def __init__(self, params):
        super().__init__(params, {})
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                rows, columns = parameter.shape
                state["wide"] = torch.empty(rows, columns, dtype=torch.float64)
                state["half"] = torch.empty(rows, columns, dtype=torch.bfloat16)
                state["turned"] = torch.empty(columns, rows).T
                state["whole"] = torch.empty(rows, columns, dtype=torch.uint8)
            for value in state.values():
                value.fill_(self.count)


def test_what_is_kept_of_one_element_is_of_one_step(tmp_path, monkeypatch):
    """A variance of before a large gradient, with the momentum of after it, is a huge step."""
    monkeypatch.setattr(checkpointwriter, "SHARE_BYTES", 64)
    _, outer, _ = make()
    shapes = ((37, 3), (1, 5), (2, 41), (3, 1))
    optimizer = Counting([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    optimizer.step()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    while not path.exists():
        writer.advance(Progress(9, 18), wait=True)
        optimizer.step()
    writer.close()
    found = load_file(path)
    for index in range(len(shapes)):
        wide = found[f"inner/{index}/wide"]
        assert all(torch.equal(found[f"inner/{index}/{key}"], wide) for key in ("half", "turned", "whole"))
    assert len(found["inner/0/wide"].unique()) > 3, "training went on in between"
    assert restore(path, make()[1], []) is not None, "the checksum is right"


def test_a_piece_that_does_not_lie_in_order_costs_no_copy_of_all():
    tensor = torch.arange(4000.0).view(2, 20, 100)
    for turned in (tensor.transpose(1, 2), tensor.permute(2, 1, 0), tensor[:, ::2], tensor[:, 3].T[None]):
        whole = turned.reshape(-1)
        for start, end in ((0, 1), (0, len(whole)), (7, 91), (95, 1803), (len(whole) - 3, len(whole))):
            piece = checkpointwriter._elements(turned, start, end)
            assert torch.equal(piece, whole[start:end])
    rows = torch.empty(100, 1000).T
    assert checkpointwriter._elements(rows, 250, 360).untyped_storage().nbytes() == 2 * 100 * 4


def test_ctrl_c_waits_until_a_share_is_handed_on(tmp_path, monkeypatch):
    """Whoever goes on after it would else get a file with a hole, in place of one that was whole."""
    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    copy = checkpointwriter._Writing._copy

    def interrupted(*arguments):
        copied = copy(*arguments)
        signal.raise_signal(signal.SIGINT)
        return copied

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpointwriter._Writing, "_copy", interrupted)
        writer.advance(Progress(8, 16), wait=True)
    while not path.exists():
        writer.advance(Progress(8, 16), wait=True)
    writer.close()
    _, fresh, again = make()
    assert restore(path, fresh, [again]) == (Progress(8, 16), True)


def test_a_share_is_few_tensors_however_small(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointwriter, "SHARE_TENSORS", 3)
    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer, advances = CheckpointWriter(path), 0
    writer.begin(outer, [optimizer])
    while writer._under_way is not None:
        writer.advance(Progress(8, 16), wait=True)
        advances += 1
    with safe_open(path, framework="pt") as file:
        assert advances == -(-len(file.keys()) // 3) + 2, "then it is closed, and found to be"
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) == (Progress(8, 16), True)


def test_many_small_tensors_are_written_less_often(tmp_path, monkeypatch):
    """Each costs the same time, whatever is in it."""
    now = 100.0
    monkeypatch.setattr(checkpointwriter, "time", SimpleNamespace(monotonic=lambda: now))
    _, outer, _ = make()
    for count, seconds in ((20, 5), (2000, 20)):
        optimizer = Counting([nn.Parameter(torch.zeros(1, 1)) for _ in range(count)])
        optimizer.step()
        writer = CheckpointWriter(tmp_path / "t")
        assert writer.is_due()
        writer.save(outer, [optimizer], Progress())
        begun, now = now, now + seconds
        assert not writer.is_due()
        now = begun + 10 * seconds
        assert writer.is_due()


def test_a_fragment_published_while_it_is_copied_is_copied_again(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointwriter, "SHARE_BYTES", 8)
    _, outer, _ = trained()
    path = tmp_path / "t"
    writer, round_ = CheckpointWriter(path), 4
    writer.begin(outer, [])
    writer.advance(Progress(), wait=True)
    outer.publish(0, round_, memoryview(bytearray(10_000)))
    while not path.exists():
        writer.advance(Progress(), wait=True)
    assert json.loads(metadata_of(path)["rounds"])[0] == round_
    _, again, _ = make(seed=1)
    again.fragments[0].last_published = round_
    assert restore(path, again, []) is not None
    for ours, known in zip(again.fragments[0].residual, outer.fragments[0].residual, strict=True):
        assert torch.equal(ours, known)


def test_it_is_written_where_the_main_thread_ended_before_training(tmp_path):
    """The interpreter then takes no more work for the threads of pools, and waits for the one that trains."""
    script = f"""
import threading
from pathlib import Path
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.checkpointwriter import CheckpointWriter
from tests.node.test_checkpoint import trained

path = Path({str(tmp_path / "t")!r})
_, outer, optimizer = trained()

def loop():
    threading.main_thread().join()
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    while not path.exists():
        writer.advance(Progress(8, 16), wait=True)

threading.Thread(target=loop).start()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)
    _, again, fresh = make(seed=1)
    assert restore(tmp_path / "t", again, [fresh]) == (Progress(8, 16), True)


def test_any_dtype_and_layout_is_read_back_by_the_library(tmp_path):
    """Numbers of all widths, in whatever order they lie in memory."""
    model, outer, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "turned": torch.arange(12.0).view(3, 4).T,
        "wide": torch.arange(3, dtype=torch.float64),
        "none": torch.empty(0, 2),
        "one": torch.tensor(7),
    }
    optimizer.state[next(model.parameters())] = dict(kept)
    path = tmp_path / "t"
    CheckpointWriter(path).save(outer, [optimizer], Progress(1, 1))
    found = load_file(path)
    assert all(torch.equal(found[f"inner/0/{name}"], tensor) for name, tensor in kept.items())
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]


def test_all_of_it_comes_back(saved):
    path, outer, optimizer = saved
    _, again, fresh = make(seed=1)
    for state, known in zip(again.fragments, outer.fragments, strict=True):
        state.last_published = known.last_published
    assert restore(path, again, [fresh]) == (Progress(8, 16), True)
    for state, known in zip(again.fragments, outer.fragments, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state.residual, known.residual, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(state.momentum, known.momentum, strict=True))
        assert any(residual.any() for residual in known.residual)
    ours, theirs = fresh.state_dict()["state"], optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[i]["exp_avg"], theirs[i]["exp_avg"]) for i in theirs)


def test_a_residual_of_an_older_delta_is_left_out(saved):
    path, outer, _ = saved
    _, again, fresh = make(seed=1)
    again.fragments[0].last_published = outer.fragments[0].last_published
    again.fragments[1].last_published = outer.fragments[1].last_published + 2
    assert restore(path, again, [fresh]) is not None
    assert any(residual.any() for residual in again.fragments[0].residual)
    assert not any(residual.any() for residual in again.fragments[1].residual)


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


def test_it_is_saved_while_the_interpreter_exits(tmp_path):
    """As of a script that never left its peer: executors take no work then."""
    script = f"""
import atexit
from pathlib import Path
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.checkpointwriter import CheckpointWriter
from tests.node.test_checkpoint import trained
_, outer, optimizer = trained()
writer = CheckpointWriter(Path({str(tmp_path / "t")!r}))
writer.begin(outer, [optimizer])
writer.advance(Progress())
atexit.register(lambda: writer.save(outer, [optimizer], Progress(8, 16)))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)
    _, outer, optimizer = make(seed=1)
    assert restore(tmp_path / "t", outer, [optimizer]) == (Progress(8, 16), True)
    assert list(tmp_path.iterdir()) == [tmp_path / "t"]


def test_it_is_saved_whatever_device_new_tensors_are_on(tmp_path):
    (_, outer, optimizer), (_, other, fresh) = trained(), make()
    torch.set_default_device("meta")
    try:
        CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(8, 16))
        restored = restore(tmp_path / "t", other, [fresh])
    finally:
        torch.set_default_device(None)
    assert restored == (Progress(8, 16), True)
    assert all(map(torch.equal, outer.fragments[0].momentum, other.fragments[0].momentum))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
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


def test_sgd_without_state_and_scalars_come_back(tmp_path):
    model, outer, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, outer, optimizer, 2)
    path = tmp_path / "trainer.safetensors"
    CheckpointWriter(path).save(outer, [optimizer], Progress(2, 4))
    again, fresh_outer, _ = make(seed=1)
    fresh = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    assert restore(path, fresh_outer, [fresh]) == (Progress(2, 4), True)
    known = optimizer.state_dict()["state"]
    assert torch.equal(fresh.state_dict()["state"][0]["momentum_buffer"], known[0]["momentum_buffer"])


def test_a_disk_that_takes_no_more_is_a_log_line(tmp_path):
    """Files are closed where they could not be written, too: what is still to be written fails then."""
    script = f"""
import resource, sys
from pathlib import Path
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.checkpointwriter import CheckpointWriter
from tests.node.test_checkpoint import trained
_, outer, optimizer = trained()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
writer = CheckpointWriter(Path({str(tmp_path / "t")!r}))
writer.save(outer, [optimizer], Progress())
writer.begin(outer, [optimizer])
while writer._under_way:
    writer.advance(Progress(), wait=True)
writer.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
CheckpointWriter(Path({str(tmp_path / "t")!r})).save(outer, [optimizer], Progress(8, 16))
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, check=False, timeout=120, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("cannot save the trainer's state") == 1
    _, outer, optimizer = make(seed=1)
    assert restore(tmp_path / "t", outer, [optimizer]) == (Progress(8, 16), True)
    assert list(tmp_path.iterdir()) == [tmp_path / "t"], "nothing is left behind"


def test_a_full_disk_is_a_log_line(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    _, outer, optimizer = trained()
    writer = CheckpointWriter(tmp_path / "t")
    for place in ("open_aside", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"gossamer.node.training.checkpointwriter.{place}", full)
            for _ in range(3):
                writer.save(outer, [optimizer], Progress())
        assert caplog.text.count("No space left on device") == 1, "one is tried every few seconds"
        assert not list(tmp_path.iterdir()), "nothing is left behind"
        caplog.clear()
        writer.save(outer, [optimizer], Progress())
        assert list(tmp_path.iterdir()) == [tmp_path / "t"], "it tries again"
        (tmp_path / "t").unlink()


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


def without(path, *keys):
    """A checkpoint as earlier releases wrote it."""
    tensors, changed = load_file(path), metadata_of(path)
    for key in (CHECKSUM, *keys):
        del changed[key]
    path.write_bytes(save(tensors, {**changed, CHECKSUM: checksum(checksums_of(tensors), changed)}))


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
    assert ["other parameters" in line for line in caplog.messages] == [True]


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
    assert ["other options" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("keys", [["options"], ["names"], ["names", "options", "dtypes"]])
def test_a_state_as_earlier_releases_wrote_it_is_taken_up(saved, keys):
    path, _, _ = saved
    without(path, *keys)
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) == (Progress(8, 16), True)


@pytest.mark.parametrize("told", ["before", "after"])
def test_a_handler_may_close_it_while_work_is_being_handed_to_its_thread(tmp_path, told):
    """A signal's, which finds the training thread anywhere."""

    class Interrupted(SimpleQueue):
        def put(self, item):
            if told == "after" and item is not None:
                super().put(item)
            if item is not None and not closed:
                closed.append(True)
                writer.close()
                writer._thread._thread.join(10)
            if told == "before" or item is None:
                super().put(item)

    closed = []
    _, outer, optimizer = trained()
    writer = CheckpointWriter(tmp_path / "t")
    writer._thread._waiting = Interrupted()
    writer.begin(outer, [optimizer])
    assert closed
    writer.close()
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_an_unforeseen_error_in_the_thread_reaches_training_and_holds_nobody_up(tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    _, outer, optimizer = trained()
    writer = CheckpointWriter(tmp_path / "t")
    with monkeypatch.context() as patch:
        patch.setattr("gossamer.node.training.checkpointwriter.open_aside", fails)
        writer.begin(outer, [optimizer])
        with pytest.raises(MemoryError):
            writer.advance(Progress(), wait=True)
    writer.save(outer, [optimizer], Progress(8, 16))
    writer.begin(outer, [optimizer])
    while writer._under_way:
        writer.advance(Progress(9, 17), wait=True)
    writer.close()
    _, outer, optimizer = make(seed=1)
    assert restore(tmp_path / "t", outer, [optimizer]) == (Progress(9, 17), True)


def test_it_is_written_where_no_thread_can_be_started(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    _, outer, optimizer = trained()
    writer = CheckpointWriter(tmp_path / "t")
    writer.begin(outer, [optimizer])
    while writer._under_way:
        writer.advance(Progress(8, 16), wait=True)
    writer.close()
    _, outer, optimizer = make(seed=1)
    assert restore(tmp_path / "t", outer, [optimizer]) == (Progress(8, 16), True)


class Wrapper(torch.optim.Optimizer):
    """As some that work around another optimizer, and share its groups."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


def test_a_wrapper_goes_on_with_the_groups_that_it_shares(tmp_path):
    path = tmp_path / "t"
    model, outer, _ = make()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=1.0))
    CheckpointWriter(path).save(outer, [optimizer], Progress(1, 1))
    model, outer, _ = make()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=1.0))
    assert restore(path, outer, [optimizer]) == (Progress(1, 1), True)
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.base.param_groups[0]["lr"] == 0.5


def test_a_schedule_goes_on_with_the_groups_that_it_holds(saved):
    path, _, _ = saved
    _, outer, optimizer = make(seed=1)
    held = optimizer.param_groups[0]
    inner = InnerOptimizer(optimizer)
    assert restore(path, outer, inner.parts) == (Progress(8, 16), True)
    assert optimizer.param_groups[0] is held
    inner.scale_lr(0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5e-2


def test_several_optimizers_come_back_each_with_its_own(tmp_path):
    def split(model):
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others)]

    model, outer, _ = make()
    optimizers = split(model)
    model(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    path = tmp_path / "t"
    CheckpointWriter(path).save(outer, optimizers, Progress(1, 2))
    fresh_model, fresh_outer, _ = make(seed=1)
    fresh = split(fresh_model)
    assert restore(path, fresh_outer, fresh) == (Progress(1, 2), True)
    for ours, theirs in zip(fresh, optimizers, strict=True):
        for index, state in theirs.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(ours.state_dict()["state"][index][key], value)


class FindsItsRate(torch.optim.Optimizer):
    """Keeps what it learns in its groups, as Prodigy and ScheduleFree do."""

    def __init__(self, params, lr=1.0, d0=0.125):
        super().__init__(params, {"lr": lr, "d0": d0, "d": d0, "k": 0, "best": 1.0, "train_mode": False})

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"], group["k"], group["train_mode"] = group["d"] * 1.5, group["k"] + 1, True
            for parameter in group["params"]:
                self.state[parameter]["s"] = torch.ones_like(parameter)


def in_groups(model, count=2, **options):
    parameters = list(model.parameters())
    share = len(parameters) // count
    groups = [{"params": parameters[i : i + share]} for i in range(0, len(parameters), share)]
    return FindsItsRate(groups, **options)


def test_what_an_optimizer_learns_in_its_groups_comes_back_and_the_rest_is_as_the_script_says(tmp_path):
    """With the tensors alone Prodigy would learn nothing more."""
    model, outer, _ = make()
    optimizer = in_groups(model)
    train(model, outer, optimizer, 2)
    optimizer.param_groups[1]["k"] = 7
    optimizer.param_groups[0]["lr"] = 0.1
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    fresh = in_groups(model, lr=0.5, d0=0.25)
    others = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert restore(tmp_path / "t", outer, [others, fresh]) == (Progress(2, 4), False)
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(2, 4), True)
    first, second = fresh.param_groups
    assert [first["d"], first["k"], second["d"], second["k"]] == [0.28125, 2, 0.28125, 7]
    assert [first["lr"], first["d0"], first["best"], first["train_mode"]] == [0.5, 0.25, 1.0, False]


@pytest.mark.parametrize("problem", ["other groups", "groups of others", "no number", "a tensor", "a list"])
def test_without_what_an_optimizer_learnt_in_its_groups_all_of_it_begins_afresh(tmp_path, problem):
    model, outer, _ = make()
    optimizer = in_groups(model)
    train(model, outer, optimizer, 2)
    bad = {"no number": float("nan"), "a tensor": torch.tensor(0.3), "a list": [0.3]}
    optimizer.param_groups[0]["best"] = bad.get(problem, 1.0)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    fresh = in_groups(model, 4 if problem == "other groups" else 2)
    if problem == "groups of others":
        fresh = FindsItsRate([{"params": group["params"]} for group in reversed(fresh.param_groups)])
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(2, 4), False)
    assert not fresh.state and [group["d"] for group in fresh.param_groups][:2] == [0.125, 0.125]


class OfAnyArguments(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, **options)


class Around(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: with its state, groups and defaults."""

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def __init__(self, params, base=torch.optim.AdamW, scaler=None):
        self.optimizer = base(params)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class SlowlyAround(Around):
    """As timm's Lookahead: with a state of its own that nothing is in, and giving out the other's."""

    state = None

    def __init__(self, params, base=torch.optim.AdamW):
        super().__init__(params, base)
        self.state = {}


@pytest.mark.parametrize(
    "wrapped", [Around, SlowlyAround, lambda params, base: Around(params, lambda p: Around(p, base))]
)
def test_the_state_of_an_optimizer_inside_another_is_its_own(tmp_path, wrapped):
    """With its tensors alone Prodigy would learn nothing more."""
    model, outer, _ = make()
    optimizer = wrapped(model.parameters(), FindsItsRate)
    train(model, outer, optimizer, 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    assert restore(tmp_path / "t", outer, [wrapped(model.parameters(), torch.optim.SGD)]) == (
        Progress(2, 4),
        False,
    )
    fresh = wrapped(model.parameters(), FindsItsRate)
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(2, 4), True)
    assert fresh.param_groups[0]["d"] == 0.28125
    assert all("s" in fresh.optimizer.state_dict()["state"][index] for index in range(4))


class Sharpness(torch.optim.Optimizer):
    """As SAM: it keeps a state of its own, beside that of the optimizer in it, and saves only that."""

    def __init__(self, params, base=torch.optim.AdamW):
        super().__init__(params, {"rho": 0.05})
        self.base = self._held(base(self.param_groups))
        self.param_groups = self._base().param_groups

    def _held(self, base):
        return base

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.detach().clone()
        return self._base().step(closure)

    def _base(self):
        return self.base


class SharpnessInList(Sharpness):
    def _held(self, base):
        return [base]

    def _base(self):
        return self.base[0]


@pytest.mark.parametrize("kind", [Sharpness, SharpnessInList])
def test_two_states_one_of_which_is_not_saved_begin_afresh(tmp_path, kind):
    model, outer, _ = make()
    optimizer = kind(model.parameters())
    train(model, outer, optimizer, 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    assert not any(name.startswith("inner/") for name in load_file(tmp_path / "t"))
    model, outer, _ = make()
    assert restore(tmp_path / "t", outer, [kind(model.parameters())]) == (Progress(2, 4), False)


@pytest.mark.parametrize("key", [0, ("a", "b"), "\ud800"])
def test_a_state_under_keys_that_are_no_text_begins_afresh(tmp_path, key):
    """They would come back as their text, and what is not there be looked for."""
    model, outer, optimizer = make()
    train(model, outer, optimizer, 1)
    for state in optimizer.state.values():
        state[key] = torch.zeros(2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    _, outer, fresh = make()
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(1, 2), False)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OfAnyArguments, Around])
def test_arguments_of_an_optimizer_are_not_taken_for_what_it_has_learnt(tmp_path, kind):
    model, outer, _ = make()
    optimizer = kind(model.parameters())
    train(model, outer, optimizer, 1)
    optimizer.param_groups[0].update(lr=0.05, eps=1e-3, initial_lr=0.1)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    assert "learnt" not in metadata_of(tmp_path / "t")
    fresh = kind(model.parameters())
    fresh.param_groups[0]["lr"] = 0.2
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(1, 2), True)
    group = fresh.param_groups[0]
    assert [group["lr"], group["eps"], "initial_lr" in group] == [0.2, 1e-8, False]


class OfNoParameter(torch.optim.AdamW):
    """As some keep a count of their own."""

    def step(self, closure=None):
        self.state["calls"] = 7
        return super().step(closure)


class Lookahead(torch.optim.AdamW):
    """As wrappers around another optimizer save its state beside theirs."""

    def state_dict(self):
        inner = super().state_dict()
        return {"fast_state": inner["state"], "slow_state": {}, "param_groups": inner["param_groups"]}


@pytest.mark.parametrize("kind", [OfNoParameter, Lookahead])
def test_a_state_of_another_form_begins_afresh(tmp_path, kind):
    model, outer, _ = make()
    optimizer = kind(model.parameters())
    train(model, outer, optimizer, 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    assert restore(tmp_path / "t", outer, [kind(model.parameters())]) == (Progress(2, 4), False)


class NeverSaved(torch.optim.AdamW):
    """As some that are written for one experiment."""

    def state_dict(self):
        raise NotImplementedError


def test_a_state_that_cannot_be_asked_for_is_left_out(tmp_path):
    model, outer, _ = make()
    optimizer = NeverSaved(model.parameters())
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    assert restore(tmp_path / "t", outer, [optimizer]) == (Progress(2, 4), False)


class NeverLoaded(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        raise RuntimeError("not here")


def test_a_state_that_is_not_taken_up_costs_no_more_than_itself(tmp_path, caplog):
    model, outer, _ = make()
    optimizer = NeverLoaded(model.parameters())
    train(model, outer, optimizer, 5)
    outer.publish(0, 2, memoryview(bytearray(10_000)))
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, again, _ = make()
    again.fragments[0].last_published = 2
    assert restore(tmp_path / "t", again, [NeverLoaded(model.parameters())]) == (Progress(2, 4), False)
    assert any(momentum.any() for momentum in again.fragments[0].momentum)
    assert "NeverLoaded takes up no state (RuntimeError: not here): it begins afresh" in caplog.text


def test_an_inner_optimizer_that_diverged_begins_afresh(tmp_path):
    _, outer, optimizer = trained()
    next(iter(optimizer.state.values()))["exp_avg"][0] = float("nan")
    path = tmp_path / "trainer.safetensors"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) == (Progress(8, 16), False)
    assert not fresh.state_dict()["state"]


def test_an_inner_state_of_tensors_of_another_kind_is_left_out_and_the_rest_is_kept(tmp_path):
    class Quantised(torch.Tensor):
        pass

    _, outer, optimizer = trained()
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].as_subclass(Quantised)
    path = tmp_path / "trainer.safetensors"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) == (Progress(8, 16), False)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_an_inner_state_of_tensors_whose_elements_are_not_there_begins_afresh(tmp_path, kind):
    """SGD with momentum keeps the sum of sparse gradients sparse."""
    _, outer, _ = make()
    table = nn.Embedding(9, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    state = optimizer.state[table.weight]
    assert state["momentum_buffer"].is_sparse
    if kind == "meta":
        state["momentum_buffer"] = torch.empty(9, 2, device="meta")
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    while not path.exists():
        writer.advance(Progress(1, 2), wait=True)
    writer.close()
    fresh = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    assert restore(path, make()[1], [fresh]) == (Progress(1, 2), False)


def test_what_killed_trainers_left_unfinished_is_removed(tmp_path):
    """As large as the checkpoint itself, and one for each time."""
    path = tmp_path / "trainer.safetensors"
    stale, fresh = (tmp_path / f".{path.name}-{name}" for name in ("stale_01", "fresh_01"))
    for file in (stale, fresh):
        file.write_bytes(b"half")
    long_ago = time.time() - 2 * UNFINISHED_S
    os.utime(stale, (long_ago, long_ago))
    _, outer, optimizer = trained()
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    assert path.exists() and fresh.exists() and not stale.exists()


class InFloat32(torch.optim.Optimizer):
    """Keeps a mean in float32 and a text of each parameter, whatever its dtype, as some do for bf16."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["kind"] = "plain"
            state["mean"].add_(1 / 3)


@pytest.mark.parametrize("now", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("says", [True, False])
def test_a_state_comes_back_in_its_own_dtype_where_the_parameters_is_as_it_was(tmp_path, now, says):
    def build(dtype):
        model, outer, _ = make()
        return outer, InFloat32(model.to(dtype).parameters())

    path = tmp_path / "t"
    outer, optimizer = build(torch.bfloat16)
    optimizer.step()
    CheckpointWriter(path).save(outer, [optimizer], Progress())
    if not says:
        without(path, "dtypes")
    again, fresh = build(now)
    assert restore(path, again, [fresh]) == (Progress(), True)
    expected = torch.float32 if says and now == torch.bfloat16 else now
    for before, after in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert after["mean"].dtype == expected
        assert torch.equal(after["mean"], before["mean"].to(expected))
        assert after["kind"] == "plain"


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
    assert not fresh.state and "saved state is torn: it begins afresh" in caplog.text


def test_optimizers_that_know_each_other_keep_their_own_states(tmp_path, caplog):
    """As a GAN's may."""

    def known(model):
        a, b = (torch.optim.Adam(part.parameters()) for part in model)
        a.other, b.others = b, [a]
        return [a, b]

    model, outer, _ = make()
    optimizers = known(model)
    model(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    CheckpointWriter(tmp_path / "t").save(outer, optimizers, Progress(1, 2))
    model, outer, _ = make(seed=1)
    fresh = known(model)
    assert restore(tmp_path / "t", outer, fresh) == (Progress(1, 2), True)
    assert [len(optimizer.state) for optimizer in fresh] == [2, 2] and not caplog.text


def test_one_of_other_parameters_is_not_taken_for_what_an_optimizer_is_around():
    """Before the first step neither keeps anything, and what is empty is the same."""
    model, _, optimizer = make()
    optimizer.part = torch.optim.SGD(model[0].parameters())
    assert state_keepers([optimizer]) is None
    assert state_keepers([around := Around(model.parameters())]) == [around.optimizer]


def test_a_state_that_is_not_kept_is_said_once(tmp_path, caplog):
    model, outer, _ = make()
    writer = CheckpointWriter(tmp_path / "t")
    optimizer = Sharpness(model.parameters())
    train(model, outer, optimizer, 1)
    writer.save(outer, (), Progress(1, 2))
    assert not caplog.text, "nothing is to be kept"
    for _ in range(2):
        writer.save(outer, [optimizer], Progress(1, 2))
    (line,) = caplog.messages
    assert line == "the inner optimizer's state cannot be saved: after a restart it begins afresh"


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
    assert "other classes or shapes than its saved state: it begins afresh" in caplog.text
