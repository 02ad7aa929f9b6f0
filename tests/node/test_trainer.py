"""`gossamer.node.training.trainer`: how its process ends. What it trains is tested with real nodes."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from gossamer.models.errors import TaskError
from gossamer.node.options import TrainerOptions
from gossamer.node.training import trainer
from gossamer.node.training.trainer import _Ending, choose_device
from gossamer.protocol.errors import ConfigError, DivergedError, UnreachableError
from tests.node.daemons import founded


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


def test_a_daemon_that_does_not_answer_yet_does_not_stop_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be reading a large model back from a slow disk: the trainer is started again."""

    class Waiting:
        def __init__(self, options: object, manifest: object) -> None:
            raise UnreachableError("no daemon has answered")

    monkeypatch.setattr(trainer, "Trainer", Waiting)
    assert status_of(monkeypatch, tmp_path) == trainer.FAILURE


def status_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """The exit status of a trainer, in this process."""
    for module, name in ((trainer.logs, "configure"), (signal, "signal"), (trainer.atexit, "register")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["trainer", TrainerOptions(folder=founded(tmp_path).root).to_json()])
    return trainer.main()


@pytest.mark.parametrize("resumed", [True, False])
def test_divergence_before_the_first_delta_leaves_no_inner_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resumed: bool
) -> None:
    """Where one was taken up, it may be to blame, and not the learning rate: the next begins afresh."""
    left = []

    class Diverging(trainer.Trainer):
        def __init__(self, options: object, manifest: object) -> None:
            self.peer = Mock(resumed=resumed)
            self._published = False

        def run(self) -> None:
            raise DivergedError("lower the learning rate")

        def give_up_window(self) -> None:
            left.append(self)

    monkeypatch.setattr(trainer, "Trainer", Diverging)
    assert status_of(monkeypatch, tmp_path) == (trainer.FAILURE if resumed else trainer.USER_ERROR)
    assert len(left) == 1


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
        assert status_of(monkeypatch, tmp_path) == trainer.FAILURE
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
    assert status_of(monkeypatch, tmp_path) == (trainer.FAILURE if is_outdated else 0)


def test_what_it_trains_on_is_said_and_whether_that_is_other_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder keeps no --data: without it, training would silently go on with the default."""
    caplog.set_level(logging.INFO)
    home = founded(tmp_path)

    def said(*data: str) -> list[str]:
        caplog.clear()
        one = object.__new__(trainer.Trainer)
        one._options, one._task = TrainerOptions(folder=home.root, data=data), Mock()
        one._task.data_in_words.return_value = "these"
        one._tell_data()
        return [record.getMessage() for record in caplog.records]

    assert said("/a", "/b") == ["training on these"] == said("/a", "/b")
    _, warning = said()
    assert "last run trained on /a, /b, and this one trains on the task's own data: give --data" in warning
    assert said() == ["training on these"], "once"
    home.data_path.write_text("damaged")
    assert said("/a") == ["training on these"]
    home.data_path.unlink()
    home.data_path.mkdir()  # nothing can be kept
    assert said("/b") == ["training on these"]
