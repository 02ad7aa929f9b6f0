"""What a node says about itself: the JSON of ``/gossamer/1/status``."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from gossamer.node.daemon.network.links import LinkTable, PeerLink, Traffic
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import Server
from gossamer.node.daemon.phi.archive import Archive
from gossamer.node.daemon.phi.loop import Merging
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.trainer_port import TrainerPort
from gossamer.node.home import Home
from gossamer.node.ipc.messages import JOINING, Report
from gossamer.protocol.identity import short
from gossamer.protocol.limits import LINK_PREFIX_BYTES
from gossamer.protocol.membership.members import Health, Member
from gossamer.protocol.replica import Replica

if TYPE_CHECKING:  # a command that only asks for a status needs none of this, nor NumPy
    from gossamer.node.ipc.messages import Report
    from gossamer.protocol.ledger import Ledger
    from gossamer.protocol.membership.members import Member
    from gossamer.protocol.merge.contributions import Summary


# --- Bytes per second of every link, from its counters.

SAMPLES = 6
"""How many looks, a second apart, a rate is measured over: steady to the eye, and still current."""


class Rates:
    """Reads the counters of links at intervals."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, int, int]]] = {}

    def look(self, links: Iterable[PeerLink], now: float) -> None:
        """Read the counters; links that are gone are forgotten."""
        kept = {}
        for link in links:
            samples = self._samples.get(link.number) or deque(maxlen=SAMPLES)
            samples.append((now, *_totals(link.traffic)))
            kept[link.number] = samples
        self._samples = kept

    def of(self, number: int) -> tuple[float, float]:
        """Bytes sent and received per second on a link, 0 if it is too new to tell."""
        samples = self._samples.get(number)
        if not samples or samples[-1][0] <= samples[0][0]:
            return 0.0, 0.0
        (begin, sent, received), (end, sent_now, received_now) = samples[0], samples[-1]
        return (sent_now - sent) / (end - begin), (received_now - received) / (end - begin)


def _totals(traffic: Traffic) -> tuple[int, int]:
    return traffic.sent + traffic.payload_sent, traffic.received + traffic.payload_received


# --- The network's links as one node knows them: its own, and those that the others' rows tell of.

LIVE = (Health.ALIVE, Health.SUSPECT)


def known_links(own: Iterable[bytes], others: Sequence[Member]) -> list[tuple[int, int]]:
    """Pairs of places, ascending: we are 0, and `others` are 1, 2, ... in their order.

    `own` are the ids of the nodes that we are linked to. A row counts while its author is live, and so do the
    members that it names. It names them by the beginning of their ids; a beginning that two live members
    share names nobody.
    """
    place_of = {member.record.node_id: place for place, member in enumerate(others, 1)}
    live = [member for member in others if member.health in LIVE]
    beginnings = Counter(_beginning(member) for member in live)
    alone = [member for member in live if beginnings[_beginning(member)] == 1]
    by_beginning = {_beginning(member): place_of[member.record.node_id] for member in alone}
    found = {(0, place_of[node_id]) for node_id in own if node_id in place_of}
    for member in live:
        here = place_of[member.record.node_id]
        there = {by_beginning[start] for start in member.record.body.dialled if start in by_beginning}
        found |= {(min(here, place), max(here, place)) for place in there - {here}}
    return sorted(found)


def _beginning(member: Member) -> bytes:
    return member.record.node_id[:LINK_PREFIX_BYTES]


# --- One node as seen by the code that shows it: the status, the admin server, metrics, the chronicle.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The parts of a daemon that are shown. Holders of a view only read."""

    home: Home
    core: Replica
    port: TrainerPort
    merging: Merging
    archive: Archive
    links: LinkTable
    server: Server
    scores: PeerScores
    disk: Disk
    stopping: asyncio.Event
    started: float = field(default_factory=time.monotonic)

    @property
    def node_id(self) -> bytes:
        return self.core.identity.node_id

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def report(self) -> Report | None:
        """The trainer's last report, with no speed once the trainer is gone; None if there was none yet."""
        return self.port.report

    @property
    def sealed_round(self) -> int | None:
        """Round of the newest snapshot here."""
        claims = self.core.sealing.claims
        return claims[0].round if claims else None

    @property
    def state(self) -> str:
        """joining, starting, training, serving, finished or leaving."""
        if self.stopping.is_set():
            return "leaving"
        if not self.merging.ready:
            return "joining"
        if not self.core.info.trains:
            return "serving"
        report = self.report if self.port.attached else None
        # A trainer says that it is joining until it begins to train, be the model here for long.
        return "starting" if report is None or report.state == JOINING else report.state


async def status_of(view: "NodeView", query: Mapping[str, str]) -> dict[str, Any]:
    """What `describe` says, and what the query asks for besides.

    ``digest``: the digests of the merged records and of Phi. ``up_to``: the digest of the records merged up
    to that round.
    """
    digests = await view.merging.recent_digest.get() if query.get("digest") else None
    status = describe(view)
    if digests is not None:
        status["merged_digest"], status["phi_digest"] = (digest.hex() for digest in digests)
    up_to = query.get("up_to", "")
    if up_to.isdecimal() and len(up_to) <= 10:
        prefix = await view.merging.prefix_digest(int(up_to))
        status["prefix"] = {"up_to": int(up_to), "digest": prefix.hex() if prefix else None}
    return status


def describe(view: "NodeView") -> dict[str, Any]:
    """The node's state; docs/status.md describes every field."""
    core, merging, scores = view.core, view.merging, view.scores
    sent, received, payload_sent, payload_received = view.links.traffic()
    status: dict[str, Any] = {
        "swarm_id": core.swarm_id.hex(),
        "swarm": core.manifest.swarm.name,
        "node_id": core.identity.node_id.hex(),
        "name": core.info.name,
        "trains": core.info.trains,
        "invited_until": core.acl.invited_until(core.identity.node_id),
        "state": view.state,
        "uptime_s": round(view.uptime_s, 1),
        "round": core.own_last,
        "clock": core.clock,
        "records": len(core.ledger),
        "ledger_digest": core.ledger.digests.root.hex(),
        "sealed_round": view.sealed_round,
        "closed_round": core.ledger.floor,
        "fetching": view.archive.progress(),
        "version": merging.version,
        "swarm_tokens": merging.tokens,
        "rounds_behind": merging.behind,
        "payloads_missing": len(core.fetcher.wants),
        "links": [
            {
                "node_id": link.node_id.hex(),
                "outbound": link.outbound,
                "dropped": link.dropped,
                "throttled_s": round(link.throttled_s, 1),
            }
            for link in view.links.values()
        ],
        "members": [
            _member(member, core.ledger, merging.conduct.of(member.record.node_id))
            for member in sorted(core.roster.members(), key=_place)
        ],
        "conduct": merging.conduct.of(core.identity.node_id)._asdict(),
        "agreement": merging.conduct.agreement,
        "void": [{"node_id": author.hex(), "round": round_} for author, round_ in core.ledger.voided()],
        "misbehaviours_seen": scores.blamed,
        "throttled": scores.throttled,
        "greylisted": scores.greylisted,
        "turned_away": scores.turned_away,
        "door": view.server.limiter.describe(),
        "tasks": len(asyncio.all_tasks()),
        "bytes_sent": sent + payload_sent,
        "bytes_received": received + payload_received,
        "payload_bytes_sent": payload_sent,
        "payload_bytes_received": payload_received,
    }
    if view.report is not None:
        status["trainer"] = _trainer(view.report)
    return status


def _place(member: "Member") -> tuple[bool, str, bytes]:
    """Sort key: by name, with members that are gone last, since a day may leave hundreds of them."""
    return member.is_gone, member.record.body.name, member.record.node_id


def _member(member: "Member", ledger: "Ledger", conduct: "Summary") -> dict[str, Any]:
    row = member.record.body
    return {
        "node_id": member.record.node_id.hex(),
        "name": row.name,
        "health": member.health.value,
        "trains": row.trains,
        "round": max(row.round, ledger.last_round(member.record.node_id)),
        "tokens": row.tokens,
        "tokens_per_s": member.tokens_per_s,
        "loss": row.loss,
        "addresses": list(row.addresses),
        "dialled": [prefix.hex() for prefix in row.dialled],
        "conduct": conduct._asdict(),
    }


def _trainer(report: "Report") -> dict[str, Any]:
    return {
        "state": report.state,
        "device": report.device,
        "inner_steps": report.inner_steps,
        "tokens": report.tokens,
        "tokens_per_s": report.tokens_per_s,
        "loss": loss_of(report) or 0.0,
        "val_loss": finite(report.val_loss),
        "val_loss_start": finite(report.val_loss_start),
        "val_version": report.evaluated_version,
        "val_round": report.evaluated_round,
        "wait_fraction": report.wait_fraction,
    }


def loss_of(report: "Report | None") -> float | None:
    """Training loss of the latest step; None before the first step, or if it is not finite."""
    return finite(report.loss) if report is not None and report.inner_steps else None


def finite(value: float | None) -> float | None:
    """The value, or None if it is not finite: JSON cannot express that."""
    return value if value is not None and isfinite(value) else None


def one_line(status: dict[str, Any]) -> str:
    """A status in one line for a person."""
    trainer = status.get("trainer") or {}
    loss = f", loss {trainer['loss']:.3f}" if trainer.get("loss") else ""
    live = sum(member["health"] == "alive" for member in status["members"])
    links = len(status["links"])
    reach = f"{live} peer{'s' * (live != 1)} alive, {links} link{'s' * (links != 1)}"
    name = status["name"] or short(bytes.fromhex(status["node_id"]))
    # A node that does not train publishes nothing, and its own round would stay 0 for ever.
    at = f"{status['round']} (swarm {status['clock']})" if status["trains"] else f"{status['clock']}"
    return f"{name}: {status['state']}, round {at}{loss}, {reach}"
