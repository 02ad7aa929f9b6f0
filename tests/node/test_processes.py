"""Children end when asked and never outlive us; one that dies is started again, unless a person is to act."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest

from gossamer.node import processes as service_module
from gossamer.node.options import NodeOptions
from gossamer.node.processes import Child, Service, daemon_service
from tests.net.processes import assert_all_gone, processes_naming, wait_for
from tests.node.children import FAITHFUL, STUBBORN, scripts_in, signals_of_its_own, wait_up, write
from tests.node.daemons import founded


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return scripts_in(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("code", "grace_s", "status"), [(FAITHFUL, 60, -signal.SIGTERM), (STUBBORN, 0.3, -signal.SIGKILL)]
)
def test_a_child_ends_when_asked_or_is_killed(scripts: Path, code: str, grace_s: float, status: int) -> None:
    child = Child(write(scripts, "child", code), [str(scripts / "up")])
    wait_up(scripts / "up")
    assert child.poll() is None
    child.terminate()
    assert child.end(grace_s) == status
    child.close()


def test_what_a_killed_child_has_started_is_killed_too(scripts: Path) -> None:
    """A DataLoader's worker, say, which would stay where its parent is gone before it looks."""
    code = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
        open(sys.argv[1], "w").write("up")
        time.sleep(600)
    """
    child = Child(write(scripts, "parent", code), [str(scripts / "up")])
    wait_up(scripts / "up")
    assert len(processes_naming(scripts)) == 2
    child.terminate()
    assert child.end(0.1) == -signal.SIGKILL
    assert_all_gone(scripts, 60)


def test_a_child_ends_although_one_of_its_threads_does_not(scripts: Path) -> None:
    code = """
        import threading
        from gossamer.node import processes as lifeline
        threading.Thread(target=threading.Event().wait).start()
        lifeline.end_within(0.1, 7)
    """
    child = Child(write(scripts, "threaded", code), [])
    assert child.end(60) == 7


def test_a_child_does_not_inherit_the_lifelines_of_its_siblings(scripts: Path) -> None:
    """Or closing one would not be noticed while another lives."""
    name = write(scripts, "faithful", FAITHFUL)
    first = Child(name, [str(scripts / "first")])
    second = Child(name, [str(scripts / "second")])
    wait_up(scripts / "first")
    wait_up(scripts / "second")
    first.close()
    assert first.wait(60) == -signal.SIGTERM
    assert second.poll() is None
    second.terminate()
    second.end(60)


def test_children_end_with_a_parent_that_is_killed(scripts: Path) -> None:
    write(scripts, "faithful", FAITHFUL)
    parent = textwrap.dedent("""
        import sys, time
        from gossamer.node.processes import Child
        children = [Child("faithful", [path]) for path in sys.argv[1:]]
        time.sleep(600)
    """)
    process = subprocess.Popen([sys.executable, "-c", parent, str(scripts / "a"), str(scripts / "b")])
    wait_up(scripts / "a")
    wait_up(scripts / "b")
    assert len(processes_naming(scripts)) == 3
    process.kill()
    process.wait()
    assert_all_gone(scripts, 60)


def test_a_child_runs_nothing_that_lies_where_it_was_started(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People have files called random.py or queue.py, and folders that others can write to."""
    write(scripts, "drawing", "import random, sys; random.random()")
    here = scripts / "here"
    here.mkdir()
    write(here, "random", "raise SystemExit(9)")
    monkeypatch.chdir(here)
    child = Child("drawing", [])
    assert child.wait(60) == 0
    child.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_worker_does_not_keep_the_children_of_its_parent_alive(scripts: Path) -> None:
    """As a DataLoader's workers would, which may outlive a script that is killed."""
    child = Child(write(scripts, "faithful", FAITHFUL), [str(scripts / "up")])
    wait_up(scripts / "up")
    worker = os.fork()
    if worker == 0:
        signal.pause()
        os._exit(0)
    try:
        child.close()
        assert child.wait(60) == -signal.SIGTERM
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


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
    assert service.wait_s == pytest.approx(0.5), "it had been steady"


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


def test_a_daemon_can_be_asked_to_stop_whatever_its_parent_blocks(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    service = daemon_service(NodeOptions(folder=home.root, plaintext=True, listen="127.0.0.1:0", admin="off"))
    with signals_of_its_own():
        service.keep_running(0.0)
    child = service.child
    assert child is not None
    wait_for(home.read_daemon, 60, "the daemon listens")
    child.terminate()
    assert child.end(60) == 0


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
        wait_for(lambda: child.poll() is not None, 60, "the daemon ends")
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
        wait_for(home.read_daemon, 60, "the daemon listens")
    finally:
        child.terminate()
        assert child.end(60) == 0


SUPERVISE = """
    import sys
    from pathlib import Path
    from gossamer.node import processes as supervisor
    from gossamer.node.processes import Child
    from gossamer.node.options import NodeOptions
    from gossamer.node.processes import Service
    folder = Path(sys.argv[1])
    supervisor.STOP_S = 1.0
    one = supervisor.Supervisor(NodeOptions(folder=folder, observe=True))
    one._services = [
        Service(name, lambda name=name: Child(name, [str(folder / (name + ".up"))]))
        for name in sys.argv[2:]
    ]
    sys.exit(one.run())
"""


Supervise = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def supervise(scripts: Path) -> Iterator[Supervise]:
    """Starts a supervisor of the scripts of these names."""
    started = []

    def start(*names: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", textwrap.dedent(SUPERVISE), str(scripts), *names]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "names"), [(signal.SIGTERM, ("faithful", "stubborn")), (signal.SIGINT, ("faithful",))]
)
def test_a_signal_ends_all_within_five_seconds(
    scripts: Path, supervise: Supervise, number: signal.Signals, names: tuple[str, ...]
) -> None:
    write(scripts, "faithful", FAITHFUL)
    write(scripts, "stubborn", STUBBORN)
    process = supervise(*names)
    for name in names:
        wait_up(scripts / f"{name}.up")
    process.send_signal(number)
    assert process.wait(60) == 0
    assert_all_gone(scripts, 60)
    assert service_module.STOP_S + service_module.POLL_S < 5


def test_exit_status_two_stops_the_node(scripts: Path, supervise: Supervise) -> None:
    write(scripts, "faithful", FAITHFUL)
    write(scripts, "mistaken", "import sys, time; time.sleep(0.3); sys.exit(2)")
    process = supervise("faithful", "mistaken")
    assert process.wait(60) == 2
    assert_all_gone(scripts, 60)


@pytest.mark.parametrize("parent", [nullcontext, signals_of_its_own])
def test_a_killed_child_comes_back(
    scripts: Path, supervise: Supervise, parent: Callable[[], AbstractContextManager[None]]
) -> None:
    """A node does without what its parent has done to signals."""
    write(scripts, "faithful", FAITHFUL)
    with parent():
        process = supervise("faithful")
    wait_up(scripts / "faithful.up")
    (child,) = psutil.Process(process.pid).children()
    (scripts / "faithful.up").unlink()
    child.kill()
    wait_up(scripts / "faithful.up")
    process.terminate()
    assert process.wait(60) == 0
