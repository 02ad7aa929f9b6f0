"""A trainer without torch: it publishes noise, at any speed, as a real one would publish deltas.

It speaks to a real daemon as a `Peer` does and keeps the pace that the protocol sets. Only its inner steps
are fake (a wait of `step_s`). So a swarm of real daemons costs a test next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import numpy as np

from gossamer.node.ipc import messages as control
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import Pace
from gossamer.protocol.payloads import encode_payload

TOKENS_PER_STEP = 100
NOISE = 1 << 10
"""Magnitude of the noise in units of Phi's resolution: 6e-5, far from diverging in thousands of rounds."""


class Puppet:
    """Pretends to train, in a task of the event loop. Use `start` and `stop`."""

    def __init__(self, socket_path: str | Path, manifest: Manifest, *, step_s: float, seed: int) -> None:
        self.step_s = step_s
        self.paused = False
        """Whether it does no more steps; it still takes what the swarm has merged."""
        self.drift = 0
        """Added to every value of its deltas: puppets with the same drift agree on a direction."""
        self.rounds: list[int] = []
        """The rounds of the deltas that it has handed in."""
        self._manifest = manifest
        self._layout = manifest.plan()
        self._codec = manifest.outer.codecs[0].name
        self._pace = Pace(manifest.pace, manifest.layout.fragments)
        self._rng = np.random.default_rng(seed)
        self._merged: dict[int, int] = {}
        self._base: dict[int, int] = {}
        """The base of each fragment's open window."""
        self._link = DaemonLink(str(socket_path), manifest)
        self._task: asyncio.Task[None] | None = None

    @property
    def settled(self) -> bool:
        """Whether all deltas handed in are signed and on disk."""
        return self._link.can_publish

    @property
    def clock(self) -> int:
        return self._link.clock

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._link.close)

    async def _run(self) -> None:
        missing = {fragment.index for fragment in self._layout.fragments}
        while missing:  # like `Peer.begin`: it trains only once the swarm's model is here
            missing -= self._take()
            await asyncio.sleep(0.02)
        steps, published_at = 0, time.monotonic()
        while True:
            await asyncio.sleep(self.step_s)
            self._take()
            if self.paused or not self._link.can_publish:
                continue
            steps += 1
            seconds = time.monotonic() - published_at
            round_ = self._pace.due(self._link.own_last, self._link.clock, steps, seconds)
            if round_ is not None:
                await self._publish(round_, steps)
                steps, published_at = 0, time.monotonic()

    def _take(self) -> set[int]:
        taken = set()
        while (offer := self._link.take_offer()) is not None:
            self._merged[offer.fragment] = offer.merged_round
            self._base.setdefault(offer.fragment, offer.merged_round)
            self._link.took(offer)
            taken.add(offer.fragment)
        return taken

    async def _publish(self, round_: int, steps: int) -> None:
        fragment = self._layout.of_round(round_)
        low, high = self.drift - NOISE, self.drift + NOISE
        noise = [self._rng.integers(low, high, slot.numel, dtype=np.int32) for slot in fragment.slots]
        payload = await asyncio.to_thread(encode_payload, self._codec, fragment, noise)
        area = self._link.payload_area
        area[: len(payload)] = payload
        body = control.Publish(
            round=round_,
            base=min(self._base[fragment.index], round_ - len(self._layout.fragments)),
            tokens=steps * TOKENS_PER_STEP,
            steps=steps,
            loss=1.0 + 1.0 / round_,
            codec=self._codec,
            payload_bytes=len(payload),
        )
        self._link.publish(body, area)
        self.rounds.append(round_)
        self._base[fragment.index] = max(round_, self._merged[fragment.index])
