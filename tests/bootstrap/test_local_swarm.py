"""What a local swarm does when processes of its own end: others go on, and it says who is gone."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gossamer.bootstrap.display import Display, Output
from gossamer.bootstrap.local_swarm import LocalSwarm
from gossamer.bootstrap.processes import NodeProcess
from gossamer.bootstrap.swarm import SwarmOptions
from gossamer.protocol.errors import LocalError
from tests.protocol.builders import SMALL


class Ended:
    """A child process that has ended with an exit status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int:
        return self.status

    def close(self) -> None:
        pass


def options(folder: Path) -> SwarmOptions:
    return SwarmOptions(
        nodes=2,
        rounds=3,
        task="text",
        options={},
        settings=(),
        data=(),
        codec="int4",
        every_steps=5,
        fragments=1,
        seed=0,
        folder=folder,
        json_path=None,
        plaintext=False,
        debug=False,
    )


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, "killed by SIGKILL"),
        (-40, "killed by signal 40"),
        (0, "stopped"),
        (2, "no text in x"),
        (1, "no text in x"),
    ],
)
def test_how_a_process_ended(tmp_path: Path, status: int, said: str) -> None:
    process = NodeProcess("node-1", tmp_path / "node-1", [], {})
    assert not process.has_ended(), "it was never started"
    process.log_path.write_text("12:00:00 info    up\nno text in x\n")
    process.child = Ended(status)  # type: ignore[assignment]
    process.status = {"round": 3}
    assert process.has_ended()
    assert process.ended == said
    assert process.status is None
    assert not process.has_ended(), "that was said"


def test_the_others_go_on_until_nobody_is_left(tmp_path: Path) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    shown = io.StringIO()
    display = Display(Console(file=shown, width=200), 3, "a swarm")
    boot, one, two = swarm._everyone
    one.status = two.status = {"state": "finished", "trains": True, "round": 3}
    one.child = Ended(-9)  # type: ignore[assignment]
    boot.child = Ended(-15)  # type: ignore[assignment]
    swarm._check_running(display)
    assert "bootstrap ended: killed by SIGTERM. The others go on." in shown.getvalue()
    assert "node-1 ended: killed by SIGKILL. The others go on." in shown.getvalue()
    assert swarm._all_finished(), "nobody waits for who is gone"
    two.child = Ended(2)  # type: ignore[assignment]
    with pytest.raises(LocalError, match="node-2 ended, and no node is left: it said nothing"):
        swarm._check_running(display)


def test_a_reader_that_is_gone_is_an_error_that_can_be_cleaned_up_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        Output().print("x")
