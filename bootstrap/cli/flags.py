"""Options that several commands have."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli import values as option_values
from gossamer.models.registry import task_names
from gossamer.node import logs
from gossamer.protocol.errors import ConfigError

# --- Options and arguments that several commands have.

Join = Annotated[
    list[str] | None,
    typer.Option(
        "--join",
        metavar="ADDRESS",
        help="A node of the swarm: HOST:PORT, or gossamer://NODE_ID@HOST:PORT to trust no other node there."
        " May be repeated.",
        **option_values.contacts(),
    ),
]
Invite = Annotated[
    str | None,
    typer.Option(
        "--invite",
        metavar="INVITATION",
        help="What gossamer invite printed for this node, or a file that holds it.",
    ),
]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The node's folder. Default: ~/.gossamer/SWARM, or SWARM-bootstrap for a bootstrap peer.",
        autocompletion=option_values.node_folders,
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="Files or folders to train on. Default: the task's own.", callback=option_values.existing_path()
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to listen. Port 0 picks a free one, [::] is every address, 0.0.0.0 every IPv4 address.",
        **option_values.address(port_min=0),
    ),
]
Advertise = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where others can dial this node, if that is not where it listens.",
        **option_values.address(),
    ),
]
Name = Annotated[str, typer.Option(help="This node's name in displays.", callback=option_values.shown_name())]
Plaintext = Annotated[
    bool,
    typer.Option(
        "--insecure-plaintext", help="Do not use TLS. For tests on loopback; all nodes must do the same."
    ),
]
Member = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="Ask as the node in this folder: an invited swarm answers members only.",
        autocompletion=option_values.node_folders,
    ),
]
Address = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="A running node: HOST:PORT.", **option_values.contacts())
]
AdminAddress = Annotated[
    str,
    typer.Option(
        "--admin",
        metavar="HOST:PORT",
        help="Where to serve the page, the metrics and gossamer top, or off. Default: 127.0.0.1, first free"
        " port from 7780.",
        **option_values.admin_address(),
    ),
]
Used = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="A node's folder; the node may be running. Default: the only one on this machine.",
        autocompletion=option_values.node_folders,
    ),
]
OwnTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:CLASS",
        help="The file with the swarm's task, if it does not come with Gossamer. Its code is executed here;"
        " the node's folder remembers it.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks.")]
LogLevel = Annotated[
    str,
    typer.Option(help=f"Lowest level to log: {', '.join(logs.LEVELS)}.", **option_values.one_of(logs.LEVELS)),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON objects, one per line.")]

# Named again here, since importing them brings NumPy, and help should not wait for it.
CODEC_NAMES = ("exact", "int8", "int4", "int2", "topk")
RULE_NAMES = ("rda", "mean", "centered-clip")
ROLE_NAMES = ("train", "observe")

ManifestPath = Annotated[
    Path | None,
    typer.Option(
        "--manifest",
        help="The swarm's manifest: my.toml, or the file named manifest in any member's folder. Default: the"
        " only manifest in the current folder with an owner's key beside it.",
    ),
]
OwnerKey = Annotated[
    Path | None, typer.Option("--owner-key", help="The owner's key. Default: my.owner beside my.toml.")
]
TaskName = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="NAME|FILE.py:CLASS",
        help="The task to train: text, or a task of your own, whose file is executed.",
        autocompletion=lambda: list(task_names()),
    ),
]
TaskSettings = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the task. May be repeated."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Size of the built-in GPT: tiny, small, medium or 124m. Default: tiny.",
        autocompletion=lambda: ["tiny", "small", "medium", "124m"],
    ),
]
Codec = Annotated[
    str,
    typer.Option(
        help=f"How deltas are compressed: {', '.join(CODEC_NAMES)}.", **option_values.one_of(CODEC_NAMES)
    ),
]
Averaging = Annotated[
    str | None,
    typer.Option(
        help=f"How deltas of weight matrices are averaged: {', '.join(RULE_NAMES)} (for all tensors)."
        " Default: the task's choice.",
        **option_values.one_of(RULE_NAMES),
    ),
]
EverySteps = Annotated[
    int,
    typer.Option(
        min=1, max=1_000_000, help="Inner steps per window, that is, between two deltas of a fragment."
    ),
]
EverySeconds = Annotated[
    float,
    typer.Option(
        min=0, max=86_400, help="Window length in seconds, instead of --every-steps; 0 to count steps."
    ),
]
Fragments = Annotated[
    int, typer.Option(min=1, max=256, help="Number of parts the model is split into; they take turns.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seed of the initial parameters and of the order of the data.",
        callback=option_values.at_most(2**62),
    ),
]


def given(settings: Iterable[str] | None, **options: str | int | None) -> dict[str, str | int | float | bool]:
    """The task's options that have their own flags, as far as they were given.

    Raises ConfigError for one that `settings`, the values of --option, have as well.
    """
    found: dict[str, str | int | float | bool] = {
        key: value for key, value in options.items() if value is not None
    }
    twice = found.keys() & {setting.partition("=")[0] for setting in settings or ()}
    if twice:
        key = min(twice)
        flag = key.replace("_", "-")
        raise ConfigError(f"--{flag} and --option {key}=... set the same option: give one of them")
    return found
