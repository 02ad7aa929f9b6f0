"""`checkpointwriter`: a checkpoint is written while training goes on, and trouble with it is one line."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from gossamer.node.files import UNFINISHED_S
from gossamer.node.trainer import checkpoint as checkpointcopy
from gossamer.node.trainer import checkpoint as checkpointwriter
from gossamer.node.trainer.checkpoint import CheckpointCopy, CheckpointWriter, Progress, restore
from tests.node.checkpoints import make, metadata_of, train, trained
from tests.node.full_disk import full
from tests.node.optimizers import Sharpness

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_each_device")


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


def test_no_checkpoint_is_written_into_another_folder_in_the_place_of_ours(tmp_path, caplog):
    """It may be another node's, whose state would be lost."""
    _, outer, optimizer = trained()
    home = tmp_path / "d"
    home.mkdir()
    writer = CheckpointWriter(home / "t")
    home.rename(tmp_path / "away")
    home.mkdir()
    writer.begin(outer, [optimizer])
    writer.advance(Progress(1, 2), wait=True)
    writer.close()
    assert list(home.iterdir()) == []
    assert "cannot save the trainer's state" in caplog.text


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
            piece = checkpointcopy._elements(turned, start, end)
            assert torch.equal(piece, whole[start:end])
    rows = torch.empty(100, 1000).T
    assert checkpointcopy._elements(rows, 250, 360).untyped_storage().nbytes() == 2 * 100 * 4


def test_ctrl_c_waits_until_a_share_is_handed_on(tmp_path, monkeypatch):
    """Whoever goes on after it would else get a file with a hole, in place of one that was whole."""
    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    copy = CheckpointCopy._copy

    def interrupted(*arguments):
        copied = copy(*arguments)
        signal.raise_signal(signal.SIGINT)
        return copied

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(CheckpointCopy, "_copy", interrupted)
        writer.advance(Progress(8, 16), wait=True)
    while not path.exists():
        writer.advance(Progress(8, 16), wait=True)
    writer.close()
    _, fresh, again = make()
    assert restore(path, fresh, [again]) == (Progress(8, 16), True)


def test_ctrl_c_waits_until_a_checkpoint_is_given_up(tmp_path, monkeypatch):
    """A loop that goes on would find a file that is closed, at each of its steps."""
    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    writer.advance(Progress(8, 16), wait=True)
    unlink = os.unlink

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        unlink(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "unlink", interrupted)
        writer.save(outer, [optimizer], Progress(8, 16))
    assert not list(tmp_path.iterdir())
    writer.advance(Progress(8, 16), wait=True)
    writer.save(outer, [optimizer], Progress(8, 16))
    writer.close()
    assert list(tmp_path.iterdir()) == [path]


def test_a_watchdogs_error_is_not_taken_for_one_of_the_optimizer_or_the_disk(tmp_path, monkeypatch, caplog):
    """The loop would go on as if there were no watchdog, and the checkpoint lack the optimizer's state."""

    def bark(*_):
        raise TimeoutError

    def barked(function):
        def run(*arguments):
            signal.raise_signal(signal.SIGALRM)
            return function(*arguments)

        return run

    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    handler = signal.signal(signal.SIGALRM, bark)
    try:
        with monkeypatch.context() as patched, pytest.raises(TimeoutError):
            patched.setattr(optimizer, "state_dict", barked(optimizer.state_dict))
            writer.begin(outer, [optimizer])
        with monkeypatch.context() as patched, pytest.raises(TimeoutError):
            patched.setattr(CheckpointCopy, "_copy", barked(CheckpointCopy._copy))
            writer.advance(Progress(8, 16), wait=True)
    finally:
        signal.signal(signal.SIGALRM, handler)
    writer.save(outer, [optimizer], Progress(8, 16))
    writer.close()
    _, fresh, again = make()
    assert restore(path, fresh, [again]) == (Progress(8, 16), True) and not caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_written_or_cannot_be_leaves_no_memory_behind(tmp_path, monkeypatch, fails):
    """Nor until Python looks for cycles: a share, and all that the optimizer keeps, may be gigabytes."""
    _, outer, optimizer = trained()
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    if fails:
        monkeypatch.setattr(CheckpointCopy, "_write", full)
    gc.collect()
    gc.disable()
    try:
        writer.begin(outer, [optimizer])
        writing = writer._under_way
        writing._grow()
        gone = [weakref.ref(one) for one in (writing, writing._room)]
        del writing
        while writer._under_way is not None:
            writer.advance(Progress(9, 18), wait=True)
        writer._thread.submit(int).wait()  # the thread has let go of the one before
        assert [ref() is None for ref in gone] == [True, True]
    finally:
        gc.enable()
    assert path.exists() is not fails
    writer.close()


def test_a_share_is_few_tensors_however_small(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointcopy, "SHARE_TENSORS", 3)
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


@pytest.mark.parametrize(
    ("module", "name", "size"), [(checkpointwriter, "SHARE_BYTES", 8), (checkpointcopy, "SHARE_TENSORS", 1)]
)
def test_a_fragment_published_sooner_than_it_is_copied_is_copied_in_larger_shares(
    tmp_path, monkeypatch, module, name, size
):
    """With a window of few steps, or many parameters in one fragment, there would else never be an end."""
    monkeypatch.setattr(checkpointwriter, "SHARES", 1 << 30)
    monkeypatch.setattr(module, name, size)
    _, outer, _ = trained()
    fragments = len(outer.fragments)
    path, round_ = tmp_path / "t", 4
    writer, room = CheckpointWriter(path), memoryview(bytearray(10_000))

    def written() -> int:
        """Steps until it is; every fragment is published at every other one."""
        nonlocal round_
        path.unlink(missing_ok=True)
        writer.begin(outer, [])
        for step in range(1, 200):
            writer.advance(Progress(), wait=True)
            if path.exists():
                return step
            if step % 2 == 0:
                for _ in range(fragments):
                    outer.publish(round_ % fragments, round_, room)
                    round_ += 1
        raise AssertionError("it never ends")

    first = written()
    writer.advance(Progress(), wait=True)
    assert written() < first, "it knows how large they have to be"
    labelled = json.loads(metadata_of(path)["rounds"])
    _, again, _ = make(seed=1)
    for state, last in zip(again.fragments, labelled, strict=True):
        state.last_published = last
    assert restore(path, again, []) is not None
    for ours, known in zip(again.fragments, outer.fragments, strict=True):
        if ours.last_published == known.last_published:
            assert all(torch.equal(a, b) for a, b in zip(ours.residual, known.residual, strict=True))
    for _ in range(8):  # in peace
        writer.save(outer, [], Progress())
    assert writer._growth == 1
    writer.close()


def test_it_is_written_where_the_main_thread_has_ended_and_while_the_interpreter_exits(tmp_path):
    """A script may train in a thread, and another never leave its peer: pools take no more work then."""
    script = f"""
import atexit, threading
from pathlib import Path
from gossamer.node.trainer.metrics import Progress
from gossamer.node.trainer.checkpoint import CheckpointWriter
from tests.node.checkpoints import trained

folder = Path({str(tmp_path)!r})
_, outer, optimizer = trained()

def loop():
    threading.main_thread().join()
    path = folder / "ended"
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    while not path.exists():
        writer.advance(Progress(8, 16), wait=True)

writer = CheckpointWriter(folder / "exits")
writer.begin(outer, [optimizer])
writer.advance(Progress())
atexit.register(lambda: writer.save(outer, [optimizer], Progress(9, 17)))
threading.Thread(target=loop).start()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)
    _, outer, optimizer = make(seed=1)
    assert restore(tmp_path / "ended", outer, [optimizer]) == (Progress(8, 16), True)
    assert restore(tmp_path / "exits", outer, [optimizer]) == (Progress(9, 17), True)
    assert {path.name for path in tmp_path.iterdir()} == {"ended", "exits"}, "nothing is left behind"


def test_a_disk_that_takes_no_more_is_a_log_line(tmp_path, caplog):
    """Files are closed where they could not be written, too: what is still to be written fails then."""
    path = tmp_path / "t"
    _, outer, optimizer = trained()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        writer = CheckpointWriter(path)
        writer.save(outer, [optimizer], Progress())
        writer.begin(outer, [optimizer])
        while writer._under_way:
            writer.advance(Progress(), wait=True)
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot save the trainer's state") == 1
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    _, outer, optimizer = make(seed=1)
    assert restore(path, outer, [optimizer]) == (Progress(8, 16), True)
    assert list(tmp_path.iterdir()) == [path], "nothing is left behind"


def test_a_full_disk_is_a_log_line(tmp_path, monkeypatch, caplog):
    _, outer, optimizer = trained()
    writer = CheckpointWriter(tmp_path / "t")
    for place in ("open_aside", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"gossamer.node.trainer.checkpoint.{place}", full)
            for _ in range(3):
                writer.save(outer, [optimizer], Progress())
        assert caplog.text.count("No space left on device") == 1, "one is tried every few seconds"
        assert not list(tmp_path.iterdir()), "nothing is left behind"
        caplog.clear()
        writer.save(outer, [optimizer], Progress())
        assert list(tmp_path.iterdir()) == [tmp_path / "t"], "it tries again"
        (tmp_path / "t").unlink()


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
        patch.setattr("gossamer.node.trainer.checkpoint.open_aside", fails)
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


def test_a_loop_that_survives_an_error_in_a_share_goes_on_with_another_checkpoint(tmp_path, monkeypatch):
    """What was copied for that share is not in the file."""
    _, outer, optimizer = trained()
    writer = CheckpointWriter(tmp_path / "t")
    writer.begin(outer, [optimizer])
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(checkpointcopy, "_elements", Mock(side_effect=torch.OutOfMemoryError))
        writer.advance(Progress(8, 16), wait=True)
    assert not list(tmp_path.iterdir())
    writer.begin(outer, [optimizer])
    while not (tmp_path / "t").exists():
        writer.advance(Progress(8, 16), wait=True)
    writer.close()
    _, fresh, again = make()
    assert restore(tmp_path / "t", fresh, [again]) == (Progress(8, 16), True)


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
    assert line == "the inner optimizer's state cannot be saved: after a restart it starts afresh"
