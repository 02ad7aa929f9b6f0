"""Transfers over a fake link, for a core that wants whatever comes."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.node.daemon.network import chunk_transfer as transfers
from gossamer.node.daemon.network.chunk_transfer import LocalChunks, Transfers
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.upload_limits import UploadLimits
from gossamer.node.daemon.phi.snapshots import SnapshotShelf
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import Offence
from gossamer.protocol.payloads.chunks import Chunk
from tests.node.full_disk import disk_of


class FakeLink:
    number = 7
    node_id = bytes(32)

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.serving = asyncio.Lock()

    def send(self, data: bytes) -> None:
        self.sent.append(data)


class Line:
    """What `chunk_requests` would do over a link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transfers, "get_chunk", self.get_chunk)
        monkeypatch.setattr(transfers, "put_chunk", self.put_chunk)
        self.answer: bytes | Exception = b""
        self.put: list[bytes] = []
        self.got = 0

    async def get_chunk(self, link: object, blob: bytes, size: int) -> bytes:
        self.got += 1
        await asyncio.sleep(0)  # others go on while this one waits for the network
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def put_chunk(self, link: object, blob: bytes, chunk: Chunk, turn: object) -> None:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.put.append(chunk.data)


class Noted(PeerScores):
    """Records which peers are blamed, or charged for small chunks."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup

    def blame(self, node_id: bytes, reason: str, offence: Offence) -> None:
        self._setup.blamed.append((node_id, offence))

    def gave_little(self, node_id: bytes) -> float:
        self._setup.charged.append(node_id)
        return super().gave_little(node_id)


class Setup:
    def __init__(self, chunks: ChunkStore, line: Line) -> None:
        self.chunks = chunks
        self.line = line
        self.wanted_by: tuple[bytes, ...] = (b"key",)
        """Keys under which the core wants any chunk."""
        wants = SimpleNamespace(keys_of=lambda blob: self.wanted_by)
        self.core: Any = SimpleNamespace(
            ledger=[], holdings=SimpleNamespace(revoked=()), fetcher=SimpleNamespace(wants=wants)
        )
        self.events: list[ev.Event] = []
        self.damaged: list[bytes] = []
        self.blamed: list[tuple[bytes, Offence]] = []
        self.charged: list[bytes] = []
        self.link = FakeLink()
        self.disk = disk_of(chunks._root)
        self.local = LocalChunks(
            chunks, self.disk, SnapshotShelf(chunks, 16), self.core, self.events.append, self.damaged.append
        )
        self.transfers = Transfers(
            self.local,
            UploadLimits(),
            Noted(self),
            asyncio.create_task,
        )

    async def get(self, data: bytes) -> None:
        blob = sha256(data).digest()
        self.transfers._getting.setdefault(self.link.number, set())
        await self.transfers.get(self.link, fx.Get(7, blob, len(data), 5.0))  # type: ignore[arg-type]

    async def ask(self, data: bytes) -> None:
        await self.transfers.ask(self.link, msg.Want(sha256(data).digest()))  # type: ignore[arg-type]
