"""Faults planted on purpose: each must be found soon, or the fuzzing is blind where it claims to look."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gossamer.node.ipc import control
from gossamer.node.phi import snapshots
from gossamer.protocol import intake
from gossamer.protocol.chunks import parse_index
from gossamer.protocol.codecs import block
from gossamer.protocol.gossip import Gossip
from gossamer.protocol.links import Links
from gossamer.protocol.membership import Membership
from gossamer.protocol.messages import Inventory
from gossamer.protocol.presence import Presence
from gossamer.protocol.roster import Roster
from gossamer.protocol.sources import Sources
from gossamer.protocol.wire import Fields
from tests.fuzz.strategy import TARGETS

INPUTS = 400


def _unchecked_integer(self: Fields, name: str, low: int, high: int) -> Any:
    return self._take(name)


def _unchecked_blob(self: Fields, name: str, value: Any, low: int, high: int) -> Any:
    return value


def _large_stock(self: Gossip, rounds: list[int]) -> Inventory:
    return Inventory(tuple((round_, (bytes(31),)) for round_ in rounds))


PLANTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "integers of any size": ("messages", lambda: mock.patch.object(Fields, "integer", _unchecked_integer)),
    "bytes of any type": ("records", lambda: mock.patch.object(Fields, "_as_blob", _unchecked_blob)),
    "exponents of any size": (
        "payload-int8",
        lambda: mock.patch.object(block, "multipliers", lambda exponents, *_: np.int32(1) << exponents),
    ),
    "no control message refused": (
        "control",
        lambda: mock.patch.object(control, "TypeError", OSError, create=True),
    ),
    "indexes of any length": (
        "snapshot",
        lambda: mock.patch.object(
            snapshots, "parse_index", lambda index, _: parse_index(index, len(index) << 15)
        ),
    ),
    "a roster without end": ("replica", lambda: mock.patch.object(Roster, "_make_room", return_value=True)),
    "a link that stays known": ("replica", lambda: mock.patch.object(Gossip, "link_down", return_value=None)),
    "two links to one node": (
        "replica",
        lambda: mock.patch.object(Links, "to", return_value=None),
    ),
    "a timer that spins": ("replica", lambda: mock.patch.object(Membership, "deadline", return_value=0.0)),
    "what honest peers refuse": ("replica", lambda: mock.patch.object(Gossip, "_take_stock", _large_stock)),
    "too many transfers": (
        "replica",
        lambda: mock.patch.object(Sources, "_free", lambda _, links, most: sorted(links)),
    ),
    "a parser that fails": (
        "replica",
        lambda: mock.patch.object(intake, "parse_peer", side_effect=ValueError),
    ),
    "a handler that fails": ("replica", lambda: mock.patch.object(Presence, "refute", side_effect=KeyError)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    target_name, plant = PLANTED[name]
    target, dice = TARGETS[target_name], Random(name)
    pairs = [
        (dice.randrange(1000), [dice.getrandbits(32) for _ in range(dice.randrange(1, 6))])
        for _ in range(INPUTS)
    ]
    assert target.seeds  # made while all is well
    with plant():
        for data in (target.derive(*pair) for pair in pairs):
            try:
                target.feed(data)
            except Exception:  # of whatever kind: found
                return
    pytest.fail(f"not found by {INPUTS} inputs")
