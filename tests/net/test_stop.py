"""A stop is noticed in time: what was learnt is published though the loop's next step never comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gossamer.node.daemon.phi.restore import replay
from gossamer.node.home import Home
from tests.net.processes import assert_all_gone, processes_naming, wait_for

pytestmark = pytest.mark.slow

PUBLISHED = "asked to stop: what this node has learnt is published, as round 1"


@pytest.mark.parametrize(
    ("mode", "package", "to_group"),
    [
        ("loop", "torch", False),
        ("transformers", "transformers", False),
        ("own", "torch", True),
        ("lightning", "lightning", True),
    ],
)
def test_what_was_learnt_is_published_within_seconds_of_the_signal(
    tmp_path: Path, mode: str, package: str, to_group: bool
) -> None:
    """Workers of a DataLoader die of the same signal: their error ends the loop before its next step."""
    pytest.importorskip(package)
    folder, log = tmp_path / "node", tmp_path / "log"
    with open(log, "wb") as file:
        script = subprocess.Popen(
            [sys.executable, "-m", "tests.net.stopped", mode, str(folder)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        wait_for((tmp_path / "far").exists, 90, "the loop is far from its next step")
        time.sleep(1.0)  # a step that was under way is over
        (os.killpg if to_group else os.kill)(script.pid, signal.SIGTERM)
        # A worker may die, and its error end the loop, before the signal reaches the script itself.
        is_over = lambda: PUBLISHED in log.read_text() or (to_group and script.poll() is not None)  # noqa: E731
        wait_for(is_over, 5, "it is published")
        time.sleep(1.0)  # the daemon stores it
        script.kill()
        script.wait(10)
        assert_all_gone(tmp_path, 8)
        assert replay(Home(folder))[1].newest_round == 1
    finally:
        for process in processes_naming(tmp_path):
            process.kill()
        script.wait(10)
