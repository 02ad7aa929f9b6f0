"""What a node says about itself: the JSON of ``/gossamer/1/status``."""

import asyncio
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from gossamer.protocol.identity import short

if TYPE_CHECKING:  # a command that only asks for a status needs none of this, nor NumPy
    from gossamer.node.ipc.control import Report
    from gossamer.node.monitoring.view import NodeView
    from gossamer.protocol.gossip.ledger import Ledger
    from gossamer.protocol.membership.roster import Member
    from gossamer.protocol.merging.conduct import Summary


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
    core, merging, policing = view.core, view.merging, view.policing
    sent, received, payload_sent, payload_received = view.links.traffic()
    status: dict[str, Any] = {
        "swarm_id": core.swarm_id.hex(),
        "swarm": core.manifest.swarm.name,
        "node_id": core.identity.node_id.hex(),
        "name": core.info.name,
        "trains": core.info.trains,
        "invited_until": core.charter.invited_until(core.identity.node_id),
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
            _member(member, core.ledger, merging.conduct.of(member.row.node_id))
            for member in sorted(core.roster.members(), key=_place)
        ],
        "conduct": merging.conduct.of(core.identity.node_id)._asdict(),
        "agreement": merging.conduct.agreement,
        "void": [{"node_id": author.hex(), "round": round_} for author, round_ in core.ledger.voided()],
        "misbehaviours_seen": policing.blamed,
        "throttled": policing.throttled,
        "greylisted": policing.greylisted,
        "turned_away": policing.turned_away,
        "door": view.transport.door.describe() if view.transport.door is not None else {},
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
    return member.is_gone, member.row.body.name, member.row.node_id


def _member(member: "Member", ledger: "Ledger", conduct: "Summary") -> dict[str, Any]:
    row = member.row.body
    return {
        "node_id": member.row.node_id.hex(),
        "name": row.name,
        "health": member.health.value,
        "trains": row.trains,
        "round": max(row.round, ledger.last_round(member.row.node_id)),
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
