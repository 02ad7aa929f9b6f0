"""`gossamer.node.processes`: children are kept running until one tells what to mend, and none is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest

from gossamer.node.options import NodeOptions
from gossamer.node.processes import Child, Service, Supervisor
from tests.net.processes import assert_all_gone
from tests.node.children import FAITHFUL, STUBBORN, scripts_in, signals_of_its_own, wait_up, write


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return scripts_in(tmp_path, monkeypatch)


SUPERVISE = """
    import sys
    from pathlib import Path
    from gossamer.node import processes as supervisor
    from gossamer.node.processes import Child
    from gossamer.node.options import NodeOptions
    from gossamer.node.processes import Service
    folder = Path(sys.argv[1])
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
    begun = time.monotonic()
    process.send_signal(number)
    assert process.wait(10) == 0
    assert time.monotonic() - begun < 5
    assert_all_gone(scripts, 0.5)


INTERRUPT = """
    import signal, sys
    from pathlib import Path
    from gossamer.node import processes as supervisor
    from gossamer.node.options import NodeOptions

    supervisor.POLL_S = 0.0

    def run(lines_before):
        node = supervisor.Supervisor(NodeOptions(folder=Path(sys.argv[1]), observe=True))
        node._services = []
        asked = False

        def trace(frame, event, argument):
            nonlocal asked, lines_before
            lines_before -= event == "line"
            if lines_before < 0 and not asked:
                asked = True
                node.stop()
            return trace

        sys.settrace(trace)
        node.run()
        sys.settrace(None)
        assert asked

    for lines_before in range(300):
        run(lines_before)
    print("all ended")
"""


def test_a_node_ends_wherever_the_signal_finds_it(tmp_path: Path) -> None:
    """A handler runs between any two lines: also where a lock is held that an Event would want again."""
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPT), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "all ended\n"


def test_exit_status_two_stops_the_node(scripts: Path, supervise: Supervise) -> None:
    write(scripts, "faithful", FAITHFUL)
    write(scripts, "mistaken", "import sys, time; time.sleep(0.3); sys.exit(2)")
    process = supervise("faithful", "mistaken")
    assert process.wait(10) == 2
    assert_all_gone(scripts, 0.5)


def test_a_child_that_ends_for_no_reason_stops_the_node_with_a_word(
    scripts: Path, supervise: Supervise, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a trainer does in whose task something calls exit()."""
    write(scripts, "faithful", FAITHFUL)
    write(scripts, "done", "pass")
    assert supervise("faithful", "done").wait(10) == 0
    assert "the done ended, though this node was not asked to stop; the node stops" in capfd.readouterr().err
    assert_all_gone(scripts, 0.5)


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
    assert process.wait(10) == 0


def test_stop_from_another_thread(scripts: Path) -> None:
    supervisor = Supervisor(NodeOptions(folder=scripts, observe=True))
    name = write(scripts, "faithful", FAITHFUL)
    supervisor._services = [Service("daemon", lambda: Child(name, [str(scripts / "up")]))]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        threading.Timer(0.5, supervisor.stop).start()
        assert supervisor.run() == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert_all_gone(scripts, 0.5)
