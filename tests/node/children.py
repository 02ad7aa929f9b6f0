"""Small Python scripts that stand in for the daemon and the trainer, and tools to disturb them."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gossamer.node.processes import stop_signals
from tests.net.processes import wait_for

FAITHFUL = """
    import signal, sys, time
    from gossamer.node import processes as lifeline
    lifeline.watch(lambda: signal.raise_signal(signal.SIGTERM))
    open(sys.argv[1], "w").write("up")
    time.sleep(600)
"""
STUBBORN = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write("up")
    time.sleep(600)
"""


def scripts_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the children's module path."""
    before = os.environ.get("PYTHONPATH")  # an empty entry would be the current folder
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *([before] if before else [])]))
    return folder


def write(folder: Path, name: str, code: str) -> str:
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return name


def wait_up(path: Path) -> None:
    wait_for(path.exists, 60, f"{path.name} started")


@contextmanager
def signals_of_its_own() -> Iterator[None]:
    """Signals as in a script that waits for SIGTERM with `sigwait` and ignores how its children end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
