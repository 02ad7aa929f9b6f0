"""Sends valid messages as fast as it can: ``python -m tests.net.flooder ADDRESS SWARM_ID SECONDS``.

It reads the answers and throws them away. Nothing that it sends is wrong in itself: pings, rosters,
comparisons, inventories, and records that the other side has long had.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import cycle

import aiohttp

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import PeerError
from gossamer.protocol.identity import Identity
from tests.net.stranger import Stranger, linked


def _random_ids(count: int) -> tuple[bytes, ...]:
    return tuple(os.urandom(32) for _ in range(count))


def costly(known: bytes) -> Iterator[bytes]:
    """Endless valid messages, of kinds that cost their receiver, which has the record `known`."""
    ids = _random_ids(limits.IDS_PER_MESSAGE_MAX)
    return cycle(
        msg.encode(message)
        for message in (
            msg.Ping(1),
            msg.Records(((known, False),) * limits.RECORDS_PER_MESSAGE_MAX),
            msg.RosterSummary(tuple((node_id, 1, 1) for node_id in ids), False),
            msg.Digest(7, tuple((number, digest) for number, digest in enumerate(ids[:700])), whole=True),
            msg.RecordIds(tuple((number, ids[:64]) for number in range(1, 700))),
            msg.GetRecords(ids),
        )
    )


async def first_record(peer: Stranger) -> bytes:
    """A record that the other side sends unasked, and so has."""
    while True:
        message = msg.decode(await peer.socket.receive_bytes())
        if isinstance(message, msg.Records) and message.entries:
            return message.entries[0][0]


async def _discard(peer: Stranger) -> None:
    async for _ in peer.socket:
        pass


async def flood(peer: Stranger, until: float) -> int:
    """Send until the monotonic clock reaches `until` or the link ends; returns how many messages went out."""
    messages = costly(await first_record(peer))
    reader = asyncio.create_task(_discard(peer))
    sent = 0
    with contextlib.suppress(TimeoutError, OSError, aiohttp.ClientError):
        async with asyncio.timeout(until - time.monotonic()):
            for data in messages:
                await peer.socket.send_bytes(data)
                sent += 1
                await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    return sent


async def _main(address: str, swarm_id: bytes, seconds: float) -> None:
    identity = Identity.from_seed(os.urandom(32))
    until = time.monotonic() + seconds
    sent = links = 0
    while time.monotonic() < until:
        try:
            async with linked(address, swarm_id, identity) as peer:
                links += 1
                sent += await flood(peer, until)
        except (PeerError, OSError, TypeError, aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(0.2)
    print(json.dumps({"messages": sent, "links": links}))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], bytes.fromhex(sys.argv[2]), float(sys.argv[3])))
