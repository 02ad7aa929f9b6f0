"""`gossamer.node.trainer.trainer`: what its process goes on with, and how it ends.

What it trains is tested with real nodes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gossamer.models import TaskError
from gossamer.node import processes as exit_status
from gossamer.node.ipc.messages import NOT_EVALUATED
from gossamer.node.options import NodeOptions
from gossamer.node.trainer import phi_updates, trainer
from gossamer.node.trainer.checkpoint import Progress
from gossamer.node.trainer.trainer import _Ending, choose_device
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.fixedpoint import ONE
from tests.node.begun_peer import begun
from tests.node.daemons import founded
from tests.protocol.builders import SMALL


class Ended(Exception):
    """In place of the process."""


def test_sigterm_ends_a_process_that_a_task_has_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader of its own, say, that multiprocessing ends so, and then waits for."""

    def end(number: int) -> None:
        raise Ended(number)

    ending = _Ending()
    handlers: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "raise_signal", end)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(Ended, match=str(int(signal.SIGTERM))):
        ending.terminate()
    assert handlers == {signal.SIGTERM: signal.SIG_DFL}


@pytest.mark.parametrize("name", ["meta", "xla", "hpu", "cuda:-1", "toaster", ""])
def test_a_device_that_cannot_be_used_is_said_in_short(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        choose_device(name)
    assert str(refusal.value).startswith(f"device {name!r} cannot be used: ")
    assert len(str(refusal.value)) < 300


def status_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """The exit status of a trainer, in this process."""
    for module, name in ((trainer.logs, "configure"), (signal, "signal"), (trainer.atexit, "register")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(
        sys, "argv", ["trainer", NodeOptions(folder=founded(tmp_path).root).model_dump_json()]
    )
    return trainer.main()


@pytest.mark.parametrize("error", [TaskError("no more data"), RuntimeError("a fault")])
def test_what_a_task_that_fails_has_left_whole_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    peer = Mock()

    class Failing(trainer.Trainer):
        def __init__(self, options: object, manifest: object) -> None:
            self.peer, self.stepped = peer, True

        def run(self) -> None:
            raise error

    monkeypatch.setattr(trainer, "Trainer", Failing)
    if isinstance(error, TaskError):
        assert status_of(monkeypatch, tmp_path) == exit_status.FAILED
    else:
        with pytest.raises(RuntimeError, match="a fault"):
            status_of(monkeypatch, tmp_path)
    peer.abandon.assert_called_once_with()


@pytest.mark.parametrize("is_outdated", [True, False])
def test_a_trainer_of_an_earlier_release_than_its_daemon_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_outdated: bool
) -> None:
    class Stopped(trainer.Trainer):
        def __init__(self, options: object, manifest: object) -> None:
            self.peer = Mock(is_outdated=is_outdated)

        def run(self) -> None:
            pass

    monkeypatch.setattr(trainer, "Trainer", Stopped)
    assert status_of(monkeypatch, tmp_path) == (exit_status.FAILED if is_outdated else 0)


class Training(trainer.Trainer):
    """One whose node has done so many inner steps before, and that does three."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._options, self._manifest = NodeOptions(folder=folder, evaluate_every=0), SMALL
        self._task = Mock(batches=lambda stream: count(stream.skip_batches))
        self.peer = Mock(
            node_id=bytes(32), progress=Progress(steps), clock=1, should_stop=False, finished=False
        )
        self.peer.request_stop.side_effect = lambda: setattr(self.peer, "should_stop", True)
        self.batches: list[object] = []
        self.drawn: list[float] = []

    def _inner_step(self, batch: object) -> None:
        self.batches.append(batch)
        self.drawn.append(torch.rand(()).item())
        if len(self.batches) == 3:
            self.peer.request_stop()

    def _report(self) -> None:
        pass


def test_who_was_started_again_goes_on_with_the_next_data(tmp_path: Path) -> None:
    first, second = (Training(tmp_path, steps) for steps in (0, 3))
    first.run()
    second.run()
    assert first.batches + second.batches == list(range(6))


def test_what_a_task_draws_is_its_own_after_each_start(tmp_path: Path) -> None:
    """Of torch's generator, whatever state building the model has left that in."""
    drawn = []
    for steps, seed in ((0, 1), (0, 2), (3, 1), (3, 2)):
        torch.manual_seed(seed)
        one = Training(tmp_path, steps)
        one.run()
        drawn.append(one.drawn)
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert not set(drawn[0]) & set(drawn[2])


def test_before_the_first_round_the_averaged_model_is_the_live_one(tmp_path: Path) -> None:
    one = Training(tmp_path, 0)
    one._options = NodeOptions(folder=tmp_path, evaluate_every=1)
    one.peer.clock, one._task.evaluate, one._model = 0, Mock(return_value=5.0), Mock()
    one.run()
    assert one._evaluation[:3] == (5.0, 5.0, 5.0) and one._task.evaluate.call_count == 1


def test_reading_the_averaged_model_takes_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    @contextmanager
    def average() -> Iterator[None]:
        nonlocal now
        now += 6.0
        yield

    one = Training(tmp_path, 0)
    one.peer.average, one._task.evaluate, one._model = average, Mock(return_value=2.0), Mock()
    one._evaluation, one._average_due = NOT_EVALUATED, 0.0
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now)
    measured = []
    for _ in range(8):
        one._evaluate()
        measured.append(one._evaluation.val_loss_average)
        now += 10.0
    assert measured == [2.0, None, None, None, None, None, 2.0, None]
    one.peer.finished = True
    one._evaluate()
    assert one._evaluation.val_loss_average == 2.0, "in the end it is measured in any case"


@pytest.mark.parametrize("has_average", [True, False])
async def test_what_is_shown_after_the_last_round_is_the_swarms_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_average: bool
) -> None:
    async with begun(tmp_path, stop_round=1) as setup:
        if has_average:
            average = setup.daemon.manifest, None, setup.phi + ONE
            monkeypatch.setattr(phi_updates, "averaged", lambda home: average)
        while setup.step() is None:
            pass
        published = setup.weights()
        setup.step()
        shown: list[np.ndarray] = []

        def evaluate(_: object) -> float:
            shown.append(setup.weights())
            one.peer.request_stop()
            return 2.0 / len(shown)

        one = object.__new__(trainer.Trainer)
        one.peer, one._task, one._model = setup.peer, Mock(evaluate=evaluate), setup.model
        one._evaluation, one._average_due = NOT_EVALUATED, float("inf")
        one._report = lambda: None  # type: ignore[method-assign]
        await asyncio.to_thread(one._stay)
        assert len(shown) == 1 + has_average and np.array_equal(shown[0], published)
        assert one._evaluation[:2] == (2.0, 1.0 if has_average else None)
