"""The `gossamer` command: how swarms begin, and everything that `gossamer.node.cli` offers."""

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from gossamer.node import logs
from gossamer.node.cli import (
    Advertise,
    Debug,
    Dir,
    Join,
    Listen,
    LogJson,
    Name,
    Plaintext,
    app,
    checked_join,
    default_folder,
)
from gossamer.node.home import Home
from gossamer.node.options import DaemonOptions
from gossamer.node.supervisor import Supervisor
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError, LocalError
from gossamer.protocol.rules import RULES

USER_ERROR = 2

Preset = Annotated[str, typer.Option(help="Size of the built-in GPT: tiny, small, medium or 124m.")]
Codec = Annotated[str, typer.Option(help=f"How deltas are compressed: {', '.join(CODECS)}.")]
Averaging = Annotated[
    str,
    typer.Option(help=f"How deltas of weight matrices are averaged: {', '.join(RULES)} (of all tensors)."),
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
    int, typer.Option(min=0, max=2**62, help="Of the first parameters and the order of the data.")
]


@app.callback()
def _gossamer() -> None:
    """Train one PyTorch model on many machines, with no server in the middle.

    Try it on this machine:  gossamer swarm

    For real:  gossamer init my.toml  and  gossamer bootstrap my.toml  on one machine,
    then  gossamer node --join HOST:PORT  on every other.
    """


@app.command(rich_help_panel="Begin")
def init(
    path: Annotated[Path, typer.Argument(metavar="MANIFEST", help="Where to write it, for example my.toml.")],
    name: Annotated[str, typer.Option(help="What to call the swarm.")] = "",
    task: Annotated[str, typer.Option(help="What is trained.")] = "text",
    preset: Preset = "tiny",
    codec: Codec = "int4",
    every_steps: EverySteps = 30,
    every_seconds: EverySeconds = 0.0,
    averaging: Averaging = "rda",
    fragments: Fragments = 1,
    seed: Seed = 0,
    horizon_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens over which the learning rate falls to a tenth; 0 keeps it constant."
        ),
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a manifest, and print the swarm's id. Edit it before the swarm begins, never after."""
    from gossamer.bootstrap import manifests

    if path.exists() and not force:
        raise ConfigError(f"{path} exists; choose another name or replace it with --force")
    manifest, _ = manifests.create(
        name=name or path.stem,
        task=task,
        options={"preset": preset, "horizon_tokens": horizon_tokens},
        codec=codec,
        every_steps=every_steps,
        every_seconds=every_seconds,
        fragments=fragments,
        seed=seed,
        averaging=averaging,
    )
    manifests.write(manifest, path)
    typer.echo(f"wrote {path}: swarm {manifest.swarm_id.hex()}")
    typer.echo(f"next, on a machine that the others can reach:  gossamer bootstrap {path}")


@app.command(rich_help_panel="Begin")
def bootstrap(
    path: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The manifest that gossamer init wrote.")],
    listen: Listen = "0.0.0.0:7700",
    advertise: Advertise = None,
    join: Join = None,
    folder: Dir = None,
    name: Name = "bootstrap",
    plaintext: Plaintext = False,
    debug: Debug = False,
    log_json: LogJson = False,
) -> None:
    """Run a bootstrap peer: a full replica without a trainer, where others can join."""
    from gossamer.bootstrap import manifests
    from gossamer.bootstrap.genesis import ensure_genesis

    logs.configure(debug=debug, as_json=log_json)
    manifest = manifests.read(path)
    home = Home((folder or default_folder(manifest, "-bootstrap")).absolute())
    addresses = checked_join(join)
    home.create()
    is_new = home.manifest() is None
    home.adopt(manifest)
    if not addresses:
        try:
            ensure_genesis(home, manifest)
        except ConfigError:
            if is_new:  # or the folder would refuse the manifest once it has been put right
                home.manifest_path.unlink()
            raise
    typer.echo(f"swarm {manifest.swarm_id.hex()}", err=True)
    supervisor = Supervisor(
        DaemonOptions(
            folder=home.root,
            listen=listen,
            advertise=checked_join(advertise),
            join=addresses,
            name=name,
            trains=False,
            plaintext=plaintext,
            debug=debug,
            log_json=log_json,
        ),
        None,
    )
    raise typer.Exit(supervisor.run())


@app.command(rich_help_panel="Begin")
def swarm(
    nodes: Annotated[
        int, typer.Option(min=1, max=64, help="Training nodes, each a process with its own key.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rounds to train.")] = 40,
    preset: Preset = "tiny",
    data: Annotated[
        list[str] | None, typer.Option(help="Files or folders of text; default: Python's standard library.")
    ] = None,
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
    """Try it: a local swarm of real node processes, trained and checked before your eyes.

    Example: gossamer swarm --nodes 6 --rounds 60 --codec topk
    Nothing stops it: gossamer swarm --chaos
    """
    from gossamer.bootstrap.swarm import SwarmOptions, run_swarm

    options = SwarmOptions(
        nodes=nodes,
        rounds=rounds,
        preset=preset,
        data=tuple(data or ()),
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
    """Entry point: one clear line and exit status 2 for whatever a person can mend."""
    try:
        status = app(standalone_mode=False, prog_name="gossamer")
    except typer.TyperException as error:
        if error.format_message():  # empty where nothing was asked, and help has been printed
            print(f"gossamer: {error.format_message()} (see gossamer --help)", file=sys.stderr)
        status = USER_ERROR
    except LocalError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"gossamer: {error}", file=sys.stderr)
        status = USER_ERROR
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
