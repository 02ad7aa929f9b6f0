"""`gossamer.node.daemon.network.address_book`: where a node says that it can be dialled."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from gossamer.node.daemon.network.address_book import OwnAddresses
from gossamer.node.home import Home
from tests.node.cores import new_core
from tests.node.daemons import facts, founded, joining, running
from tests.node.trainer_side import until

IPV4 = frozenset({socket.AF_INET})
BOTH = frozenset({socket.AF_INET, socket.AF_INET6})


class Moving:
    """A node on a machine whose addresses are as a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: set[str] = set()
        self.core = new_core(Home(folder))
        self.own_addresses = OwnAddresses(self.core, lambda effects: None)
        self.goes_out_from = {socket.AF_INET: "192.168.1.5", socket.AF_INET6: "2001:db8::5"}
        monkeypatch.setattr("gossamer.node.daemon.network.address_book.is_gone", self.lost.__contains__)
        monkeypatch.setattr("gossamer.node.daemon.network.address_book.own_address", self.own_address)

    def own_address(self, family: socket.AddressFamily, *, loopback: bool) -> str | None:
        here = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
        return (here if loopback else self.goes_out_from).get(family)

    def links_from(self, host: str) -> tuple[str, ...]:
        """A link comes up; returns where the node now says that it can be dialled."""
        self.own_addresses.learn((host, 40000))
        return self.core.own_record.addresses


def test_a_laptop_that_changes_its_network_says_where_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = Moving(tmp_path, monkeypatch)
    laptop.own_addresses.listening(7701, (), BOTH)
    assert laptop.links_from("127.0.0.1") == ("127.0.0.1:7701",)
    assert laptop.links_from("192.168.1.5") == ("192.168.1.5:7701",)
    assert laptop.links_from("10.8.0.2") == ("192.168.1.5:7701",)  # a second one, and the first still works
    laptop.lost.add("192.168.1.5")
    assert laptop.links_from("127.0.0.1") == ("192.168.1.5:7701",)  # says nothing to anybody else
    assert laptop.links_from("10.8.0.2") == ("10.8.0.2:7701",)
    assert laptop.links_from("192.168.1.77") == ("10.8.0.2:7701",)


def test_whoever_was_told_its_address_learns_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Moving(tmp_path, monkeypatch)
    server.own_addresses.listening(7701, ("my.host:7701",), BOTH)
    assert server.links_from("192.168.1.5") == ("my.host:7701",)


def test_nobody_is_told_an_address_of_a_kind_that_is_not_listened_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Moving(tmp_path, monkeypatch)
    node.own_addresses.listening(7701, (), IPV4)
    assert node.links_from("::1") == ("127.0.0.1:7701",)
    assert node.links_from("fd00::2") == ("192.168.1.5:7701",)
    assert node.links_from("10.8.0.2") == ("192.168.1.5:7701",)  # the first one still works


def test_of_each_kind_of_address_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = Moving(tmp_path, monkeypatch)
    laptop.own_addresses.listening(7701, (), BOTH)
    assert laptop.links_from("::1") == ("[::1]:7701",)
    assert laptop.links_from("127.0.0.1") == ("[::1]:7701",)
    assert laptop.links_from("192.168.1.5") == ("192.168.1.5:7701",)
    assert laptop.links_from("fd00::2") == ("192.168.1.5:7701", "[fd00::2]:7701")
    laptop.lost.update(("192.168.1.5", "fd00::2"))
    del laptop.goes_out_from[socket.AF_INET6]
    assert laptop.links_from("10.8.0.2") == ("10.8.0.2:7701",)


def test_an_address_that_is_lost_is_told_no_more_though_that_of_the_other_kind_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    laptop = Moving(tmp_path, monkeypatch)
    laptop.own_addresses.listening(7701, (), BOTH)
    laptop.links_from("192.168.1.5")
    assert laptop.links_from("fd00::2") == ("192.168.1.5:7701", "[fd00::2]:7701")
    laptop.lost.add("192.168.1.5")
    del laptop.goes_out_from[socket.AF_INET]
    with caplog.at_level(logging.INFO, "gossamer.node"):
        assert laptop.links_from("fd00::2") == ("[fd00::2]:7701",)
    assert caplog.messages == ["this machine is no longer at 192.168.1.5"]
    assert laptop.links_from("10.8.0.2") == ("[fd00::2]:7701", "10.8.0.2:7701")


def test_a_lost_address_gives_way_to_the_one_that_the_machine_has_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    laptop = Moving(tmp_path, monkeypatch)
    laptop.own_addresses.listening(7701, (), BOTH)
    laptop.links_from("192.168.1.5")
    laptop.links_from("fd00::2")
    laptop.lost.add("192.168.1.5")
    laptop.goes_out_from[socket.AF_INET] = "10.8.0.2"
    with caplog.at_level(logging.INFO, "gossamer.node"):
        assert laptop.links_from("fd00::2") == ("[fd00::2]:7701", "10.8.0.2:7701")
    assert caplog.messages == ["this machine is at 10.8.0.2 now, and no longer at 192.168.1.5"]


def test_a_link_local_link_beside_an_address_that_others_dial_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Moving(tmp_path, monkeypatch)
    node.own_addresses.listening(7701, (), BOTH)
    node.links_from("192.168.1.5")
    node.goes_out_from = {}
    assert node.links_from("fe80::1%eth0") == ("192.168.1.5:7701",)
    assert not caplog.messages


def test_nobody_is_told_a_link_local_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Moving(tmp_path, monkeypatch)
    node.own_addresses.listening(7701, (), BOTH)
    node.goes_out_from = {socket.AF_INET6: "fe80::1%eth0"}
    for _ in range(2):
        assert node.links_from("fe80::1%eth0") == ()
    assert [record.message for record in caplog.records if "--advertise" in record.message] == [
        "other nodes are not told where to dial this one: they cannot dial fe80::1%eth0, our end of its"
        " first link; set --advertise HOST:PORT"
    ]
    node.goes_out_from = {socket.AF_INET: "192.168.1.5"}
    assert node.links_from("fe80::1%eth0") == ("192.168.1.5:7701",)


async def test_a_node_of_ipv4_alone_that_joins_by_ipv6_can_be_dialled(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here, or it is kept apart")
    first = founded(tmp_path / "first")
    second = joining(tmp_path / "second", first)
    async with running(first, listen="[::1]:0", plaintext=False) as seed:
        seed_at = facts(first)["address"]
        async with running(second, listen="0.0.0.0:0", plaintext=False, join=(seed_at,)) as daemon:
            await until(lambda: daemon.core.own_record.addresses, 10)
            assert daemon.core.own_record.addresses == (facts(second)["address"],)
            assert seed.core.own_record.addresses == (seed_at,)
