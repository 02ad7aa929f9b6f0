"""What is here of a payload is told place by place."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from gossamer.protocol import limits
from gossamer.protocol.effects import Get, Send
from gossamer.protocol.fetch import Fetcher
from gossamer.protocol.holdings import Holdings
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.messages import Parts
from gossamer.protocol.offers import Offers
from tests.protocol import builders


def test_a_chunk_that_comes_twice_in_a_payload_is_told_of_in_both_places() -> None:
    """Zeros, say. Else its author, who dealt both, would wait to hear of the second."""
    rng = random.Random(1)
    fetcher, offers = Fetcher(lambda blob: False, rng), Offers()
    links: Any = SimpleNamespace(all=lambda: [SimpleNamespace(number=n) for n in (1, 2)], get=lambda _: None)
    holdings = Holdings(Ledger(), links, fetcher, offers, rng)
    for link in (1, 2):
        fetcher.link_up(link, outbound=True)
    zeros, other = bytes(32), b"\1" * 32
    size = 2 * limits.PAYLOAD_CHUNK_BYTES_MIN + 1
    delta = builders.unsigned(1, 1)
    delta = replace(delta, body=replace(delta.body, payload_bytes=size, chunks=(zeros, zeros, other)))
    holdings.add(delta, 1, 0.0)
    holdings.hint_parts(delta, (0, 1), 1)
    assert fetcher.plan(0.0) == [Get(1, zeros, limits.PAYLOAD_CHUNK_BYTES_MIN)]
    holdings.arrived(zeros, 1.0)
    (told,) = [cast(Send, effect) for effect in offers.wake(offers.deadline())]
    assert told == Send(2, Parts(delta.record_id, (0, 1)))
