"""The `gossamer` command: how swarms begin, and everything that `gossamer.node.cli` offers."""

import asyncio
import logging
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.models.registry import task_names
from gossamer.node import __version__, logs
from gossamer.node.address import WILDCARDS, format_address, parse_address, parse_node_id
from gossamer.node.cli import (
    AdminAddress,
    Advertise,
    Data,
    Debug,
    Dir,
    Invite,
    Join,
    Listen,
    LogJson,
    LogLevel,
    Name,
    Plaintext,
    app,
)
from gossamer.node.config import option_values
from gossamer.protocol.errors import ConfigError, LocalError, UnreachableError
from gossamer.protocol.limits import ROUND_MAX

if TYPE_CHECKING:
    from gossamer.node.storage.home import Home
    from gossamer.protocol.identity import Identity
    from gossamer.protocol.invitation import Invitation
    from gossamer.protocol.manifest import Manifest

USER_ERROR = 2
BUG = 1

# Named again here, since importing them brings NumPy, and help should not wait for it.
CODEC_NAMES = ("exact", "int8", "int4", "int2", "topk")
RULE_NAMES = ("rda", "mean", "centered-clip")
ROLE_NAMES = ("train", "observe")

ManifestPath = Annotated[
    Path | None,
    typer.Option("--manifest", help="Default: the only manifest here with an owner's key beside it."),
]
OwnerKey = Annotated[
    Path | None, typer.Option("--owner-key", help="The owner's key. Default: beside the manifest.")
]
TaskName = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="NAME|FILE.py:CLASS",
        help="What is trained: text, or a task of your own, whose file is run.",
        autocompletion=lambda: list(task_names()),
    ),
]
TaskSettings = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the task; may be given several times."),
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
    str,
    typer.Option(
        help=f"How deltas of weight matrices are averaged: {', '.join(RULE_NAMES)} (of all tensors).",
        **option_values.one_of(RULE_NAMES),
    ),
]
EverySteps = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="Inner steps of a window, between two deltas of a fragment.")
]
EverySeconds = Annotated[
    float, typer.Option(min=0, max=86_400, help="Window length in seconds instead; 0 for steps.")
]
Fragments = Annotated[
    int, typer.Option(min=1, max=256, help="Parts the model is split into; they take turns.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Of the first parameters and the order of the data.",
        callback=option_values.at_most(2**62),
    ),
]


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"gossamer {__version__}")
        raise typer.Exit


@app.callback()
def _gossamer(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_tell_version, help="Say which release this is."),
    ] = False,
) -> None:
    """Train one PyTorch model on many machines, with no server in the middle.

    See it work on this machine, with four nodes and real text:

        gossamer swarm

    For real: write down what is trained, and let one machine be where the others join.

        gossamer init my.toml
        gossamer bootstrap my.toml

    On every machine that trains, with the address of that one; then watch it, and use the model.

        gossamer node --join 192.168.1.5:7700
        gossamer top
        gossamer generate --prompt "def "

    Nodes may come, go and crash as they like. Each command explains itself: gossamer node --help.
    """


@app.command(rich_help_panel="Begin")
def init(
    path: Annotated[Path, typer.Argument(metavar="MANIFEST", help="Where to write it, for example my.toml.")],
    name: Annotated[str, typer.Option(help="What to call the swarm.")] = "",
    task: TaskName = "text",
    option: TaskSettings = None,
    preset: Preset = None,
    codec: Codec = "int4",
    every_steps: EverySteps = 30,
    every_seconds: EverySeconds = 0.0,
    averaging: Averaging = "rda",
    fragments: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Parts the model is split into; they take turns. Default: 4."),
    ] = None,
    seed: Seed = 0,
    horizon_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of text: tokens over which the learning rate falls to a tenth; 0 keeps it constant.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Go on from existing weights: a safetensors file, or a folder as transformers writes it.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files or folders to try a task of your own out on.", callback=option_values.existing_path()
        ),
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial/--no-trial", help="Try a task of your own out for one step.")
    ] = True,
    invited: Annotated[
        bool, typer.Option("--invited", help="Let in only nodes that an owner has invited.")
    ] = False,
    owner_key: OwnerKey = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # `main` looks for it
) -> None:
    """Write a new swarm's manifest: what its nodes agree on.

    It builds the model once, and prints the swarm's id, which is a hash of all that is written. So edit the
    file before the swarm begins, and never after. With --invited it also makes an owner's key, beside the
    manifest: keep it to yourself.

        gossamer init my.toml
        gossamer init my.toml --preset small --codec topk --fragments 4
        gossamer init my.toml --every-seconds 60 --invited
        gossamer init my.toml --task my_task.py:MyTask --option width=64
        gossamer init my.toml --from model.safetensors

    With --from, or a task of your own, it also writes the first parameters beside the manifest, for the
    bootstrap peer.

    Then look it over with gossamer config check, and run gossamer bootstrap with it.
    """
    from gossamer.bootstrap import genesis_file, manifests, owners

    first = genesis_file.beside(path)
    for file in (path, first):
        if file.exists() and not force:
            raise ConfigError(f"{file} exists; choose another name or replace it with --force")
    owner = None
    new_key = path.with_suffix(owners.SUFFIX) if invited and owner_key is None else None
    if owner_key is not None:
        owner = owners.read_owner(owner_key)
    elif new_key is not None:
        owner = owners.create_owner(new_key)
    try:
        manifest, phi = manifests.create(
            name=name or path.stem,
            task=task,
            options=_given(preset=preset, horizon_tokens=horizon_tokens),
            settings=option or (),
            weights=weights,
            data=data or (),
            trial=trial,
            codec=codec,
            every_steps=every_steps,
            every_seconds=every_seconds,
            fragments=fragments,
            seed=seed,
            averaging=averaging,
            owners=(owner.public_key.hex(),) if owner else (),
            invited=invited,
        )
        has_first = weights is not None or bool(manifest.task.source)
        if has_first:
            genesis_file.write(manifest, phi, first)
        manifests.write(manifest, path)
    except LocalError:
        if new_key is not None:  # it owns nothing, and would be in the way of the next try
            new_key.unlink()
        raise
    typer.echo(f"wrote {path}: swarm {manifest.swarm_id.hex()}")
    if has_first:
        typer.echo(f"wrote {first}: the first parameters, which gossamer bootstrap takes from there")
    else:
        first.unlink(missing_ok=True)  # of the manifest that was replaced
    if new_key is not None:
        typer.echo(f"wrote {new_key}: the owner's key, which no node needs; back it up")
    typer.echo(f"next, on a machine that the others can reach:  gossamer bootstrap {path}")


def _given(**options: str | int | None) -> dict[str, str | int | float | bool]:
    """Those options of the task that have a flag of their own, and were given."""
    return {key: value for key, value in options.items() if value is not None}


@app.command("invite", rich_help_panel="Begin")
def invite_node(
    node_id: Annotated[str, typer.Argument(metavar="NODE_ID", help="As gossamer id prints it there.")],
    days: Annotated[float, typer.Option(min=0, max=36_500, help="How long it holds; 0 for ever.")] = 30,
    role: Annotated[
        str,
        typer.Option(
            help="train, or observe: hold and serve a replica, publish nothing.",
            **option_values.one_of(ROLE_NAMES),
        ),
    ] = "train",
    join: Join = None,
    tell: Annotated[
        list[str] | None,
        typer.Option(
            "--tell",
            metavar="ADDRESS",
            help="Hand it to this running node too, to renew one before it ends.",
            **option_values.contacts(),
        ),
    ] = None,
    manifest_path: ManifestPath = None,
    owner_key: OwnerKey = None,
    plaintext: Plaintext = False,
) -> None:
    """Let a node in: print an invitation for it.

    Send the line there by mail or chat; it is no secret, since only that node can use it. NODE_ID is what
    gossamer id prints there. Run it where the manifest and the owner's key are.

        gossamer invite NODE_ID --join my.host:7700
        gossamer invite NODE_ID --days 0 --role observe --join my.host:7700

    Renew an invitation while its node runs, by telling any running node:

        gossamer invite NODE_ID --days 30 --tell my.host:7700
    """
    from gossamer.bootstrap import owners
    from gossamer.node.entering import checked_join
    from gossamer.node.network.client import deliver
    from gossamer.protocol.admission import Role

    manifest, owner = _owned(manifest_path, owner_key)
    invitation = owners.invite(
        owner,
        manifest.swarm_id,
        parse_node_id(node_id),
        role=Role[role.upper()],
        days=days,
        contacts=checked_join(join),
    )
    for address in tell or ():
        asyncio.run(deliver(address, invitation.grant.data, plaintext=plaintext))
    typer.echo(invitation.to_text())
    until = f"for {days:g} days" if days else "for ever"
    typer.echo(f"to {role} {until}; on that machine:  gossamer node --invite INVITATION", err=True)


@app.command(rich_help_panel="Begin")
def revoke(
    node_id: Annotated[str, typer.Argument(metavar="NODE_ID", help="The node to put out, for good.")],
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="ADDRESS",
            help="A running node, which tells the others.",
            **option_values.contacts(),
        ),
    ],
    after_round: Annotated[
        int | None,
        typer.Option(min=0, help="Void its deltas after this round; default: the swarm's round now."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Shown in logs and to that node.")] = "",
    manifest_path: ManifestPath = None,
    owner_key: OwnerKey = None,
    plaintext: Plaintext = False,
) -> None:
    """Put a node out of the swarm, everywhere and for good.

    Its links are cut, and its deltas after the swarm's round now are void. Run it where the manifest and the
    owner's key are.

        gossamer revoke NODE_ID --to my.host:7700 --reason "key stolen"
    """
    from gossamer.bootstrap import owners
    from gossamer.node.network.client import Asker, deliver, fetch_status

    manifest, owner = _owned(manifest_path, owner_key)
    target = parse_node_id(node_id)
    asker = Asker(owner, manifest.swarm_id)
    status = asyncio.run(fetch_status(to[0], plaintext=plaintext, asker=asker))
    if status["swarm_id"] != manifest.swarm_id.hex():
        raise ConfigError(f"{to[0]} belongs to swarm {status['swarm_id'][:12]}, not to this one")
    clock, sealed = _standing(to[0], status)
    last_round = clock if after_round is None else after_round
    if last_round < sealed:
        raise ConfigError(
            f"rounds up to {sealed} are sealed: newcomers may have started from a snapshot of them, which"
            f" cannot be changed; --after-round must be at least {sealed}"
        )
    record = owners.revoke(owner, manifest.swarm_id, target, last_round=last_round, reason=reason)
    for address in to:
        asyncio.run(deliver(address, record, plaintext=plaintext))
    typer.echo(f"revoked {target.hex()}: its deltas after round {last_round} are void")


def _standing(address: str, status: dict[str, Any]) -> tuple[int, int]:
    """A node's clock, and the newest round that it has sealed or closed. Raises UnreachableError."""
    rounds = [status.get(key) or 0 for key in ("clock", "sealed_round", "closed_round")]
    if not all(type(round_) is int and 0 <= round_ <= ROUND_MAX for round_ in rounds):
        raise UnreachableError(f"{address} sent a status that cannot be read")
    return rounds[0], max(rounds[1:])


def _owned(manifest_path: Path | None, owner_key: Path | None) -> "tuple[Manifest, Identity]":
    """A manifest and its owner's key. Raises ConfigError."""
    from gossamer.bootstrap import manifests, owners

    path = owners.find_manifest(manifest_path)
    manifest = manifests.read(path)
    return manifest, owners.owner_of(manifest, path, owner_key)


@app.command(rich_help_panel="Begin")
def bootstrap(
    path: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The manifest that gossamer init wrote.")],
    listen: Listen = "0.0.0.0:7700",
    advertise: Advertise = None,
    join: Join = None,
    invite: Invite = None,
    folder: Dir = None,
    name: Name = "bootstrap",
    plaintext: Plaintext = False,
    admin: AdminAddress = "",
    debug: Debug = False,
    log_json: LogJson = False,
    log_level: LogLevel = logs.INFO,
) -> None:
    """Run a bootstrap peer: a replica where others can join.

    It does not train, holds all there is, and serves it to newcomers. The first one of a swarm begins its
    history; any further one, and any node, can be joined through as well. Where members are invited, it
    invites itself if the owner's key lies beside the manifest.

    The first, on a machine that others reach as my.host; then a second one elsewhere:

        gossamer bootstrap my.toml --advertise my.host:7700
        gossamer bootstrap my.toml --join my.host:7700
    """
    from gossamer.bootstrap import manifests
    from gossamer.bootstrap.genesis import ensure_genesis
    from gossamer.node.entering import checked_advertise, checked_join, default_folder, given_invitation
    from gossamer.node.options import DaemonOptions
    from gossamer.node.storage.home import Home
    from gossamer.node.supervisor import Supervisor

    logs.configure(level=log_level, debug=debug, as_json=log_json)
    manifest = manifests.read(path)
    home = Home((folder or default_folder(manifest.swarm_id, "-bootstrap")).absolute())
    addresses = checked_join(join)
    home.create()
    is_new = home.manifest() is None
    home.adopt(manifest)
    if not addresses:
        try:
            ensure_genesis(home, manifest, path)
        except ConfigError:
            if is_new:  # or the folder would refuse the manifest once it has been put right
                home.manifest_path.unlink()
            raise
    _let_in(home, manifest, path, given_invitation(invite))
    _tell_how_to_join(home, manifest, advertise or [listen])
    supervisor = Supervisor(
        DaemonOptions(
            folder=home.root,
            listen=listen,
            advertise=checked_advertise(advertise),
            join=addresses,
            name=name,
            trains=False,
            plaintext=plaintext,
            admin=admin,
            debug=debug,
            log_json=log_json,
            log_level=log_level,
        ),
        None,
    )
    raise typer.Exit(supervisor.run())


def _let_in(home: "Home", manifest: "Manifest", path: Path, invitation: "Invitation | None") -> None:
    """Keep an invitation, or make one where the owner's key is at hand. Raises ConfigError."""
    from gossamer.bootstrap import owners
    from gossamer.protocol.admission import Role

    if invitation is not None:
        home.keep_invitation(invitation)
        return
    key = path.with_suffix(owners.SUFFIX)
    if manifest.admission.mode == "open" or home.invitation() is not None or not key.exists():
        return  # without any the daemon will say what is missing
    owner = owners.owner_of(manifest, path, None)
    own_id = home.identity().node_id
    home.keep_invitation(
        owners.invite(owner, manifest.swarm_id, own_id, role=Role.OBSERVE, days=0, contacts=())
    )
    typer.echo(f"this bootstrap peer may observe: invited by the owner's key {key}", err=True)


def _tell_how_to_join(home: "Home", manifest: "Manifest", addresses: list[str]) -> None:
    from gossamer.models.task_file import flag_for, is_own_name

    host, port = parse_address(addresses[0], port_min=0)
    where = format_address("THIS_MACHINE" if host in WILDCARDS else host, port) if port else "ADDRESS"
    contact = f"gossamer://{home.identity().node_id.hex()}@{where}"
    typer.echo(f"swarm {manifest.swarm_id.hex()}", err=True)
    if manifest.admission.mode == "invited":
        typer.echo(f"invite others with  gossamer invite NODE_ID --join {contact}", err=True)
    else:
        task = manifest.task.name
        flag = f" {flag_for(task)}" if is_own_name(task) else ""
        typer.echo(f"others join with  gossamer node --join {contact}{flag}", err=True)


@app.command(rich_help_panel="Begin")
def swarm(
    nodes: Annotated[
        int, typer.Option(min=1, max=64, help="Training nodes, each a process with its own key.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rounds to train.")] = 40,
    task: TaskName = "text",
    option: TaskSettings = None,
    preset: Preset = None,
    data: Data = None,
    codec: Codec = "int4",
    every_steps: EverySteps = 30,
    fragments: Fragments = 1,
    seed: Seed = 0,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep the nodes' folders here; default: a temporary one.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the summary here as JSON.")] = None,
    chaos: Annotated[
        bool,
        typer.Option(
            "--chaos",
            help="Kill a node and restart it, let one join late, split the network, kill the bootstrap peer.",
        ),
    ] = False,
    plaintext: Plaintext = False,
    debug: Debug = False,
) -> None:
    """Try it: a local swarm, trained before your eyes.

    It starts a bootstrap peer and nodes as real processes, trains on Python's own source, shows losses and
    rounds as they go, and checks at the end that all hold the same model.

        gossamer swarm
        gossamer swarm --nodes 6 --rounds 60 --codec topk

    With a kill, a late joiner, a split network and a dead bootstrap peer on the way:

        gossamer swarm --chaos
    """
    from gossamer.bootstrap.local_swarm import SwarmOptions
    from gossamer.bootstrap.swarm import run_swarm

    options = SwarmOptions(
        nodes=nodes,
        rounds=rounds,
        task=task,
        options=_given(preset=preset),
        settings=tuple(option or ()),
        data=tuple(map(str, data or ())),
        codec=codec,
        every_steps=every_steps,
        fragments=fragments,
        seed=seed,
        folder=folder,
        json_path=json_path,
        chaos=chaos,
        plaintext=plaintext,
        debug=debug,
    )
    raise typer.Exit(run_swarm(options))


def main() -> None:
    """Entry point: one clear line, and exit status 2 for whatever a person can mend, 1 for a bug of ours."""
    try:
        status = app(standalone_mode=False, prog_name="gossamer")
    except typer.TyperException as error:
        if error.format_message():  # empty where nothing was asked, and help has been printed
            print(f"gossamer: {_usage_error(error)}", file=sys.stderr)
        status = USER_ERROR
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except Exception as error:
        if "--debug" in sys.argv or logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"gossamer: {_in_words(error)}", file=sys.stderr)
        status = USER_ERROR if isinstance(error, LocalError | OSError | MemoryError) else BUG
    sys.exit(status if isinstance(status, int) else 0)


def _in_words(error: Exception) -> str:
    """One line, also for what nobody has foreseen."""
    if isinstance(error, LocalError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    at = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    where = f"{Path(at.filename).name}:{at.lineno}"
    return f"a bug in gossamer: {said} ({where}); run it again with --debug, and report it"


def _usage_error(error: typer.TyperException) -> str:
    """One line: what is wrong, what may have been meant, and where to read on."""
    known, ctx = getattr(error, "possibilities", None), getattr(error, "ctx", None)
    said = f"{error.args[0]}; did you mean {known[0]}?" if known else error.format_message()
    return f"{' '.join(said.split())} (see {ctx.command_path if ctx else 'gossamer'} --help)"


if __name__ == "__main__":
    main()
