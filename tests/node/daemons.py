"""Daemons in this process, with the test as their trainer, for the tests of monitoring."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from gossamer.node.daemon.daemon import Daemon
from gossamer.node.daemon.dashboard.server import token_here
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home, manifest_of
from gossamer.node.ipc import messages as control
from gossamer.node.options import NodeOptions
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.protocol.payloads import TensorSpec, encode_payload
from tests.node.trainer_side import until
from tests.protocol.builders import manifest as build_manifest
from tests.protocol.builders import one_rung

SPECS = (TensorSpec("w", (30, 10), "rda"), TensorSpec("b", (10,), "mean"))
PHI = np.arange(310, dtype=np.int32)


def release(home: Home) -> None:
    """Release a folder's lock, as the end of the process does."""
    while home.locked:
        os.close(home.locked.pop())


def founded(folder: Path) -> Home:
    """A folder with a manifest and the first model."""
    swarm = {"name": "n", "created": int(time.time())}
    genesis = {"digest": snapshots.digest(PHI).hex()}
    manifest = build_manifest(SPECS, 1, genesis=genesis, swarm=swarm, outer=one_rung("int8"))
    home = Home(folder)
    home.create()
    home.adopt(manifest)
    snapshots.store(PHI, ChunkStore(home.chunks_path))
    return home


def joining(folder: Path, first: Home) -> Home:
    """A folder with the manifest of another node's folder."""
    home = Home(folder)
    home.create()
    home.adopt(manifest_of(first))
    return home


@contextlib.asynccontextmanager
async def started(home: Home, **options: Any) -> AsyncIterator[tuple[Daemon, asyncio.Task[None]]]:
    """A daemon that has just begun to run, and its task. It is stopped afterwards; raises what ended it."""
    daemon = Daemon(NodeOptions(folder=home.root, **{"listen": "127.0.0.1:0", "plaintext": True, **options}))
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon, task
    finally:
        daemon.stop()
        await asyncio.wait([task], timeout=60)
        release(daemon.store.home)  # as the end of its process would do
        await task


@contextlib.asynccontextmanager
async def running(home: Home, **options: Any) -> AsyncIterator[Daemon]:
    """A daemon that listens, with its admin server on a port that the system chooses."""
    home.daemon_path.unlink(missing_ok=True)
    async with started(home, **{"admin": "127.0.0.1:0", **options}) as (daemon, task):
        await until(lambda: task.done() or home.read_daemon())
        if task.done():
            await task
        yield daemon


def facts(home: Home) -> dict[str, Any]:
    found = home.read_daemon()
    assert found is not None
    return found


@contextlib.asynccontextmanager
async def training(home: Home) -> AsyncIterator[DaemonLink]:
    """A trainer's link to the daemon in a folder."""
    link = DaemonLink(home.socket_path(), manifest_of(home))
    try:
        assert await asyncio.to_thread(link.wait_connected, 60)
        yield link
    finally:
        await asyncio.to_thread(link.close)


async def publish(home: Home, link: DaemonLink, round_: int, loss: float = 2.0, value: int = 1000) -> None:
    """Hand in a delta and wait until it is acknowledged."""
    fragment = manifest_of(home).plan().fragments[0]
    data = encode_payload("int8", fragment, [np.full(s.numel, value, dtype=np.int32) for s in fragment.slots])
    area = link.payload_area
    area[: len(data)] = data
    link.publish(control.Publish(round_, round_ - 1, 100, 10, loss, "int8", len(data)), area)
    assert await asyncio.to_thread(link.wait_acknowledged, 60)


def report(**changes: Any) -> control.Report:
    values: dict[str, Any] = {
        "state": "training",
        "inner_steps": 10,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "loss": 2.0,
        "val_loss": 2.5,
        "val_loss_average": 2.25,
        "val_loss_start": 5.0,
        "evaluated_version": 1,
        "evaluated_round": 1,
        "wait_fraction": 0.01,
        "device": "cpu",
    }
    return control.Report(**{**values, **changes})


async def get(home: Home, path: str, **options: Any) -> tuple[int, Any, Any]:
    """Status, headers and body (parsed, if it is JSON) of a response of a node's admin server."""
    url = f"http://{facts(home)['admin']}{path}"
    method = options.pop("method", "GET")
    async with aiohttp.ClientSession() as session, session.request(method, url, **options) as response:
        is_json = response.content_type == "application/json"
        body = await response.json() if is_json else await response.text()
        return response.status, response.headers, body


async def events_until(address: str, name: str, condition: Any = lambda data: True) -> list[tuple[str, Any]]:
    """All server-sent events up to the first of a name that fulfils a condition."""
    seen, event = [], ""
    headers = {"Authorization": f"Bearer {token_here()}"}
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession(read_bufsize=1 << 20, headers=headers) as session,
        session.get(f"http://{address}/api/events") as response,
    ):
        while line := await response.content.readline():
            field, _, value = line.rstrip(b"\n").partition(b": ")
            if field == b"event":
                event = value.decode()
            elif field == b"data":
                seen.append((event, json.loads(value)))
                if event == name and condition(seen[-1][1]):
                    return seen
    raise AssertionError("the server ended first")
