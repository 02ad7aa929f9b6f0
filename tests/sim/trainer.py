"""A stand-in trainer: inner steps at its own speed, small real payloads, the real pace.

It behaves like `gossamer.node.trainer.peer` with its daemon link: it begins once its daemon has caught up,
goes on
alone while the daemon is away, and hands a delta in again if the daemon died before acknowledging it. Its
deltas depend on the Phi that it has seen, so a replica that has gone astray strays further.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gossamer.protocol.events import Progress
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.pace import Pace
from gossamer.protocol.payloads import chunk_hashes, encode_payload, payload_chunk_bytes
from gossamer.protocol.records import NO_RECORD, DeltaBody
from gossamer.protocol.sampling import EVERY_ROUND

if TYPE_CHECKING:
    from tests.sim.node import Node

STEP_VARIES = 0.2
"""By which part an inner step may take more or less than usual."""

_NOISE = 1 << 16


@dataclass(frozen=True, slots=True)
class Window:
    """Inner steps since the last delta of a fragment, closed by the delta of a round."""

    base: int
    steps: int
    tokens: int
    round: int
    codec: str
    turn: int = EVERY_ROUND

    def body(self, payload: bytes) -> DeltaBody:
        return DeltaBody(
            round=self.round,
            base=self.base,
            tokens=self.tokens,
            steps=self.steps,
            loss=1.0 + 1.0 / self.round,
            codec=self.codec,
            payload_bytes=len(payload),
            chunks=chunk_hashes(payload, payload_chunk_bytes(len(payload))),
            previous=NO_RECORD,
            turn=self.turn,
        )


class Trainer:
    """The trainer process of one node."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        stage = node.stage
        node_id = node.traits.identity.node_id
        self._pace = Pace(stage.manifest.pace, stage.manifest.layout.fragments, node_id)
        self._fragments = len(stage.layout.fragments)
        seed = stage.dice(f"trainer {node.index}").randrange(2**63)
        self._rng = np.random.default_rng(seed)
        self.life = 0
        self.running = False
        self.begun = False
        self.hangs = False
        """Whether it does no steps although its process is there."""
        self.resting = False
        """Whether it does no more steps, so that the swarm comes to rest."""
        self.own_last = 0
        self._clock = 0
        self._unacknowledged: tuple[Window, bytes] | None = None
        self._steps = 0
        self._windows: list[tuple[int, int]] = []
        """For each fragment, the base of the open window and the step at which that began."""
        self._last_step = 0
        """The step at which we last published, or the clock last went past that round."""
        self.published_at = 0.0
        """When that was."""
        self._passed_by = 0
        """The clock as it last did."""

    # -- life

    def start(self) -> None:
        """Start the process; it begins to train once its daemon is ready."""
        if not self._node.traits.trains:
            return
        self.life += 1
        self.running, self.begun, self.hangs = True, False, False
        self._unacknowledged = None
        self.own_last = 0
        self._steps = self._last_step = 0
        self._windows = [(index - self._fragments if index else 0, 0) for index in range(self._fragments)]
        self._next_step(self.life)

    def die(self) -> None:
        """The process ends; its open windows are lost."""
        self.life += 1
        self.running = self.hangs = False

    def hang(self) -> None:
        """Stop doing steps: it evaluates for long, waits for its disk, or its whole machine sleeps."""
        if self.running and not self.hangs:
            self.life += 1
            self.hangs = True

    def go_on(self, *, hastily: bool = False) -> None:
        """Go on as if nothing had happened. `hastily`: first publish, if due by what the daemon last said."""
        if self.hangs:
            self.hangs = False
            if hastily and self.begun:
                self._publish_if_due()
            self._next_step(self.life)

    def daemon_is_back(self) -> None:
        """Connect to a new daemon process: hand in again the delta that the old one did not acknowledge."""
        if not self.running:
            return
        last = self._node.core.own_last
        pending = self._unacknowledged
        if pending is not None and last < pending[0].round:
            self._node.soon(0.01, self._node.publish, *pending)
        else:
            self._unacknowledged = None
            self.own_last = max(self.own_last, last)

    def acknowledged(self, round_: int) -> None:
        """The daemon has stored our delta safely, or has refused it."""
        if self._unacknowledged is not None and self._unacknowledged[0].round == round_:
            self._unacknowledged = None

    # -- the inner loop

    def _next_step(self, life: int) -> None:
        delay = self._node.traits.step_s * (1 - STEP_VARIES + 2 * STEP_VARIES * self._node.rng.random())
        self._node.stage.loop.after(delay, self._step, life)

    def _step(self, life: int) -> None:
        if life != self.life:
            return
        node = self._node
        if not self.begun:
            self._begin()
        elif not self.resting:
            self._steps += 1
            if node.responsive:
                node.dispatch(Progress(self._steps, 0, 0.0, 0.0, ""))
                self._clock = node.core.clock_to_publish_by
                self._publish_if_due()
        self._next_step(life)

    def _begin(self) -> None:
        node = self._node
        if node.responsive and node.ready:
            self.begun = True
            self.own_last = max(self.own_last, node.core.own_last)
            self._windows = [(self._merged(index), self._steps) for index in range(self._fragments)]
            self.published_at = node.stage.loop.now

    def _merged(self, index: int) -> int:
        assert self._node.fold is not None
        return self._node.fold.highest(index)

    def _publish_if_due(self) -> None:
        node = self._node
        if self._unacknowledged is not None or self.resting or node.fold is None:
            return
        now = node.stage.loop.now
        if self.own_last < self._clock != self._passed_by:
            self._passed_by, self._last_step, self.published_at = self._clock, self._steps - 1, now
        steps, seconds = self._steps - self._last_step, now - self.published_at
        length, turn, _ = node.fold.pace(max(0, self._clock))
        round_ = self._pace.due(self.own_last, self._clock, steps, seconds, length, turn)
        if round_ is None:
            return
        index = round_ % self._fragments
        base, begun = self._windows[index]
        steps = self._steps - begun
        base = min(base, round_ - self._fragments)
        window = Window(base, steps, steps * node.traits.batch_tokens, round_, node.core.codec.name, turn)
        payload = self._encode(index, window.codec)
        self._windows[index] = (max(round_, self._merged(index)), self._steps)
        self._unacknowledged = (window, payload)
        self.own_last = round_
        self._last_step = self._steps
        self.published_at = now
        node.soon(0.001, node.publish, window, payload)

    def _encode(self, index: int, codec: str) -> bytes:
        """A delta that pulls Phi towards zero, with noise."""
        stage, fold = self._node.stage, self._node.fold
        assert fold is not None
        fragment = stage.layout.fragments[index]
        tensors: list[Ints] = []
        for slot in fragment.slots:
            start = fragment.offset + slot.offset
            noise = self._rng.integers(-_NOISE, _NOISE, slot.numel, dtype=np.int32)
            tensors.append((fold.phi[start : start + slot.numel] >> 5) + noise)
        return encode_payload(codec, fragment, tensors)
