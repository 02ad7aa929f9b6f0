"""`gossamer status`, `peers`, `top` and `verify`: looking at running nodes."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli.flags import Address, AsJson, Member, Plaintext, a_folder
from gossamer.node.formatting import WRONG_SHAPE, harmless_line
from gossamer.protocol.errors import ConfigError, UnreachableError


def status(
    address: Address,
    as_json: AsJson = False,
    folder: Member = None,
    plaintext: Plaintext = False,
) -> None:
    """Show a running node's status.

    That is its state, its round, and how it sees the other members. Any running node can be asked; nodes of
    an invited swarm answer members only.

        gossamer status 192.168.1.5:7700
        gossamer status 192.168.1.5:7700 --json
    """
    from gossamer.node.daemon.monitoring.status import data_in_words, one_line, unlisted
    from gossamer.node.daemon.network.rpc import asker_in, fetch_status

    asker = asker_in(folder)
    found = asyncio.run(fetch_status(address, digest=as_json, plaintext=plaintext, asker=asker))
    try:
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        lines = [
            f"swarm {found['swarm']} ({found['swarm_id'][:12]}), {found['records']} records",
            one_line(found),
            *([data_in_words(found["data"])] if found["data"] else []),
            *([f"windows of {found['window']} steps {found['window_why']}"] if found["window"] else []),
            *([f"a member contributes to one round in {found['turn']:.1f}"] if found["turn"] > 1 else []),
            *([f"publishes in {found['codec']}: {found['codec_why']}"] if found["codec_why"] else []),
            *(
                f"  {member['name'] or member['node_id'][:8]}: {member['health']}, round {member['round']}"
                f"{', ' + member['codec'] if member['codec'] else ''}"
                for member in found["members"]
            ),
            *([f"  and {more} more"] if (more := unlisted(found)) else []),
        ]
    except WRONG_SHAPE:
        raise UnreachableError(f"{address} sent a status that cannot be read") from None
    typer.echo("\n".join(map(harmless_line, lines)))


def peers(
    address: Address,
    everybody: Annotated[bool, typer.Option("--all", help="All members, of a large swarm, too.")] = False,
    folder: Member = None,
    plaintext: Plaintext = False,
) -> None:
    """List the members: their health, and how good their deltas are.

    A member whose deltas are usually bad gets a verdict. Those in trouble come first. Any running node can be
    asked; nodes of an invited swarm answer members only.

        gossamer peers 192.168.1.5:7700
        gossamer peers 192.168.1.5:7700 --all
    """
    from rich.console import Console

    from gossamer.bootstrap.live_table import show_peers
    from gossamer.node.daemon.monitoring.status import unlisted
    from gossamer.node.daemon.network.rpc import asker_in, fetch_status

    asker = asker_in(folder)
    ask = partial(fetch_status, address, plaintext=plaintext, asker=asker)
    found = asyncio.run(ask(skip=0) if everybody else ask())
    try:
        while everybody and unlisted(found):
            more = asyncio.run(ask(skip=len(found["members"])))["members"]
            if not more:  # some have been forgotten meanwhile
                break
            found["members"] += more
        show_peers(found, Console())
    except WRONG_SHAPE:
        raise UnreachableError(f"{address} does not report what it has seen of its members") from None


def top(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="A node's admin address, HOST:PORT, as shown in its log."),
    ] = None,
    folder: Annotated[
        Path | None,
        a_folder("A node's folder. Default: the only node on this machine, or the only one that trains."),
    ] = None,
) -> None:
    """Watch a node and its swarm live in the terminal.

    Ctrl-C quits. A browser shows more: open the admin address, by default http://127.0.0.1:7780/. For a node
    on another machine, forward its port with ssh.

        gossamer top
        gossamer top --dir ~/.gossamer/0f2aa9b7d875
        gossamer top 127.0.0.1:7781
    """
    from gossamer.bootstrap.live_table import show_top
    from gossamer.node.daemon.dashboard.client import find_admin

    find_admin(address, folder)  # report a mistake before the screen is taken over
    show_top(lambda: find_admin(address, folder))


def verify(
    addresses: Annotated[
        list[str],
        typer.Argument(metavar="ADDRESS...", help="Two or more running nodes: HOST:PORT."),
    ],
    wait: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds to wait for them to hold the same records.")
    ] = 30,
    folder: Member = None,
    plaintext: Plaintext = False,
) -> None:
    """Check that nodes hold the same model, bit for bit.

    The exit status is 0 only if they do. It waits until they hold the same records, since only then must
    their models match.

        gossamer verify 192.168.1.5:7700 192.168.1.6:7701
    """
    from gossamer.node.daemon.network.rpc import asker_in
    from gossamer.node.verify import verify as verify_replicas

    if len(addresses) < 2:
        raise ConfigError("give two or more addresses: a single replica always agrees with itself")
    asker = asker_in(folder)
    verdict = asyncio.run(verify_replicas(tuple(addresses), wait_s=wait, plaintext=plaintext, asker=asker))
    for address, answer in verdict.answers.items():
        records, model = answer.get("merged_digest", "-")[:16], answer.get("phi_digest", "-")[:16]
        typer.echo(harmless_line(f"{address}  records {records}  model {model}"))
    typer.echo(harmless_line(verdict.explain()))
    raise typer.Exit(0 if verdict.agreed else 1)
