"""Rations: honest members never meet theirs, and who downloads all day does."""

from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import Rations, Stock
from gossamer.protocol.limits import RATION_BYTES_MIN, RATION_COPIES, RATION_PERIOD_S

MIB = 1 << 20
HELD = 4 * RATION_BYTES_MIN
STOCK = Stock(HELD, 0)


def taken(rations: Rations, stock: Stock, now: float, node_id: bytes = b"taker") -> int:
    """Bytes that a member gets which asks for as much as it can get, chunk by chunk."""
    total = 0
    while rations.take(node_id, MIB, stock, now):
        total += MIB
    return total


def test_everything_may_be_taken_some_times_over_and_no_more():
    rations = Rations()
    assert taken(rations, STOCK, 0.0) == RATION_COPIES * HELD
    assert not rations.take(b"taker", 1, STOCK, 0.0)
    assert rations.take(b"another", MIB, STOCK, 0.0), "the others have rations of their own"


def test_what_comes_anew_may_be_taken_too():
    rations = Rations()
    taken(rations, STOCK, 0.0)
    assert taken(rations, Stock(HELD, 10 * MIB), 0.0) == RATION_COPIES * 10 * MIB


def test_who_takes_each_chunk_once_never_meets_its_ration():
    """A year of rounds, of which only the last are held."""
    rations = Rations()
    came = 0
    assert taken_once(rations, HELD, Stock(HELD, 0))
    for round_ in range(20_000):
        came += MIB
        assert rations.take(b"taker", MIB, Stock(HELD, came), 0.0), round_


def taken_once(rations: Rations, size: int, stock: Stock) -> bool:
    return all(rations.take(b"taker", MIB, stock, 0.0) for _ in range(size // MIB))


def test_a_day_restores_it_where_nothing_comes_any_more():
    rations = Rations()
    taken(rations, STOCK, 0.0)
    assert taken(rations, STOCK, RATION_PERIOD_S / 4) == RATION_COPIES * HELD / 4
    assert taken(rations, STOCK, 100 * RATION_PERIOD_S) == RATION_COPIES * HELD


def test_no_more_members_are_remembered_than_the_bound():
    rations = Rations()
    for number in range(limits.PEERS_WATCHED_MAX + 10):
        rations.take(number.to_bytes(4, "big"), 1, STOCK, 0.0)
    assert len(rations) == limits.PEERS_WATCHED_MAX
