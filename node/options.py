"""The options of a daemon and of a trainer, passed to their processes as one JSON argument."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

ADMIN_OFF = "off"
"""Given as the admin address: there is no admin server."""


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
    """How one daemon runs. What the whole swarm agrees on is in the manifest."""

    listen: str = "127.0.0.1:0"
    advertise: tuple[str, ...] = ()
    """Addresses where others can dial us; if empty, the node finds out."""
    join: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()
    """Ids in hex of nodes that we believe about the past when we join; if empty, what members agree on."""
    name: str = ""
    trains: bool = True
    plaintext: bool = False
    admin: str = ""
    """Where the page, the metrics and `gossamer top` are served: ``host:port``, "off", or empty for the first
    free port of loopback from 7780 up."""
    socket: str = ""
    """Path of the Unix socket where a script finds us; if empty, `Home.socket_path()`. That path depends on
    TMPDIR, which a script may change after it has used it."""
    debug: bool = False
    log_json: bool = False
    log_level: str = "info"

    @property
    def is_beside_a_script(self) -> bool:
        """Whether the daemon runs beside a script, and words its log for one (see `wording`)."""
        return bool(self.socket)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions(_Options):
    """How one trainer runs."""

    data: tuple[str, ...] = ()
    threads: int = 0
    """Threads for torch; 0 leaves it to torch."""
    device: str = "auto"
    stop_round: int = 0
    """Publish no round past this one, and then stay to evaluate; 0 for no limit."""
    evaluate_every: int = 5
    """Evaluate whenever the own round reaches or passes a multiple of this; 0 for never."""
    restarted: bool = False
    """Whether the trainer ran before and died. As it worked then, what goes wrong now may pass."""
    debug: bool = False
    log_json: bool = False
    log_level: str = "info"
