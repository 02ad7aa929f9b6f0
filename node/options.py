"""What a daemon and a trainer are started with, passed as one JSON argument."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

ADMIN_OFF = "off"
"""In place of an admin address: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    folder: Path

    def to_json(self) -> str:
        """One argument for a command line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        known = {field.name for field in fields(cls)} - {"folder"}
        rest: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known
        }
        return cls(folder=Path(values["folder"]), **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions(_Options):
    """How one daemon runs; what the swarm agrees on is in the manifest."""

    listen: str = "127.0.0.1:0"
    advertise: tuple[str, ...] = ()
    """Addresses where others can dial us; empty to find out."""
    join: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()
    """Node ids in hex whose word about the past is enough when we join; empty: what members agree on."""
    name: str = ""
    trains: bool = True
    plaintext: bool = False
    admin: str = ""
    """Where this machine's pages, metrics and `gossamer top` find us: ``host:port``, "off", or empty for the
    first free port from 7780 of loopback."""
    socket: str = ""
    """Where a script looks for us; empty: where `Home.socket_path` says. That depends on TMPDIR, which a
    script may change when it has used it already."""
    debug: bool = False
    log_json: bool = False
    log_level: str = "info"

    @property
    def is_beside_a_script(self) -> bool:
        """Whether the daemon runs beside a script, whose words its log has."""
        return bool(self.socket)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions(_Options):
    """How one trainer runs."""

    data: tuple[str, ...] = ()
    threads: int = 0
    """Threads for torch; 0 leaves it to torch."""
    device: str = "auto"
    stop_round: int = 0
    """Publish no round past this one and then stay to evaluate; 0 trains without end."""
    evaluate_every: int = 5
    """Evaluate after every so many own rounds; 0 never."""
    restarted: bool = False
    """Whether it ran before and died: what goes wrong now may pass, as it had worked."""
    debug: bool = False
    log_json: bool = False
    log_level: str = "info"
