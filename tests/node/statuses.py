"""`NodeStatus` of nodes that there are not: what is not given is as in a healthy node that is alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast, get_origin

from gossamer.node.daemon.monitoring.status import (
    LinkStatus,
    MemberStatus,
    NodeStatus,
    TrainerStatus,
    Vitals,
)
from gossamer.protocol.merge.contributions import NOTHING_SENT

T = TypeVar("T")

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


def _made(kind: type[T], **facts: Any) -> T:
    """A status of this kind with these fields; the others are 0, False, empty or None."""
    nothing: dict[Any, Any] = {int: 0, float: 0.0, str: "", bool: False, tuple: ()}
    kinds = {each.name: get_origin(each.type) or each.type for each in fields(cast(Any, kind))}
    others = {name: nothing.get(of) for name, of in kinds.items()}
    return kind(**others | facts)


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
        "codec": "int4",
        "device": "cpu",
        "release": "0.1.0",
        "addresses": (f"192.0.2.{number}:7700",),
        "heard_s": 0.5,
        "contributions": NOTHING_SENT._asdict(),
    }
    return _made(MemberStatus, **facts | changes)


def link(number: int = 1, **changes: Any) -> LinkStatus:
    facts = {"node_id": f"{number:02x}" * 32, "outbound": True, "sent": 1000, "received": 2000}
    return _made(LinkStatus, **facts | changes)


def trainer(**changes: Any) -> TrainerStatus:
    facts: dict[str, Any] = {
        "state": "training",
        "device": "cpu",
        "inner_steps": 10,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "loss": 2.0,
        "val_loss": 2.5,
        "val_loss_average": 2.25,
        "val_loss_start": 5.0,
        "val_version": 1,
        "val_round": 1,
        "wait_fraction": 0.01,
    }
    return TrainerStatus(**facts | changes)


def status(**changes: Any) -> NodeStatus:
    """Fields of its vitals may be given like its own."""
    vitals = {"files_free": 1 << 20, "is_ready": True, "has_model": True, "has_trainer": True}
    vitals |= {each.name: changes.pop(each.name) for each in fields(Vitals) if each.name in changes}
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
        "state": "training",
        "uptime_s": 40.0,
        "round": 3,
        "clock": 4,
        "codec": "int4",
        "records": 7,
        "ledger_digest": "cd" * 32,
        "sealed_round": 0,
        "swarm_tokens": 400,
        "itself": member(0, name="me"),
        "listener": {},
        "tasks": 9,
        "disk_free": 1 << 40,
        "vitals": _made(Vitals, **vitals),
    }
    return _made(NodeStatus, **facts | figures(changes.get("members", ())) | changes)


def figures(members: Sequence[MemberStatus]) -> dict[str, Any]:
    """What a status says of all members together."""
    live = [one for one in members if one.is_live]
    same = [one.replica_round or 0 for one in live if one.replica == "same"]
    return {
        "by_health": dict(Counter(one.health for one in members)),
        "replicas": dict(Counter(one.replica or "unknown" for one in live)),
        "same_at": (min(same, default=0), max(same, default=0)),
    }
