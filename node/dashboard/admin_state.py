"""The state of a node as the page and `gossamer top` show it: JSON, about once a second.

Ids are in hex, times and durations in seconds, sizes in bytes.
"""

import time
from typing import Any

from gossamer.node import __version__
from gossamer.node.monitoring.known_links import LIVE, known_links
from gossamer.node.monitoring.replicas import Comparison, compare, summary
from gossamer.node.monitoring.status import finite, loss_of
from gossamer.node.monitoring.view import NodeView
from gossamer.node.monitoring.watching import Watching
from gossamer.protocol.admission.charter import Role
from gossamer.protocol.membership.roster import Health, Member
from gossamer.protocol.merging.conduct import Summary
from gossamer.protocol.records import RowBody


def admin_state(view: NodeView, watching: Watching) -> dict[str, Any]:
    """What is shown about a node, its swarm and its members."""
    others = view.core.roster.members()
    claims = view.core.sealing.claims
    found = [compare(claims, m.row.body.claims) if m.health in LIVE else None for m in others]
    members = [_itself(view), *(_member(view, m, f) for m, f in zip(others, found, strict=True))]
    return {
        "time": round(time.time(), 3),
        "swarm": _swarm(view),
        "node": _node(view, watching),
        "now": {**_now(view, members), "agree": summary(claims, found)},
        "members": members,
        "links": _links(view, watching),
        "edges": known_links((link.node_id for link in view.links.values()), others),
    }


def _swarm(view: NodeView) -> dict[str, Any]:
    manifest, layout = view.core.manifest, view.core.layout
    pace = manifest.pace
    return {
        "id": view.core.swarm_id.hex(),
        "name": manifest.swarm.name,
        "task": manifest.task.name,
        "parameters": layout.numel,
        "tensors": sum(len(fragment.slots) for fragment in layout.fragments),
        "fragments": len(layout.fragments),
        "codec": manifest.outer.codec,
        "averaging": sorted({s.spec.averaging for fragment in layout.fragments for s in fragment.slots}),
        "pace": f"{pace.every_steps} steps" if pace.every_steps else f"{pace.every_seconds:g} s",
        "admission": manifest.admission.mode,
    }


def _node(view: NodeView, watching: Watching) -> dict[str, Any]:
    report = view.report
    return {
        "id": view.node_id.hex(),
        "name": view.core.info.name,
        "state": view.state,
        "trains": view.core.info.trains,
        "version": __version__,
        "uptime_s": round(view.uptime_s, 1),
        "addresses": list(view.core.own_row.addresses),
        "reachable": watching.vitals.reachable,
        "device": report.device if report else "",
        "folder": str(view.home.root.absolute()),
    }


def _now(view: NodeView, members: list[dict[str, Any]]) -> dict[str, Any]:
    core, report = view.core, view.report
    training = [m for m in members if m["trains"] and m["health"] in LIVE]
    fetching = view.archive.progress()
    return {
        "round": core.own_last,
        "clock": core.clock,
        "swarm_tokens": view.merging.tokens,
        "own_tokens": report.tokens if report else 0,
        "tokens_per_s": finite(report.tokens_per_s) or 0.0 if report else 0.0,
        "swarm_tokens_per_s": sum(member["tokens_per_s"] for member in training),
        "inner_steps": report.inner_steps if report else 0,
        "loss": loss_of(report),
        "val_loss": finite(report.val_loss) if report else None,
        "val_version": report.evaluated_version if report else 0,
        "val_round": report.evaluated_round if report else 0,
        "wait_fraction": report.wait_fraction if report else 0.0,
        "rounds_behind": view.merging.behind,
        "payloads_missing": len(core.fetcher.wants),
        "sealed_round": view.sealed_round,
        "closed_round": core.ledger.floor,
        "records": len(core.ledger),
        "version": view.merging.version,
        "fetching": list(fetching) if fetching else None,
    }


def _itself(view: NodeView) -> dict[str, Any]:
    report = view.report
    row = _row(view, view.node_id, view.core.own_row)
    if report is not None:  # newer than what the row tells others
        row.update(tokens=report.tokens, device=report.device)
    return {
        **row,
        "health": Health.ALIVE.value,
        "self": True,
        "heard_s": 0.0,
        "claim": None,
        "claim_round": None,
    }


def _member(view: NodeView, member: Member, found: Comparison | None) -> dict[str, Any]:
    return {
        **_row(view, member.row.node_id, member.row.body),
        "health": member.health.value,
        "tokens_per_s": member.tokens_per_s,
        "self": False,
        "heard_s": round(max(0.0, time.monotonic() - member.heard), 1),
        "claim": found.likeness.value if found else None,
        "claim_round": found.round if found else None,
    }


def _row(view: NodeView, node_id: bytes, row: RowBody) -> dict[str, Any]:
    """The fields that are the same for ourselves and for others."""
    may_train = view.core.charter.role_of(node_id) is Role.TRAIN
    return {
        "id": node_id.hex(),
        "name": row.name,
        "trains": row.trains,
        "round": max(row.round, view.core.ledger.last_round(node_id)),
        "tokens": row.tokens,
        "tokens_per_s": row.tokens_per_s,
        "loss": row.loss or None,
        "device": row.device,
        "version": row.version,
        "addresses": list(row.addresses),
        "role": "train" if row.trains and may_train else "observe",
        "conduct": _conduct(view.merging.conduct.of(node_id)),
    }


def _conduct(found: Summary) -> dict[str, Any] | None:
    """What has been seen of a member's deltas; None if it has published none lately."""
    if not found.judged:
        return None
    return {
        "judged": found.judged,
        "void": found.void,
        "clipped": found.clipped,
        "mean_clip": found.clip_factor,
        "opposed": found.opposed,
        "agreement": found.agreement,
        "verdict": found.verdict,
    }


def _links(view: NodeView, watching: Watching) -> list[dict[str, Any]]:
    rows = []
    for link in view.links.values():
        sent, received = watching.rates.of(link.number)
        rows.append(
            {
                "id": link.node_id.hex(),
                "outbound": link.outbound,
                "sent": link.traffic.sent,
                "received": link.traffic.received,
                "payload_sent": link.traffic.payload_sent,
                "payload_received": link.traffic.payload_received,
                "sent_per_s": round(sent, 1),
                "received_per_s": round(received, 1),
                "dropped": link.dropped,
            }
        )
    return rows
