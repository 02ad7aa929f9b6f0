"""`gossamer.node.daemon.network.server`: who is dialled, and what is said of a dial that came to nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest

from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import Dialler
from gossamer.node.home import Home
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.errors import Offence, RefusedError
from gossamer.protocol.membership.member_records import NodeInfo
from gossamer.protocol.records import MemberRecord
from gossamer.protocol.replica import Replica
from tests.node.cores import new_core
from tests.protocol import builders

HOME = "192.168.1.5:7700"


class Street:
    """A transport that finds some certificate wherever it dials."""

    def __init__(self, shown: bytes) -> None:
        self.shown = shown
        self.dialled: list[str] = []

    async def dial(self, address: str, expected: bytes | None, fingerprint: bytes) -> None:
        self.dialled.append(address)
        host, _, port = address.partition(":")
        raise aiohttp.ServerFingerprintMismatch(fingerprint, self.shown, host, int(port))


def member(core: Replica, number: int, address: str, fingerprint: bytes) -> bytes:
    """A row that tells an address and a certificate; returns its node id."""
    row = builders.row(builders.identity(number), addresses=(address,))
    peer = MemberRecord(node_id=row.node_id, body=replace(row.body, fingerprint=fingerprint), data=row.data)
    core.roster.update(peer, 0.0)
    return row.node_id


@pytest.mark.parametrize(
    ("shown", "is_said"),
    [(b"o" * 32, False), (b"n" * 32, False), (b"f" * 32, True), (b"?" * 32, True)],
    ids=["our own", "the neighbour's", "a member's elsewhere", "a stranger's"],
)
@pytest.mark.parametrize("told", [HOME, "10.9.9.8:7700"], ids=["ours too", "ours is another"])
async def test_a_private_address_that_two_members_have_is_no_matter(
    caplog: pytest.LogCaptureFixture, shown: bytes, is_said: bool, told: str
) -> None:
    core = Replica(
        identity=builders.identity(0),
        manifest=builders.SMALL,
        info=NodeInfo(name="n", trains=False, incarnation=1, fingerprint=b"o" * 32),
        fits=lambda blob, size: None,
        unix_offset_s=builders.CREATED,
        rng=random.Random(0),
    )
    core.announce((told,))
    member(core, 1, HOME, b"n" * 32)
    member(core, 2, "10.9.9.9:7700", b"f" * 32)
    wanted = member(core, 3, HOME, b"w" * 32)
    events: list[ev.Event] = []
    street: Any = Street(shown)
    await Dialler(street, PeerScores(), core, events.append).dial(fx.Dial(HOME, wanted, b"w" * 32))
    assert events == [ev.DialFailed(HOME)]
    assert ("shows a different certificate" in caplog.text) is is_said


async def test_who_is_turned_away_is_not_dialled(tmp_path: Path) -> None:
    wanted, scores = builders.identity(1).node_id, PeerScores()
    while not scores.is_greylisted(wanted):
        scores.blame(wanted, "garbage", Offence.MALFORMED)
    events: list[ev.Event] = []
    street = Street(b"w" * 32)
    transport: Any = street
    await Dialler(transport, scores, new_core(Home(tmp_path)), events.append).dial(fx.Dial(HOME, wanted))
    assert street.dialled == [] and events == [ev.DialFailed(HOME)]


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError(), TimeoutError(), aiohttp.ServerDisconnectedError(), RefusedError("no")],
    ids=lambda error: type(error).__name__,
)
async def test_that_no_link_came_up_is_told_whatever_the_reason(tmp_path: Path, error: Exception) -> None:
    """Or the address would pass for one that is being dialled, for ever."""
    events: list[ev.Event] = []
    transport: Any = AsyncMock(dial=AsyncMock(side_effect=error))
    await Dialler(transport, PeerScores(), new_core(Home(tmp_path)), events.append).dial(fx.Dial(HOME, None))
    assert events == [ev.DialFailed(HOME)]


@pytest.mark.parametrize("made_up", ["", "host", "host:0", "host:port", "http://host:7700/"])
async def test_an_address_that_cannot_be_is_not_dialled(tmp_path: Path, made_up: str) -> None:
    """A row may tell any text."""
    events: list[ev.Event] = []
    street = Street(b"w" * 32)
    transport: Any = street
    await Dialler(transport, PeerScores(), new_core(Home(tmp_path)), events.append).dial(
        fx.Dial(made_up, None)
    )
    assert street.dialled == [] and events == [ev.DialFailed(made_up)]
