"""Points that fade: liars are turned away for a while, wrong clocks and other releases never."""

from __future__ import annotations

import pytest

from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import Greylist
from gossamer.protocol.errors import (
    ImplausibleError,
    MalformedError,
    Offence,
    SignatureError,
    offence_in_record,
)

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
        assert len(greylist) <= 10
    assert greylist.remaining(PEER, 0.0) > 0.0
