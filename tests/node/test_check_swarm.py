"""`check_swarm`: what the nodes say that are to be joined."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gossamer.bootstrap.cli import config_check as check_swarm
from gossamer.bootstrap.cli.config_check import ask_nodes
from gossamer.node.address import Contact, parse_contact
from gossamer.node.home import manifest_of
from tests.node.daemons import facts, founded, joining, running
from tests.node.findings import found, look


async def test_nodes_that_answer(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    second = joining(tmp_path / "b", home)
    swarm_id = manifest_of(home).swarm_id.hex()
    async with running(home), running(second, join=(str(facts(home)["address"]),)):
        contacts = [parse_contact(facts(home)["address"]), parse_contact("127.0.0.1:1")]

        def ask(*who: Any, swarm: str | None = None) -> Any:
            return asyncio.to_thread(ask_nodes, who, swarm, plaintext=True, asker=None)

        answers = await ask(*contacts, swarm=swarm_id)
        assert answers.swarm_ids == [swarm_id]
        said = found(answers.findings)
        assert sorted(level for level, _ in said["join"]) == ["ok", "warning"], "one of two is enough"
        assert said["clock"] == [("ok", "agrees with the nodes to join")]
        elsewhere = found((await ask(contacts[0], swarm="ffff")).findings)
        assert elsewhere["join"][0][0] == "error" and "not ffff" in elsewhere["join"][0][1]
        nobody = found((await ask(contacts[1])).findings)
        assert [level for level, _ in nobody["join"]] == ["error"]


async def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = founded(tmp_path / "a")
    async with running(home):
        monkeypatch.setattr("gossamer.node.daemon.network.rpc.offset_of", lambda date, now: 3600.0)
        contact = parse_contact(facts(home)["address"])
        answers = await asyncio.to_thread(ask_nodes, [contact], None, plaintext=True, asker=None)
    ((level, text),) = found(answers.findings)["clock"]
    assert level == "warning" and "differ by 3600 s" in text


async def test_a_node_file_against_a_running_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path / "home"))
    home = founded(tmp_path / "a")
    async with running(home):
        (tmp_path / "n.toml").write_text(
            f'[node]\njoin = ["{facts(home)["address"]}"]\ninsecure-plaintext = true\nobserve = true\n'
            'listen = "127.0.0.1:0"\n'
        )
        said = await asyncio.to_thread(look, tmp_path / "n.toml", offline=False)
    assert {level for lines in said.values() for level, _ in lines} == {"ok", "warning"}
    assert [level for level, _ in said["join"]] == ["ok"]
    swarm = manifest_of(home).swarm_id.hex()[:12]
    assert swarm in said["manifest"][0][1], "the manifest was fetched"
    assert swarm in said["dir"][0][1], "the default folder follows from it"
    assert "needed" in said["disk"][0][1]
    assert not (tmp_path / "home").exists()


def test_as_many_members_count_as_any_node_knows_of_and_nonsense_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"a:1": [{}] * 5, "b:1": [{}] * 2, "c:1": None, "d:1": 7}

    async def probe(contact: Contact, **_: object) -> tuple[dict[str, Any], None]:
        return {"swarm_id": "ab" * 32, "members": told[contact.address]}, None

    monkeypatch.setattr(check_swarm, "probe_status", probe)
    answers = ask_nodes([parse_contact(where) for where in told], None, plaintext=True, asker=None)
    assert answers.members == 6 and len(answers.swarm_ids) == 4
