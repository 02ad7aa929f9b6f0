"""Which codec of the manifest's ladder this node publishes in: the finest that its uplink carries.

Each node decides it for itself, and nothing breaks if others decide otherwise: a round may mix codecs.

**What is measured.** How long each of our deltas takes to be with half of the peers that were told of it,
from when they were told, or from when the one before was there. All that holds a delta up is in it: the line,
the peers' lines, what they fetch meanwhile. The *load* is the part that this takes of the time that a delta
may take, its share of `BUSY` of a window. Where the swarm sets its pace, that is a window of `STEPS`, however
long windows are now: they would not get shorter before the deltas do.

**Down** at once, when the median of the last `RECENT` loads is over 1: to the finest codec whose bytes fit.
What is behind the deltas of the codec before is not judged: it waits for those.

**Up** by trial only. Small payloads say little of a fast line, since they cost its latency. So now and then
one delta is sent in the next finer codec. If it fits with `ROOM` to spare, that codec is used from then on.
Trials are `PATIENCE` deltas apart. They get twice as rare, down to every `PATIENCE_MAX`, with each that fails
or whose codec does not last. So a line that comes and goes changes the codec ever less often.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from gossamer.protocol.effects import Notice, Outbox
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import length_in
from gossamer.protocol.records import Delta

STEPS = 10
"""Windows of so few steps gain nearly all that short windows can (docs/benchmarks.md)."""

BUSY = 0.5
"""The part of a window that its deltas may take: the line also passes on what others send."""

RECENT = 4
ROOM = 0.7

PATIENCE, PATIENCE_MAX = 8, 256
"""In deltas."""

UNDER_WAY_MAX = 64
"""Older deltas are given up: their peers may never say that they hold them."""


@dataclass(slots=True)
class _Sent:
    """A delta of ours that less than half of those who were told of it hold."""

    record_id: bytes
    rung: int
    is_trial: bool
    since: float
    allowed_s: float
    lacking: set[int]
    """Links whose peers do not hold it yet."""
    is_behind: bool
    """Whether it waits behind deltas in another codec: how long it takes says nothing of its own."""
    held: int = 0


class CodecChoice:
    """The choice, and the measurements behind it. With a ladder of one rung nothing is measured."""

    def __init__(self, manifest: Manifest, outbox: Outbox) -> None:
        self._outbox = outbox
        self._names = list(manifest.outer.rungs)
        layout = manifest.plan()
        rounds = range(len(layout.fragments))
        self._bytes = [sum(length_in(r, name, layout) for r in rounds) for name in self._names]
        """Of a window's payloads, by rung."""
        self._is_paced = manifest.pace.is_set_by_swarm
        self._rung = 0
        self._loads: deque[float] = deque(maxlen=RECENT)
        """Of the last deltas in the codec that is used."""
        self._under_way: deque[_Sent] = deque(maxlen=UNDER_WAY_MAX)
        self._free_at = 0.0
        """When a delta last was with half of its peers."""
        self._patience = PATIENCE
        self._since_trial = 0
        self._rose = False
        """Whether a trial led to this codec, not long ago."""
        self.why = ""
        """Why the codec last changed; empty if it has not."""

    @property
    def name(self) -> str:
        """The codec for the next delta."""
        return self._names[self._rung - (self._rung > 0 and self._since_trial >= self._patience)]

    def restore(self, own: Sequence[Delta]) -> None:
        """Go on with the codec of the last delta that an earlier run signed."""
        if own:
            last = max(own, key=lambda delta: delta.round)
            self._rung = self._names.index(last.body.codec)

    def published(self, delta: Delta, links: Iterable[int], now: float) -> None:
        """The peers of these links are told of our delta."""
        body, rung = delta.body, self._names.index(delta.body.codec)
        is_trial, lacking = rung < self._rung and body.codec == self.name, set(links)
        if lacking and body.took and len(self._names) > 1:
            windows = STEPS / body.steps if self._is_paced else 1.0
            share = BUSY * windows * body.payload_bytes / self._bytes[rung]
            allowed_s = share * body.took / 1000
            is_behind = any(sent.rung != rung and not sent.is_trial for sent in self._under_way)
            self._under_way.append(_Sent(delta.record_id, rung, is_trial, now, allowed_s, lacking, is_behind))
        self._since_trial = 0 if is_trial else self._since_trial + 1
        if self._rose and self._since_trial >= self._patience:  # it has lasted
            self._rose, self._patience = False, PATIENCE
        self._watch(now)

    def held(self, record_ids: Iterable[bytes], link: int, now: float) -> None:
        """A link's peer says that it holds the payloads of these deltas."""
        ids = set(record_ids)
        for sent in [sent for sent in self._under_way if sent.record_id in ids and link in sent.lacking]:
            sent.lacking.remove(link)
            sent.held += 1
            self._settle(sent, now)

    def link_down(self, link: int, now: float) -> None:
        for sent in list(self._under_way):
            sent.lacking.discard(link)
            self._settle(sent, now)

    def _settle(self, sent: _Sent, now: float) -> None:
        """A delta is through, if half of the peers hold it that were told of it and are still there."""
        if sent.held < len(sent.lacking):
            return
        self._under_way.remove(sent)
        if not sent.held:
            return
        load = self._load(sent, now)
        self._free_at = now
        if sent.is_trial:
            self._tried(sent.rung, load)
        elif sent.rung == self._rung and not sent.is_behind:
            self._loads.append(load)
            self._judge(list(self._loads))

    def _load(self, sent: _Sent, now: float) -> float:
        return (now - max(sent.since, self._free_at)) / sent.allowed_s

    def _watch(self, now: float) -> None:
        """Do not wait for what takes too long as it is; what is behind it will take as long."""
        sent = next(iter(self._under_way), None)
        if sent is None or (load := self._load(sent, now)) <= 1:
            return
        if sent.is_trial:
            sent.is_trial = False
            self._tried(sent.rung, load)
        elif sent.rung == self._rung and not sent.is_behind:
            waiting = sum(other.rung == self._rung for other in self._under_way)
            self._judge([*self._loads, *[load] * waiting][-RECENT:])

    def _judge(self, loads: list[float]) -> None:
        """Take a coarser codec, if the median load is too high."""
        if len(loads) < RECENT or (load := median(loads)) <= 1 or self._rung + 1 == len(self._names):
            return
        coarser = range(self._rung + 1, len(self._names))
        fitting = (rung for rung in coarser if load * self._bytes[rung] <= self._bytes[self._rung])
        if self._rose:
            self._be_patient()
        why = f"deltas in {self._names[self._rung]} take {load:.1f} times as long as they may"
        self._change(next(fitting, coarser[-1]), why)

    def _tried(self, rung: int, load: float) -> None:
        """Take a finer codec, if a delta in it fits."""
        if load > ROOM:
            self._be_patient()
        elif rung == self._rung - 1:
            self._change(rung, f"a delta in {self._names[rung]} took {load:.2f} of the time that it may")
            self._rose = True

    def _be_patient(self) -> None:
        self._patience = min(2 * self._patience, PATIENCE_MAX)

    def _change(self, rung: int, why: str) -> None:
        self._rung, self._since_trial, self._rose, self.why = rung, 0, False, why
        self._loads.clear()
        self._outbox.append(Notice(f"publishing in {self._names[rung]} from now on: {why}"))
