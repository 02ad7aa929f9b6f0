"""Addresses: where the members are that this node has met, and where others can dial this node."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from socket import AddressFamily

from gossamer.node.address import Contact, format_address, is_loopback, is_of_one_interface, parse_contact
from gossamer.node.daemon.network.sockets import family_of, is_gone
from gossamer.node.home import Home
from gossamer.node.logs import RateLimit
from gossamer.protocol.effects import Effect
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.replica import Replica

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


class AddressBook:
    """Writes down, for the next run, where the members are."""

    def __init__(self, home: Home, core: Replica) -> None:
        self._home = home
        self._core = core
        self._limit = RateLimit()

    def remember(self) -> None:
        """Write down where members are, and their ids."""
        self._write(self._contacts())

    def _contacts(self) -> list[str]:
        """The anchors, the others that are alive, then those gone: it may be our own network that is gone.

        We chose the anchors long ago, so nobody can have planted them since. Of the others, first one address
        of each, then more while there is room, in random order: else a few members that one liar made up,
        with many addresses each, could be all that we know.
        """
        firsts, more = [], []
        for members in (self._core.roster.live(), self._core.roster.doubted()):
            for member in random.sample(members, len(members)):
                addresses = member.record.body.addresses
                shuffled = random.sample(addresses, len(addresses))
                contacts = [(address, member.record.node_id) for address in shuffled]
                firsts += contacts[:1]
                more += contacts[1:]
        found = dict.fromkeys((*self._core.links.anchors(), *firsts, *more))
        return [str(Contact(address, node_id)) for address, node_id in found][:REMEMBERED_MAX]

    def _write(self, contacts: list[str]) -> None:
        try:
            if contacts:
                self._home.write_peers(contacts)
        except OSError as error:
            if self._limit.allows(error.errno):
                log.warning("cannot save our peers' addresses: %s", error.strerror)

    async def run(self) -> None:
        """Remember members soon, since this run may be short, and then now and then, until cancelled."""
        await asyncio.sleep(REMEMBER_FIRST_S)
        while True:
            await asyncio.to_thread(self._write, self._contacts())  # a disk that hangs holds nothing up
            await asyncio.sleep(REMEMBER_INTERVAL_S)


class OwnAddresses:
    """Works out where others can dial us, and has the core tell them."""

    def __init__(self, core: Replica, carry_out: Callable[[Iterable[Effect]], None]) -> None:
        self._core = core
        self._carry_out = carry_out
        self._port = 0
        self._learns = False
        """Whether our links show where others can dial us, since nobody has told us."""
        self._families: frozenset[AddressFamily] = frozenset()
        """The kinds of address that we listen on."""
        self._hosts: dict[AddressFamily, str] = {}
        """The hosts that our links have shown, one of each kind."""
        self._limit = RateLimit()

    def listening(self, port: int, advertised: tuple[str, ...], families: frozenset[AddressFamily]) -> None:
        """We listen on `port` of these `families`. Others can dial the `advertised` addresses, if any."""
        self._port = port
        self._families = families
        self._learns = not advertised
        self._carry_out(self._core.announce(advertised))

    def learn(self, name: tuple[str, int] | None) -> None:
        """Learn our address from our end of a link, unless we were told which to advertise.

        An address that only this machine can reach gives way to a better one. So does one that this machine
        no longer has: a laptop moves from one network to the next, and routers hand out new addresses. The
        last address is told until there is another.
        """
        if name is None or not self._learns:
            return
        host = name[0]
        if family_of(host) not in self._families or is_of_one_interface(host):
            if not self._hosts and self._limit.allows("advertise"):
                log.warning(
                    "other nodes are not told where to dial this one: they cannot dial %s, our end of a link;"
                    " set --advertise HOST:PORT, or listen on [::]:PORT",
                    host,
                )
            return
        known = self._hosts.get(family_of(host))
        works = known is not None and not is_loopback(known) and not is_gone(known)
        if works or (is_loopback(host) and self._hosts):
            return
        public = {family: known for family, known in self._hosts.items() if not is_loopback(known)}
        if lost := [known for known in public.values() if is_gone(known)]:
            log.info("this machine is at %s now, and no longer at %s", host, " and ".join(lost))
        self._hosts = {family: known for family, known in public.items() if known not in lost}
        self._hosts[family_of(host)] = host
        addresses = tuple(format_address(host, self._port) for host in self._hosts.values())
        self._carry_out(self._core.announce(addresses))
