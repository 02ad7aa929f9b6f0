"""`check_machine`: what would go wrong on this machine: ports, devices, disks, open files."""

from __future__ import annotations

import socket
from collections import namedtuple
from pathlib import Path

import pytest

from gossamer.bootstrap.cli import config_check as check_machine
from gossamer.node.daemon.network import listening
from tests.node.findings import found, levels


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


def test_what_the_transport_would_refuse() -> None:
    for where, expected in (("[::]:0", ["error"]), ("127.0.0.1:0", ["ok"])):
        said = check_machine.check_listen(where, is_running=False, is_loopback_swarm=True, plaintext=True)
        assert levels(said) == {"listen": expected}


@pytest.mark.parametrize(
    ("listen", "admin", "is_one"),
    [
        ("127.0.0.1:77", "127.0.0.1:77", True),
        ("[::]:77", "127.0.0.1:77", True),
        ("127.0.0.1:77", "0.0.0.0:77", True),
        ("127.0.0.1:77", "127.0.0.2:77", False),
        ("[::]:77", "127.0.0.1:78", False),
        ("[::]:0", "127.0.0.1:0", False),
        ("[::]:77", "off", False),
        ("[::]:77", "", False),
    ],
)
def test_two_ports_are_two(listen: str, admin: str, is_one: bool) -> None:
    assert bool(list(check_machine.check_apart(listen, admin))) is is_one


def test_a_name_that_leads_to_this_machine_alone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "127.0.1.1"

    def getaddrinfo(host: str, port: object, **_: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr("gossamer.node.daemon.network.listening.socket.getaddrinfo", getaddrinfo)
    assert listening.names_loopback("my.host")
    address = "192.0.2.7"
    assert not listening.names_loopback("my.host")


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


@pytest.mark.parametrize("option", ["", "off", "127.0.0.1:0"])
def test_a_short_admin_token_is_an_error_wherever_the_node_listens(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_ADMIN_TOKEN", "s" * 15)
    assert levels(check_machine.check_admin(option, is_running=False)) == {"admin": ["error", "ok"]}


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
