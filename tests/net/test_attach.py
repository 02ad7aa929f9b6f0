"""`Peer.attach`: scripts that are nodes, as real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gossamer.bootstrap.invites import invite
from gossamer.protocol.access.acl import Role
from gossamer.protocol.identity import Identity
from tests.net.processes import (
    assert_all_gone,
    gossamer,
    gossamer_status,
)
from tests.net.scripts import PATIENCE_S, scripts_in

pytestmark = pytest.mark.slow


def test_scripts_train_together_and_end_with_the_same_bits(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one")
        address = scripts.address("one")
        scripts.start("two", join=[address])
        for name in ("one", "two"):
            scripts.wait_rounds(name, 3)
        status = gossamer_status(address)
        assert status is not None and status["trainer"]["state"] == "training"
        (tmp_path / "stop").touch()
        (one,), (two,) = scripts.results("one"), scripts.results("two")
        assert one["rests"] and two["rests"]
        assert one["digest"] == two["digest"]
        assert one["node_id"] != two["node_id"]
        for result in (one, two):
            assert result["merged"] == sorted(set(result["merged"])) and result["merged"]
            metrics = result["metrics"]
            assert metrics["links"] >= 0 and 0 < metrics["wait_fraction"] < 1
            assert metrics["tokens"] == 16 * metrics["steps"]
        assert one["metrics"]["swarm_tokens"] == two["metrics"]["swarm_tokens"]


def test_scripts_of_invited_nodes_train_together_and_others_hear_why_not(tmp_path: Path) -> None:
    owner = Identity.from_seed(bytes(range(32)))
    with scripts_in(tmp_path, owner) as scripts:

        def invitation(name: str, *contacts: str) -> str:
            node_id = bytes.fromhex(gossamer("id", "--dir", tmp_path / name).stdout)
            return invite(
                owner, scripts.swarm_id, node_id, role=Role.TRAIN, days=1, contacts=contacts
            ).to_text()

        scripts.start("one", invite=invitation("one"))
        address = scripts.address("one")
        scripts.start("two", invite=invitation("two", address), manifest=None)
        scripts.wait_rounds("two", 3)
        scripts.start("stranger", join=[address])
        assert scripts.processes["stranger"].wait(PATIENCE_S) == 1
        assert "start with --invite and the invitation that comes back" in scripts.log("stranger")
        (tmp_path / "stop").touch()
        (one,), (two,) = scripts.results("one"), scripts.results("two")
        assert one["rests"] and two["rests"] and one["digest"] == two["digest"]


def test_a_killed_daemon_comes_back_while_training_goes_on(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one")
        scripts.wait_rounds("one", 2)
        daemon = scripts.daemon("one")
        daemon.kill()
        steps = scripts.metrics("one")["steps"]
        scripts.wait_rounds("one", 3)
        assert scripts.metrics("one")["steps"] > steps
        assert scripts.daemon("one").pid != daemon.pid
        (tmp_path / "stop").touch()
        scripts.results("one")


def test_nothing_is_left_when_the_script_is_killed(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one")
        scripts.wait_rounds("one", 1)
        scripts.processes["one"].kill()
        assert_all_gone(tmp_path, 8)


@pytest.mark.parametrize("stubborn", [False, True])
def test_sigterm_ends_it_in_good_order_and_it_resumes(tmp_path: Path, stubborn: bool) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one", stubborn=stubborn)
        scripts.wait_rounds("one", 2)
        scripts.processes["one"].send_signal(signal.SIGTERM)
        status = scripts.processes["one"].wait(30)
        assert status == (128 + signal.SIGTERM if stubborn else 0), scripts.log("one")
        assert "Traceback" not in scripts.log("one")
        assert_all_gone(tmp_path, 5)
        printed = [line for line in scripts.log("one").splitlines() if line.startswith("{")]
        last = json.loads(printed[-1])
        scripts.start("one", join=[])
        scripts.wait_rounds("one", 1)
        (tmp_path / "stop").touch()
        (result,) = scripts.results("one")
        assert result["metrics"]["steps"] > last["steps"], "it went on where it had been"
