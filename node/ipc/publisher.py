"""From a payload in shared memory to a signed record on disk: write before you speak."""

import asyncio
import logging
from collections.abc import Callable
from hashlib import sha256

from gossamer.node.ipc import control
from gossamer.node.seldom import Trouble
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.node.storage.wholefile import FULL
from gossamer.protocol import effects as fx
from gossamer.protocol.chunks import split_payload
from gossamer.protocol.records import NO_RECORD, DeltaBody

DISK_RETRY_S = 5.0

log = logging.getLogger("gossamer.publisher")


class Publisher:
    """Takes our trainer's deltas. They are acknowledged once their records are durable, and not here."""

    def __init__(self, chunks: ChunkStore, dispatch: Callable[[fx.Event], list[fx.Effect]]) -> None:
        self._chunks = chunks
        self._dispatch = dispatch
        self._trouble = Trouble(log, "our own deltas can be stored again")

    async def publish(self, message: control.Publish, payload: memoryview) -> bool:
        """Store a payload, then have the core sign for it. A full disk delays this, and nothing else.

        Returns whether it did sign: else no record will come of it.
        """
        reserved: set[bytes] = set()
        while True:
            try:
                hashes = await asyncio.to_thread(self._store, payload, reserved)
                self._trouble.not_met()
                break
            except OSError as error:
                until = "there is space" if error.errno in FULL else "the folder can be written to"
                self._dispatch(fx.Paused())
                self._trouble.met(
                    f"cannot store our own delta: {error.strerror}; publishing pauses until {until}"
                )
                await asyncio.sleep(DISK_RETRY_S)
        body = DeltaBody(
            round=message.round,
            base=message.base,
            tokens=message.tokens,
            steps=message.steps,
            loss=message.loss,
            codec=message.codec,
            payload_bytes=len(payload),
            chunks=hashes,
            previous=NO_RECORD,
        )
        payload.release()
        effects = self._dispatch(fx.Publish(body))
        is_signed = any(isinstance(effect, fx.Store) for effect in effects)
        if not is_signed:
            self._chunks.release(reserved)
        return is_signed

    def _store(self, payload: memoryview, reserved: set[bytes]) -> tuple[bytes, ...]:
        """Put the payload's chunks; those that no earlier delta has reserved are added to `reserved`."""
        hashes = []
        for view in split_payload(payload):
            piece = bytes(view)
            blob = sha256(piece).digest()
            # What is the same in a delta that is closed is being dropped, maybe.
            if self._chunks.reserve(blob):
                reserved.add(blob)
            self._chunks.put(blob, piece, durable=True)
            hashes.append(blob)
        return tuple(hashes)
