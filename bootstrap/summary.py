"""What a local swarm achieved, as JSON and in words."""

import fcntl
import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gossamer.node.files import put
from gossamer.protocol.errors import ConfigError, StorageError

# --- Where a local swarm's result is written: a file, or an existing pipe, terminal or device.
#
# A file appears whole or not at all. Anything else is written into, as by a shell's ``>``, and never
# replaced.

STDOUT = 1

_NAMED_FD = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,6})")
_STANDARD = {"/dev/stdout": STDOUT, "/dev/stderr": 2}


class ResultFile:
    """The path given with ``--json``."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if nothing can be written there, since that is better known before the run."""
        self._path = path
        self._place = path.absolute()
        self._fd = _fd_named(self._place)
        try:
            self._check()
        except OSError as error:
            raise ConfigError(f"--json {path}: {error.strerror}") from None

    @property
    def is_stdout(self) -> bool:
        """Whether it is standard output. The display should then go elsewhere."""
        return self._fd == STDOUT

    def write(self, data: bytes) -> None:
        """Write the result. Raises StorageError."""
        try:
            if self._fd is not None:
                _write_all(self._fd, data)
            elif self._is_stream():
                with open(self._place, "wb") as stream:
                    stream.write(data)
            else:
                put(self._place, data)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from None

    def _check(self) -> None:
        path, folder = self._place, Path(os.path.realpath(self._place)).parent
        if self._fd is not None:
            if fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise ConfigError(f"--json {self._path} is only open for reading")
        elif path.is_dir():
            raise ConfigError(f"--json {self._path} is a folder; name a file")
        elif self._is_stream():
            if not os.access(path, os.W_OK):
                raise ConfigError(f"--json {self._path} is not writable")
        elif path.exists() and not path.is_file():
            raise ConfigError(f"--json {self._path} is neither a file nor a pipe; name a file")
        elif not folder.is_dir():
            raise ConfigError(f"--json {self._path}: there is no folder {folder}")
        elif not os.access(folder, os.W_OK):
            raise ConfigError(f"--json {self._path}: the folder {folder} is not writable")

    def _is_stream(self) -> bool:
        with suppress(OSError):
            mode = os.stat(self._place).st_mode
            return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
        return False


def _fd_named(path: Path) -> int | None:
    """The file descriptor of ours that a path names, as with a shell's ``>(...)``; None if it names none."""
    named = _NAMED_FD.fullmatch(str(path))
    return int(named[1]) if named else _STANDARD.get(str(path))


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node at the end of the run."""

    node_id: str
    name: str
    digest: str
    round: int
    inner_steps: int
    tokens: int
    val_loss: float | None
    bytes_sent: int
    bytes_received: int
    payload_bytes_sent: int
    payload_bytes_received: int
    wait_fraction: float

    @classmethod
    def of(cls, status: dict[str, Any]) -> "NodeSummary":
        """From a node's last status."""
        trainer = status.get("trainer") or {}
        return cls(
            node_id=status["node_id"],
            name=status["name"],
            digest=status.get("phi_digest", ""),
            round=status["round"],
            inner_steps=trainer.get("inner_steps", 0),
            tokens=trainer.get("tokens", 0),
            val_loss=trainer.get("val_loss"),
            bytes_sent=status["bytes_sent"],
            bytes_received=status["bytes_received"],
            payload_bytes_sent=status["payload_bytes_sent"],
            payload_bytes_received=status["payload_bytes_received"],
            wait_fraction=trainer.get("wait_fraction", 0.0),
        )


@dataclass(frozen=True, slots=True)
class SwarmSummary:
    """The whole run. `identical` only if every replica holds the same records and the same bits."""

    swarm_id: str
    identical: bool
    val_loss_start: float | None
    val_loss_end: float | None
    wall_s: float
    rounds: int
    parameters: int
    codec: str
    tokens: int
    data_parallel_bytes: int
    sample: str
    events: list[dict[str, Any]]
    """The events of --chaos, see `gossamer.bootstrap.chaos`."""
    nodes: list[NodeSummary]
    ended: list[str] = field(default_factory=list)
    """Processes that were killed or ended on the way, and how; the others went on."""
    loss_unit: str = ""

    @property
    def ok(self) -> bool:
        """Whether the run went well: identical replicas, all remaining nodes done, and a loss that fell."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why the run did not go well; empty if it did."""
        start, end = self.val_loss_start, self.val_loss_end
        found = []
        if not self.identical:
            found.append("the replicas are not identical")
        found += [
            f"{node.name} published {node.round} of {self.rounds} rounds"
            for node in self.nodes
            if node.round < self.rounds
        ]
        if start is None or end is None:
            found.append("the validation loss was not measured")
        elif not end < start:
            found.append("the validation loss did not fall")
        found += [f"{event['text']}: not recovered" for event in self.events if event["recovered_s"] is None]
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "reasons": self.reasons}


def data_parallel_bytes(parameters: int, steps: list[int]) -> int:
    """Bytes that data-parallel training would have sent for the same steps.

    A ring all-reduce of fp32 gradients sends ``2 (n - 1) / n`` times their size per worker and step.
    """
    n = len(steps)
    return sum(steps) * parameters * FLOAT32_BYTES * 2 * (n - 1) // n


def summarise(
    statuses: list[dict[str, Any]], *, starts: Collection[float] = (), **facts: Any
) -> SwarmSummary:
    """Summarise the nodes' last statuses.

    `starts` are losses at the start that nodes reported earlier: a trainer that was restarted no longer knows
    its own. `facts` are the fields that no node knows.
    """
    nodes = [NodeSummary.of(status) for status in statuses]
    replicas = {(status.get("merged_digest"), status.get("phi_digest")) for status in statuses}
    told = [loss for s in statuses if (loss := (s.get("trainer") or {}).get("val_loss_start")) is not None]
    ends = [node.val_loss for node in nodes if node.val_loss is not None]
    return SwarmSummary(
        swarm_id=statuses[0]["swarm_id"],
        identical=len(replicas) == 1 and None not in next(iter(replicas)),
        val_loss_start=min([*told, *starts], default=None),
        val_loss_end=max(ends, default=None),
        tokens=sum(node.tokens for node in nodes),
        data_parallel_bytes=data_parallel_bytes(facts["parameters"], [node.inner_steps for node in nodes]),
        nodes=nodes,
        **facts,
    )


def amount(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
