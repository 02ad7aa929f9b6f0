"""`gossamer.node.daemon.network.address_book`: whom a node remembers, and in which order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gossamer.node.address import Contact
from gossamer.node.daemon.network.address_book import REMEMBERED_MAX, AddressBook, whom_to_join
from gossamer.node.home import Home
from gossamer.protocol import events as ev
from gossamer.protocol.membership.members import Health
from tests.node.cores import new_core
from tests.node.trainer_side import until
from tests.protocol import builders


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
    home = Home(tmp_path)
    core = new_core(home)
    for number in (1, 2, 3):
        addresses = tuple(f"10.0.{number}.{host}:7700" for host in range(3))
        core.roster.update(builders.row(builders.identity(number), addresses=addresses), 0.0)
    core.roster.judge(builders.identity(2).node_id, Health.DOWN, 1.0)
    AddressBook(home, core).remember()
    remembered = whom_to_join((), home)
    assert len(remembered) == 9
    assert len({contact.node_id for contact in remembered[:3]}) == 3
    assert remembered[2].node_id == builders.identity(2).node_id, "who is gone comes last of those"


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
        await until(home.read_peers, 20)
        assert whom_to_join((), home) == (Contact("10.0.0.1:7700", author.node_id),)
        assert threading.get_ident() not in written_by, "a disk that hangs would keep the node from answering"
    finally:
        task.cancel()


def test_whom_an_outage_took_for_dead_is_remembered_behind_those_alive(tmp_path: Path) -> None:
    home = Home(tmp_path)
    core = new_core(home)
    authors = {number: builders.identity(number) for number in (1, 2, 3)}
    for number, author in authors.items():
        core.roster.update(builders.row(author, addresses=(f"10.0.0.{number}:7700",)), 0.0)
    acquaintances = AddressBook(home, core)
    for number in (1, 2):
        core.roster.judge(authors[number].node_id, Health.DOWN, 1.0)
    acquaintances.remember()
    assert whom_to_join((), home)[0] == Contact("10.0.0.3:7700", authors[3].node_id)
    assert len(whom_to_join((), home)) == 3
    core.roster.judge(authors[3].node_id, Health.DOWN, 2.0)
    acquaintances.remember()
    assert len(whom_to_join((), home)) == 3
