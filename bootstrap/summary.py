"""What a local swarm achieved, as JSON and in words."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gossamer.node.files import SHARED, keep
from gossamer.protocol.errors import ConfigError

FLOAT32_BYTES = 4


def node_summary(status: dict[str, Any]) -> dict[str, Any]:
    """One node at the end of the run, from its last status."""
    trainer = {name: value for name, value in (status.get("trainer") or {}).items() if value is not None}
    return {
        **{name: status[name] for name in ("node_id", "name", "round", "bytes_sent", "bytes_received")},
        **{name: status[name] for name in ("payload_bytes_sent", "payload_bytes_received")},
        **{name: trainer.get(name, 0) for name in ("inner_steps", "tokens", "wait_fraction")},
        "val_loss_average": trainer.get("val_loss_average"),
        "val_loss": trainer.get("val_loss"),
        "digest": status.get("phi_digest", ""),
    }


@dataclass(frozen=True, slots=True)
class SwarmSummary:
    """The whole run. `identical` only if every replica holds the same records and the same bits."""

    swarm_id: str
    identical: bool
    val_loss_start: float | None
    val_loss_average: float | None
    """Of the averaged model, at the end."""
    val_loss_end: float | None
    """Of the live model."""
    wall_s: float
    rounds: int
    parameters: int
    codec: str
    tokens: int
    data_parallel_bytes: int
    """What data-parallel training would have sent for the same steps."""
    nodes: list[dict[str, Any]]
    ended: list[str] = field(default_factory=list)
    """Processes that were killed or ended on the way, and how; the others went on."""

    @property
    def ok(self) -> bool:
        """Whether the run went well: identical replicas, all remaining nodes done, and losses that fell."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why the run did not go well; empty if it did."""
        start = self.val_loss_start
        ends = [loss for loss in (self.val_loss_average, self.val_loss_end) if loss is not None]
        found = [] if self.identical else ["the replicas are not identical"]
        found += [
            f"{node['name']} published {node['round']} of {self.rounds} rounds"
            for node in self.nodes
            if node["round"] < self.rounds
        ]
        if start is None or not ends:
            found.append("the validation loss was not measured")
        elif not max(ends) < start:
            found.append("the validation loss did not fall")
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "reasons": self.reasons}


def summarise(
    statuses: list[dict[str, Any]], *, starts: Collection[float] = (), **facts: Any
) -> SwarmSummary:
    """Summarise the nodes' last statuses.

    `starts` are losses at the start that nodes reported earlier: a trainer that was restarted no longer knows
    its own. `facts` are the fields that no node knows.
    """
    nodes = [node_summary(status) for status in statuses]
    replicas = {(status.get("merged_digest"), status.get("phi_digest")) for status in statuses}
    told = [loss for s in statuses if (loss := (s.get("trainer") or {}).get("val_loss_start")) is not None]

    def worst(name: str) -> float | None:
        return max((node[name] for node in nodes if node[name] is not None), default=None)

    return SwarmSummary(
        swarm_id=statuses[0]["swarm_id"],
        identical=len(replicas) == 1 and None not in next(iter(replicas)),
        val_loss_start=min([*told, *starts], default=None),
        val_loss_average=worst("val_loss_average"),
        val_loss_end=worst("val_loss"),
        tokens=sum(node["tokens"] for node in nodes),
        # A ring all-reduce of fp32 gradients sends 2 (n - 1) / n times their size per worker and step.
        data_parallel_bytes=sum(node["inner_steps"] for node in nodes)
        * (facts["parameters"] * FLOAT32_BYTES * 2 * (len(nodes) - 1))
        // len(nodes),
        nodes=nodes,
        **facts,
    )


def check_result_path(path: Path) -> None:
    """Raise ConfigError if no result can be written there: that is better known before the run."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"--json {path} is not a file: name one")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {path.absolute().parent}")


def write_result(path: Path, summary: SwarmSummary) -> None:
    """Write the result as JSON: the file is there whole or not at all. Raises StorageError."""
    keep(path.absolute(), json.dumps(summary.to_json(), indent=2).encode() + b"\n", mode=SHARED)
