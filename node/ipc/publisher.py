"""Our own deltas, from a payload in shared memory to a signed record on disk: write before you speak."""

import asyncio
import logging
from collections.abc import Callable
from hashlib import sha256

from gossamer.node.ipc import control
from gossamer.node.seldom import Trouble
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.node.storage.wholefile import writable_once
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.payloads.chunks import split_payload
from gossamer.protocol.records import NO_RECORD, DeltaBody

DISK_RETRY_S = 5.0

log = logging.getLogger("gossamer.publisher")


class Publisher:
    """Takes our trainers' deltas, one after another, even if the trainer has died meanwhile.

    A delta is acknowledged once its record is durable, or once it is clear that there will be no record.
    """

    def __init__(
        self,
        chunks: ChunkStore,
        dispatch: Callable[[ev.Event], list[fx.Effect]],
        tell: Callable[[control.ControlMessage], None],
    ) -> None:
        """`tell` sends to the trainer, if there is one."""
        self._chunks = chunks
        self._dispatch = dispatch
        self._tell = tell
        self._waiting: asyncio.Queue[tuple[control.Publish, memoryview]] = asyncio.Queue(1)
        self.trouble = Trouble(log, "our own deltas can be stored again")
        self.handed_in = 0
        """The last round for which we were handed a delta: none is wanted for this or an earlier round."""
        self.acknowledged = 0
        """The last round whose delta needs nothing more from a trainer."""

    def hand_in(self, message: control.Publish, payload: memoryview) -> None:
        """Have a delta stored and signed; `payload` is released then.

        A trainer waits until its last delta is acknowledged. So a second delta comes while one waits here
        only if another trainer comes while nothing can be stored. Only the newest delta is then kept.
        """
        if self._waiting.full():
            lost, _ = self._waiting.get_nowait()
            self._waiting.task_done()
            log.warning(
                "the delta of round %d is lost: another trainer's arrived before it could be stored",
                lost.round,
            )
        self._waiting.put_nowait((message, payload))
        self.handed_in = message.round

    async def run(self) -> None:
        """Store the deltas handed in, until cancelled. A full disk delays this, and nothing else."""
        while True:
            message, payload = await self._waiting.get()
            await self._publish(message, payload)
            self._waiting.task_done()

    async def drained(self) -> None:
        """Wait until all deltas handed in are signed."""
        await self._waiting.join()

    def acknowledge(self, round_: int) -> None:
        """The deltas for this round and earlier ones need nothing more from a trainer."""
        self.acknowledged = max(self.acknowledged, round_)
        self._tell(control.Published(round_))

    async def _publish(self, message: control.Publish, payload: memoryview) -> None:
        """Store a payload, then have the core sign for it."""
        reserved: set[bytes] = set()
        body = DeltaBody(
            round=message.round,
            base=message.base,
            tokens=message.tokens,
            steps=message.steps,
            loss=message.loss,
            codec=message.codec,
            payload_bytes=len(payload),
            chunks=await self._stored(payload, reserved),
            previous=NO_RECORD,
        )
        payload.release()
        effects = self._dispatch(ev.Publish(body))
        if not any(isinstance(effect, fx.Store) for effect in effects):
            self._chunks.release(reserved)
            self.acknowledge(message.round)

    async def _stored(self, payload: memoryview, reserved: set[bytes]) -> tuple[bytes, ...]:
        """Put the payload's chunks as soon as the disk lets us; returns their hashes."""
        while True:
            try:
                hashes = await asyncio.to_thread(self._store, payload, reserved)
            except OSError as error:
                self._dispatch(ev.Paused())
                until = writable_once(error)
                self.trouble.met(
                    f"cannot store our own delta: {error.strerror}; publishing pauses until {until}"
                )
                await asyncio.sleep(DISK_RETRY_S)
            else:
                self.trouble.not_met()
                return hashes

    def _store(self, payload: memoryview, reserved: set[bytes]) -> tuple[bytes, ...]:
        """Put the payload's chunks; those that no earlier delta has reserved are added to `reserved`."""
        hashes = []
        for view in split_payload(payload):
            piece = bytes(view)
            blob = sha256(piece).digest()
            # The same chunk in a delta whose round has closed may be about to be dropped.
            if self._chunks.reserve(blob):
                reserved.add(blob)
            self._chunks.put(blob, piece, durable=True)
            hashes.append(blob)
        return tuple(hashes)
