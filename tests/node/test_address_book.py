"""Whom a node remembers, in which order, and where it says that it can be dialled itself."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gossamer.node.address import Contact
from gossamer.node.daemon.network.address_book import REMEMBERED_MAX, AddressBook, OwnAddresses, whom_to_join
from gossamer.node.home import Home
from gossamer.protocol import events as ev
from gossamer.protocol.membership.members import Health
from tests.node.cores import new_core
from tests.node.trainer_side import until
from tests.protocol import builders

IPV4 = frozenset({socket.AF_INET})
BOTH = frozenset({socket.AF_INET, socket.AF_INET6})


def test_whom_it_chose_long_ago_comes_first_after_a_restart(tmp_path: Path) -> None:
    home = Home(tmp_path)
    core = new_core(home)
    for number in (3, 1, 2):
        author = builders.identity(number)
        core.roster.update(builders.row(author, addresses=(f"10.0.0.{number}:7700",)), 0.0)
    core.handle(ev.LinkUp(1, builders.identity(2).node_id, True, "10.0.0.2:7700"), 0.0)
    core.handle(ev.LinkUp(2, builders.identity(3).node_id, False, None), 0.0)
    AddressBook(home, core).remember()
    joined = whom_to_join(("boot:1",), home)
    ids = {number: builders.identity(number).node_id for number in (1, 2, 3)}
    assert joined[:2] == (Contact("boot:1"), Contact("10.0.0.2:7700", ids[2]))
    assert set(joined[2:]) == {Contact(f"10.0.0.{number}:7700", ids[number]) for number in (1, 3)}


def test_no_member_fills_the_memory_with_its_addresses(tmp_path: Path) -> None:
    """Four whose node ids come first, with eight addresses each, were all that a node remembered."""
    home = Home(tmp_path)
    core = new_core(home)
    members = sorted((builders.identity(number) for number in range(1, 45)), key=lambda m: m.node_id)
    liars, honest = members[:4], members[4:]
    for number, member in enumerate(honest):
        core.roster.update(builders.row(member, addresses=(f"10.0.0.{number}:7700",)), 0.0)
    for number, liar in enumerate(liars):
        row = builders.row(liar, addresses=tuple(f"10.9.{number}.{host}:7700" for host in range(8)))
        core.roster.update(row, 0.0)
    AddressBook(home, core).remember()
    remembered = whom_to_join((), home)
    assert len(remembered) == len({contact.node_id for contact in remembered}) == REMEMBERED_MAX


def test_all_addresses_of_a_few_members_are_remembered_one_of_each_first(tmp_path: Path) -> None:
    """Those whom an outage took for dead come after those alive."""
    home = Home(tmp_path)
    core = new_core(home)
    for number in (1, 2, 3):
        addresses = tuple(f"10.0.{number}.{host}:7700" for host in range(3))
        core.roster.update(builders.row(builders.identity(number), addresses=addresses), 0.0)
    for gone in (2, 1, 3):
        core.roster.judge(builders.identity(gone).node_id, Health.DOWN, 1.0)
        AddressBook(home, core).remember()
        remembered = whom_to_join((), home)
        assert len(remembered) == 9
        assert len({contact.node_id for contact in remembered[:3]}) == 3
        if gone == 2:
            assert remembered[2].node_id == builders.identity(2).node_id


async def test_whoever_does_not_live_long_remembers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.node.daemon.network.address_book.REMEMBER_FIRST_S", 0.01)
    home = Home(tmp_path)
    core = new_core(home)
    written_by: set[int] = set()
    write = home.write_peers

    def noted(contacts: Sequence[str]) -> None:
        written_by.add(threading.get_ident())
        write(contacts)

    monkeypatch.setattr(home, "write_peers", noted)
    task = asyncio.create_task(AddressBook(home, core).run())
    try:
        author = builders.identity(1)
        core.roster.update(builders.row(author, addresses=("10.0.0.1:7700",)), 0.0)
        await until(home.read_peers)
        assert whom_to_join((), home) == (Contact("10.0.0.1:7700", author.node_id),)
        assert threading.get_ident() not in written_by, "a disk that hangs would keep the node from answering"
    finally:
        task.cancel()


class Moving:
    """A node on a machine whose addresses are as a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: set[str] = set()
        self.core = new_core(Home(folder))
        self.own_addresses = OwnAddresses(self.core, lambda effects: None)
        monkeypatch.setattr("gossamer.node.daemon.network.address_book.is_gone", self.lost.__contains__)

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


def test_of_each_kind_of_address_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = Moving(tmp_path, monkeypatch)
    laptop.own_addresses.listening(7701, (), BOTH)
    assert laptop.links_from("::1") == ("[::1]:7701",)
    assert laptop.links_from("127.0.0.1") == ("[::1]:7701",)
    assert laptop.links_from("192.168.1.5") == ("192.168.1.5:7701",)
    assert laptop.links_from("fd00::2") == ("192.168.1.5:7701", "[fd00::2]:7701")
    laptop.lost.update(("192.168.1.5", "fd00::2"))
    assert laptop.links_from("10.8.0.2") == ("10.8.0.2:7701",)


@pytest.mark.parametrize(
    ("host", "families"),
    [("fe80::1%eth0", BOTH), ("fd00::2", IPV4)],
    ids=["link-local", "of a kind that is not listened on"],
)
def test_an_address_that_others_cannot_dial_is_not_announced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: str,
    families: frozenset[socket.AddressFamily],
) -> None:
    node = Moving(tmp_path, monkeypatch)
    node.own_addresses.listening(7701, (), families)
    for _ in range(2):
        assert node.links_from(host) == ()
    assert caplog.messages == [
        f"other nodes are not told where to dial this one: they cannot dial {host}, our end of a link; set"
        " --advertise HOST:PORT, or listen on [::]:PORT"
    ]
    assert node.links_from("192.168.1.5") == ("192.168.1.5:7701",)
    assert node.links_from(host) == ("192.168.1.5:7701",)
    assert len(caplog.messages) == 1
