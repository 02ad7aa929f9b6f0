"""`gossamer.node.training.trainer`: how its process ends. What it trains is tested with real nodes."""

from __future__ import annotations

import os
import signal

import pytest

from gossamer.node.training.trainer import _Ending


def test_sigterm_ends_a_process_that_a_task_has_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader of its own, say, that multiprocessing ends so, and then waits for."""
    ending = _Ending()
    handlers: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "raise_signal", lambda number: os._exit(number))
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail(f"exit {status}", pytrace=False))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(pytest.fail.Exception, match=f"exit {int(signal.SIGTERM)}"):
        ending.terminate()
    assert handlers == {signal.SIGTERM: signal.SIG_DFL}
