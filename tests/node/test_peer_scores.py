"""Who is turned away and for how long, who has to wait, and few log lines about it."""

from __future__ import annotations

from hashlib import sha256

import pytest

from gossamer.node.daemon.network.peer_scores import COMPLAINTS_MAX, PeerScores
from gossamer.node.logs import REPEAT_S
from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import PER_NODE, Resource
from gossamer.protocol.errors import Offence
from gossamer.protocol.identity import short

BAD, GOOD = b"\1" * 32, b"\2" * 32


class Watch:
    """Scores with a clock of our own, and all that they logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        self.scores = PeerScores(clock=lambda: self.now)
        self.caplog = caplog

    @property
    def lines(self) -> list[str]:
        return self.caplog.messages


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture) -> Watch:
    return Watch(caplog)


def test_only_who_has_to_wait_is_throttled(watch: Watch) -> None:
    assert watch.scores.charge(GOOD, None, {Resource.CPU: 0.0}) == 0.0
    assert watch.scores.throttled == 0
    assert watch.scores.charge(GOOD, None, {Resource.CPU: 3600.0}) > 0.0
    assert watch.scores.throttled == 1


def test_bad_signatures_end_in_being_turned_away_and_let_in_again(watch: Watch) -> None:
    answers = []
    for _ in range(5):
        assert watch.scores.refusal(BAD) is None
        answers.append(watch.scores.blame(BAD, "signature does not hold", Offence.SIGNATURE))
    assert answers == [False] * 4 + [True]
    assert watch.scores.refusal(BAD) == "turned away for misbehaviour, for another 300 s"
    assert watch.scores.refusal(GOOD) is None
    assert watch.scores.greylisted == 1
    watch.now += limits.GREYLIST_HALF_LIFE_S + 10.0
    assert watch.scores.refusal(BAD) is None
    assert watch.scores.greylisted == 0
    name = short(BAD)
    assert watch.lines == [
        f"{name} misbehaved: signature does not hold",
        f"{name} is turned away for about 5 min: it misbehaved too often",
    ]


def test_a_thousand_offences_are_one_line_in_five_minutes(watch: Watch) -> None:
    """As where a join address leads to another node now, which is dialled every few seconds."""
    assert not any(watch.scores.blame(BAD, "round 7 is too early", Offence.IMPLAUSIBLE) for _ in range(1000))
    assert watch.lines == [f"{short(BAD)} misbehaved: round 7 is too early"]
    watch.now += REPEAT_S + 10.0
    watch.scores.blame(BAD, "again", Offence.IMPLAUSIBLE)
    assert watch.lines[1:] == [f"{short(BAD)} misbehaved: again"]


def test_a_thousand_keys_are_a_few_lines(watch: Watch) -> None:
    for number in range(1000):
        key = sha256(bytes([number % 256, number // 256])).digest()
        watch.scores.blame(key, "garbage", Offence.MALFORMED)
    assert len(watch.lines) == len(set(watch.lines)) == COMPLAINTS_MAX
    assert watch.scores.blamed == 1000


def test_one_key_that_links_itself_again_and_again_has_to_wait(watch: Watch) -> None:
    answers = [watch.scores.refusal(BAD) for _ in range(30)]
    assert answers.count(None) == PER_NODE[Resource.HANDSHAKES].burst
    assert answers[-1] == "too many handshakes; try again in 2 s"
    watch.now += 2.0
    assert watch.scores.refusal(BAD) is None


def test_an_address_is_turned_away_but_never_this_machine(watch: Watch) -> None:
    for _ in range(1000):
        watch.scores.blame_address("203.0.113.5", Offence.HANDSHAKE)
        watch.scores.blame_address(None, Offence.HANDSHAKE)
    assert watch.scores.refused_for("203.0.113.5")
    assert not watch.scores.refused_for("203.0.113.6")
    assert not watch.scores.refused_for(None)
    watch.now += 20 * 60.0
    assert not watch.scores.refused_for("203.0.113.5")
    assert len(watch.lines) == 1


def test_keys_of_one_address_share_what_it_has(watch: Watch) -> None:
    """Keys cost nothing; this machine's own nodes are many and honest."""
    shared = local = 0.0
    for number in range(64):
        key = number.to_bytes(32, "big")
        shared = max(shared, watch.scores.charge(key, "203.0.113.5", {Resource.CPU: 1.0}))
        local = max(local, watch.scores.charge(key, None, {Resource.CPU: 1.0}))
    assert shared == limits.PAUSE_MAX_S
    assert local == 0.0
