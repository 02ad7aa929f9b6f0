"""The ledger is a set: what it means depends on what was added, never on when or how often."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.ledger import EMPTY, Added, Ledger, RangeDigests
from gossamer.protocol.limits import RANGE_FANOUT, RANGE_LEVEL_MAX, ROUND_MAX
from gossamer.protocol.pace import round_clock
from tests.protocol import builders
from tests.protocol.cost import calls

KEYS = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.integers(1, 40), st.integers(1, 10**6)), st.integers(0, 2)),
    max_size=40,
    unique=True,
)


def _filled(keys) -> Ledger:
    ledger = Ledger()
    for key in keys:
        ledger.add(builders.unsigned(*key))
    return ledger


def _meaning(keys) -> dict:
    """Per author and round: the one record, or void."""
    found: dict = {}
    for author, round_, variant in keys:
        found.setdefault((author, round_), set()).add(variant)
    return {key: "void" if len(variants) > 1 else variants for key, variants in found.items()}


@given(KEYS, st.randoms(use_true_random=False))
def test_any_order_with_any_repetition_means_the_same(keys, rng):
    again = keys + [rng.choice(keys) for _ in keys]
    rng.shuffle(again)
    one, other = _filled(keys), _filled(again)
    assert one.digests.root == other.digests.root
    assert one.rounds() == other.rounds()
    for round_ in one.rounds():
        assert [d.record_id for d in one.valid(round_)] == [d.record_id for d in other.valid(round_)]
    assert set(one.voided()) == set(other.voided())


@given(KEYS, KEYS)
def test_roots_are_equal_exactly_when_the_meaning_is(one, other):
    equal = _filled(one).digests.root == _filled(other).digests.root
    assert equal == (_meaning(one) == _meaning(other))


@given(KEYS)
def test_what_is_valid_void_and_last(keys):
    ledger = _filled(keys)
    meaning = _meaning(keys)
    for (author, round_), what in meaning.items():
        some = builders.unsigned(author, round_)
        mine = [d for d in ledger.valid(round_) if d.author == some.author]
        assert len(mine) == (0 if what == "void" else 1)
        assert ledger.is_void(some) == (what == "void")
        assert ledger.last_round(some.author) == max(r for a, r in meaning if a == author)
        last = ledger.get(ledger.last_record(some.author))
        assert last is not None
        assert (last.author, last.round) == (some.author, ledger.last_round(some.author))
    authors = [d.author for round_ in ledger.rounds() for d in ledger.valid(round_)]
    assert len(authors) == sum(what != "void" for what in meaning.values())
    for round_ in ledger.rounds():
        in_round = [d.author for d in ledger.valid(round_)]
        assert in_round == sorted(in_round)
    assert len(ledger) == len(list(ledger)) == sum(len(ledger.ids(r)) for r in ledger.rounds())


def test_authors_who_are_gone_are_forgotten_before_they_are_too_many(monkeypatch):
    """Anybody can make up any number of them, where anybody may take part."""
    monkeypatch.setattr(limits, "AUTHORS_KEPT", 8)
    member, *others = (bytes([number]) * 32 for number in range(60))
    ledger = Ledger(lambda author: author == member)
    ledger.close(5)
    ledger.note_last(member, 3, bytes(32))
    for author in others:
        ledger.note_last(author, 4, bytes(32))
        assert len(ledger.last_rounds) <= 9
    assert ledger.last_round(member) == 3
    for author in range(20):
        ledger.add(builders.unsigned(author, 6))
    assert sum(round_ == 6 for round_ in ledger.last_rounds.values()) == 20, "their records are here, too"
    ledger.close(6)
    assert ledger.last_rounds == {member: 3}


def test_what_is_closed_takes_nothing_more():
    ledger = _filled([(1, 5, 0), (1, 6, 0)])
    assert ledger.close(5) == [builders.unsigned(1, 5)]
    assert [ledger.add(builders.unsigned(2, round_)) for round_ in (4, 5, 6)] == [
        Added.CLOSED,
        Added.CLOSED,
        Added.NEW,
    ]
    assert ledger.rounds() == [6]


def test_void_with_three_different_records():
    """Two prove it; which two is no matter; a third adds nothing and is not kept."""
    a, b, c = (builders.unsigned(1, 5, variant) for variant in range(3))
    ledger = Ledger()
    assert ledger.add(a) is Added.NEW
    once = ledger.digests.root
    assert ledger.add(a) is Added.IGNORED
    assert ledger.digests.root == once
    assert ledger.add(b) is Added.VOIDED
    void = ledger.digests.root
    assert void != once
    assert [ledger.add(d) for d in (c, a, b, c)] == [Added.IGNORED] * 4
    assert ledger.digests.root == void
    assert c.record_id not in ledger
    assert len(ledger) == 2
    assert ledger.ids(5) == sorted([a.record_id, b.record_id])
    assert ledger.valid(5) == []
    assert list(ledger.voided()) == [(a.author, 5)]
    other = Ledger()
    other.add(c)
    other.add(b)
    assert other.digests.root == void


@given(KEYS, st.integers(0, 4), st.integers(0, 40))
def test_what_is_dropped_might_never_have_come(keys, author, after):
    ledger = _filled(keys)
    before = {delta.record_id for delta in ledger}
    node_id = builders.unsigned(author, 1).author
    dropped = ledger.drop(node_id, after)
    without = _filled([key for key in keys if key[0] != author or key[1] <= after])
    assert ledger.digests.root == without.digests.root
    assert ledger.rounds() == without.rounds()
    assert {delta.record_id for delta in ledger} == {delta.record_id for delta in without}
    assert {delta.record_id for delta in dropped} == before - {delta.record_id for delta in without}
    assert set(ledger.voided()) == set(without.voided())
    assert ledger.last_round(node_id) == without.last_round(node_id)
    assert ledger.horizon == without.horizon
    for round_ in ledger.rounds():
        assert ledger.ids(round_) == without.ids(round_)
    assert ledger.drop(node_id, after) == []
    assert not any(ledger.id_of(delta.data) for delta in dropped)
    for delta in dropped:  # a grant may come after a revocation has gone wrong: nothing of it is left
        ledger.add(delta)
    assert ledger.digests.root == _filled(keys).digests.root


@given(KEYS, st.integers(0, 40))
def test_what_lies_beyond_a_round_is_dropped_and_may_come_again(keys, round_):
    ledger = _filled(keys)
    lasts = dict(ledger.last_rounds)
    dropped = ledger.drop_beyond(round_)
    without = _filled([key for key in keys if key[1] <= round_])
    assert ledger.digests.root == without.digests.root and ledger.rounds() == without.rounds()
    assert {delta.record_id for delta in ledger} == {delta.record_id for delta in without}
    assert {delta.record_id for delta in dropped} == {d.record_id for d in _filled(keys) if d.round > round_}
    assert not any(ledger.id_of(delta.data) for delta in dropped)
    assert ledger.last_rounds == lasts, "their authors did sign them"
    for delta in dropped:
        ledger.add(delta)
    assert ledger.digests.root == _filled(keys).digests.root


def test_who_begins_anew_from_an_earlier_round_takes_those_after_it_again():
    ledger = Ledger()
    ledger.close(20)
    early = builders.unsigned(1, 15, 0)
    assert ledger.add(early) is Added.CLOSED
    ledger.reopen(30)
    assert ledger.floor == 20, "that opens nothing"
    ledger.reopen(10)
    assert ledger.add(early) is Added.NEW


@given(KEYS, st.integers(0, 40), st.integers(0, 4), st.integers(0, 40), st.integers(0, 5))
def test_how_far_the_authors_are_is_the_clock_of_their_last_rounds(keys, floor, dropped, after, but):
    ledger = _filled(keys)
    ledger.drop(builders.unsigned(dropped, 1).author, after)
    ledger.close(floor)
    left_out = builders.unsigned(but, 1).author
    last = [round_ for author, round_ in ledger.last_rounds.items() if author != left_out]
    assert ledger.reached(left_out) == max(floor, round_clock((r, b"") for r in last if r > floor))
    every = ledger.last_rounds.values()
    assert ledger.reached() == max(floor, round_clock((r, b"") for r in every if r > floor))


# --- digests of ranges: equal exactly when the sets are, whatever happened on the way

LATER_ROUNDS = st.one_of(st.integers(0, 40), st.integers(0, 5000), st.integers(0, ROUND_MAX))
CONTENT = st.dictionaries(LATER_ROUNDS, st.integers(0, 3), max_size=15)


def _digest(value: int) -> bytes:
    return sha256(bytes([value])).digest()


def _built(content: dict[int, int]) -> RangeDigests:
    digests = RangeDigests()
    for round_, value in content.items():
        digests.update(round_, _digest(value))
    return digests


@given(CONTENT, st.randoms(use_true_random=False))
def test_order_and_detours_do_not_matter(content, rng):
    expected = _built(content)
    order = list(content.items())
    rng.shuffle(order)
    other = RangeDigests()
    for round_, value in order:
        other.update(round_, _digest(7))
        if rng.random() < 0.5:
            _ = other.root, other.summary()  # caches something that must be forgotten
        detour = rng.randrange(ROUND_MAX)
        if detour not in content:
            other.update(detour, _digest(9))
            _ = other.root
            other.update(detour, EMPTY)
        other.update(round_, _digest(value))
    assert other.root == expected.root
    assert other.top == expected.top
    assert other.summary() == expected.summary()


@given(CONTENT, CONTENT)
def test_roots_are_equal_exactly_when_the_sets_are(one, other):
    assert (_built(one).root == _built(other).root) == (one == other)


@given(CONTENT.filter(bool))
def test_descending_where_it_is_not_empty_finds_every_round(content):
    digests = _built(content)
    found = {}
    todo = [(digests.top, index, digest) for index, digest in digests.summary()]
    while todo:
        level, index, digest = todo.pop()
        assert digest == digests.digest(level, index)
        if digest == EMPTY:
            continue
        if level == 0:
            found[index] = digest
        else:
            todo += [(level - 1, i, d) for i, d in digests.children(level, index)]
    assert found == {round_: _digest(value) for round_, value in content.items()}


def test_a_gap_costs_nothing():
    """A peer may sign a round as far ahead as plausible: millions of empty rounds must not be walked."""
    digests = _built({1: 1, ROUND_MAX: 1})
    assert calls(lambda: digests.root) < 6 * RANGE_FANOUT * (RANGE_LEVEL_MAX + 2)
