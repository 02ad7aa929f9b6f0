"""Which links to keep: enough for gossip to reach everybody, few enough for a home router.

A node wants six links and dials members it is not linked to until it has them. For a day it retries members
that are down, now and then, and it turns to its bootstrap addresses again when links run short. So the halves
of a healed partition find each other whatever happened in between (memberlist calls the lack of this
"partition amnesia").

An attacker who wants to cut a node off from the others (an eclipse attack) must hold all its links. So a node
keeps at least two links that it dialled itself, and no more than two of those in one *network group* (the
adapter's word for a /24 or /48 of the internet; nodes of one LAN have none). It never gives up a link of its
own choice for a stranger's, and remembers its oldest ones over restarts (the *anchors*). A full node still
lets a newcomer in now and then: one of its later inbound links gives way, of the group with the most links.
"""

from collections import Counter
from collections.abc import Iterable, KeysView
from dataclasses import dataclass
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.effects import Dial, Hangup, Outbox
from gossamer.protocol.events import LinkUp
from gossamer.protocol.membership.members import Health, Member, NodeInfo, Roster
from gossamer.protocol.sampling import RandomSource, shuffle


@dataclass(frozen=True, slots=True)
class Link:
    """An authenticated connection to a peer."""

    number: int
    node_id: bytes
    outbound: bool
    address: str | None
    """The address that we dialled; None if the peer dialled us."""
    group: str | None
    """Its network group, if it is in any."""


Target = tuple[str, bytes | None]
"""An address to dial, and the node id that must answer there, if it is known."""


class Links:
    """Keeps the number of links near the wanted one. Bootstrap addresses are never forgotten."""

    def __init__(
        self, own_id: bytes, roster: Roster, info: NodeInfo, rng: RandomSource, outbox: Outbox
    ) -> None:
        self._own_id = own_id
        self._roster = roster
        self._info = info
        self._contacts: list[Target] = [(address, info.pins.get(address)) for address in info.bootstrap]
        self._rng = rng
        self._outbox = outbox
        self._links: dict[int, Link] = {}
        self._dialling: dict[str, tuple[float, bool]] = {}
        """Dials under way by address: when they are given up, and whether to a member that is gone."""
        self._tried: dict[Target, float] = {}
        """When each target was last dialled: kept a while for members, for ever for bootstrap addresses."""
        self._leads_to: dict[str, bytes] = {}
        """Who answered last at each bootstrap address."""
        self._next_yield = 0.0

    def __len__(self) -> int:
        return len(self._links)

    def get(self, number: int) -> Link | None:
        return self._links.get(number)

    def down(self, number: int) -> None:
        self._links.pop(number, None)

    def all(self) -> list[Link]:
        return list(self._links.values())

    @property
    def numbers(self) -> KeysView[int]:
        return self._links.keys()

    def to(self, node_id: bytes) -> Link | None:
        """Our newest link to a node, if there is one."""
        return next((link for link in reversed(self._links.values()) if link.node_id == node_id), None)

    def outbound(self) -> list[Link]:
        """The links that we dialled, oldest first."""
        return sorted((link for link in self.all() if link.outbound), key=lambda link: link.number)

    def anchors(self) -> list[tuple[str, bytes]]:
        """Address and node id of our oldest outbound links, which the next run dials first."""
        anchors = [(link.address, link.node_id) for link in self.outbound() if link.address is not None]
        return anchors[: limits.LINKS_OUTBOUND_MIN]

    def given_ids(self) -> set[bytes]:
        """Node ids that answer, or must, at the bootstrap addresses that we were given at this start."""
        found = {**self._leads_to, **self._info.pins}
        return {node_id for address, node_id in found.items() if address not in self._info.remembered}

    def up(self, event: LinkUp, now: float) -> Hangup | None:
        """Take in a new link. Returns the link that has to go, which may be the new one; None if all stay."""
        link = Link(event.link, event.node_id, event.outbound, event.address, event.group)
        goes = self._instead_of(link, now)
        if goes is None or goes.link != link.number:
            self._links[link.number] = link
        if event.address is not None:
            self._dialling.pop(event.address, None)
            if event.address in self._info.bootstrap:
                self._leads_to[event.address] = event.node_id
        return goes

    def _instead_of(self, link: Link, now: float) -> Hangup | None:
        if link.node_id == self._own_id:
            return Hangup(link.number, "that is ourselves")
        old = self.to(link.node_id)
        if old is not None:
            # If each end dialled one, both ends keep the one that the smaller node id dialled. Two links in
            # the same direction mean that the dialler lost the first one, so the newer one counts.
            if link.outbound in (old.outbound, self._own_id < link.node_id):
                return Hangup(old.number, "replaced by a newer link")
            return Hangup(link.number, "already linked")
        return self._take_ours(link, now) if link.outbound else self._take_in(link, now)

    def _take_ours(self, link: Link, now: float) -> Hangup | None:
        """A link that we dialled stays, unless it is one too many in its network group.

        A member that we thought dead may be the first from the other half of a healed partition: its link
        takes the place of another one of its group.
        """
        group = [one for one in self.outbound() if link.group is not None and one.group == link.group]
        if len(group) >= limits.LINKS_PER_GROUP_MAX and len(self._links) >= limits.LINKS_MIN:
            member = self._roster.get(link.node_id)
            if member is not None and member.health is Health.ALIVE:
                self._tried[link.address or "", link.node_id] = now + limits.REDIAL_DOWN_INTERVAL_S
                return Hangup(link.number, "enough links into that network")
            return Hangup(group[-1].number, "making room for a new link into that network")
        if len(self._links) < limits.LINKS_MAX:
            return None
        yields = self._who_yields() or self._any(self.all())
        return Hangup(yields.number, "making room for a new link")

    def _take_in(self, link: Link, now: float) -> Hangup | None:
        """A link that a newcomer dialled stays if there is room, or if another link is due to make room."""
        if len(self._links) < limits.LINKS_MAX:
            return None
        yields = self._who_yields() if now >= self._next_yield else None
        if yields is None:
            return Hangup(link.number, "no room for more links")
        self._next_yield = now + limits.YIELD_INTERVAL_S
        return Hangup(yields.number, "making room for a newcomer")

    def _who_yields(self) -> Link | None:
        """A random one of the later half of the inbound links, of the network group with the most links."""
        inbound = sorted((link for link in self.all() if not link.outbound), key=lambda link: link.number)
        recent = inbound[len(inbound) // 2 :]
        if not recent:
            return None
        sizes = Counter(link.group for link in self.all())
        sizes[None] = 0
        most = max(sizes[link.group] for link in recent)
        return self._any([link for link in recent if sizes[link.group] == most])

    def _any(self, links: list[Link]) -> Link:
        return links[self._rng.randrange(len(links))]

    def dial_failed(self, address: str) -> None:
        self._dialling.pop(address, None)

    def wake(self, now: float) -> None:
        """Dial members if links are short, and now and then a member that is down even if they are not.

        All our links may be to our own half of a partition: then the members that are down are the other
        half. But a dial that nobody answers may take long, and such members may be made up: dials to them
        never take the place of dials to live members.
        """
        self._dialling = {address: dial for address, dial in self._dialling.items() if dial[0] > now}
        to_gone = sum([is_to_gone for _, is_to_gone in self._dialling.values()])
        outbound = sum([link.outbound for link in self._links.values()])
        wanted = max(limits.LINKS_WANTED - len(self._links), limits.LINKS_OUTBOUND_MIN - outbound)
        missing = max(0, wanted - (len(self._dialling) - to_gone))
        if not missing and not any(map(self._is_missed, self._roster.doubted())):
            return
        # A large swarm has hundreds of members that are down: the others need a look only if links are short.
        alive, gone = self._candidates(self._roster.members() if missing else self._roster.doubted(), now)
        chosen = [(target, False) for target in alive[:missing]]
        room = limits.DIALS_TO_GONE_MAX - to_gone
        chosen += [(target, True) for target in gone[: min(room, max(1, missing - len(chosen)))]]
        for (address, node_id), is_to_gone in chosen:
            if len(self._dialling) < limits.DIALS_AT_ONCE_MAX and address not in self._dialling:
                self._dialling[address] = (now + limits.REDIAL_INTERVAL_S * 2, is_to_gone)
                self._tried[address, node_id] = now
                member = self._roster.get(node_id) if node_id is not None else None
                fingerprint = member.record.body.fingerprint if member is not None else b""
                self._outbox.append(Dial(address, node_id, fingerprint))
        self._tried = {
            target: at
            for target, at in self._tried.items()
            if now - at < limits.REDIAL_DOWN_INTERVAL_S or target in self._contacts
        }

    def _candidates(self, members: Iterable[Member], now: float) -> tuple[list[Target], list[Target]]:
        """Targets to dial: a bootstrap address, live ones of `members`, the other bootstrap addresses; and
        separately, members that do not answer. A bootstrap address comes first since no live member may be
        where its record says, and records may be made up."""
        linked = {self._own_id, *(link.node_id for link in self._links.values())}
        alive: list[Target] = []
        gone: list[Target] = []
        for member in members:
            addresses = member.record.body.addresses
            is_alive = member.health is Health.ALIVE
            if member.record.node_id in linked or not (is_alive or self._is_missed(member)):
                continue
            if any(address in self._dialling for address in addresses):
                continue  # two dials to one member would give two links that get in each other's way
            wait = limits.REDIAL_INTERVAL_S if is_alive else limits.REDIAL_DOWN_INTERVAL_S
            due = [one for one in addresses if self._is_due((one, member.record.node_id), wait, now)]
            if due:
                address = due[self._rng.randrange(len(due))]
                (alive if is_alive else gone).append((address, member.record.node_id))
        shuffle(alive, self._rng)
        shuffle(gone, self._rng)
        # Bootstrap addresses that do not lead to a node we are linked to, whatever name they go by. Those
        # never tried come first, then those tried longest ago.
        contacts = sorted(
            (
                contact
                for contact in self._contacts
                if len(self._links) < limits.LINKS_MIN
                and self._leads_to.get(contact[0]) not in linked
                and self._is_due(contact, limits.REDIAL_INTERVAL_S, now)
            ),
            key=lambda contact: self._tried.get(contact, -inf),
        )
        return [*contacts[:1], *alive, *contacts[1:]], gone

    def _is_missed(self, member: Member) -> bool:
        """Whether a member that is gone should be dialled now and then.

        Members that left are not, except at a bootstrap address. A founder that left and came back knows of
        nobody, so the members that joined through it must dial it.
        """
        if member.health is not Health.LEFT:
            return member.health is Health.DOWN  # who is merely suspected may answer in a moment
        return any(address in self._info.bootstrap for address in member.record.body.addresses)

    def _is_due(self, target: Target, wait: float, now: float) -> bool:
        return target[0] not in self._dialling and now - self._tried.get(target, -inf) >= wait
