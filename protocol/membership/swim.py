"""Who is alive: SWIM with Lifeguard's local health, over the existing links.

Links carry records all the time; one that has been silent for 6.5 s is pinged. If no answer comes within the
time-out, three other links are asked to vouch for the peer. If none can, the peer is *suspect*. Suspicions
are gossiped, and any newer record of the peer refutes them; a member that does not refute one in time is
*down*. Members without a link to us are judged by their gossiped heartbeat. A node that notices that it is
slow itself (its own wake-ups come late) becomes more patient with the others instead of blaming them.

Sources: Das et al., "SWIM" (2002); Dadgar et al., "Lifeguard" (arXiv 1707.00788). Membership steers
gossip, dialling and displays, and never gates training.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.effects import Notice, Outbox
from gossamer.protocol.membership.members import Health, Member, Roster, listed
from gossamer.protocol.messages import Ack, Ping, PingFor, Records, Suspect
from gossamer.protocol.sampling import RandomSource, sample

LATE_WAKE_S = 0.5
"""A wake-up this late means that our own event loop is slow."""

SILENT_INTERVALS = 4
"""In a large swarm, silence counts once as many records have not come: those linked to a dead member find out
much sooner, and all hear of it from them."""


@dataclass(slots=True)
class _Probe:
    node_id: bytes
    began: float
    deadline: float
    indirect: bool = False


@dataclass(slots=True)
class _Link:
    node_id: bytes
    since: float
    heard: float
    """When something last came over it."""


class _Vouch(NamedTuple):
    """A ping that we sent for another node: who asked, under which number, and whom we pinged."""

    asker: int
    number: int
    target: int
    deadline: float


class Swim:
    """Judges the health of the roster's members."""

    def __init__(self, roster: Roster, rng: RandomSource, outbox: Outbox) -> None:
        self._roster = roster
        self._rng = rng
        self._outbox = outbox
        self._links: dict[int, _Link] = {}
        self._probes: dict[int, _Probe] = {}
        self._vouching: dict[int, _Vouch] = {}
        self._numbers = 0
        self._next_probe = 0.0
        self._down: list[str] = []
        """Members found to be down of which our log is to tell. In a large swarm they are gathered."""
        self._told_at = -inf
        self.local_health = 0
        """0 when we are on time. Grows up to LOCAL_HEALTH_MAX - 1 as we find ourselves slow."""

    def link_up(self, link: int, node_id: bytes, now: float) -> None:
        self._links[link] = _Link(node_id, now, now)
        self._roster.heard_from(node_id, now)

    def heard_on(self, link: int, now: float) -> None:
        """Any message on a link shows that it works."""
        self._links[link].heard = now

    def silent_links(self, now: float) -> set[int]:
        """Links that are dead though their peers may live: others may reach those, and we do not (yet)."""
        since = now - self._patience(limits.LINK_SILENCE_S)
        return {number for number, link in self._links.items() if link.heard < since}

    def link_down(self, number: int, now: float) -> None:
        """A broken link is a reason to ask others at once, not yet a verdict.

        One that ends as soon as it is there was turned away: its peer has no room, and has just spoken. In a
        swarm whose nodes are full there are many of these, and few others that can tell.
        """
        link = self._links.pop(number)
        self._roster.heard_from(link.node_id, link.heard)
        self._vouching = {n: v for n, v in self._vouching.items() if number not in (v.asker, v.target)}
        member = self._roster.get(link.node_id)
        if member is None or member.health is not Health.ALIVE or now - link.since < limits.PROBE_TIMEOUT_S:
            return
        if not self._links_to(link.node_id):
            self._ask_others(link.node_id, now)

    def _links_to(self, node_id: bytes) -> list[int]:
        return [number for number, link in self._links.items() if link.node_id == node_id]

    def deadline(self) -> float:
        return min([self._next_probe, *(probe.deadline for probe in self._probes.values())])

    def wake(self, now: float) -> None:
        """Probe the next link, follow up on silence, and let suspicions run out."""
        late = now - self.deadline()
        if late > LATE_WAKE_S and self._next_probe:
            self._be_patient(late)
        elif now >= self._next_probe:
            self.local_health = max(0, self.local_health - 1)
        for number in [n for n, probe in self._probes.items() if now >= probe.deadline]:
            probe = self._probes.pop(number, None)  # None: another question replaced it
            if probe is not None and not self._lived(probe.node_id, probe.began):
                (self._suspect if probe.indirect else self._ask_others)(probe.node_id, now)
        if now >= self._next_probe:
            self._next_probe = now + limits.PROBE_INTERVAL_S
            for link in self._links.values():  # who has spoken to us since is alive
                member = self._roster.get(link.node_id)
                if member is not None and member.health is not Health.ALIVE:
                    self._roster.heard_from(link.node_id, link.heard)
            self._probe_the_silent(now)
            self._judge_silence(now)
            self._roster.forget_old(now)

    def ack(self, link: int, message: Ack, now: float) -> None:
        """An answer to our own probe, or to a ping that we sent for another node, which then hears of it."""
        self._roster.heard_from(self._links[link].node_id, now)
        probe = self._probes.get(message.number)
        # Numbers can be guessed: a direct probe is answered by its target only.
        if probe is not None and (probe.indirect or self._links[link].node_id == probe.node_id):
            del self._probes[message.number]
            self._roster.heard_from(probe.node_id, now)
        vouch = self._vouching.get(message.number)
        if vouch is not None and vouch.target == link:
            self._outbox.send(vouch.asker, Ack(vouch.number))

    def ping_for(self, link: int, message: PingFor, now: float) -> None:
        """Vouch for a node by pinging it over our link to it.

        Its last heartbeat is not enough: that may be from just before it died, and the asker hears the next
        one as soon as we do. For one asker we ping only a few times: it could have us flood that node.
        """
        targets = self._links_to(message.node_id)
        self._vouching = {n: vouch for n, vouch in self._vouching.items() if now < vouch.deadline}
        made = sum(vouch.asker == link for vouch in self._vouching.values())
        if targets and made < limits.VOUCHES_PER_LINK_MAX:
            self._numbers += 1
            deadline = now + limits.PROBE_TIMEOUT_S
            self._vouching[self._numbers] = _Vouch(link, message.number, targets[0], deadline)
            self._outbox.send(targets[0], Ping(self._numbers))

    def suspicion(self, link: int, message: Suspect, now: float) -> None:
        """A peer suspects a member: believe that, unless we know better.

        If gossip has brought us a newer record and has missed the peer, it gets that (an older one may be the
        member's last): in calm swarms of 28 nodes suspicions lasted for seconds. A member that has just
        spoken to us is sent the rumour so that it can refute it: who believes it may have no link to it.
        """
        member = self._roster.get(message.node_id)
        if member is None or member.health is not Health.ALIVE:
            return
        if (message.incarnation, message.heartbeat) < member.record.body.age:
            if now - member.received_at < limits.HEARTBEAT_INTERVAL_S:
                self._outbox.send(link, Records(((member.record.data, False),)))
        elif now - member.since >= limits.RUMOUR_PAUSE_S:
            if now - self._answered(member) >= limits.PROBE_TIMEOUT_S:
                self._suspect(message.node_id, now, source=link)
            else:
                for to in self._links_to(message.node_id):
                    self._outbox.send(to, message)

    def _patience(self, seconds: float) -> float:
        return seconds * (1 + self.local_health)

    def _be_patient(self, late: float) -> None:
        self.local_health = min(limits.LOCAL_HEALTH_MAX - 1, self.local_health + 1)
        for probe in self._probes.values():
            probe.began += late
            probe.deadline += late
        for link in self._links.values():
            link.heard += late
        for member in self._roster.live():
            member.heard += late
            member.answered += late
            member.since += late if member.health is Health.SUSPECT else 0.0

    def _probe_the_silent(self, now: float) -> None:
        """Ping the links on which nothing has come for a while, unless their peers are being probed."""
        probed = {probe.node_id for probe in self._probes.values()}
        for number, link in self._links.items():
            if link.heard <= now - limits.PROBE_AFTER_S and link.node_id not in probed:
                self._numbers += 1
                deadline = now + self._patience(limits.PROBE_TIMEOUT_S)
                self._probes[self._numbers] = _Probe(link.node_id, now, deadline)
                self._outbox.send(number, Ping(self._numbers))

    def _answered(self, member: Member) -> float:
        """When a member last spoke to us. Links know it first, and the roster only when it matters."""
        node_id = member.record.node_id
        heard = [link.heard for link in self._links.values() if link.node_id == node_id]
        return max(heard, default=member.answered)

    def _lived(self, node_id: bytes, at: float) -> bool:
        """Whether a member was alive at `at`, judged by what was heard since, or is none any more. Its last
        record may come late, so a record must have come `MEMBERS_LAG_S` after that time."""
        member = self._roster.get(node_id)
        return member is None or self._answered(member) > at or member.heard > at + limits.MEMBERS_LAG_S

    def _ask_others(self, node_id: bytes, now: float) -> None:
        """Ask some other peers whether they reach a node. Earlier questions about it no longer count.

        Peers known to be linked to it come first: others can only tell if they are linked to it and their
        records do not show that yet.
        """
        earlier = [n for n, probe in self._probes.items() if probe.indirect and probe.node_id == node_id]
        for number in earlier:
            del self._probes[number]
        peers = {to: link.node_id for to, link in self._links.items() if link.node_id != node_id}
        begins, dialled = node_id[: limits.LINK_PREFIX_BYTES], self._dialled(node_id)

        def is_linked(to: int) -> bool:
            return peers[to][: limits.LINK_PREFIX_BYTES] in dialled or begins in self._dialled(peers[to])

        self._numbers += 1
        deadline = now + self._patience(limits.PROBE_TIMEOUT_S)
        self._probes[self._numbers] = _Probe(node_id, now, deadline, indirect=True)
        for link in sorted(sample(peers, len(peers), self._rng), key=is_linked)[-limits.INDIRECT_PROBES :]:
            self._outbox.send(link, PingFor(self._numbers, node_id))

    def _dialled(self, node_id: bytes) -> tuple[bytes, ...]:
        """The beginnings of the ids that a member has dialled, as its record says."""
        member = self._roster.get(node_id)
        return member.record.body.dialled if member is not None else ()

    def _suspect(self, node_id: bytes, now: float, source: int | None = None) -> None:
        member = self._roster.get(node_id)
        if member is None or member.health is not Health.ALIVE:
            return
        self._roster.judge(node_id, Health.SUSPECT, now)
        rumour = Suspect(node_id, *member.record.body.age)
        for link in self._links:  # all of them: who does not hear of it may take minutes to see it
            if link != source:
                self._outbox.send(link, rumour)

    def _judge_silence(self, now: float) -> None:
        silence = limits.SILENCE_SUSPECT_S + SILENT_INTERVALS * self._roster.delay_s
        silent_since = now - self._patience(silence)
        suspected_since = now - self._patience(limits.SUSPICION_TIMEOUT_S)
        for member in self._roster.live():
            if member.health is Health.ALIVE:
                if member.heard < silent_since and self._answered(member) < silent_since:
                    self._suspect(member.record.node_id, now)
            elif member.since < suspected_since:
                self._roster.judge(member.record.node_id, Health.DOWN, now)
                self._down.append(member.label)
        if self._down and now >= self._told_at + self._roster.delay_s:
            are = "is" if len(self._down) == 1 else "are"
            self._outbox.append(Notice(f"{listed(self._down)} {are} down"))
            self._down, self._told_at = [], now
