"""The command line of a node: `node`, `status`, `peers`, `top`, `verify`, `generate`, `export`, `id`.

`gossamer.bootstrap.cli` adds how swarms begin and is the `gossamer` command. Commands import what they need
when they run: help and mistakes in flags then take no longer than Python itself.
"""

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from gossamer.node import logs
from gossamer.node.config import config_cli, option_values
from gossamer.node.config.command import App
from gossamer.protocol.errors import ConfigError, StorageError, UnreachableError

app = App()
app.add_typer(config_cli.app, name="config", rich_help_panel="Configure")

Join = Annotated[
    list[str] | None,
    typer.Option(
        "--join",
        metavar="ADDRESS",
        help="A node of the swarm: HOST:PORT, or gossamer://NODE_ID@HOST:PORT to trust no other node there;"
        " may be given several times.",
        **option_values.contacts(),
    ),
]
Invite = Annotated[
    str | None,
    typer.Option(
        "--invite", metavar="INVITATION", help="What gossamer invite printed for this node, or its file."
    ),
]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The node's folder. Default: ~/.gossamer/SWARM",
        autocompletion=option_values.node_folders,
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="Files or folders to train on; default: the task's own.", callback=option_values.existing_path()
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to listen; port 0 chooses one, 0.0.0.0 is every address.",
        **option_values.address(port_min=0),
    ),
]
Advertise = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where others can dial this node, if not as it listens.",
        **option_values.address(),
    ),
]
Name = Annotated[str, typer.Option(help="What displays call this node.", callback=option_values.shown_name())]
Plaintext = Annotated[
    bool,
    typer.Option("--insecure-plaintext", help="No TLS. For tests on loopback; all nodes must do the same."),
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
        help="Where to watch this node: page, metrics, gossamer top. Default: 127.0.0.1, first free port from"
        " 7780; off for nowhere.",
        **option_values.admin_address(),
    ),
]
Used = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="A node's folder; it may be running. Default: the only one of this machine.",
        autocompletion=option_values.node_folders,
    ),
]
OwnTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:CLASS",
        help="The file with the swarm's task, where that does not come with Gossamer. Its code is run here;"
        " --dir remembers it.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks.")]
LogLevel = Annotated[
    str,
    typer.Option(help=f"Log from here on: {', '.join(logs.LEVELS)}.", **option_values.one_of(logs.LEVELS)),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON objects, one a line.")]


@app.command(rich_help_panel="Train")
def node(
    join: Join = None,
    invite: Invite = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Do not train: hold a replica and serve it to others.")
    ] = False,
    folder: Dir = None,
    swarm_id: Annotated[
        str | None, typer.Option(help="Refuse any other swarm than this (its id or the beginning of it).")
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE_ID",
            help="When joining, believe this node about the model, whatever others say; may be given several"
            " times.",
        ),
    ] = None,
    data: Data = None,
    task: OwnTask = None,
    listen: Listen = "0.0.0.0:0",
    advertise: Advertise = None,
    name: Name = "",
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE", help="auto, cpu, cuda, cuda:1, mps ...", autocompletion=option_values.devices
        ),
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, max=1024, help="CPU threads for training; 0 for all.")] = 0,
    rounds: Annotated[int, typer.Option(min=0, help="Stop training after this round; 0 for never.")] = 0,
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Evaluate every so many rounds; 0 for never.")
    ] = 5,
    plaintext: Plaintext = False,
    admin: AdminAddress = "",
    debug: Debug = False,
    log_json: LogJson = False,
    log_level: LogLevel = logs.INFO,
) -> None:
    """Join a swarm and train with this machine.

    It fetches the swarm's manifest and model from the node named, trains, and goes on for good: through
    the deaths of others, through partitions, and through its own restarts, from its folder. Ctrl-C stops it
    in good order. Its log says where to watch it.

    Join, and go on later from the folder that was made then:

        gossamer node --join 192.168.1.5:7700
        gossamer node --dir ~/.gossamer/0f2aa9b7d875

    A lasting node, with data of its own and a port where others find it again:

        gossamer node --join my.host:7700 --listen 0.0.0.0:7701 --data texts

    Where members are invited, with what gossamer invite printed (or a file with it):

        gossamer node --invite invitation.txt

    With everything in a file, which gossamer config check looks over first:

        gossamer node --config node.toml
    """
    from gossamer.node.entering import (
        checked_advertise,
        checked_join,
        checked_trust,
        enter_invited,
        enter_swarm,
        given_invitation,
    )
    from gossamer.node.options import DaemonOptions, TrainerOptions
    from gossamer.node.own_task import check_trainable, remember_task
    from gossamer.node.supervisor import Supervisor
    from gossamer.protocol.admission import Role

    logs.configure(level=log_level, debug=debug, as_json=log_json)
    addresses = checked_join(join)
    trusted = checked_trust(trust)
    invitation = given_invitation(invite)
    if invitation is not None:
        addresses = addresses or checked_join(list(invitation.contacts))
        observe = observe or invitation.grant.role is Role.OBSERVE
        home = enter_invited(invitation, addresses, folder, plaintext)
    else:
        home = enter_swarm(addresses, folder, swarm_id, plaintext)
        kept = home.invitation()
        observe = observe or (kept is not None and kept.grant.role is Role.OBSERVE)
    if task is not None:
        remember_task(home, task)
    if not observe:
        check_trainable(home)
    supervisor = Supervisor(
        DaemonOptions(
            folder=home.root,
            listen=listen,
            advertise=checked_advertise(advertise),
            join=addresses,
            trust=trusted,
            name=name,
            trains=not observe,
            plaintext=plaintext,
            admin=admin,
            debug=debug,
            log_json=log_json,
            log_level=log_level,
        ),
        None
        if observe
        else TrainerOptions(
            folder=home.root,
            data=tuple(str(path.absolute()) for path in data or ()),
            threads=threads,
            device=device,
            stop_round=rounds,
            evaluate_every=evaluate_every,
            debug=debug,
            log_json=log_json,
            log_level=log_level,
        ),
    )
    raise typer.Exit(supervisor.run())


@app.command(rich_help_panel="Watch")
def status(
    address: Address,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as JSON.")] = False,
    folder: Member = None,
    plaintext: Plaintext = False,
) -> None:
    """Ask a node how it is doing.

    It says its state, its round, and how it sees the other members. Any running node can be asked; nodes of
    an invited swarm answer members only.

        gossamer status 192.168.1.5:7700
        gossamer status 192.168.1.5:7700 --json
    """
    from gossamer.node.monitoring.status import one_line
    from gossamer.node.network.askers import asker_for
    from gossamer.node.network.client import fetch_status

    asker = asker_for(folder, address)
    found = asyncio.run(fetch_status(address, digest=as_json, plaintext=plaintext, asker=asker))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    try:
        lines = [
            f"swarm {found['swarm']} ({found['swarm_id'][:12]}), {found['records']} records",
            one_line(found),
            *(
                f"  {member['name'] or member['node_id'][:8]}: {member['health']}, round {member['round']}"
                for member in found["members"]
            ),
        ]
    except (LookupError, TypeError, ValueError):
        raise UnreachableError(f"{address} sent a status that cannot be read") from None
    typer.echo(_harmless("\n".join(lines)))


@app.command(rich_help_panel="Watch")
def peers(
    address: Address,
    as_json: Annotated[bool, typer.Option("--json", help="The same, as JSON.")] = False,
    folder: Member = None,
    plaintext: Plaintext = False,
) -> None:
    """List the members: how they do, and what their deltas are like.

    A member whose deltas are bad as a rule has a verdict.

        gossamer peers 192.168.1.5:7700
        gossamer peers 192.168.1.5:7700 --json
    """
    from gossamer.node.network.askers import asker_for
    from gossamer.node.network.client import fetch_status

    asker = asker_for(folder, address)
    found = asyncio.run(fetch_status(address, plaintext=plaintext, asker=asker))
    if not {"agreement", "conduct", "members"} <= found.keys():
        raise UnreachableError(f"{address} does not say what it has seen of its members")
    if as_json:
        typer.echo(json.dumps({key: found[key] for key in ("agreement", "conduct", "members")}, indent=2))
        return
    from rich.console import Console

    from gossamer.node.dashboard.peers import peers_table

    try:
        table = peers_table(found)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UnreachableError(f"{address} does not say what it has seen of its members") from None
    Console().print(table)


@app.command(rich_help_panel="Watch")
def top(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            help="A node's admin address, HOST:PORT, as its log says it.",
            autocompletion=option_values.admin_addresses,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A node's folder. Default: the only node of this machine.",
            autocompletion=option_values.node_folders,
        ),
    ] = None,
) -> None:
    """Watch a node and its swarm live in the terminal.

    Keys: q quit, s sort, jk select, p pause, ? help. A browser shows more: open the admin address, by
    default http://127.0.0.1:7780/. For another machine's node, forward its port with ssh.

        gossamer top
        gossamer top --dir ~/.gossamer/0f2aa9b7d875
        gossamer top 127.0.0.1:7781
    """
    from gossamer.node.dashboard.admin_client import find_admin
    from gossamer.node.dashboard.top import show_top

    find_admin(address, folder)  # a mistake is better said before the screen is taken over
    show_top(lambda: find_admin(address, folder))


@app.command(rich_help_panel="Watch")
def verify(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS...", help="Two or more running nodes: HOST:PORT.", **option_values.contacts()
        ),
    ],
    wait: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds to wait for them to hold the same records.")
    ] = 30,
    folder: Member = None,
    plaintext: Plaintext = False,
) -> None:
    """Check that nodes hold the same model, bit for bit.

    Exit status 0 only if they do. It waits until they hold the same records, since only then the models must
    be alike.

        gossamer verify 192.168.1.5:7700 192.168.1.6:7701
    """
    from gossamer.node.monitoring.verify import verify as verify_replicas
    from gossamer.node.network.askers import asker_for

    if len(addresses) < 2:
        raise ConfigError("give two or more addresses: one replica alone agrees with itself")
    asker = next((found for address in addresses if (found := asker_for(folder, address))), None)
    verdict = asyncio.run(verify_replicas(tuple(addresses), wait_s=wait, plaintext=plaintext, asker=asker))
    for address, answer in verdict.answers.items():
        records, model = answer.get("merged_digest", "-")[:16], answer.get("phi_digest", "-")[:16]
        typer.echo(f"{address}  records {records}  model {model}")
    typer.echo(verdict.explain())
    raise typer.Exit(0 if verdict.agreed else 1)


@app.command(rich_help_panel="Use")
def generate(
    folder: Used = None,
    prompt: Annotated[str, typer.Option(help="What to continue.")] = "",
    length: Annotated[int, typer.Option(min=1, max=1_000_000, help="Characters to write.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, max=10, help="0 takes the likeliest byte always; more is more varied.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(min=0, help="Another one gives another text.")] = 0,
    task: OwnTask = None,
) -> None:
    """Continue a prompt with the model in a node's folder.

    It reads the folder alone, also beside a running node.

        gossamer generate --prompt "def "
        gossamer generate --dir d0 --length 2000 --temperature 0.3 --seed 7
    """
    from gossamer.node.entering import node_in
    from gossamer.node.own_task import remember_task

    home = node_in(folder)
    if task is not None:
        remember_task(home, task)
    # One byte is many small steps. Beside a trainer on the same cores, threads that spin between them wait
    # longer than they work. It has to be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gossamer.node.exports.generate import generate as write_text

    pieces = write_text(home, prompt, length, temperature=temperature, seed=seed)
    try:
        typer.echo(prompt, nl=False)
        for piece in pieces:
            typer.echo(_harmless(piece), nl=False)
        typer.echo()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # who reads along has seen enough: typer ends without a word
        raise StorageError(f"cannot write the text: {error.strerror}") from None


def _harmless(text: str) -> str:
    """Without what would command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


@app.command(rich_help_panel="Use")
def export(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A file that ends in .safetensors, or a folder to make.")
    ],
    folder: Used = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    sealed: Annotated[
        bool, typer.Option("--sealed", help="The newest sealed snapshot, not all that is merged by now.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say what was written as JSON.")] = False,
) -> None:
    """Write the model as a safetensors file or Hugging Face folder.

    It reads the node's folder alone, also beside a running node; equal records give equal bytes.

    One file, for anything that reads safetensors; in half the size:

        gossamer export model.safetensors
        gossamer export --dir d0 model.safetensors --dtype bfloat16

    A folder, for AutoModelForCausalLM.from_pretrained:

        gossamer export my-model
    """
    from gossamer.node.entering import node_in
    from gossamer.node.exports.export import export as write_model

    done = write_model(node_in(folder), out, dtype=dtype, sealed=sealed, force=force)
    if as_json:
        typer.echo(json.dumps(done.as_json(), indent=2))
    else:
        typer.echo(done.explain())
    if done.frozen:
        typer.echo(
            f"gossamer: {len(done.frozen)} frozen parameters, such as {done.frozen[0]!r}, are not in it: the"
            " swarm does not train them",
            err=True,
        )


@app.command("id", rich_help_panel="Begin")
def show_id(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A node's folder. Default: this machine's node, for --dir-less commands.",
            autocompletion=option_values.node_folders,
        ),
    ] = None,
) -> None:
    """Print this machine's node id, for an owner to invite.

    A key is made if there is none yet.

        gossamer id
        gossamer id --dir d0
    """
    from gossamer.node.entering import own_id

    typer.echo(own_id(folder))
