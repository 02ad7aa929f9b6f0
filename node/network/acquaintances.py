"""Finding others again: remembers, from one run to the next, where the members are that a node has met."""

import asyncio
import logging
import random
import time
from contextlib import suppress

from gossamer.node.address import Contact, parse_contact
from gossamer.node.seldom import Seldom
from gossamer.node.storage.home import Home
from gossamer.protocol.core.replica import Replica
from gossamer.protocol.errors import ConfigError

REMEMBER_FIRST_S = 1.0
REMEMBER_INTERVAL_S = 30.0
REMEMBERED_MAX = 32

log = logging.getLogger("gossamer.node")


def whom_to_join(told: tuple[str, ...], home: Home) -> tuple[Contact, ...]:
    """The contacts that we were told to join, and those known from earlier runs: bootstrap peers may be gone.

    Raises ConfigError if a contact that we were told cannot be one.
    """
    contacts = {contact.address: contact for contact in map(parse_contact, told)}
    for known in home.read_peers() if home.ledger_path.exists() else ():
        with suppress(ConfigError):  # written by another version, perhaps
            contact = parse_contact(known)
            contacts.setdefault(contact.address, contact)
    return tuple(contacts.values())


class Acquaintances:
    """Writes down where members are."""

    def __init__(self, home: Home, core: Replica) -> None:
        self._home = home
        self._core = core
        self._seldom = Seldom()

    def remember(self) -> None:
        """Write down where members are, and their ids: the anchors, the others that are alive, then those
        gone.

        Members that are gone are kept because it may be our own network that is gone: we look for them the
        next time. First one address of each member, then more while there is room, in random order: otherwise
        a few members that one liar made up, with many addresses each, could be all that we know.
        """
        self._write(self._contacts())

    def _contacts(self) -> list[str]:
        # We chose the anchors long ago, so nobody can have planted them since.
        found = dict.fromkeys((*self._core.links.anchors(), *self._others()))
        return [str(Contact(address, node_id)) for address, node_id in found][:REMEMBERED_MAX]

    def _write(self, contacts: list[str]) -> None:
        try:
            if contacts:
                self._home.write_peers(contacts)
        except OSError as error:
            if self._seldom.is_due(error.errno, time.monotonic()):
                log.warning("cannot save our peers' addresses: %s", error.strerror)

    def _others(self) -> list[tuple[str, bytes]]:
        roster = self._core.roster
        firsts: list[tuple[str, bytes]] = []
        more: list[tuple[str, bytes]] = []
        for members in (roster.live(), roster.doubted()):
            for member in random.sample(members, len(members)):
                addresses = member.row.body.addresses
                contacts = [
                    (address, member.row.node_id) for address in random.sample(addresses, len(addresses))
                ]
                firsts += contacts[:1]
                more += contacts[1:]
        return firsts + more

    async def run(self) -> None:
        """Remember members soon, since this run may be short, and then more and more rarely, until cancelled.

        The file is written in a thread, so that a disk that hangs holds nothing up.
        """
        interval = REMEMBER_FIRST_S
        while True:
            await asyncio.sleep(interval)
            await asyncio.to_thread(self._write, self._contacts())
            interval = min(2 * interval, REMEMBER_INTERVAL_S)
