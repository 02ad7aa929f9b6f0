"""Reads a daemon's status once a second, judges it, and keeps what happens over time.

Nothing that the node does for the swarm depends on it, and a fault in here is only logged.
"""

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.node import __version__
from gossamer.node.daemon.monitoring.events import LogRing, SwarmEvents
from gossamer.node.daemon.monitoring.health import HealthChecks
from gossamer.node.daemon.monitoring.members import LISTED, LISTED_MAX, Members
from gossamer.node.daemon.monitoring.round_history import RoundHistory, load_rounds, save_rounds
from gossamer.node.daemon.monitoring.status import (
    DataStatus,
    LinkStatus,
    NodeStatus,
    TrainerStatus,
    Vitals,
    to_json,
)
from gossamer.node.daemon.network.links import LinkTable, PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import Server
from gossamer.node.daemon.phi.archive import Archive
from gossamer.node.daemon.phi.data_view import DataView
from gossamer.node.daemon.phi.loop import MergeLoop
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.trainer_port import TrainerPort
from gossamer.node.home import Home
from gossamer.node.ipc.messages import JOINING, Report
from gossamer.protocol.errors import RefusedError, StorageError
from gossamer.protocol.manifest import Manifest, PaceSection
from gossamer.protocol.merge.contributions import RoundFigures
from gossamer.protocol.payloads import Layout
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica
from gossamer.protocol.sampling import EVERY_ROUND

TICK_S = 1.0
DISK_TICKS = 10
SAVE_TICKS = 30
"""A node that is killed loses this many seconds of its history of rounds; its records are not affected."""

LAGS = 60
STEPPING_STATES = frozenset({"starting", "training"})
"""States in which the next thing that a trainer does is a step."""

BEHIND_MAX = 10
"""With more rounds that wait to be merged, a node does not hold the current model: it was away."""

SERVING_STATES = frozenset({"starting", "training", "serving", "finished"})
"""The states of a node that has joined and does not leave: all that is wrong then is a problem of its own."""

log = logging.getLogger("gossamer.monitor")
_ALL = logging.getLogger("gossamer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The parts of a daemon that its status is read from. Nothing here changes them."""

    home: Home
    core: Replica
    port: TrainerPort
    loop: MergeLoop
    archive: Archive
    data: DataView
    links: LinkTable
    server: Server
    scores: PeerScores
    disk: Disk
    stopping: asyncio.Event
    started: float = field(default_factory=time.monotonic)

    @property
    def state(self) -> str:
        """One of `status.STATES`."""
        if self.stopping.is_set():
            return "leaving"
        if not self.loop.ready:
            return "joining"
        if not self.core.info.trains:
            return "serving"
        report = self.port.report if self.port.attached else None
        # A trainer says that it is joining until it begins to train, be the model here for long.
        return "starting" if report is None or report.state == JOINING else report.state


class Monitor:
    """What is known of a daemon now, and over time."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.health = HealthChecks()
        self.log = LogRing()
        self.events = SwarmEvents()
        self._members = Members(sources.core, sources.loop)
        self.history = RoundHistory(sources.core)
        self._save_anew = True
        """Whether the history's file is to be replaced by what is known now: it may be damaged."""
        self._model = _model(sources.core.manifest, sources.core.layout)
        self._free = _free_in(sources.home)
        self._lags = deque([0.0], maxlen=LAGS)
        self._has_failed = False
        self._looked = asyncio.Event()
        self._latest: NodeStatus | None = None

    # -- called by the daemon

    async def restore(self) -> None:
        """Read back what an earlier run saved, and what the ledger holds beyond that."""
        _ALL.addHandler(self.log)
        self.history.restore(await asyncio.to_thread(load_rounds, self._sources.home.history_path))
        for delta in self._sources.core.ledger:
            self.heard(delta)

    def heard(self, delta: Delta) -> None:
        """Note a record that is new here."""
        with self._contained():
            self.history.heard(delta, live=self._sources.loop.ready)

    def merged(self, round_: int, deltas: tuple[Delta, ...], found: RoundFigures | None) -> None:
        """Note that a round was merged, or merged again."""
        with self._contained():
            self.history.merged(round_, deltas, found)

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Inside, a fault is logged, once, and must not end the node."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                log.exception("an error while watching this node; the node goes on")
            self._has_failed = True

    # -- as time goes by

    async def run(self) -> None:
        """Look every second until cancelled."""
        loop = asyncio.get_running_loop()
        ticks = 0
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            with self._contained():
                await self._tick(ticks, loop.time() - due)
            ticks += 1
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()

    async def next_look(self) -> NodeStatus:
        """Wait for the next look at the node."""
        await self._looked.wait()
        return self.latest

    async def _tick(self, ticks: int, late_s: float) -> None:
        if ticks % DISK_TICKS == 0:
            self._free = await asyncio.to_thread(_free_in, self._sources.home)
        if ticks % SAVE_TICKS == 0:
            await self._save()
        self._lags.append(max(0.0, late_s))
        self._latest = status = self.read()
        self.health.check(status, time.monotonic())
        roster = self._sources.core.roster
        self.events.log(status, roster.members(), roster.delay_s)
        self.history.evaluated(self._sources.port.report)

    async def _save(self) -> None:
        """Save what has changed; what cannot be written now is tried again with the next."""
        anew, self._save_anew = self._save_anew, True  # until it is done: this may be cancelled, or fail
        rounds = self.history.take_unsaved(everything=anew)
        path = self._sources.home.history_path
        try:
            self._save_anew = await asyncio.to_thread(save_rounds, path, rounds, anew=anew)
        except StorageError as error:
            log.debug("%s", error)

    async def close(self) -> None:
        """Save the rest, and stop."""
        _ALL.removeHandler(self.log)
        with self._contained():
            await self._save()

    # -- questions

    @property
    def latest(self) -> NodeStatus:
        """The status at the last look, or now if there was none yet."""
        return self._latest or self.read()

    def is_healthy(self) -> tuple[bool, str]:
        """Whether the node is healthy, and its problem or its state."""
        if problem := self.health.problem or self._sources.disk.problem:
            return False, problem
        state = self._sources.state
        return state in SERVING_STATES, state

    def is_ready(self) -> tuple[bool, str]:
        """Whether the node holds the swarm's current model, and its state or how far it is behind.

        One that is alone is ready, and so is one whose trainer or disk has a problem: it serves others.
        """
        state, behind = self._sources.state, self._sources.core.rounds_behind
        if behind > BEHIND_MAX:
            return False, f"{state}: {behind} rounds wait to be merged"
        return state in SERVING_STATES, state

    async def answer(self, query: Any) -> dict[str, Any]:
        """The status for other nodes, and what their query asks for besides.

        ``digest``: the digests of the merged records, of Phi and of the averaged model. ``up_to``: that of
        the records merged up to that round. ``members``: how many to list, after the first ``skip``.
        """
        merging = self._sources.loop
        digests = await merging.digest() if query.get("digest") else None
        limit = min(_number(query, "members", LISTED), LISTED_MAX)
        status = to_json(self.read(limit, _number(query, "skip", 0)), is_for_others=True)
        if digests is not None:
            status["merged_digest"], status["phi_digest"] = digests.merged.hex(), digests.phi.hex()
            status["average_digest"], status["average_round"] = digests.average.hex(), digests.average_round
        up_to = _number(query, "up_to", -1)
        if up_to >= 0:
            prefix = await merging.prefix_digest(up_to)
            status["prefix"] = {"up_to": up_to, "digest": prefix.hex() if prefix else None}
        return status

    def read(self, limit: int = LISTED, skip: int = 0) -> NodeStatus:
        """The status at this moment, with so many of the members after the first `skip`."""
        sources, core, loop = self._sources, self._sources.core, self._sources.loop
        report = sources.port.report
        healthy, reason = self.is_healthy()
        claims = core.sealing.claims
        survey = self._members.survey([link.node_id for link in sources.links.values()])
        itself = self._members.status(core.identity.node_id, core.own_record, None)
        if report is not None:  # newer than what our record tells others
            itself = replace(
                itself, tokens=report.tokens, device=report.device, tokens_per_s=report.tokens_per_s
            )
        sent, received, payload_sent, payload_received = sources.links.traffic()
        return NodeStatus(
            time=round(time.time(), 3),
            swarm_id=core.swarm_id.hex(),
            swarm=core.manifest.swarm.name,
            model=self._model,
            node_id=core.identity.node_id.hex(),
            name=core.info.name,
            trains=core.info.trains,
            release=__version__,
            folder=str(sources.home.root.absolute()),
            addresses=tuple(core.own_record.addresses),
            reachable=sources.links.dialled_by_others > 0,
            invited_until=core.acl.invited_until(core.identity.node_id),
            state=sources.state,
            problem=None if healthy else reason,
            uptime_s=round(time.monotonic() - sources.started, 1),
            round=core.own_last,
            clock=core.clock,
            codec=core.codec.name,
            codec_why=core.codec.why,
            records=len(core.ledger),
            ledger_digest=core.ledger.digests.root.hex(),
            void=tuple({"node_id": author.hex(), "round": at} for author, at in core.ledger.voided()),
            sealed_round=claims[0].round if claims else None,
            sealed_digest=claims[0].root.hex() if claims else None,
            closed_round=core.ledger.floor,
            fetching=sources.archive.progress(),
            payloads_missing=len(core.fetcher.wants),
            version=loop.version,
            rounds_behind=core.rounds_behind,
            merge_s=loop.seconds,
            swarm_tokens=loop.tokens if loop.ready else None,
            window=loop.pace[0],
            turn=loop.pace[1] / EVERY_ROUND,
            window_why=loop.window_why,
            agreement=loop.contributions.agreement,
            data=_data(sources.data) if core.manifest.data.blocks else None,
            itself=itself,
            by_health=survey.by_health,
            replicas=survey.replicas,
            same_at=survey.same_at,
            swarm_tokens_per_s=survey.tokens_per_s + itself.tokens_per_s,
            members=self._members.listed(survey.order[skip : skip + limit]),
            members_accused=survey.accused,
            links=tuple(map(_link, sources.links.values())),
            bytes_sent=sent + payload_sent,
            bytes_received=received + payload_received,
            payload_bytes_sent=payload_sent,
            payload_bytes_received=payload_received,
            control_bytes_sent=sent,
            control_bytes_received=received,
            misbehaviours_seen=sources.scores.blamed,
            throttled=sources.scores.throttled,
            greylisted=sources.scores.greylisted,
            turned_away=sources.scores.turned_away,
            listener=sources.server.limiter.describe(),
            trainer=_trainer(report) if report is not None else None,
            tasks=len(asyncio.all_tasks()),
            lag_s=max(self._lags),
            disk_free=self._free[0],
            vitals=self._vitals(len(survey.addresses.union(core.info.bootstrap))),
        )

    def _vitals(self, known_addresses: int) -> Vitals:
        """What only the health checks need."""
        sources, core, port = self._sources, self._sources.core, self._sources.port
        has_step_to_do = port.attached and sources.state in STEPPING_STATES
        offsets = (link.clock_offset_s for link in sources.links.values())
        refusal = ""
        try:
            core.access.vet(core.identity.node_id, b"", time.monotonic())
        except RefusedError as error:
            refusal = str(error)
        return Vitals(
            late_s=self._lags[-1],
            files_free=self._free[1],
            is_ready=sources.loop.ready,
            has_model=core.sealing.joined,
            known_addresses=known_addresses,
            refusal=refusal,
            fetched_bytes=core.fetcher.came,
            missing_is_held=core.fetcher.wants.any_has_holder,
            diverged=sources.loop.diverged,
            clock_offsets=tuple(offset for offset in offsets if offset is not None),
            clock_contradicted=core.is_contradicted,
            has_trainer=port.attached,
            trainer_starts=port.attachments,
            step_overdue_s=port.pulse.overdue_s(time.monotonic()) if has_step_to_do else 0.0,
            own_void=len(core.ledger.void_rounds(core.identity.node_id)),
        )


def _number(query: Any, name: str, default: int) -> int:
    """A number in a query; what is none counts as not given."""
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else default


def _length(pace: PaceSection) -> str:
    return f"{pace.every_steps} steps" if pace.every_steps else f"{pace.every_seconds:g} s"


def _model(manifest: Manifest, layout: Layout) -> dict[str, Any]:
    pace, codecs = manifest.pace, manifest.outer.codecs
    return {
        "task": manifest.task.name,
        "parameters": layout.numel,
        "tensors": len(manifest.layout.tensors),
        "fragments": len(layout.fragments),
        "codec": " to ".join(dict.fromkeys((codecs[0].name, codecs[-1].name))),
        "averaging": sorted({slot.spec.averaging for each in layout.fragments for slot in each.slots}),
        "pace": "window" if pace.is_set_by_swarm else _length(pace),
        "admission": manifest.admission.mode,
    }


def _data(view: DataView) -> DataStatus:
    view.look()
    claims = view.claims
    current, before = claims.current, claims.before
    blocks = current.claimed.size
    seen = float(current.claimed.sum()) / blocks
    return DataStatus(
        epoch=claims.epoch,
        seen_once=max(0.0, seen - current.again / blocks),
        seen_again=current.again / blocks,
        not_seen=1.0 - seen,
        before_seen=float(before.claimed.sum()) / blocks if claims.epoch else None,
        before_seen_again=before.again / blocks if claims.epoch else None,
    )


def _trainer(report: Report) -> TrainerStatus:
    has_joined = report.state != JOINING
    return TrainerStatus(
        state=report.state,
        device=report.device,
        inner_steps=report.inner_steps if has_joined else None,
        tokens=report.tokens if has_joined else None,
        tokens_per_s=report.tokens_per_s,
        loss=report.loss if report.inner_steps else None,
        val_loss=report.val_loss,
        val_loss_average=report.val_loss_average,
        val_loss_start=report.val_loss_start,
        val_version=report.evaluated_version,
        val_round=report.evaluated_round,
        wait_fraction=report.wait_fraction,
    )


def _link(link: PeerLink) -> LinkStatus:
    return LinkStatus(
        node_id=link.node_id.hex(),
        outbound=link.outbound,
        sent=link.traffic.sent,
        received=link.traffic.received,
        payload_sent=link.traffic.payload_sent,
        payload_received=link.traffic.payload_received,
        dropped=link.dropped,
        throttled_s=round(link.throttled_s, 1),
    )


def _free_in(home: Home) -> tuple[int, int]:
    """Bytes and files that fit into a node's folder; its chunks may be on another disk. Raises OSError."""
    found = [os.statvfs(path) for path in (home.root, home.chunks_path)]
    files = [each.f_favail for each in found if each.f_files]  # some file systems have no bound
    return min(each.f_bavail * each.f_frsize for each in found), min(files, default=sys.maxsize)
