"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from gossamer.node import logs
from gossamer.node.config import option_values

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
