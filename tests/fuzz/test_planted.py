"""Faults planted on purpose: each must be found soon, and for what it is about.

Else the fuzzing is blind where it claims to look."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from random import Random
from typing import Any, get_type_hints
from unittest import mock

import numpy as np
import pytest

from gossamer.node.daemon.phi import snapshots
from gossamer.node.ipc import messages as control
from gossamer.protocol import limits, wire
from gossamer.protocol import replica as intake
from gossamer.protocol.codecs import block
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.member_records import Presence
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.membership.swim import Swim
from gossamer.protocol.messages import RecordIds
from tests.fuzz.runs import TARGETS
from tests.fuzz.target import Target

INPUTS = 400


def _anything_goes(kind: type) -> list[tuple[str, wire.Check]]:
    return [(name, lambda value: value) for name in get_type_hints(kind)]


def _large_ids(self: AntiEntropy, rounds: list[int]) -> RecordIds:
    return RecordIds(tuple((round_, (bytes(31),)) for round_ in rounds))


@dataclass(frozen=True)
class Planted:
    """A fault, where it should be found, and by what."""

    target: str
    found_by: str
    """A regular expression of the line of code that raised, and of what it raised (see `_verdict`)."""
    owner: Any
    name: str
    broken: Any
    members_max: int = limits.MEMBERS_MAX
    """Fewer are there sooner."""


PLANTED = {
    "text that a terminal should not see": Planted(
        "wire", "AssertionError: took .* for text", wire, "is_printable", lambda _: True
    ),
    "fields of any type": Planted("messages", r"assert conforms\(message", wire, "_schema", _anything_goes),
    "exponents of any size": Planted(
        "payload-int8",
        r"assert np\.abs.* < VALUE_LIMIT",
        block,
        "multipliers",
        lambda exponents, *_: np.int32(1) << exponents,
    ),
    "control messages refused as nobody expects": Planted(
        "control",
        "ValueError: control message ",
        control,
        "MalformedError",
        ValueError,
    ),
    "a snapshot of chunks of any size": Planted(
        "snapshot",
        r"view\[start|== data\[:INDEX_BYTES\]",
        snapshots,
        "_lacking",
        lambda listed, chunks: tuple(one for one in listed if one[0] not in chunks),
    ),
    "a roster without end": Planted(
        "replica", r"roster\._members holds \d+, over", Roster, "_make_room", lambda *_: True, members_max=16
    ),
    "a link that stays known": Planted(
        "replica", r"assert linked == set\(core\.fetcher\._links", Swim, "link_down", lambda *_: None
    ),
    "two links to one node": Planted(
        "replica", r"assert len\(set\(nodes\)\) == len\(nodes\)", Links, "to", lambda *_: None
    ),
    "a timer that spins": Planted(
        "replica", r"assert self\.core\.next_wake\(\) > self\.now", Swim, "deadline", lambda _: 0.0
    ),
    "what honest peers refuse": Planted(
        "replica",
        "MalformedError: RecordIds: field rounds is not 32 to 32 bytes",
        AntiEntropy,
        "_ids_of",
        _large_ids,
    ),
    "too many transfers": Planted(
        "replica",
        r"assert all\(count <= limits\.FETCHES_PER_LINK_MAX",
        Fetcher,
        "_free",
        lambda fetcher, most=0: set(fetcher.requests.load),
    ),
    "a parser that fails": Planted(
        "replica",
        "ValueError: planted",
        intake,
        "parse_member_record",
        mock.Mock(side_effect=ValueError("planted")),
    ),
    "a handler that fails": Planted(
        "replica", "KeyError: 'planted'", Presence, "refute", mock.Mock(side_effect=KeyError("planted"))
    ),
}


def _verdict(target: Target, data: bytes) -> str | None:
    """What an input finds: the line of code that raised, since an assertion may say nothing more, and what.

    A TypeError, AttributeError or NameError is no finding: the patch does not fit the code any more.
    """
    try:
        target.feed(data)
    except (TypeError, AttributeError, NameError):
        raise
    except Exception as error:
        return f"{traceback.extract_tb(error.__traceback__)[-1].line}\n{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    planted = PLANTED[name]
    target, dice = TARGETS[planted.target], Random(name)
    pairs = [
        (dice.randrange(1000), [dice.getrandbits(32) for _ in range(dice.randrange(1, 6))])
        for _ in range(INPUTS)
    ]
    assert target.seeds  # made while all is well
    with (
        mock.patch.object(planted.owner, planted.name, planted.broken),
        mock.patch.object(limits, "MEMBERS_MAX", planted.members_max),
    ):
        verdict = next(filter(None, (_verdict(target, target.derive(*pair)) for pair in pairs)), None)
    assert verdict, f"not found by {INPUTS} inputs"
    assert re.search(planted.found_by, verdict), f"found, but not for what it is about: {verdict}"
