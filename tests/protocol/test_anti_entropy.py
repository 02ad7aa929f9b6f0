"""Anti-entropy between two ledgers, message by message: it ends, it ends soon, and then they are equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.effects import Effect, Send
from gossamer.protocol.gossip.announce import Announcer
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.ledger import Added
from gossamer.protocol.records import Delta
from tests.protocol import builders

KEYS = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.integers(1, 60), st.integers(1, 10**6)), st.integers(0, 2)),
    max_size=30,
)


class Side:
    """One ledger and its anti-entropy; does with messages what `Replica` does, without signatures."""

    def __init__(
        self,
        keys: Iterable[tuple[int, int, int]],
        accepts: Callable[[Delta], bool] = lambda _: True,
        links: int = 1,
    ):
        self.context = builders.context(links=links)
        self.ledger = self.context.ledger
        for key in keys:
            self.ledger.add(builders.unsigned(*key))
        self.held: set[bytes] = set()
        announcer = Announcer(self.context, self.held)
        self.announcer = builders.Drained(announcer, self.context.outbox)
        self.anti_entropy = builders.Drained(AntiEntropy(self.context, announcer), self.context.outbox)
        self.refused = 0
        self._accepts = accepts

    def receive(self, message: msg.Message, everything: dict[bytes, Delta]) -> list[Effect]:
        match message:
            case msg.Digest():
                return self.anti_entropy.compare(1, message)
            case msg.RecordIds():
                return self.anti_entropy.record_ids(1, message)
            case msg.GetRecords():
                return self.announcer.give(1, message.record_ids)
            case msg.Records():
                ids = []
                for data, _ in message.entries:
                    delta = everything[data]
                    ids.append(delta.record_id)
                    if self._accepts(delta):
                        self.ledger.add(delta)
                    else:
                        self.refused += 1
                return self.anti_entropy.received(1, ids)
        raise AssertionError(message)


def talk(one: Side, other: Side, most: int, opener: int = 0) -> dict[str, int]:
    """Let one side open an exchange, and carry messages until there are none left; counts them."""
    everything = {delta.data: delta for side in (one, other) for delta in side.ledger}
    sides = (one, other)
    for side in sides:
        side.held.update(delta.record_id for delta in side.ledger)
    queue = deque((1 - opener, effect) for effect in sides[opener].anti_entropy.open_exchange(1))
    counts: dict[str, int] = {}
    total = 0
    while queue:
        target, effect = queue.popleft()
        assert isinstance(effect, Send)
        message = msg.decode(msg.encode(_sendable(effect.message)))
        counts[type(message).__name__] = counts.get(type(message).__name__, 0) + 1
        total += 1
        assert total <= most, f"no end after {counts}"
        queue.extend((1 - target, answer) for answer in sides[target].receive(_original(effect), everything))
    return counts


def _sendable(message: msg.Message) -> msg.Message:
    """Pad the short stand-ins for envelopes, so that the message itself is checked against the wire."""
    if isinstance(message, msg.Records):
        return msg.Records(tuple((data.ljust(200, b"."), held) for data, held in message.entries))
    return message


def _original(effect: Send) -> msg.Message:
    return effect.message


@given(KEYS, KEYS, st.integers(0, 1))
def test_one_exchange_makes_two_ledgers_equal(one, other, opener):
    a, b = Side(one), Side(other)
    talk(a, b, 60, opener)
    assert a.ledger.digests.root == b.ledger.digests.root
    assert a.anti_entropy.synced_once
    assert b.anti_entropy.synced_once


@pytest.mark.parametrize("opener", [0, 1])
@pytest.mark.parametrize(
    ("ours", "theirs", "most"),
    [
        (range(0), range(0), 2),
        (range(0), range(1, 2), 12),
        (range(0), range(1, 3001), 250),
        (range(1, 3001), range(0), 250),
        (range(1, 3001), range(1, 3001), 2),
        (range(1, 3001), range(1, 3002), 15),
        (range(1, 3001, 2), range(2, 3001, 2), 300),
        (range(1, 1500), range(1501, 3001), 300),
        (range(1, 5), range(10**6, 10**6 + 5), 20),  # tops on different levels
        (range(1, 10), [*range(1, 10), limits.ROUND_MAX], 20),
    ],
    ids=str,
)
def test_thousands_of_rounds_in_a_bounded_number_of_messages(ours, theirs, most, opener):
    a, b = Side((1, r, 0) for r in ours), Side((1, r, 0) for r in theirs)
    talk(a, b, most, opener)
    assert a.ledger.digests.root == b.ledger.digests.root
    assert set(a.ledger.rounds()) == {*ours, *theirs}
    assert a.anti_entropy.synced_once


@pytest.mark.parametrize("opener", [0, 1])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([(1, 5, 0)], [(1, 5, 1)]),
        ([(1, 5, 0)], [(1, 5, 1), (1, 5, 2)]),
        ([], [(1, 5, 1), (1, 5, 2)]),
        ([(1, 5, 0), (1, 5, 1), (2, 5, 0)], [(1, 5, 1), (1, 5, 2), (3, 5, 0)]),
    ],
)
def test_equivocators_become_void_on_both_sides(one, other, opener):
    a, b = Side(one), Side(other)
    talk(a, b, 20, opener)
    assert a.ledger.digests.root == b.ledger.digests.root
    assert set(a.ledger.voided()) == set(b.ledger.voided()) == {(builders.unsigned(1, 5).author, 5)}
    assert b.ledger.add(builders.unsigned(1, 5, 9)) is Added.IGNORED


@pytest.mark.parametrize("opener", [0, 1])
@pytest.mark.parametrize("refused", [1, 40, 500])
def test_records_that_one_side_refuses_do_not_go_round_for_ever(refused, opener):
    """Two honest nodes with different clocks: what is plausible for one is not for the other."""
    late = 10_000
    a = Side([(1, r, 0) for r in range(1, 50)], accepts=lambda d: d.round < late)
    b = Side([(2, r, 0) for r in [*range(1, 50), *range(late, late + refused)]])
    for _ in range(2):  # the periodic exchange comes again
        talk(a, b, 250, opener)
    assert [r for r in b.ledger.rounds() if r < late] == a.ledger.rounds()
    assert len(a.ledger) == 98
    assert 1 <= a.refused <= 2 * limits.IDS_PER_MESSAGE_MAX
    assert a.anti_entropy.synced_once, "it has all that it will ever have"


def test_a_lost_message_only_ends_the_exchange():
    """Whatever is lost: the next exchange starts anew and succeeds."""
    for lost in range(12):
        a = Side([(1, r, 0) for r in range(1, 200)])
        b = Side([(2, r, 0) for r in range(100, 300)])
        everything = {delta.data: delta for side in (a, b) for delta in side.ledger}
        for side in (a, b):
            side.held.update(delta.record_id for delta in side.ledger)
        queue = deque((1, effect) for effect in a.anti_entropy.open_exchange(1))
        for number in range(200):
            if not queue:
                break
            target, effect = queue.popleft()
            if number != lost:
                queue.extend((1 - target, e) for e in (a, b)[target].receive(effect.message, everything))
        assert not queue
        talk(b, a, 100)
        assert a.ledger.digests.root == b.ledger.digests.root


# --- what a hostile peer can make us say ------------------------------------------------------------

HASH = st.binary(min_size=32, max_size=32)


@given(
    st.lists(
        st.one_of(
            st.builds(
                msg.Digest,
                st.integers(0, limits.RANGE_LEVEL_MAX),
                st.lists(st.tuples(st.integers(0, limits.ROUND_MAX), HASH), max_size=20).map(tuple),
                st.booleans(),
            ),
            st.builds(
                msg.RecordIds,
                st.lists(
                    st.tuples(st.integers(0, 100), st.lists(HASH, max_size=5).map(tuple)), max_size=5
                ).map(tuple),
            ),
            st.builds(msg.GetRecords, st.lists(HASH, max_size=5).map(tuple)),
        ),
        max_size=10,
    )
)
def test_any_message_has_a_bounded_answer(messages):
    side = Side((author, r, 0) for author in range(3) for r in range(1, 40))
    side.anti_entropy.open_exchange(1)
    for message in messages:
        effects = side.receive(message, {})
        assert len(effects) <= 4 + len(side.ledger) // limits.RECORDS_PER_MESSAGE_MAX
        for effect in effects:
            assert isinstance(effect, Send)
            assert effect.link == 1
            assert len(msg.encode(effect.message)) < limits.MESSAGE_BYTES_MAX


def _bytes(effects: list[Effect]) -> int:
    return sum(len(msg.encode(e.message)) for e in effects if isinstance(e, Send))


def test_repeating_a_question_in_one_message_does_not_repeat_the_answer():
    side = Side((author, 7, 0) for author in range(200))
    most = limits.COMPARED_PARENTS_MAX * limits.RANGE_FANOUT
    assert _bytes(side.anti_entropy.compare(1, msg.Digest(0, ((7, bytes(32)),) * most))) < 10_000
    assert _bytes(side.anti_entropy.compare(1, msg.Digest(1, ((0, bytes(32)),) * most))) < 2_000
    records = side.anti_entropy.record_ids(1, msg.RecordIds(((7, ()),) * most))
    given = [data for e in records if isinstance(e.message, msg.Records) for data, _ in e.message.entries]
    assert len(given) == len(set(given)) == 200


def test_a_crowd_in_one_round_is_made_equal_all_the_same(monkeypatch):
    """Whoever has many keys may tell one half of a swarm of some of them, and the other half of the rest."""
    monkeypatch.setattr(limits, "IDS_PER_ROUND_MAX", 64)
    monkeypatch.setattr(limits, "IDS_PER_MESSAGE_MAX", 32)
    crowd = [(author, 7, 0) for author in range(400)]
    one = Side(crowd[:250] + crowd[300:])
    other = Side(crowd[50:])
    for turn in range(200):
        if one.ledger.digests.root == other.ledger.digests.root:
            break
        talk(one, other, 1000, turn % 2)
    assert len(one.ledger) == len(other.ledger) == 400


# --- when -------------------------------------------------------------------------------------------


def test_exchange_every_ten_seconds_or_so():
    side = Side([], links=3)
    assert side.anti_entropy.compare(1, msg.Digest(0, ())) == []  # there is nothing that we lack
    now, opened, links = 0.0, [], set()
    while now < 200.0:
        effects = side.anti_entropy.wake(now)
        if effects:
            opened.append(now)
            links.update(e.link for e in effects)
            assert len(effects) == 1
        assert side.anti_entropy._next_exchange > now
        assert side.anti_entropy.wake(now) == []
        now = side.anti_entropy._next_exchange
    gaps = [b - a for a, b in pairwise(opened)]
    assert 7.5 <= min(gaps) <= max(gaps) <= 12.5
    assert links == {1, 2, 3}


def test_who_has_just_started_asks_at_each_look_until_it_is_answered():
    """But not while records that it has asked for are under way: it would ask for them again."""
    side = Side([])
    side.anti_entropy.open_exchange(1)
    looks = [now / 2 for now in range(100)]
    assert [len(side.anti_entropy.wake(now)) for now in looks[:4]] == [1] * 4
    one = builders.unsigned(1, 1)
    side.anti_entropy.record_ids(1, msg.RecordIds(((1, (one.record_id,)),)))
    assert sum(len(side.anti_entropy.wake(now)) for now in looks[4:20]) <= 1
    side.anti_entropy.received(1, [one.record_id])
    assert side.anti_entropy.synced_once
    assert sum(len(side.anti_entropy.wake(now)) for now in looks[20:40]) <= 2
