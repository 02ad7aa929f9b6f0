"""Token buckets: bursts are free, a steady excess is slowed to the rate, and memory is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import PER_ADDRESS, PER_NODE, Allowance, Bucket, Budgets, Resource

TEN = Allowance(10.0, 100.0)


def test_a_burst_is_free_and_a_debt_takes_time():
    bucket = Bucket(TEN, 0.0)
    assert bucket.spend(100.0, 0.0) == 0.0
    assert bucket.spend(5.0, 0.0) == pytest.approx(0.5)
    assert bucket.spend(5.0, 0.5) == pytest.approx(0.5)
    assert bucket.spend(0.0, 1.0) == 0.0
    assert not bucket.is_full(10.0)
    assert bucket.is_full(11.0)


def test_a_pause_is_bounded():
    bucket = Bucket(TEN, 0.0)
    assert bucket.spend(1e9, 0.0) == limits.PAUSE_MAX_S
    assert bucket.spend(0.0, limits.PAUSE_MAX_S) == 0.0, "and then it may be read again"


def test_what_is_refused_is_not_charged():
    bucket = Bucket(Allowance(1.0, 2.0), 0.0)
    assert [bucket.afford(1.0, 0.0) for _ in range(4)] == [True, True, False, False]
    assert bucket.afford(1.0, 1.0)


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 30.0)), max_size=50))
def test_who_keeps_its_pauses_gets_the_rate_and_no_more(steps):
    """However it asks: what it got is at most the burst, the rate times the time, and one last message."""
    bucket, now, got, largest = Bucket(TEN, 0.0), 0.0, 0.0, 0.0
    for idle, amount in steps:
        now += idle
        got += amount
        largest = max(largest, amount)
        now += bucket.spend(amount, now)
        assert got <= TEN.burst + TEN.rate * now + 1e-6


def test_the_scarcest_resource_sets_the_pause_and_the_others_are_free():
    budgets = Budgets({Resource.CPU: TEN, Resource.MESSAGES: Allowance(1.0, 1.0)})
    costs = {Resource.CPU: 110.0, Resource.MESSAGES: 3.0, Resource.BYTES: 1e12}
    assert budgets.spend(b"a", costs, 0.0) == pytest.approx(2.0)


def test_memory_is_bounded_and_keeps_those_who_owe(monkeypatch):
    monkeypatch.setattr(limits, "PEERS_WATCHED_MAX", 10)
    budgets = Budgets({Resource.CPU: TEN})
    budgets.spend(b"debtor", {Resource.CPU: 149.0}, 0.0)
    for number in range(100):
        budgets.spend(str(number), {Resource.CPU: 0.1}, number * 0.1)
        assert len(budgets) <= 10
    assert budgets.spend(b"debtor", {Resource.CPU: 60.0}, 10.0) == pytest.approx(0.9)
    for number in range(100):
        budgets.spend(str(number), {Resource.CPU: 149.0}, 10.0)
    assert len(budgets) == 10


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
            Resource.CPU: max(0.0, count * (0.0006 - limits.RECORD_CREDIT_S)),
        }
        assert budgets.spend(b"holder", costs, 0.0) == 0.0


def test_64_nodes_of_one_address_fit():
    """All join at once, ask for manifest and status, and open connections for chunks."""
    budgets = Budgets(PER_ADDRESS)
    for _ in range(64):
        assert all(budgets.afford("10.0.0.1", Resource.CONNECTIONS, 0.0) for _ in range(8))
        assert budgets.spend("10.0.0.1", {Resource.REQUESTS: 3.0}, 0.0) == 0.0
