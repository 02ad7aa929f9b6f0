"""`gossamer id`, `invite` and `revoke`: who is let in by an owner, or shut out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.node import logs
from gossamer.node.home import Home, keep_better
from gossamer.node.inputs import read_manifest
from gossamer.node.options import NodeOptions
from gossamer.protocol.access.acl import AccessList, Revocation, Role, read_invitation
from gossamer.protocol.errors import NobodyThereError, NotAnsweredError
from gossamer.protocol.identity import Identity
from tests.bootstrap.gossamer_command import Run, entries, in_process

NODE_ID = "ab" * 32


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return in_process(capsys, monkeypatch, tmp_path)


def test_an_invited_swarm_from_init_to_invitation(run: Run, tmp_path: Path) -> None:
    outcome = run("init", "my.toml", "--invited")
    assert outcome.status == 0 and "my.owner" in outcome.out
    assert entries(tmp_path) == {"my.toml", "my.owner"}
    assert (tmp_path / "my.owner").stat().st_mode & 0o777 == 0o600
    manifest = read_manifest(tmp_path / "my.toml")
    owner = Identity.from_seed((tmp_path / "my.owner").read_bytes())
    assert f"as listed in admission.owners:  {owner.public_key.hex()}\n" in outcome.out
    assert manifest.admission.mode == "invited" and manifest.admission.owners == (owner.public_key.hex(),)
    assert manifest.outer.weight_cap == 0
    node_id = run("id").out.strip()
    assert run("id").out.strip() == node_id, "always the same"
    contact = f"gossamer://{NODE_ID}@my.host:7700"
    outcome = run("invite", node_id, "--join", contact, "--days", 3, "--role", "observe")
    said = f"an invitation to observe in swarm 'my' ({manifest.swarm_id.hex()[:12]}) for 3 days; on that"
    assert outcome.status == 0 and outcome.err.startswith(said)
    found = read_invitation(outcome.out)
    assert found.swarm_id == manifest.swarm_id and found.contacts == (contact,)
    assert (found.grant.node_id.hex(), found.grant.role) == (node_id, Role.OBSERVE)


def test_a_members_copy_of_the_manifest_and_the_owners_key_are_enough(run: Run, tmp_path: Path) -> None:
    outcome = run("init", "my.toml", "--invited")
    assert "my.owner: the owner's key, which no node needs; back it up together with my.toml" in outcome.out
    member = Home(tmp_path / "d")
    member.create()
    member.adopt(read_manifest(tmp_path / "my.toml"))
    (tmp_path / "my.toml").unlink()
    run("invite", NODE_ID, "--manifest", "d/manifest").assert_user_error("--owner-key")
    found = run("invite", NODE_ID, "--manifest", "d/manifest", "--owner-key", "my.owner").out
    manifest = member.manifest()
    assert manifest is not None and read_invitation(found).swarm_id == manifest.swarm_id


def test_one_owner_may_own_several_swarms(run: Run, tmp_path: Path) -> None:
    assert run("init", "one.toml", "--invited").status == 0
    assert run("init", "two.toml", "--invited", "--owner-key", "one.owner").status == 0
    assert run("init", "open.toml", "--owner-key", "one.owner").status == 0
    one, two, open_ = (read_manifest(tmp_path / f"{name}.toml").admission for name in ("one", "two", "open"))
    assert one.owners == two.owners == open_.owners
    assert (one.mode, two.mode, open_.mode) == ("invited", "invited", "open")
    assert run("invite", NODE_ID, "--manifest", "two.toml", "--owner-key", "one.owner").status == 0
    run("invite", NODE_ID, "--manifest", "two.toml").assert_user_error("two.owner")
    assert entries(tmp_path) == {"one.toml", "one.owner", "two.toml", "open.toml"}


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["invite", "xyz"], "64 hex digits"),
        (["invite", NODE_ID, "--role", "rule"], "'train', 'observe'"),
        (["invite", NODE_ID, "--days", -1], "--days"),
        (["invite", NODE_ID, "--days", 99_999], "--days"),
        (["invite", NODE_ID, "--join", "nowhere"], "nowhere"),
        (["invite", NODE_ID, "--join", "gossamer://abc@host:1"], "64 hex digits"),
        (["invite", NODE_ID, "--owner-key", "no.owner"], "no.owner"),
        (["invite", NODE_ID, "--manifest", "no.toml"], "no.toml"),
        (["invite", NODE_ID, "--tell", "127.0.0.1:1"], "no Gossamer node answers"),
        (["revoke", NODE_ID], "--to"),
        (["revoke", "xyz", "--to", "127.0.0.1:1"], "64 hex digits"),
        (["revoke", NODE_ID, "--to", "127.0.0.1:1"], "no Gossamer node answers"),
        (["revoke", NODE_ID, "--to", "nowhere"], "nowhere"),
        (["node", "--invite", "gossamer-invitation:AAAA"], "damaged"),
        (["node", "--invite", "no-such-file"], "no-such-file"),
        (["node", "--invite", "my.toml"], "not an invitation"),
    ],
)
def test_mistakes_of_owners_and_the_invited(run: Run, args: list[object], part: str) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    run(*args).assert_user_error(part)


@pytest.fixture
def told(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whoever was told of a credential, of nodes of which those at port 1 do not answer."""
    addresses: list[str] = []

    def check(address: str) -> None:
        if address.endswith(":1"):
            raise NobodyThereError(f"no Gossamer node answers at {address}")
        if address.endswith(":9"):
            raise NotAnsweredError(f"{address} refuses: node abab was revoked by an owner of this swarm")

    async def fetch_status(address: str, **_: object) -> dict[str, Any]:
        check(address)
        swarm_id = read_manifest(Path("my.toml")).swarm_id.hex()
        return {"swarm_id": swarm_id, "node_id": NODE_ID, "clock": 7, "sealed_round": 4, "closed_round": None}

    async def deliver(address: str, *_: object, **__: object) -> None:
        check(address)
        addresses.append(address)

    monkeypatch.setattr("gossamer.node.daemon.network.rpc.fetch_status", fetch_status)
    monkeypatch.setattr("gossamer.node.daemon.network.rpc.deliver", deliver)
    assert run("init", "my.toml", "--invited").status == 0
    return addresses


def test_who_does_not_answer_does_not_keep_an_owners_word_from_the_others(run: Run, told: list[str]) -> None:
    outcome = run("revoke", NODE_ID, "--to", "a:1", "--to", "b:2", "--to", "c:3")
    assert (outcome.status, told) == (0, ["b:2", "c:3"])
    assert outcome.err == "gossamer: no Gossamer node answers at a:1\n"
    assert "after round 7 are void" in outcome.out
    outcome = run("invite", NODE_ID, "--tell", "b:2", "--tell", "a:1", "--tell", "c:3")
    assert (outcome.status, told[2:]) == (0, ["b:2", "c:3"])
    assert outcome.err.startswith("gossamer: no Gossamer node answers at a:1\n")
    assert read_invitation(outcome.out)


def test_where_nobody_answers_an_owner_fails_and_the_invitation_is_there(run: Run, told: list[str]) -> None:
    for command, flag in (("revoke", "--to"), ("invite", "--tell")):
        outcome = run(command, NODE_ID, flag, "a:1", flag, "b:1")
        assert outcome.status == 2 and sorted(outcome.err.splitlines()) == [
            f"gossamer: no Gossamer node answers at {address}:1" for address in "ab"
        ]
    assert read_invitation(outcome.out) and not told


def test_an_owner_is_told_that_a_node_was_revoked(run: Run, told: list[str]) -> None:
    outcome = run("invite", NODE_ID, "--tell", "a:9")
    assert outcome.status == 2
    assert outcome.err == "gossamer: a:9 refuses: node abab was revoked by an owner of this swarm\n"


def test_an_owner_is_asked_which_swarm_is_meant(run: Run) -> None:
    run("invite", NODE_ID).assert_user_error("which swarm?", "--manifest")
    assert run("init", "one.toml", "--invited").status == 0
    assert run("init", "two.toml", "--invited", "--seed", 1).status == 0
    run("invite", NODE_ID).assert_user_error("which swarm?", "--manifest")
    run("invite", NODE_ID, "--manifest", "one.toml", "--owner-key", "two.owner").assert_user_error(
        "does not belong to an owner"
    )


def test_an_invitation_for_another_node_or_without_an_address(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    text = run("invite", NODE_ID).out
    (tmp_path / "letter").write_text(f"\n{text[:50]}\n{text[50:]}\n")
    for given in (text, "letter"):
        run("node", "--invite", given, "--dir", "d").assert_user_error(f"is for node {NODE_ID}")
    mine = run("invite", run("id", "--dir", "e").out.strip()).out
    run("node", "--invite", mine, "--dir", "e").assert_user_error("names no address", "--join")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[NodeOptions]:
    """What nodes are started with, which end at once."""
    found: list[NodeOptions] = []
    monkeypatch.setattr(logs, "configure", lambda **_: None)

    class Supervisor:
        def __init__(self, options: NodeOptions) -> None:
            found.append(options)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("gossamer.node.processes.Supervisor", Supervisor)
    return found


def test_who_is_told_where_to_join_or_which_swarm_is_meant_is_told_more_than_the_invitation_says(
    run: Run, tmp_path: Path, started: list[NodeOptions]
) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(read_manifest(tmp_path / "my.toml"))
    text = run("invite", run("id", "--dir", "d").out.strip(), "--join", "127.0.0.1:1").out.strip()
    with_it = "node", "--dir", "d", "--invite", text
    assert run(*with_it).status == run(*with_it, "--join", "127.0.0.1:2").status == 0
    assert [options.join for options in started] == [("127.0.0.1:1",), ("127.0.0.1:2",)]
    run(*with_it, "--swarm-id", "0123").assert_user_error("the invitation is for swarm", "not 0123")


def test_a_promoted_node_trains_though_it_is_started_with_its_first_invitation(
    run: Run, tmp_path: Path, started: list[NodeOptions], caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose node file holds that."""
    caplog.set_level(logging.INFO)
    assert run("init", "my.toml", "--invited").status == 0
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(read_manifest(tmp_path / "my.toml"))
    to = run("id", "--dir", "d").out.strip(), "--join", "127.0.0.1:1"
    first = run("invite", *to, "--role", "observe").out
    (tmp_path / "node.toml").write_text(f'dir = "d"\ninvite = "{first.strip()}"\n')
    assert run("node", "--config", "node.toml").status == 0
    promotion = read_invitation(run("invite", *to).out)
    keep_better(home, replace(promotion, contacts=()))
    assert run("node", "--config", "node.toml").status == 0
    assert run("node", "--dir", "d", *to[1:]).status == 0
    assert run("node", "--dir", "d", *to[1:], "--observe").status == 0
    assert [options.observe for options in started] == [True, False, False, True]
    assert caplog.text.count("invited to observe: it holds and serves a replica, and does not train") == 1


STATUS = {"node_id": NODE_ID, "clock": 40, "sealed_round": 16, "closed_round": 0}


@pytest.mark.parametrize(
    ("changes", "args", "parts"),
    [
        ({}, ["--after-round", 15], ["rounds up to 16 are sealed", "at least 16"]),
        ({"closed_round": 32}, ["--after-round", 31], ["at least 32"]),
        ({}, ["--after-round", 41], ["the swarm is at round 40", "leave --after-round out"]),
        ({"swarm_id": "cd" * 32}, [], ["belongs to swarm cdcdcdcdcdcd, not to this one"]),
        ({"clock": "soon"}, [], ["cannot be read"]),
        ({"clock": True}, [], ["cannot be read"]),
        ({"clock": 2**31}, [], ["cannot be read"]),
        ({}, ["--reason", "two\nlines"], ["--reason"]),
        ({}, ["--after-round", 2**31], ["--after-round", "2147483647"]),
    ],
)
def test_a_revocation_that_cannot_be(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    args: list[object],
    parts: list[str],
) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    answer = {"swarm_id": read_manifest(tmp_path / "my.toml").swarm_id.hex(), **STATUS, **changes}
    delivered = _answering(monkeypatch, answer)
    run("revoke", NODE_ID, "--to", "host:1", *args).assert_user_error(*parts)
    assert delivered == []


@pytest.mark.parametrize(("args", "last_round"), [([], 40), (["--after-round", 16], 16)])
def test_a_revocation_is_handed_to_all_nodes_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[object], last_round: int
) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    manifest = read_manifest(tmp_path / "my.toml")
    delivered = _answering(monkeypatch, {"swarm_id": manifest.swarm_id.hex(), **STATUS})
    outcome = run("revoke", NODE_ID, "--to", "a:1", "--to", "b:1", "--reason", "key stolen", *args)
    assert outcome.status == 0 and f"after round {last_round} are void" in outcome.out
    assert [address for address, _ in delivered] == ["a:1", "b:1"]
    acl = AccessList(manifest.admission, manifest.swarm_id)
    found = acl.learn(delivered[0][1])
    assert isinstance(found, Revocation)
    assert (found.node_id.hex(), found.last_round, found.reason) == (NODE_ID, last_round, "key stolen")


def _answering(monkeypatch: pytest.MonkeyPatch, status: dict[str, object]) -> list[tuple[str, bytes]]:
    """Stands in for running nodes; returns what is handed to them."""
    delivered: list[tuple[str, bytes]] = []

    async def fetch_status(address: str, **_: object) -> dict[str, object]:
        return status

    async def deliver(address: str, credential: bytes, **_: object) -> None:
        delivered.append((address, credential))

    monkeypatch.setattr("gossamer.node.daemon.network.rpc.fetch_status", fetch_status)
    monkeypatch.setattr("gossamer.node.daemon.network.rpc.deliver", deliver)
    return delivered
