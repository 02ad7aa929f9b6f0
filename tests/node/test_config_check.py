"""`gossamer config check`: it says what would go wrong, and changes nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer

from gossamer.bootstrap import cli, manifests
from gossamer.bootstrap.owners import create_owner, invite
from gossamer.node.address import parse_contact
from gossamer.node.config import check_machine
from gossamer.node.config.check_folder import check_folder
from gossamer.node.config.check_manifest import check_manifest, disk_needed
from gossamer.node.config.check_swarm import ask_nodes
from gossamer.node.config.config_check import check
from gossamer.node.config.findings import Finding
from gossamer.node.folders import default_folder, own_id
from gossamer.node.storage.home import Home
from gossamer.protocol.admission import Role
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.invitation import Invitation
from gossamer.protocol.payload import payload_bytes_max
from gossamer.protocol.rules import RULES
from tests.node.daemons import facts, founded, joining, manifest_of, running
from tests.protocol import builders
from tests.protocol.builders import OWNER

INVITED = builders.manifest(admission=builders.admission())


def found(findings: Iterable[Finding]) -> dict[str, list[tuple[str, str]]]:
    """Level and text by subject."""
    by_subject: dict[str, list[tuple[str, str]]] = {}
    for finding in findings:
        assert finding.text.isprintable() and finding.text
        by_subject.setdefault(finding.subject, []).append((finding.level, finding.text))
    return by_subject


def levels(findings: Iterable[Finding]) -> dict[str, list[str]]:
    return {subject: [level for level, _ in said] for subject, said in found(findings).items()}


def look(path: Path | None, *, offline: bool = True) -> dict[str, list[tuple[str, str]]]:
    """The whole check."""
    gossamer: Any = typer.main.get_command(cli.app)
    return found(check(typer.Context(gossamer, info_name="gossamer"), path, offline))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A folder of the invited swarm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path / "home"))
    made = Home(tmp_path / "d")
    made.create()
    made.adopt(INVITED)
    return made


# -- the folder


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert levels(check_folder(Home(tmp_path / "a" / "b"), joins=True)) == {"dir": ["ok"]}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert levels(check_folder(Home(tmp_path / "file"), joins=True)) == {"dir": ["error"]}


def test_a_folder_without_a_model_must_join(home: Home) -> None:
    assert levels(check_folder(home, joins=True)) == {"dir": ["ok"], "manifest": ["ok"]}
    assert levels(check_folder(home, joins=False))["join"] == ["error"]
    assert {path.name for path in home.root.iterdir()} == {"manifest"}, "no key was made, no lock"


def test_a_running_node_is_seen_by_its_lock(home: Home) -> None:
    assert not home.lock.is_taken()
    with open(home.root / "lock", "w") as lock:
        assert not home.lock.is_taken()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert home.lock.is_taken()
        assert levels(check_folder(home, joins=True))["dir"] == ["warning"]
    home.lock.take()


def test_a_damaged_ledger_is_seen_whoever_is_to_be_joined(home: Home) -> None:
    """The node would end of it as it starts."""
    home.ledger_path.write_bytes(bytes(range(1, 201)) * 15)
    for joins in (True, False):
        said = found(check_folder(home, joins))
        assert said["dir"][1][0] == "error" and "if it is damaged, remove it" in said["dir"][1][1]
    home.ledger_path.write_bytes(b"")
    assert levels(check_folder(home, joins=True)) == {"dir": ["ok"], "manifest": ["ok"]}
    assert {path.name: path.stat().st_size for path in home.root.glob("[!m]*")} == {"ledger.sqlite": 0}


def test_a_damaged_folder(home: Home) -> None:
    home.manifest_path.write_bytes(b"junk")
    home.key_path.write_bytes(bytes(32))
    home.key_path.chmod(0o644)
    said = found(check_folder(home, joins=True))
    assert "chmod 600" in said["key"][0][1] and "damaged" in said["dir"][1][1]


@pytest.mark.parametrize(
    ("days", "level", "part"),
    [(30, "ok", "train"), (0, "ok", "train"), (1, "warning", "runs out in 1.0 days")],
)
def test_an_invitation(home: Home, days: float, level: str, part: str) -> None:
    own = home.identity().node_id
    home.keep_invitation(invite(OWNER, INVITED.swarm_id, own, role=Role.TRAIN, days=days, contacts=()))
    ((found_level, text),) = found(check_folder(home, joins=True))["invite"]
    assert found_level == level and part in text


def test_an_invitation_that_comes_before_the_key(home: Home, tmp_path: Path) -> None:
    text = invite(OWNER, INVITED.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=()).to_text()
    for folder, said in (('dir = "d"\n', f"gossamer id --dir {home.root}"), ("", "gossamer id")):
        (tmp_path / "n.toml").write_text(f'[node]\n{folder}invite = "{text}"\nobserve = true\n')
        found_there = look(tmp_path / "n.toml").get("invite", [])
        assert [level for level, _ in found_there] == ["error"]
        assert found_there[0][1].endswith(said)
    assert not home.key_path.exists()


def test_a_bootstrap_peers_invitation_is_for_the_key_of_its_own_folder(home: Home, tmp_path: Path) -> None:
    """Not for this machine's, which a node beside it would take."""
    file, own = tmp_path / "b.toml", Home(default_folder(INVITED.swarm_id, "-bootstrap"))
    manifests.write(INVITED, tmp_path / "m.toml")
    machine = own_id(None)
    text = '[bootstrap]\nmanifest = "m.toml"\njoin = ["127.0.0.1:1"]\n'
    file.write_text(text)
    assert f"gossamer id --dir {own.root} names" in errors(look(file))["invite"]

    def invited(node_id: str) -> Invitation:
        node = bytes.fromhex(node_id)
        return invite(OWNER, INVITED.swarm_id, node, role=Role.OBSERVE, days=0, contacts=())

    file.write_text(f'{text}invite = "{invited(machine).to_text()}"\n')
    assert errors(look(file))["invite"].endswith(f"send an owner: gossamer id --dir {own.root}")
    assert not own.root.exists()
    right = invited(own_id(own.root))
    assert right.grant.node_id.hex() != machine
    file.write_text(f'{text}invite = "{right.to_text()}"\n')
    assert errors(look(file)) == {}
    own.keep_invitation(right)
    file.write_text(text)
    assert errors(look(file)) == {}, "it is let in by what it was given before"


def test_an_invitation_for_somebody_else_or_elsewhere(home: Home, tmp_path: Path) -> None:
    own, other = home.identity().node_id, bytes(32)
    for swarm_id, node_id, part in (
        (INVITED.swarm_id, other, "is for node"),
        (other, own, "to another swarm"),
    ):
        text = invite(OWNER, swarm_id, node_id, role=Role.TRAIN, days=1, contacts=()).to_text()
        (tmp_path / "n.toml").write_text(f'[node]\ndir = "d"\ninvite = "{text}"\nobserve = true\n')
        assert [part in said for level, said in look(tmp_path / "n.toml")["invite"] if level == "error"] == [
            True
        ]


def test_an_invitation_that_cannot_be_read_is_said_of_that(home: Home, tmp_path: Path) -> None:
    for wrong, part in (("nowhere", "No such file"), ("gossamer-invitation:AAAA", "damaged")):
        (tmp_path / "n.toml").write_text(f'[node]\ndir = "d"\ninvite = "{wrong}"\nobserve = true\n')
        said = look(tmp_path / "n.toml")
        assert [part in text for level, text in said["invite"] if level == "error"] == [True]
        assert [level for level, _ in said["dir"]] == ["ok"]


# -- what the command would refuse at once


def errors(said: dict[str, list[tuple[str, str]]]) -> dict[str, str]:
    return {subject: text for subject, lines in said.items() for level, text in lines if level == "error"}


def founding(tmp_path: Path, **changes: Any) -> Path:
    """A manifest of a task that comes with Gossamer, beside which nothing lies."""
    wanted = {"options": {}, "codec": "int4", "every_steps": 30, "every_seconds": 0, "seed": 0, **changes}
    manifest, _ = manifests.create(name="n", task="text", **wanted)
    manifests.write(manifest, tmp_path / "m.toml")
    return tmp_path / "m.toml"


def test_what_a_node_would_not_train_with(home: Home, tmp_path: Path) -> None:
    found_there = Home(tmp_path / "text")
    found_there.create()
    found_there.adopt(manifests.read(founding(tmp_path)))
    (tmp_path / "blank").mkdir()
    addresses = ", ".join(f'"127.0.0.1:{port}"' for port in range(1, 10))
    (tmp_path / "n.toml").write_text(
        '[node]\ndir = "text"\njoin = ["127.0.0.1:1"]\ntrust = ["abc"]\ntask = "my.py:Mine"\n'
        f'data = ["blank"]\nadvertise = [{addresses}]\n'
    )
    said = errors(look(tmp_path / "n.toml"))
    assert said.keys() == {"node", "task", "data", "advertise"}
    assert "trust in" in said["node"] and "'abc' is no node id" in said["node"]
    assert "leave --task out" in said["task"] and "no text in" in said["data"]
    assert "8 addresses of a node, and not 9" in said["advertise"]
    (tmp_path / "n.toml").write_text('[node]\ndir = "text"\njoin = ["127.0.0.1:1"]\n')
    assert errors(look(tmp_path / "n.toml")) == {}


def test_a_bootstrap_peer_needs_first_parameters(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    file.write_text('[bootstrap]\nmanifest = "m.toml"\ndir = "b"\n')
    seeded = founding(tmp_path)
    assert errors(look(file)) == {}
    seeded.write_text(seeded.read_text().replace("seed = 0", "seed = 1"))  # as if made --from other weights
    assert "makes other first parameters" in errors(look(file))["genesis"]
    manifests.write(builders.manifest(task={"name": "my:Mine"}), tmp_path / "m.toml")
    assert "there is no" in errors(look(file))["genesis"]
    manifests.write(builders.manifest(task={"name": "chess"}), tmp_path / "m.toml")
    assert "found it with Peer.attach" in errors(look(file))["genesis"]
    file.write_text('[bootstrap]\nmanifest = "m.toml"\ndir = "b"\njoin = ["127.0.0.1:1"]\n')
    assert errors(look(file)) == {}, "who joins is given them"
    assert not (tmp_path / "b").exists()


def test_whether_a_bootstrap_peer_has_a_model_is_looked_at_and_nothing_written(
    home: Home, tmp_path: Path
) -> None:
    file = tmp_path / "b.toml"
    file.write_text('[bootstrap]\nmanifest = "m.toml"\ndir = "b"\n')
    founding(tmp_path)
    begun = Home(tmp_path / "b")
    begun.chunks_path.mkdir(parents=True)
    begun.ledger_path.touch()
    assert errors(look(file)) == {}
    assert sorted(path.name for path in begun.root.iterdir()) == ["chunks", "ledger.sqlite"]
    assert begun.ledger_path.stat().st_size == 0


def test_a_bootstrap_peer_of_an_invited_swarm_must_be_let_in(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    text = '[bootstrap]\nmanifest = "m.toml"\ndir = "d"\njoin = ["127.0.0.1:1"]\n'
    file.write_text(text)
    manifests.write(INVITED, tmp_path / "m.toml")
    assert "m.owner" in errors(look(file))["invite"]
    create_owner(tmp_path / "m.owner")
    assert "no owner's" in errors(look(file))["invite"]
    own = invite(OWNER, INVITED.swarm_id, home.identity().node_id, role=Role.OBSERVE, days=0, contacts=())
    file.write_text(f'{text}invite = "{own.to_text()}"\n')
    assert errors(look(file)) == {}
    file.write_text(text)
    home.keep_invitation(own)
    assert errors(look(file)) == {}


# -- this machine


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        said = found(check_machine.check_listen(where, is_running=False, is_loopback_swarm=True))
        assert said["listen"][0][0] == "error" and "already in use" in said["listen"][0][1]
        own = levels(check_machine.check_listen(where, is_running=True, is_loopback_swarm=True))
        assert own == {"listen": ["ok"]}
        assert levels(check_machine.check_admin(where, is_running=False)) == {"admin": ["error"]}
    assert levels(check_machine.check_listen(where, is_running=False, is_loopback_swarm=True)) == {
        "listen": ["ok"]
    }
    lasting = found(check_machine.check_listen("127.0.0.1:0", is_running=False, is_loopback_swarm=False))
    assert [level for level, _ in lasting["listen"]] == ["ok", "warning", "warning"]
    nowhere = levels(check_machine.check_listen("192.0.2.1:0", is_running=False, is_loopback_swarm=True))
    assert nowhere == {"listen": ["error"]}


def test_a_port_is_free_only_where_the_node_could_listen() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here, or it is kept apart")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        where = f"[::]:{taken.getsockname()[1]}"
        said = found(check_machine.check_listen(where, is_running=False, is_loopback_swarm=True))
        assert said["listen"] == [
            ("error", f"cannot listen on {where}: address already in use; choose another --listen")
        ]
        assert levels(check_machine.check_admin(where, is_running=True))["admin"][-1] == "ok"
    assert levels(check_machine.check_listen(where, is_running=False, is_loopback_swarm=True)) == {
        "listen": ["ok"]
    }


def test_an_admin_address_needs_a_token_where_others_can_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_ADMIN_TOKEN", raising=False)
    assert levels(check_machine.check_admin("0.0.0.0:0", is_running=False)) == {"admin": ["error", "ok"]}
    monkeypatch.setenv("GOSSAMER_ADMIN_TOKEN", "s" * 16)
    assert levels(check_machine.check_admin("0.0.0.0:0", is_running=False)) == {"admin": ["ok"]}
    for option in ("", "off"):
        assert levels(check_machine.check_admin(option, is_running=False)) == {"admin": ["ok"]}


def test_a_device() -> None:
    assert levels(check_machine.check_device("cpu", 1)) == {"device": ["ok"]}
    assert levels(check_machine.check_device("abacus", 10_000)) == {
        "device": ["error"],
        "threads": ["warning"],
    }


@pytest.mark.parametrize(("needed", "level"), [(None, "ok"), (500, "ok"), (900, "warning"), (1001, "error")])
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needed: int | None, level: str) -> None:
    usage = namedtuple("usage", "total used free")(2000, 1000, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert levels(check_machine.check_disk([tmp_path / "not" / "there"], needed)) == {"disk": [level]}


def test_chunks_may_have_a_disk_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root, chunks = tmp_path / "d", tmp_path / "d" / "chunks"
    chunks.mkdir(parents=True)
    usage = namedtuple("usage", "total used free")
    free = {root: 1000, chunks: 100}
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(2000, 0, free[path]))
    for _ in range(2):
        assert levels(check_machine.check_disk([root, chunks], 500)) == {"disk": ["error"]}
        free = {root: 100, chunks: 1000}


@pytest.mark.parametrize(("limit", "level"), [(256, "warning"), (1024, "ok"), (-1, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, level: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    assert levels(check_machine.check_open_files()) == {"files": [level]}


# -- the manifest


def odd(**sections: Any) -> set[str]:
    """Fields that are warned of."""
    said = levels(check_manifest(builders.manifest(**sections)))
    return {field for field, level in said.items() if "warning" in level} - {"task.name"}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"outer": {"codec": "int2"}}, "outer.momentum"),
        ({"outer": {"learning_rate": 3.0}}, "outer.learning_rate"),
        ({"outer": {"codec": "topk", "momentum": 0.0, "learning_rate": 4.0}}, "outer.learning_rate"),
        ({"outer": {"learning_rate": 0.01}}, "outer.learning_rate"),
        ({"outer": {"ef_decay": 0.1}}, "outer.ef_decay"),
        ({"outer": {"clip": 0.0}}, "outer.clip"),
        ({"outer": {"weight_cap": 0.0}}, "outer.weight_cap"),
        ({"pace": {"every_steps": 0, "every_seconds": 0.2}}, "pace.every_seconds"),
        ({"pace": {"min_round_seconds": 90.0}}, "pace.min_round_seconds"),
        ({"swarm": {"name": "n", "created": 2**40}}, "swarm.created"),
        ({"history": {"retain": 0}}, "history.retain"),
        ({"history": {"retain": 30}}, "history.retain"),
        ({"history": {"snapshot_every": 2000, "retain": 9000}}, "history.snapshot_every"),
    ],
)
def test_values_that_are_seldom_meant(sections: dict[str, Any], field: str) -> None:
    assert odd(**sections) == {field}


def test_how_long_histories_usually_are_goes_with_the_fragments() -> None:
    """As `gossamer init` writes them."""
    manifest = builders.manifest(fragments=2, history={"retain": 30})
    (said,) = [found.text for found in check_manifest(manifest) if found.subject == "history.retain"]
    assert said.endswith("512 is usual")


def test_a_node_cannot_train_what_a_script_trains() -> None:
    manifest = builders.manifest(task={"name": "chess"})
    assert levels(check_manifest(manifest))["task.name"] == ["warning"]
    assert levels(check_manifest(manifest, trains=True))["task.name"] == ["error"]


def test_a_folder_of_another_swarm_than_is_pinned(home: Home, tmp_path: Path) -> None:
    for pinned, found_there in ((INVITED.swarm_id.hex()[:12].upper(), False), ("ffff", True)):
        (tmp_path / "n.toml").write_text(f'[node]\ndir = "d"\nobserve = true\nswarm-id = "{pinned}"\n')
        assert ("swarm-id" in look(tmp_path / "n.toml")) is found_there


def test_what_init_writes_is_not_odd(tmp_path: Path) -> None:
    assert odd() == set()
    for codec in CODECS:
        for rule in (None, *RULES):
            manifest, _ = manifests.create(
                name="n",
                task="text",
                options={},
                codec=codec,
                every_steps=30,
                every_seconds=0,
                fragments=2,
                seed=0,
                averaging=rule,
            )
            assert set(levels(check_manifest(manifest))) == {"manifest"}, f"{codec} by {rule}"
    manifests.write(manifest, tmp_path / "m.toml")
    assert set(look(tmp_path / "m.toml")) == {"manifest"}
    text = (tmp_path / "m.toml").read_text().replace('preset = "tiny"', 'preset = "huge"')
    (tmp_path / "m.toml").write_text(text)
    assert [level for level, _ in look(tmp_path / "m.toml")["task.options"]] == ["error"]
    (tmp_path / "m.toml").write_text(text.replace("momentum", "momentun"))
    ((level, said),) = look(tmp_path / "m.toml")["manifest"]
    assert level == "error" and "outer.momentun" in said


def test_the_disk_that_a_model_needs() -> None:
    """As docs/operating.md has it: payloads of all members, five snapshots, the trainer's state twice."""
    numel = INVITED.plan().numel
    few, many = disk_needed(INVITED, 1, False), disk_needed(INVITED, 9, False)
    more = disk_needed(INVITED, 2, False) - few
    assert few > more + 20 * numel and many - few == 8 * more
    assert disk_needed(INVITED, 1, True) - few == 32 * numel


def test_the_smallest_chunk_takes_a_block_of_the_disk() -> None:
    """Of tiny models nearly all of the space is that."""
    history = {"retain": 500, "seal_after": 4, "snapshot_every": 12}
    tiny = builders.manifest(history=history)
    assert payload_bytes_max(CODECS[tiny.outer.codec], tiny.plan().fragments[0]) < 4096
    needed = disk_needed(tiny, 3, False)
    assert 3 * 512 * 4096 < needed < 3 * 512 * (4096 + 1100) + 2e6


# -- the swarm


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
        assert said["clock"] == [("ok", "agrees with theirs")]
        elsewhere = found((await ask(contacts[0], swarm="ffff")).findings)
        assert elsewhere["join"][0][0] == "error" and "not to ffff" in elsewhere["join"][0][1]
        nobody = found((await ask(contacts[1])).findings)
        assert [level for level, _ in nobody["join"]] == ["error"]


async def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = founded(tmp_path / "a")
    async with running(home):
        monkeypatch.setattr("gossamer.node.network.client.offset_of", lambda date, now: 3600.0)
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


# -- the node file


def test_all_faults_of_a_file_are_told_at_once(home: Home, tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text(
        '[node]\ndir = "d"\njion = 1\nthreads = "4"\nrounds = -1\nlisten = "x"\nobserve = true\n'
    )
    said = look(tmp_path / "n.toml")
    faults = [text for level, text in said["node"] if level == "error"]
    assert len(faults) == 4
    for fault, part in zip(faults, ("join?", "a whole number", "listen in", "rounds in"), strict=True):
        assert part in fault and "n.toml" in fault
    assert "listen" not in said, "what is wrong is not looked at further"


def test_the_example_in_the_documents_is_one(home: Home, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text("utf-8")
    example = re.search(r"^    \[node\]\n(    .*\n|\n)+", text, re.MULTILINE)
    assert example is not None
    (tmp_path / "node.toml").write_text(textwrap.dedent(example[0]))
    (tmp_path / "texts").mkdir()
    said = look(tmp_path / "node.toml")
    assert said["node"] == [
        ("ok", "10 settings: join, dir, swarm-id, data, listen, name, device, threads, admin, log-json")
    ]
    assert [level for level, _ in said["bootstrap"]] == ["ok"]


def test_a_folder_brings_its_file(home: Home) -> None:
    (home.root / "node.toml").write_text("[node]\nobserve = true\nname = 'n'\n")
    said = look(home.root)
    assert "observe, dir, name" not in said["node"][0][1] and "observe, name" in said["node"][0][1]
    assert str(home.root) in said["dir"][0][1] and "device" not in said
    (home.root / "node.toml").write_text("[init]\npreset = 'small'\n[generate]\nlength = 5\n")
    said = look(home.root)
    assert said["init"] == [("ok", "1 settings: preset")] and said["generate"][0][1] == "1 settings: length"


def test_a_variable_that_sets_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_NODE_OBSERVE", "1")
    monkeypatch.setenv("GOSSAMER_NODE_LISTN", "127.0.0.1:1")
    said = look(None)
    assert said["environment"] == [
        ("warning", "GOSSAMER_NODE_LISTN sets nothing; did you mean GOSSAMER_NODE_LISTEN?")
    ]
    assert said["join"][0][0] == "error" and "which swarm?" in said["join"][0][1]


def test_the_command(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["gossamer", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().out

    (tmp_path / "n.toml").write_text('[node]\ndir = "d"\nobserve = true\n[status]\naddress = "a:1"\n')
    status, text = run("config", "check", "n.toml", "--offline")
    assert status == 1 and "error   join" in text and "errors: 1, warnings: 2" in text
    assert "ok      status" in text, "every section is looked at"
    status, text = run("config", "check", "n.toml", "--offline", "--json")
    assert status == 1 and '"level": "error"' in text
    status, text = run("config", "show", "node", "--config", "n.toml", "--name", "x")
    assert status == 0
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["observe"] == ["yes", "file", "n.toml"] and rows["name"] == ["x", "flag", "--name"]
    assert rows["threads"] == ["0", "default"]


@pytest.mark.parametrize(("variable", "text"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_colours_are_for_those_who_want_them(home: Home, variable: str, text: str) -> None:
    """On a terminal, which a pseudo-terminal is."""
    (home.root / "node.toml").write_text("[init]\npreset = 'small'\n")
    ours, theirs = os.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with os.fdopen(ours, "rb", buffering=0) as screen:
        subprocess.run(
            [sys.executable, "-m", "gossamer.bootstrap.cli", "config", "check", str(home.root)],
            env={**env, "TERM": "xterm", variable: text},
            stdin=theirs,
            stdout=theirs,
            check=True,
            timeout=60,
        )
        os.close(theirs)
        shown = screen.read(4096)
    assert b"1 settings: preset" in shown
    assert (b"\x1b[3" in shown) is (text == "xterm")
