"""Possible states of nodes at the end of a run, and the run's summary."""

from __future__ import annotations

from typing import Any

from gossamer.bootstrap.summary import summarise


def status(number: int, **changes: Any) -> dict[str, Any]:
    trainer = {
        "inner_steps": 100,
        "tokens": 1000,
        "val_loss": 2.0 + number / 10,
        "val_loss_average": 1.5 + number / 10,
        "val_loss_start": 5.0 + number / 10,
        "wait_fraction": 0.01,
        **changes.pop("trainer", {}),
    }
    return {
        "swarm_id": "ab",
        "node_id": str(number),
        "name": f"node-{number}",
        "round": 10,
        "merged_digest": "m",
        "phi_digest": "p",
        "bytes_sent": 7,
        "bytes_received": 8,
        "payload_bytes_sent": 5,
        "payload_bytes_received": 6,
        "trainer": trainer,
        **changes,
    }


def summary(*statuses: dict[str, Any]) -> Any:
    facts = {"wall_s": 1.5, "rounds": 10, "parameters": 1000, "codec": "int4"}
    return summarise(list(statuses), **facts)
