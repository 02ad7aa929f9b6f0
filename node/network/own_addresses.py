"""Where others can dial this node, as its owner has said or as its links show."""

import logging
from collections.abc import Callable, Iterable
from socket import AddressFamily

from gossamer.node.address import format_address, is_loopback, is_of_one_interface
from gossamer.node.network.link import PeerLink
from gossamer.node.network.listening import family_of, is_gone, own_address
from gossamer.protocol.core.replica import Replica
from gossamer.protocol.effects import Effect

Hosts = dict[AddressFamily, str]
"""One host for each kind of address, IPv4 and IPv6."""

log = logging.getLogger("gossamer.node")


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
        self._hosts: Hosts = {}
        """The hosts that our links have shown, one of each kind."""
        self._was_warned = False

    def listening(self, port: int, advertised: tuple[str, ...], families: frozenset[AddressFamily]) -> None:
        """We listen on `port` of these `families`. Others can dial the `advertised` addresses, if any."""
        self._port = port
        self._families = families
        self._learns = not advertised
        self._carry_out(self._core.announce(advertised))

    def learn(self, link: PeerLink) -> None:
        """Learn our address from a link, unless we were told which to advertise.

        An address that only this machine can reach gives way to a better one. So does one that this machine
        no longer has: a laptop moves from one network to the next, and routers hand out new addresses.
        """
        name = link.socket_name()
        if name is None or not self._learns:
            return
        shown = self._dialable(name[0])
        if not shown and not self._hosts:
            self._warn(name[0])
        public = {family: host for family, host in self._hosts.items() if not is_loopback(host)}
        lost = {family: host for family, host in public.items() if is_gone(host)}
        kept = {family: host for family, host in public.items() if family not in lost}
        better = self._better(lost, shown)
        if not better and not (lost and kept):  # the last address is told until there is another
            return
        if lost:
            now = f"at {' and '.join(better.values())} now, and " if better else ""
            log.info("this machine is %sno longer at %s", now, " and ".join(lost.values()))
        self._hosts = kept | better
        addresses = tuple(format_address(host, self._port) for host in self._hosts.values())
        self._carry_out(self._core.announce(addresses))

    def _better(self, lost: Hosts, shown: list[str]) -> Hosts:
        """Replacements for addresses that are lost, and better addresses that a link has shown."""
        instead = {family: self._instead_of(host) for family, host in lost.items()}
        found = {family: host for family, host in instead.items() if host is not None}
        return found | {family_of(host): host for host in shown if self._is_better(host)}

    def _warn(self, host: str) -> None:
        if not self._was_warned:
            self._was_warned = True
            log.warning(
                "other nodes are not told where to dial this one: they cannot dial %s, our end of its first"
                " link; %sset --advertise HOST:PORT",
                host,
                "listen on [::]:PORT, or " if len(self._families) == 1 else "",
            )

    def _dialable(self, host: str) -> list[str]:
        """Our end of a link, if others can dial it; else our own addresses of the kinds that we listen on."""
        if family_of(host) in self._families and not is_of_one_interface(host):
            return [host]
        found = (own_address(family, loopback=is_loopback(host)) for family in sorted(self._families))
        return [own for own in found if own is not None and not is_of_one_interface(own)]

    @staticmethod
    def _instead_of(lost: str) -> str | None:
        """An address of the kind of one that this machine has lost, where others may dial us; else None."""
        own = own_address(family_of(lost), loopback=False)
        return None if own is None or own == lost or is_of_one_interface(own) else own

    def _is_better(self, host: str) -> bool:
        if is_loopback(host):
            return not self._hosts
        known = self._hosts.get(family_of(host))
        return known is None or is_loopback(known) or is_gone(known)
