"""Our own record, and the exchange of everybody's records.

Our record is signed again every few seconds. New records, ours and others', are gathered for a moment and
sent to a few links in turn, whose peers do the same. No peer is sent a record that it is known to have.
A record of a member that was suspected and lives is relayed at once. Anti-entropy brings what all
this loses: now and then we tell a link which records we have and how new they are, and each side sends what
the other lacks.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gossamer.protocol import limits
from gossamer.protocol.effects import Expelled, Outbox
from gossamer.protocol.errors import ConfigError, MalformedError
from gossamer.protocol.events import Progress
from gossamer.protocol.identity import Identity
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import Health, NodeInfo, Roster
from gossamer.protocol.messages import Records, RosterSummary, Suspect
from gossamer.protocol.records import (
    Claim,
    MemberRecord,
    MemberRecordBody,
    RecordKind,
    parse_member_record,
    seal,
)
from gossamer.protocol.sampling import RandomSource, sample

TWIN = (
    "another process runs with this node's key, in a copy of its folder or by the same GOSSAMER_KEY; two"
    " would void each other's deltas, so this one stops. Stop the other, or give this one a key of its own"
)


@dataclass(slots=True)
class _News:
    """A record to be sent, and the links that need not get it from us."""

    data: bytes
    known_to: set[int] = field(default_factory=set)
    times: int = limits.MEMBERS_REPEATS


def _within(value: float, bound: float) -> float:
    """Clamp a number to what others accept: a diverged loss shows as the bound."""
    return max(-bound, min(bound, value)) if math.isfinite(value) else bound


class Presence:
    """Makes us known to others."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: bytes,
        info: NodeInfo,
        roster: Roster,
        links: Links,
        rng: RandomSource,
        outbox: Outbox,
    ) -> None:
        self._identity = identity
        self._swarm_id = swarm_id
        self._info = info
        self._roster = roster
        self._links = links
        self._rng = rng
        self._outbox = outbox
        self.round = 0
        self.claims: tuple[Claim, ...] = ()
        """What our record states: the last round that we have published, and the snapshots that we hold."""
        self._addresses: tuple[str, ...] = ()
        self._progress = Progress(0, 0, 0.0, 0.0, "")
        self._incarnation = info.incarnation
        self._heartbeat = 0
        self._leaving = False
        self._news: dict[bytes, _News] = {}
        self._last_served = 0
        """The link that was sent news last: they take turns by their numbers."""
        self._rosters: Counter[int] = Counter()
        """Number of roster summaries received on each link since we last sent one unasked."""
        self._renewed_at = -math.inf
        self._share = 1.0
        """The share of the usual delay that our record lasts, drawn each time: or those that started together
        would renew theirs together for ever."""
        self._next_records = 0.0
        self._next_refutation = 0.0
        self._next_roster = 0.0
        self._sole_from = 0.0
        """From when on we take it that no other process has our key."""
        self._renew()

    def announce(self, addresses: tuple[str, ...]) -> None:
        """Tell where we can be dialled."""
        self._addresses = addresses
        self.beat()

    def introduced(self, now: float) -> None:
        """A peer is about to read our record: another process that has our key will answer."""
        self._sole_from = self._sole_from or now + limits.TWIN_PATIENCE_S

    def is_sole(self, now: float) -> bool:
        """Whether no other process has our key, as far as can be known: two would sign a round twice."""
        return now >= self._sole_from

    def progress(self, progress: Progress) -> None:
        """Take over what our trainer reports, for the next heartbeat."""
        self._progress = replace(
            progress,
            tokens_per_s=_within(progress.tokens_per_s, limits.TOKENS_PER_S_MAX),
            loss=_within(progress.loss, limits.LOSS_MAX),
        )

    def leave(self) -> None:
        """Say to all links that we leave: otherwise all that their peers see is a dead link."""
        self._leaving = True
        self._renew()
        self._send([self.data], self._links.numbers)

    def beat(self) -> None:
        """Sign a newer record of ourselves and push it at once."""
        self._renew()
        self.forget(self._identity.node_id)
        self._push(_News(self.data))

    def deadline(self) -> float:
        return self._next_records

    def wake(self, now: float) -> None:
        """Send records, our own heartbeat among them, and compare rosters with a link, each when due."""
        if now < self._next_records:
            return
        self._next_records = now + limits.MEMBERS_INTERVAL_S
        soon = now + limits.MEMBERS_INTERVAL_S / 2
        interval, least = self._roster.interval_s, limits.HEARTBEAT_INTERVAL_S
        is_due = soon > self._renewed_at + least + self._share * (interval - least)
        if is_due or self._is_outdated(interval):
            self._renewed_at = now
            self._share = 0.5 + self._rng.random() if interval > least else 1.0
            self._renew()
            self._news[self._identity.node_id] = _News(self.data)
        self._send_news()
        if soon > self._next_roster:
            self._next_roster = now + limits.ANTI_ENTROPY_INTERVAL_S * interval / least
            self._rosters.clear()
            for number in sample(self._links.numbers, 1, self._rng):
                self._outbox.send(number, self.summary(answer=False))

    def _is_outdated(self, interval: float) -> bool:
        """Whether our record should be renewed before its time, for what it states.

        In a large swarm only for whether we publish: our deltas tell our rounds, and enough others renew
        their records in any second to tell which snapshots there are.
        """
        if interval > limits.HEARTBEAT_INTERVAL_S:
            return bool(self.round) != bool(self.record.round)
        return (self.round, self._stated_claims) != (self.record.round, self.record.claims)

    @property
    def _stated_claims(self) -> tuple[Claim, ...]:
        return tuple(dict.fromkeys(self.claims))[: limits.CLAIMS_MAX]

    # -- messages

    def received(self, record: MemberRecord, link: int, now: float) -> None:
        """Take in a record, and have it relayed if it is news: at once if it refutes a suspicion, or is the
        first of another process, which may be elsewhere now. If the process before still has a link to us, it
        hears of that, too.
        """
        if record.node_id == self._identity.node_id:
            self._outdone(record.body)
            return
        known = self._roster.get(record.node_id)
        began = known is not None and record.body.incarnation > known.record.body.incarnation
        is_urgent = began or (known is not None and known.is_missing)
        if self._roster.update(record, now):
            others = {one.number for one in self._links.all() if one.node_id == record.node_id} - {link}
            news = self._news[record.node_id] = _News(record.data, {link, *others})
            if began:
                self._send([record.data], others)
            if is_urgent:
                self._push(news)

    def _outdone(self, record: MemberRecordBody) -> None:
        """A record of ours has come. If it is newer than all that we have signed, then it is of an earlier
        run, as after a clock was set back, or of another process that has our key: go beyond it, and say so.

        Only a process that has read our record answers with the number after ours. So of two processes
        exactly one hears an answer, as a rule the one that began later, and gives way
        (`test_of_two_nodes_with_one_key_the_later_one_stops_before_it_publishes`).
        """
        if record.incarnation == self.record.incarnation + 1:
            self._sole_from = math.inf
            self._outbox.append(Expelled(TWIN))
        elif record.age > self.record.age and record.incarnation >= self._incarnation:
            self._incarnation = record.incarnation + 1
            self._renew()
            self._send([self.data], self._links.numbers)

    def is_known(self, record: bytes, link: int) -> bool:
        """Whether we have this record already, byte for byte. If so, it need not be sent to that link."""
        node_id = self._roster.whose(record)
        if node_id is None:
            return record == self.data
        if node_id in self._news:
            self._news[node_id].known_to.add(link)
        return True

    def forget(self, node_id: bytes) -> None:
        """Send others no more of a node that is no longer a member."""
        self._news.pop(node_id, None)

    def refute(self, link: int, message: Suspect, now: float) -> None:
        """A peer suspects us: answer with a newer record than the one it has seen. We may have one already.

        A peer that claims to have seen a record that we never signed lies, and so may one that suspects us
        all the time: neither makes us sign a new record.
        """
        is_newest = (message.incarnation, message.heartbeat) == self.record.age
        if is_newest and now >= self._next_refutation:
            self._next_refutation = now + limits.MEMBERS_INTERVAL_S
            self.beat()
        else:
            self._send([self.data], [link])

    def summary(self, *, answer: bool) -> RosterSummary:
        """Which records we have, our own among them, and how new they are."""
        ages = [(m.record.node_id, *m.record.body.age) for m in self._roster.members()]
        own = (self._identity.node_id, *self.record.age)
        return RosterSummary((own, *ages[: limits.MEMBERS_MAX - 1]), answer)

    def exchange(self, link: int, message: RosterSummary) -> None:
        """Send records that the peer lacks or has older, and let it do the same.

        Those of members that are missing would pass for a sign of life, and those of members that left are of
        no use to who never knew them. A peer that asks again and again is not answered for a while: a few
        bytes would draw megabytes.
        """
        self._rosters[link] += 1
        if self._rosters[link] > limits.ROSTERS_PER_LINK_MAX:
            return
        theirs = {node_id: (incarnation, heartbeat) for node_id, incarnation, heartbeat in message.ages}
        records = [
            member.record.data
            for member in self._roster.members()
            if theirs.get(member.record.node_id, (-1, -1)) < member.record.body.age
            if member.health is Health.ALIVE or (not member.is_missing and member.record.node_id in theirs)
        ]
        if theirs.get(self._identity.node_id, (-1, -1)) < self.record.age:
            records.append(self.data)
        self._send(records, [link])
        if not message.answer:
            self._outbox.send(link, self.summary(answer=True))

    def _send(self, records: list[bytes], links: Iterable[int]) -> None:
        for message in Records.batches([(data, False) for data in records]):
            for link in links:
                self._outbox.send(link, message)

    def _send_news(self) -> None:
        """Send the links whose turn it is records that are news to them, but none of members missing by
        now."""
        missing = {member.record.node_id for member in self._roster.doubted() if member.is_missing}
        self._news = {n: news for n, news in self._news.items() if news.times and n not in missing}
        if not self._news:
            return
        links = self._take_turns()
        for link in links:
            self._send([news.data for news in self._news.values() if link not in news.known_to], [link])
        for news in self._news.values():
            news.known_to.update(links)
            news.times -= 1

    def _take_turns(self) -> list[int]:
        """The links whose turn it is. Every link has its turn, so none is silent for long."""
        numbers = sorted(self._links.numbers, key=lambda number: (number <= self._last_served, number))
        turn = numbers[: max(limits.MEMBERS_FANOUT, -(-len(numbers) // limits.MEMBERS_TURN_INTERVALS))]
        self._last_served = turn[-1] if turn else 0
        return turn

    def _push(self, news: _News) -> None:
        """Send a record at once to a few links that do not know it."""
        targets = sample(self._links.numbers - news.known_to, limits.PUSH_FANOUT, self._rng)
        news.known_to.update(targets)
        self._send([news.data], targets)

    def _renew(self) -> None:
        """Sign a newer record. Raises ConfigError if others would refuse it, as for what a name contains."""
        self._heartbeat += 1
        dialled = [link.node_id[: limits.LINK_PREFIX_BYTES] for link in self._links.outbound()]
        self.record = MemberRecordBody(
            incarnation=self._incarnation,
            heartbeat=self._heartbeat,
            leaving=self._leaving,
            trains=self._info.trains,
            addresses=self._addresses,
            fingerprint=self._info.fingerprint,
            name=self._info.name,
            device=self._progress.device,
            version=self._info.version,
            round=self.round,
            inner_steps=self._progress.inner_steps,
            tokens=self._progress.tokens,
            tokens_per_s=self._progress.tokens_per_s,
            loss=self._progress.loss,
            claims=self._stated_claims,
            dialled=tuple(dialled[: limits.LINKS_STATED_MAX]),
        )
        try:
            envelope = seal(self._identity, RecordKind.MEMBER, self._swarm_id, self.record.pack())
            parse_member_record(envelope)
        except (MalformedError, UnicodeEncodeError) as error:  # the latter of a name in no encoding
            raise ConfigError(f"this node cannot present itself to others: {error}") from None
        self.data = envelope.data
