"""`NodeStatus` of nodes that there are not: what is not given is as in a healthy node that is alone."""

from __future__ import annotations

from typing import Any

from gossamer.node.daemon.monitoring.status import (
    LinkStatus,
    MemberStatus,
    NodeStatus,
    TrainerStatus,
)
from gossamer.protocol.merge.contributions import NOTHING_SENT

MODEL = {
    "task": "text",
    "parameters": 12_345_678,
    "tensors": 75,
    "fragments": 4,
    "codec": "int4",
    "averaging": ["mean", "rda"],
    "pace": "30 steps",
    "admission": "open",
}


def member(number: int = 1, **changes: Any) -> MemberStatus:
    facts: dict[str, Any] = {
        "node_id": f"{number:02x}" * 32,
        "name": f"n{number}",
        "health": "alive",
        "trains": True,
        "role": "train",
        "round": 3,
        "tokens": 1_234_567,
        "tokens_per_s": 4321.0,
        "loss": 2.5,
        "device": "cpu",
        "release": "0.1.0",
        "addresses": (f"192.0.2.{number}:7700",),
        "dialled": (),
        "heard_s": 0.5,
        "downs": 0,
        "replica": None,
        "replica_round": None,
        "contributions": NOTHING_SENT._asdict(),
    }
    return MemberStatus(**facts | changes)


def link(number: int = 1, **changes: Any) -> LinkStatus:
    facts: dict[str, Any] = {
        "node_id": f"{number:02x}" * 32,
        "outbound": True,
        "sent": 1000,
        "received": 2000,
        "payload_sent": 0,
        "payload_received": 0,
        "dropped": 0,
        "throttled_s": 0.0,
    }
    return LinkStatus(**facts | changes)


def trainer(**changes: Any) -> TrainerStatus:
    facts: dict[str, Any] = {
        "state": "training",
        "device": "cpu",
        "inner_steps": 10,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "loss": 2.0,
        "val_loss": 2.5,
        "val_loss_start": 5.0,
        "val_version": 1,
        "val_round": 1,
        "wait_fraction": 0.01,
    }
    return TrainerStatus(**facts | changes)


def status(**changes: Any) -> NodeStatus:
    facts: dict[str, Any] = {
        "time": 1000.0,
        "swarm_id": "ab" * 32,
        "swarm": "s",
        "model": MODEL,
        "node_id": "00" * 32,
        "name": "me",
        "trains": True,
        "release": "0.1.0",
        "folder": "/d",
        "addresses": (),
        "reachable": None,
        "invited_until": None,
        "state": "training",
        "problem": None,
        "uptime_s": 40.0,
        "round": 3,
        "clock": 4,
        "records": 7,
        "ledger_digest": "cd" * 32,
        "void": (),
        "sealed_round": 0,
        "sealed_digest": None,
        "closed_round": 0,
        "fetching": None,
        "payloads_missing": 0,
        "version": 0,
        "rounds_behind": 0,
        "merge_s": 0.0,
        "swarm_tokens": 400,
        "agreement": None,
        "itself": member(0, name="me"),
        "members": (),
        "members_accused": 0,
        "links": (),
        "bytes_sent": 0,
        "bytes_received": 0,
        "payload_bytes_sent": 0,
        "payload_bytes_received": 0,
        "control_bytes_sent": 0,
        "control_bytes_received": 0,
        "misbehaviours_seen": 0,
        "throttled": 0,
        "greylisted": 0,
        "turned_away": 0,
        "listener": {},
        "trainer": None,
        "tasks": 9,
        "lag_s": 0.0,
        "late_s": 0.0,
        "disk_free": 1 << 40,
        "files_free": 1 << 20,
        "disk_problem": "",
        "is_ready": True,
        "has_model": True,
        "known_addresses": 0,
        "refusal": "",
        "fetched_bytes": 0,
        "missing_is_held": False,
        "diverged": "",
        "clock_offsets": (),
        "clock_contradicted": False,
        "has_trainer": True,
        "trainer_starts": 0,
        "step_overdue_s": 0.0,
        "own_void": 0,
        "newer_own_records": 0,
    }
    return NodeStatus(**facts | changes)
