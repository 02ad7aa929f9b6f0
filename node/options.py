"""The options of a node: one schema for the command line, a script, the daemon and the trainer.

A field with a `Flag` is at once a flag of `gossamer node` (its docstring is the help), a key of a node file
and an environment variable. `Peer.attach` fills in the same fields. The processes of a node get all of them
as one JSON argument, and use those that concern them.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from gossamer.node.address import (
    WILDCARDS,
    check_node_name,
    check_plaintext,
    check_swarm_id,
    parse_address,
    parse_contact,
    parse_node_id,
)
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX

ADMIN_OFF = "off"
"""As the admin address: there is no admin server."""


STOP_MIN_S = 5.0


class Flag(NamedTuple):
    """How a field is written on the command line. Its help is the field's docstring."""

    name: str = ""
    """Without dashes; by default the field's name."""
    metavar: str | None = None
    """A name for the value in the help."""
    help: str = ""


def _valid(parse: Callable[[str], object]) -> AfterValidator:
    """Checks a text with `parse`, and takes what that returns instead if it is a text too."""

    def validate(text: str) -> str:
        try:
            found = parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return found if isinstance(found, str) else text

    return AfterValidator(validate)


def _dialable(text: str) -> str:
    host, _ = parse_address(text)
    if host in WILDCARDS:
        raise ConfigError(f"nobody can dial {text}: give an address at which others reach this node")
    return text.strip()


def _listen(text: str) -> None:
    parse_address(text, port_min=0)


def _admin(text: str) -> None:
    if text not in ("", ADMIN_OFF):
        _listen(text)


def _path(value: Any) -> Any:
    """An empty path comes from an unset shell variable; a shell leaves the tilde of ``--dir=~/d`` alone."""
    if not isinstance(value, str):
        return value
    if not value or "\0" in value:
        raise ValueError("the path is empty" if not value else "a path has no null characters")
    return os.path.expanduser(value)


def _list(value: Any) -> Any:
    """Any collection will do, but a single text would become a list of its letters."""
    return tuple(value) if isinstance(value, Collection) and not isinstance(value, str | bytes) else value


_Text = Annotated[str, Field(strict=True)]
_Switch = Annotated[bool, Field(strict=True)]
_Path = Annotated[Path, BeforeValidator(_path)]
_Contacts = Annotated[
    tuple[Annotated[_Text, _valid(lambda text: str(parse_contact(text)))], ...], BeforeValidator(_list)
]
_NodeIds = Annotated[
    tuple[Annotated[_Text, _valid(lambda text: parse_node_id(text).hex())], ...], BeforeValidator(_list)
]
_Addresses = Annotated[
    tuple[Annotated[_Text, _valid(_dialable)], ...],
    BeforeValidator(_list),
    Field(max_length=ADDRESSES_PER_PEER_MAX),
]
_Paths = Annotated[tuple[_Path, ...], BeforeValidator(_list)]


class NodeOptions(BaseModel):
    """How one node runs. What the whole swarm agrees on is in the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    join: Annotated[_Contacts, Flag(metavar="ADDRESS")] = ()
    """A node of the swarm: HOST:PORT, or gossamer://NODE_ID@HOST:PORT to trust no other node there. May be
    repeated."""
    invite: Annotated[_Text | None, Flag(metavar="INVITATION")] = None
    """What gossamer invite printed for this node, or a file that holds it."""
    wait: Annotated[_Switch, Flag()] = False
    """If no node to join answers, keep trying until one does."""
    check: Annotated[_Switch, Flag()] = False
    """Do all that a start does, up to listening and the first batch, and end: with status 0 if the node can
    start, or 2 and the reason."""
    observe: Annotated[_Switch, Flag()] = False
    """Do not train: hold a replica and serve it to others."""
    folder: Annotated[_Path | None, Flag("dir", "FOLDER")] = None
    """The node's folder. Default: ~/.gossamer/SWARM, or SWARM-bootstrap for a bootstrap peer."""
    swarm_id: Annotated[Annotated[_Text, _valid(check_swarm_id)] | None, Flag(metavar="ID")] = None
    """Refuse any swarm but this one (its id, or the beginning of it)."""
    trust: Annotated[_NodeIds, Flag(metavar="NODE_ID")] = ()
    """When joining, believe this node about the model, whatever others say. May be repeated."""
    data: Annotated[_Paths, Flag(metavar="PATH")] = ()
    """Files or folders to train on. Default: the task's own. May be repeated."""
    task: Annotated[_Text | None, Flag(metavar="FILE.py:CLASS")] = None
    """The file with the swarm's task, if it does not come with Gossamer. Its code is executed here; the
    node's folder remembers it."""
    listen: Annotated[_Text, _valid(_listen), Flag(metavar="HOST:PORT")] = "[::]:0"
    """Where to listen. Port 0 picks a free one, [::] is every address, 0.0.0.0 every IPv4 address."""
    advertise: Annotated[_Addresses, Flag(metavar="HOST:PORT")] = ()
    """Where others can dial this node, if that is not where it listens. May be repeated."""
    name: Annotated[_Text, _valid(check_node_name), Flag()] = ""
    """This node's name in displays."""
    device: Annotated[_Text, Flag()] = "auto"
    """Where to train: auto, cpu, cuda, cuda:1, mps ..."""
    threads: Annotated[int, Field(ge=0, le=1024), Flag(metavar="N")] = 0
    """CPU threads for training; 0 leaves it to PyTorch."""
    stop_round: Annotated[int, Field(ge=0), Flag("rounds", "N")] = 0
    """Stop training after this round; 0 for never."""
    stop_within: Annotated[float, Field(ge=STOP_MIN_S, le=3600), Flag(metavar="SECONDS")] = STOP_MIN_S
    """How long a stop may take. With more than 5 s, the open windows of all fragments are published, each as
    the swarm comes to its round."""
    evaluate_every: Annotated[int, Field(ge=0), Flag(metavar="N")] = 5
    """Evaluate every N rounds; 0 for never."""
    plaintext: Annotated[_Switch, Flag("insecure-plaintext")] = False
    """Do not use TLS. For tests on loopback; all nodes must do the same."""
    admin: Annotated[_Text, _valid(_admin), Flag(metavar="HOST:PORT")] = ""
    """Where to serve the page, the metrics and gossamer top, or off. Default: 127.0.0.1, first free port from
    7780."""
    packing: Annotated[Literal["auto", "none", "lz4", "zstd"], Flag()] = "auto"
    """How chunks are packed: none, lz4, zstd, or auto for what has them there soonest, by measured speeds."""
    debug: Annotated[_Switch, Flag()] = False
    """Log everything, and show tracebacks."""
    log_json: Annotated[_Switch, Flag()] = False
    """Log JSON objects, one per line."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag()] = "info"
    """Lowest level to log: debug, info, warning, error."""

    # What a node passes to its own processes.
    socket: str = ""
    """Path of the Unix socket where a script finds its daemon; if empty, `Home.socket_path()`. That path
    depends on TMPDIR, which a script may change after it has used it."""
    restarted: bool = False
    """Whether the trainer ran before and died. As it worked then, what goes wrong now may pass."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The options with these values. Raises ConfigError, one line that names the first wrong flag."""
        try:
            options = cls(**values)
        except ValidationError as error:
            raise ConfigError(_first_problem(error)) from None
        if options.plaintext:
            check_plaintext(parse_address(options.listen, port_min=0)[0])
        return options

    @property
    def extra_stop_s(self) -> float:
        """How much longer a stop may take than usual."""
        return self.stop_within - STOP_MIN_S

    @property
    def root(self) -> Path:
        """The node's folder, once it has been entered."""
        assert self.folder is not None, "the folder is known before a process starts"
        return self.folder


def flags() -> dict[str, Flag]:
    """The flags of `gossamer node` by field, complete."""
    return {
        field: Flag(
            flag.name or field.replace("_", "-"), flag.metavar, " ".join((info.description or "").split())
        )
        for field, info in NodeOptions.model_fields.items()
        for flag in info.metadata
        if isinstance(flag, Flag)
    }


def _first_problem(error: ValidationError) -> str:
    problem: ErrorDetails = error.errors(include_url=False)[0]
    field = str(problem["loc"][0])
    flag = flags().get(field)
    text = (
        problem["msg"]
        .removeprefix("Value error, ")
        .removeprefix("Input ")
        .replace("Extra inputs are not permitted", "no such option")
    )
    names_it = problem["type"] in ("value_error", "too_long", "extra_forbidden")
    value = "" if names_it else f", not {problem['input']!r:.60}"
    return f"--{flag.name if flag else field}: {text}{value}"
