"""`gossamer.node.trainer.beside`: SIGTERM as an end in good order, taken over where nobody else has."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer.node import processes as service_module
from gossamer.node.options import NodeOptions
from gossamer.node.processes import Service
from gossamer.node.trainer import beside as beside_module
from gossamer.node.trainer.beside import TERMINATED, Beside
from tests.net.processes import wait_for


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_sigterm_asks_and_the_second_would_kill() -> None:
    beside = Beside()
    beside.start()
    assert not beside.must_stop
    signal.raise_signal(signal.SIGTERM)
    assert beside.must_stop
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ending = beside.ending()
    assert isinstance(ending, SystemExit) and ending.code == TERMINATED
    beside.stop()


def test_a_script_that_handles_sigterm_itself_keeps_it() -> None:
    caught = []
    signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
    beside = Beside()
    beside.start()
    signal.raise_signal(signal.SIGTERM)
    beside.stop()
    assert caught == [1] and not beside.must_stop


def test_it_is_given_back_when_the_peer_leaves() -> None:
    beside = Beside()
    beside.start()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    beside.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_all_peers_of_a_process_are_asked() -> None:
    first, second, third = Beside(), Beside(), Beside()
    for beside in (first, second, third):
        beside.start()
    first.stop()
    signal.raise_signal(signal.SIGTERM)
    assert [b.must_stop for b in (first, second, third)] == [False, True, True]
    second.stop()
    third.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_the_script_sets_later_stays() -> None:
    beside = Beside()
    beside.start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    beside.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_ctrl_c_while_the_daemon_is_ended_does_not_keep_it_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Event(), threading.Event()

    class Daemon:
        def poll(self) -> None:
            pass

        def terminate(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def end(self, grace_s: float) -> None:
            ended.set()

    def start() -> Any:
        started.set()
        return Daemon()

    monkeypatch.setattr(beside_module, "daemon_service", lambda _: Service("daemon", start))
    monkeypatch.setattr(beside_module, "POLL_S", 0.01)
    beside = Beside(NodeOptions(folder=tmp_path))
    beside.start()
    assert started.wait(10)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            beside.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.wait(10)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_daemon_that_died_is_known_to_have_though_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Daemon:
        def __init__(self, status: int | None) -> None:
            self.status = status

        def poll(self) -> int | None:
            return self.status

        def close(self) -> None:
            pass

        def terminate(self) -> None:
            pass

        def end(self, grace_s: float) -> None:
            pass

    dies, stays = Daemon(None), Daemon(None)
    runs: list[Any] = [stays, dies]
    monkeypatch.setattr(beside_module, "daemon_service", lambda _: Service("daemon", runs.pop))
    monkeypatch.setattr(beside_module, "POLL_S", 0.01)
    monkeypatch.setattr(service_module, "BACKOFF_MIN_S", 0.01)
    beside = Beside(NodeOptions(folder=tmp_path))
    beside.start()
    wait_for(lambda: len(runs) == 1, 10, "the daemon runs")
    assert not beside.has_died
    dies.status = -9
    wait_for(lambda: not runs, 10, "another runs")
    assert beside.has_died and not beside.must_stop
    beside.stop()
    assert not Beside().has_died, "it has none"


def test_a_forked_worker_dies_of_sigterm_as_ever() -> None:
    beside = Beside()
    beside.start()
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    assert not beside.must_stop
    beside.stop()
