"""What a peer may use, and how much of what it should not do costs it its link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import (
    PER_ADDRESS,
    PER_NODE,
    RECORD_CREDIT_S,
    Allowance,
    Budgets,
    Greylist,
    Rations,
    Resource,
    Stock,
)
from gossamer.protocol.errors import (
    ImplausibleError,
    MalformedError,
    Offence,
    SignatureError,
    offence_in_record,
)
from gossamer.protocol.limits import RATION_BYTES_MIN, RATION_COPIES, RATION_PERIOD_S

TEN = Allowance(10.0, 100.0)
MIB = 1 << 20
HELD = 4 * RATION_BYTES_MIN
STOCK = Stock(HELD, 0)


def test_a_burst_is_free_a_debt_takes_time_and_a_pause_is_bounded():
    budgets = Budgets({Resource.CPU: TEN})
    steps = [(100.0, 0.0, 0.0), (5.0, 0.0, 0.5), (5.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.0, 0.5, 0.0)]
    steps += [(1e9, 1.0, limits.PAUSE_MAX_S), (0.0, 1.0 + limits.PAUSE_MAX_S, 0.0)]
    for amount, now, pause in steps:
        assert budgets.spend(b"a", {Resource.CPU: amount}, now) == pytest.approx(pause)
    assert budgets.spend(b"b", {Resource.CPU: 1.0}, 0.0) == 0.0, "peers do not pay for each other"


def test_what_is_refused_is_not_charged():
    budgets = Budgets({Resource.HANDSHAKES: Allowance(1.0, 2.0)})
    afforded = [budgets.afford(b"a", Resource.HANDSHAKES, now) for now in (0.0, 0.0, 0.0, 0.0, 1.0)]
    assert afforded == [True, True, False, False, True]


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 30.0)), max_size=50))
def test_who_keeps_its_pauses_gets_the_rate_and_no_more(steps):
    """However it asks: what it got is at most the burst, the rate times the time, and one last message."""
    budgets, now, got, largest = Budgets({Resource.CPU: TEN}), 0.0, 0.0, 0.0
    for idle, amount in steps:
        now += idle
        got += amount
        largest = max(largest, amount)
        now += budgets.spend(b"a", {Resource.CPU: amount}, now)
        assert got <= TEN.burst + TEN.rate * now + 1e-6


def test_memory_is_bounded_and_keeps_those_who_owe(monkeypatch):
    monkeypatch.setattr(limits, "PEERS_WATCHED_MAX", 10)
    budgets = Budgets({Resource.CPU: TEN})
    budgets.spend(b"debtor", {Resource.CPU: 149.0}, 0.0)
    for number in range(100):
        budgets.spend(str(number), {Resource.CPU: 0.1}, number * 0.1)
        assert len(budgets._buckets) <= 10
    assert budgets.spend(b"debtor", {Resource.CPU: 60.0}, 10.0) == pytest.approx(0.9)
    for number in range(100):
        budgets.spend(str(number), {Resource.CPU: 149.0}, 10.0)
    assert len(budgets._buckets) == 10


def test_honest_bursts_fit():
    """A joiner is sent 10,000 records at once, 32 to a message, each that of a payload of 1 GiB."""
    budgets = Budgets(PER_NODE)
    records = 10_000
    for _ in range(records // limits.RECORDS_PER_MESSAGE_MAX):
        count = limits.RECORDS_PER_MESSAGE_MAX
        costs = {
            Resource.MESSAGES: 1.0,
            Resource.BYTES: count * 33_000.0,
            Resource.RECORDS: float(count),
            Resource.CPU: max(0.0, count * (0.0006 - RECORD_CREDIT_S)),
        }
        assert budgets.spend(b"holder", costs, 0.0) == 0.0


def test_64_nodes_of_one_address_fit():
    """All join at once, ask for manifest and status, and open connections for chunks."""
    budgets = Budgets(PER_ADDRESS)
    for _ in range(64):
        assert all(budgets.afford("10.0.0.1", Resource.CONNECTIONS, 0.0) for _ in range(8))
        assert budgets.spend("10.0.0.1", {Resource.REQUESTS: 3.0}, 0.0) == 0.0


# --- rations


def taken(rations: Rations, stock: Stock, now: float, node_id: bytes = b"taker") -> int:
    """Bytes that a member gets which asks for as much as it can get, chunk by chunk."""
    total = 0
    while rations.take(node_id, MIB, stock, now):
        total += MIB
    return total


def test_everything_may_be_taken_some_times_over_and_no_more():
    rations = Rations()
    assert taken(rations, STOCK, 0.0) == RATION_COPIES * HELD
    assert taken(rations, Stock(HELD, 10 * MIB), 0.0) == RATION_COPIES * 10 * MIB, "and what comes anew"
    assert not rations.take(b"taker", 1, Stock(HELD, 10 * MIB), 0.0)
    assert rations.take(b"another", MIB, STOCK, 0.0), "the others have rations of their own"


def test_who_takes_each_chunk_once_never_meets_its_ration():
    """A year of rounds, of which only the last are held."""
    rations = Rations()
    came = 0
    assert all(rations.take(b"taker", MIB, STOCK, 0.0) for _ in range(HELD // MIB))
    for round_ in range(20_000):
        came += MIB
        assert rations.take(b"taker", MIB, Stock(HELD, came), 0.0), round_


def test_a_day_restores_it_where_nothing_comes_any_more():
    rations = Rations()
    taken(rations, STOCK, 0.0)
    assert taken(rations, STOCK, RATION_PERIOD_S / 4) == RATION_COPIES * HELD / 4
    assert taken(rations, STOCK, 100 * RATION_PERIOD_S) == RATION_COPIES * HELD


def test_no_more_members_are_remembered_than_the_bound():
    rations = Rations()
    for number in range(limits.PEERS_WATCHED_MAX + 10):
        rations.take(number.to_bytes(4, "big"), 1, STOCK, 0.0)
    assert len(rations._rations) == limits.PEERS_WATCHED_MAX


PEER = bytes(32)


def until_listed(offence: Offence, every_s: float, at_most: int = 10_000) -> int | None:
    """How often a peer may commit an offence at this pace before it is turned away; None for ever."""
    greylist = Greylist()
    for count in range(1, at_most):
        if greylist.add(PEER, offence, count * every_s):
            return count
    return None


def test_points_put_a_peer_on_the_list_once_and_time_takes_it_off():
    greylist = Greylist()
    begun = [greylist.add(PEER, Offence.SIGNATURE, 0.0) for _ in range(4)]
    assert not any(begun) and 4 * Offence.SIGNATURE.points > limits.GREYLIST_POINTS_RELEASED
    assert greylist.remaining(PEER, 0.0) == 0.0, "who is let in again so is not turned away for as much"
    begun = [greylist.add(PEER, Offence.SIGNATURE, 0.0) for _ in range(2)]
    assert begun == [True, False]
    assert greylist.listed(0.0) == [PEER]
    points = 6 * Offence.SIGNATURE.points
    assert limits.GREYLIST_POINTS <= points < 2 * limits.GREYLIST_POINTS
    seconds = greylist.remaining(PEER, 0.0)
    assert limits.GREYLIST_HALF_LIFE_S <= seconds < 2 * limits.GREYLIST_HALF_LIFE_S
    assert greylist.remaining(PEER, seconds - 1.0) == pytest.approx(1.0)
    assert greylist.remaining(PEER, seconds + 0.2) == 0.0 and greylist.listed(seconds + 0.2) == []


def test_released_is_not_forgiven_at_once():
    greylist = Greylist()
    for _ in range(5):
        greylist.add(PEER, Offence.SIGNATURE, 0.0)
    now = greylist.remaining(PEER, 0.0) + 0.1
    assert [greylist.add(PEER, Offence.SIGNATURE, now) for _ in range(3)] == [False, False, True]


def test_nobody_is_turned_away_for_ever():
    greylist = Greylist()
    for _ in range(1000):
        greylist.add(PEER, Offence.MALFORMED, 0.0)
    assert greylist.remaining(PEER, 0.0) <= 15 * 60.0


@pytest.mark.parametrize("offence", [Offence.SIGNATURE, Offence.MALFORMED, Offence.RECORD, Offence.CHUNK])
def test_what_only_a_liar_does_is_soon_too_much(offence):
    assert until_listed(offence, 1.0) <= 12


@pytest.mark.parametrize(
    ("offence", "every_s"),
    [
        (Offence.IMPLAUSIBLE, 0.001),  # a clock two hours ahead
        (Offence.RELAYED, 3.0),  # it relays the rows of a node of a later release
        (Offence.HANDSHAKE, 30.0),
        (Offence.STALLED, 1.5),  # several nodes of one home, behind a line that loses long packets
    ],
)
def test_what_honest_nodes_do_is_never_too_much(offence, every_s):
    assert until_listed(offence, every_s) is None


def test_offences_in_records():
    assert offence_in_record(SignatureError(), relayed=True) is Offence.SIGNATURE
    assert offence_in_record(ImplausibleError(), relayed=False) is Offence.IMPLAUSIBLE
    assert offence_in_record(MalformedError(), relayed=False) is Offence.RECORD
    assert offence_in_record(MalformedError(), relayed=True) is Offence.RELAYED


def test_memory_is_bounded_and_keeps_the_worst(monkeypatch):
    monkeypatch.setattr(limits, "PEERS_WATCHED_MAX", 10)
    greylist = Greylist()
    for _ in range(5):
        greylist.add(PEER, Offence.SIGNATURE, 0.0)
    for number in range(100):
        greylist.add(str(number), Offence.NONSENSE, 0.0)
        assert len(greylist._scores) <= 10
    assert greylist.remaining(PEER, 0.0) > 0.0
