"""`gossamer.node.processes`: a child that ends is started again, unless it is done or has told what to
mend."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gossamer.node import processes as service_module
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.node.processes import Child, Service, daemon_service, trainer_service
from gossamer.protocol.backoff import Backoff
from tests.net.processes import wait_for
from tests.node.children import signals_of_its_own
from tests.node.daemons import founded


class FakeChild:
    def __init__(self) -> None:
        self.status: int | None = None
        self.closed = False

    def poll(self) -> int | None:
        return self.status

    def close(self) -> None:
        self.closed = True


def a_service() -> tuple[Service, list[FakeChild]]:
    """A service, and the children that it has started so far."""
    children: list[FakeChild] = []

    def start() -> Child:
        children.append(FakeChild())
        return children[-1]  # type: ignore[return-value]

    return Service("daemon", start), children


def test_a_child_that_dies_is_started_again_with_backoff() -> None:
    service, children = a_service()
    now = 100.0
    pauses = []
    for _ in range(9):
        assert service.keep_running(now) is None
        children[-1].status = -9
        assert service.keep_running(now) is None
        assert children[-1].closed
        died = now
        while service.child is None:
            now += 0.1
            service.keep_running(now)
        pauses.append(now - died)
    assert pauses[0] == pytest.approx(0.5, abs=0.11)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(service_module.BACKOFF_MAX_S, abs=0.11)
    now += service_module.STEADY_AFTER_S + 1
    children[-1].status = 1
    service.keep_running(now)
    assert service.backoff is not None
    assert service.backoff.wait == pytest.approx(0.5), "it had been steady"


def test_a_child_is_started_again_however_often_it_has_failed() -> None:
    """As a daemon fails whose disk is full from Friday to Monday."""
    service, children = a_service()
    for minute in range(3000):
        service.keep_running(60.0 * minute)
        children[-1].status = 1
        service.keep_running(60.0 * minute + 1.0)
    assert len(children) == 3000


def test_a_child_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    problems = [OSError(errno.EAGAIN, "Resource temporarily unavailable")] * 2

    def start() -> Child:
        if problems:
            raise problems.pop()
        return FakeChild()  # type: ignore[return-value]

    service = Service("trainer", start)
    for now, is_up in ((100.0, False), (100.4, False), (100.5, False), (101.4, False), (101.5, True)):
        assert service.keep_running(now) is None
        assert (service.child is not None) is is_up
    assert "cannot start the trainer (Resource temporarily unavailable); trying again in 0.5 s" in caplog.text


@pytest.mark.parametrize("status", [0, 2])
def test_a_child_that_is_done_or_has_told_what_to_mend_is_not_started_again(status: int) -> None:
    child = FakeChild()
    service = Service("trainer", lambda: child)  # type: ignore[arg-type,return-value]
    service.keep_running(0.0)
    child.status = status
    assert service.keep_running(1.0) == status


def test_a_trainer_is_told_that_it_has_worked_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[bool] = []

    def start(module: str, args: list[str], *, env: dict[str, str]) -> FakeChild:
        started.append(NodeOptions.from_json(args[0]).restarted)
        return child

    child = FakeChild()
    monkeypatch.setattr(service_module, "Child", start)
    service = trainer_service(NodeOptions(folder=tmp_path))
    service.keep_running(0.0)
    child.status = 1
    service.keep_running(1.0)
    child.status = None
    service.keep_running(9.0)
    assert started == [False, True]


@pytest.mark.parametrize("given", [None, "4"])
def test_a_daemon_has_one_heap_unless_the_user_wants_more(
    given: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[str, str] = {}
    monkeypatch.setattr(service_module, "Child", lambda *_, env: found.update(env))
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)
    daemon_service(NodeOptions(folder=tmp_path)).keep_running(0.0)
    assert found["MALLOC_ARENA_MAX"] == (given or "1")


def test_a_daemon_can_be_asked_to_stop_whatever_its_parent_blocks(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    service = daemon_service(NodeOptions(folder=home.root, plaintext=True, listen="127.0.0.1:0", admin="off"))
    with signals_of_its_own():
        service.keep_running(0.0)
    child = service.child
    assert child is not None
    wait_for(home.read_daemon, 20, "the daemon listens")
    child.terminate()
    assert child.end(10) == 0


def test_a_daemon_that_comes_back_does_not_insist_on_a_port_that_the_system_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes its last one if that is free, see `Server.start`; another process may have it by now."""
    home = Home(tmp_path)
    home.write_daemon(address="127.0.0.1:7701")
    started: list[NodeOptions] = []

    class NoChild:
        def __init__(self, module: str, args: list[str], **_: object) -> None:
            started.append(NodeOptions.from_json(args[0]))

    monkeypatch.setattr(service_module, "Child", NoChild)
    service = daemon_service(NodeOptions(folder=tmp_path, listen="127.0.0.1:0"))
    service.backoff = Backoff(until=0.0, wait=0.5, kept=0.0)
    service.keep_running(0.0)
    assert [options.listen for options in started] == ["127.0.0.1:0"]


def test_a_folder_that_is_away_is_waited_for_and_not_made_anew(tmp_path: Path) -> None:
    """It was moved, or its disk unmounted: what is made in its place would be in its way as it comes back."""
    home = founded(tmp_path / "d")
    away = home.root.rename(tmp_path / "away")
    service = daemon_service(NodeOptions(folder=home.root, plaintext=True, listen="127.0.0.1:0", admin="off"))

    def status(now: float) -> int:
        """With which the next daemon ends."""
        assert service.keep_running(now) is None
        child = service.child
        assert child is not None
        wait_for(lambda: child.poll() is not None, 20, "the daemon ends")
        found = child.poll()
        assert found is not None
        assert service.keep_running(now + 1.0) is None, "another one will be started"
        return found

    assert status(1000.0) == 1
    assert not home.root.exists()
    home.root.mkdir()  # as an unmounted disk leaves it
    assert status(2000.0) == 1
    assert not list(home.root.iterdir())
    home.root.rmdir()
    away.rename(home.root)
    service.keep_running(3000.0)
    child = service.child
    assert child is not None
    try:
        wait_for(home.read_daemon, 20, "the daemon listens")
    finally:
        child.terminate()
        assert child.end(10) == 0
