"""Being found, and finding others again: our own address, and those of members met."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from gossamer.node.address import Contact, format_address, is_loopback, parse_contact
from gossamer.node.network.link import PeerLink
from gossamer.node.network.listening import is_gone
from gossamer.node.storage.home import Home
from gossamer.protocol.effects import Effect
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.replica import Replica

REMEMBER_FIRST_S = 1.0
REMEMBER_INTERVAL_S = 30.0
REMEMBERED_MAX = 32

log = logging.getLogger("gossamer.node")


def whom_to_join(told: tuple[str, ...], home: Home) -> tuple[Contact, ...]:
    """Where we were told to join, and whom we knew in our last life: bootstrap peers may be gone.

    Raises ConfigError for a contact that we were told and cannot be one.
    """
    contacts = {contact.address: contact for contact in map(parse_contact, told)}
    for known in home.read_peers() if home.ledger_path.exists() else ():
        with suppress(ConfigError):  # written by another version, perhaps
            contact = parse_contact(known)
            contacts.setdefault(contact.address, contact)
    return tuple(contacts.values())


class Acquaintances:
    """Writes down where members are, and works out where they can dial us."""

    def __init__(self, home: Home, core: Replica, carry_out: Callable[[Iterable[Effect]], None]) -> None:
        self._home = home
        self._core = core
        self._carry_out = carry_out
        self._port = 0
        self._learns = False
        """Whether our links show where others can dial us, since nobody has told us."""
        self._host = ""
        """What they have shown."""

    def listening(self, port: int, advertised: tuple[str, ...]) -> None:
        """We listen on `port`; others can dial the `advertised` addresses, if any are known."""
        self._port = port
        self._learns = not advertised
        self._carry_out(self._core.announce(advertised))

    def learn_address(self, link: PeerLink) -> None:
        """A node that listens everywhere and was not told its address uses the one that its links show.

        One that only this machine can reach gives way to a better one, and so does one that this machine has
        no longer: a laptop goes from one network to the next, and routers hand out new addresses.
        """
        name = link.socket_name()
        if name is None or not self._learns or not self._is_better(name[0]):
            return
        if self._host and not is_loopback(self._host):
            log.info("this machine is at %s now, and no longer at %s", name[0], self._host)
        self._host = name[0]
        self._carry_out(self._core.announce((format_address(name[0], self._port),)))

    def _is_better(self, host: str) -> bool:
        if not self._host:
            return True
        return not is_loopback(host) and (is_loopback(self._host) or is_gone(self._host))

    def remember(self) -> None:
        """Write down where members are, and who they are: the anchors, the others alive, those who are gone.

        Our own network may be what is gone, and they whom we look for the next time.
        """
        roster = self._core.roster
        others = [
            (address, member.peer.node_id)
            for member in (*roster.live(), *roster.doubted())
            for address in member.peer.body.addresses
        ]
        # Anchors we chose long ago: nobody can have put them there since.
        found = dict.fromkeys((*self._core.links.anchors(), *others))
        contacts = [str(Contact(address, node_id)) for address, node_id in found]
        try:
            if contacts:
                self._home.write_peers(contacts[:REMEMBERED_MAX])
        except OSError as error:
            log.warning("cannot write down our peers' addresses: %s", error.strerror)

    async def run(self) -> None:
        """Remember soon, for we may not live long, and then ever more rarely, until cancelled."""
        interval = REMEMBER_FIRST_S
        while True:
            await asyncio.sleep(interval)
            self.remember()
            interval = min(2 * interval, REMEMBER_INTERVAL_S)
