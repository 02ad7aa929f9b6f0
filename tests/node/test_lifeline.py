"""`gossamer.node.processes`: children end when asked, and never outlive us."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gossamer.node import processes as lifeline
from gossamer.node.processes import Child, Service
from tests.net.processes import assert_all_gone, processes_naming, wait_for
from tests.node.children import FAITHFUL, STUBBORN, scripts_in, wait_up, write


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return scripts_in(tmp_path, monkeypatch)


def test_a_child_ends_when_asked(scripts: Path) -> None:
    child = Child(write(scripts, "faithful", FAITHFUL), [str(scripts / "up")])
    wait_up(scripts / "up")
    assert child.poll() is None
    child.terminate()
    assert child.end(5) == -signal.SIGTERM
    child.close()


def test_a_stubborn_child_is_killed(scripts: Path) -> None:
    child = Child(write(scripts, "stubborn", STUBBORN), [str(scripts / "up")])
    wait_up(scripts / "up")
    child.terminate()
    begun = time.monotonic()
    assert child.end(0.3) == -signal.SIGKILL
    assert time.monotonic() - begun < 2


def test_what_a_killed_child_has_started_is_killed_too(scripts: Path) -> None:
    """A DataLoader's worker, say, which would stay where its parent is gone before it looks."""
    code = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
        open(sys.argv[1], "w").write("up")
        time.sleep(60)
    """
    child = Child(write(scripts, "parent", code), [str(scripts / "up")])
    wait_up(scripts / "up")
    assert len(processes_naming(scripts)) == 2
    child.terminate()
    assert child.end(0.1) == -signal.SIGKILL
    assert_all_gone(scripts, 5)


def test_a_child_ends_although_one_of_its_threads_does_not(scripts: Path) -> None:
    code = """
        import threading
        from gossamer.node import processes as lifeline
        threading.Thread(target=threading.Event().wait).start()
        lifeline.end_within(0.1, 7)
    """
    child = Child(write(scripts, "threaded", code), [])
    assert child.end(20) == 7


def test_a_child_hears_how_its_own_children_end_whatever_its_parent_ignores(scripts: Path) -> None:
    code = """
        import signal, subprocess, sys
        from gossamer.node import processes as lifeline
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as inherited
        lifeline.reset_signals()
        sys.exit(subprocess.call([sys.executable, "-c", "raise SystemExit(7)"]))
    """
    child = Child(write(scripts, "parent", code), [])
    assert child.end(20) == 7


def test_a_child_ends_with_its_own_status_also_where_python_is_to_go_on_after_a_script(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONINSPECT", "1")
    assert Child(write(scripts, "failing", "raise SystemExit(2)"), []).end(20) == 2
    assert capfd.readouterr().err == ""


def test_what_a_child_starts_does_not_inherit_its_lifeline(scripts: Path) -> None:
    code = """
        import os, sys
        from gossamer.node import processes as lifeline
        fd = int(os.environ["GOSSAMER_LIFELINE_FD"])
        lifeline.watch(lambda: None)
        sys.exit(os.get_inheritable(fd))
    """
    child = Child(write(scripts, "parent", code), [])
    assert child.end(20) == 0


def test_closing_the_lifeline_ends_a_child(scripts: Path) -> None:
    child = Child(write(scripts, "faithful", FAITHFUL), [str(scripts / "up")])
    wait_up(scripts / "up")
    child.close()
    assert child.process.wait(5) == -signal.SIGTERM


def test_a_child_runs_also_where_the_standard_streams_are_closed(scripts: Path) -> None:
    """As by ``<&-``: the lifeline must not become a child's standard input, which is at its end."""
    code = f"""
        import sys
        from gossamer.node.processes import Child
        child = Child({write(scripts, "faithful", FAITHFUL)!r}, [sys.argv[1]])
        child.process.wait(20)
        open(sys.argv[2], "w").close()
    """
    parent = write(scripts, "parent", code)
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", parent]
    process = subprocess.Popen([*command, str(scripts / "up"), str(scripts / "ended")])
    try:
        wait_up(scripts / "up")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert not (scripts / "ended").exists(), "its lifeline holds"
    finally:
        process.kill()
        process.wait()
    assert_all_gone(scripts, 5)


def test_a_child_does_not_inherit_the_lifelines_of_its_siblings(scripts: Path) -> None:
    """Or closing one would not be noticed while another lives."""
    name = write(scripts, "faithful", FAITHFUL)
    first = Child(name, [str(scripts / "first")])
    second = Child(name, [str(scripts / "second")])
    wait_up(scripts / "first")
    wait_up(scripts / "second")
    first.close()
    assert first.process.wait(5) == -signal.SIGTERM
    assert second.poll() is None
    second.terminate()
    second.end(5)


def test_children_end_with_a_parent_that_is_killed(scripts: Path) -> None:
    write(scripts, "faithful", FAITHFUL)
    parent = textwrap.dedent("""
        import sys, time
        from gossamer.node.processes import Child
        children = [Child("faithful", [path]) for path in sys.argv[1:]]
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", parent, str(scripts / "a"), str(scripts / "b")])
    wait_up(scripts / "a")
    wait_up(scripts / "b")
    assert len(processes_naming(scripts)) == 3
    process.kill()
    process.wait()
    assert_all_gone(scripts, 5)


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
    assert child.process.wait(20) == 0
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
        assert child.process.wait(5) == -signal.SIGTERM
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_descriptors_are_given_back(scripts: Path) -> None:
    gc.collect()
    before = psutil.Process().num_fds()
    for number in range(3):
        child = Child(write(scripts, f"quick{number}", "pass"), [])
        assert child.end(10) == 0
    with pytest.raises(ValueError, match="null"):
        Child("x", ["\0"])
    assert psutil.Process().num_fds() <= before


def ignored() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def reaped() -> None:
    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, reap)


@pytest.mark.parametrize("taken", [ignored, reaped])
def test_a_child_whose_status_somebody_takes_has_failed(
    scripts: Path, caplog: pytest.LogCaptureFixture, taken: Callable[[], None]
) -> None:
    """A script may ignore SIGCHLD, or reap whatever ends: how its daemon ended nobody knows then."""
    name = write(scripts, "faithful", FAITHFUL)
    service = Service("daemon", lambda: Child(name, [str(scripts / "up")]))
    handler = signal.getsignal(signal.SIGCHLD)
    taken()
    try:
        service.keep_running(0.0)
        first = service.child
        assert first is not None
        wait_up(scripts / "up")
        assert service.keep_running(1.0) is None and service.child is first, "it runs"
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: service.keep_running(2.0) is None and service.child is None, 5, "it is missed")
        assert "the daemon ended" in caplog.text
        service.keep_running(9.0)
        second = service.child
        assert second is not None and second.poll() is None
        second.terminate()
        assert second.end(10) == lifeline.STATUS_LOST
        second.terminate()
    finally:
        signal.signal(signal.SIGCHLD, handler)
