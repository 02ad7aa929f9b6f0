"""`gossamer init`: a new swarm's manifest."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli.flags import (
    FRAGMENTS,
    Debug,
    EverySteps,
    Preset,
    Seed,
    TaskName,
    TaskSettings,
    all_settings,
)
from gossamer.protocol.errors import ConfigError


def init(
    path: Annotated[Path, typer.Argument(metavar="MANIFEST", help="File to write, for example my.toml.")],
    name: Annotated[str, typer.Option(help="Name of the swarm.")] = "",
    task: TaskName = "text",
    option: TaskSettings = None,
    preset: Preset = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="How deltas are compressed: exact, int8, int4, topk ... (docs/protocol.md). Default: each"
            " node uses the finest that its uplink carries of int4, topk8, topk16 and topk."
        ),
    ] = None,
    every_steps: EverySteps = None,
    every_seconds: Annotated[
        float, typer.Option(min=0, max=86_400, help="Window length in seconds, instead of --every-steps.")
    ] = 0.0,
    averaging: Annotated[
        str | None,
        typer.Option(
            help="How deltas of weight matrices are averaged: rda, mean, or centered-clip (for all tensors)."
            " Default: the task's choice."
        ),
    ] = None,
    fragments: Annotated[int | None, FRAGMENTS] = None,
    seed: Seed = 0,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Start from existing weights: a safetensors file, or a folder written by transformers.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(exists=True, help="Data to test a task of your own on.")
    ] = None,
    same_data: Annotated[
        bool,
        typer.Option(
            "--same-data", help="All nodes train on this --data: go through it together, each sample once."
        ),
    ] = False,
    trial: Annotated[
        bool, typer.Option("--trial/--no-trial", help="Test a task of your own for one step.")
    ] = True,
    invited: Annotated[
        bool, typer.Option("--invited", help="Let in only nodes that an owner has invited.")
    ] = False,
    owner_key: Annotated[
        Path | None,
        typer.Option(help="An owner's key, to own this swarm too. Default: a new one with --invited."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace existing files, but never an owner's key.")
    ] = False,
    debug: Debug = False,  # `main` looks for it
) -> None:
    """Write a new swarm's manifest: what its nodes agree on.

    It builds the model once and prints the swarm's id, which is a hash of everything in the file. So edit the
    file before the swarm begins, and never afterwards. With --invited it also creates an owner's key beside
    the manifest: keep it to yourself.

        gossamer init my.toml
        gossamer init my.toml --preset small --codec topk --fragments 8
        gossamer init my.toml --every-seconds 60 --invited
        gossamer init my.toml --task my_task.py:MyTask --option width=64
        gossamer init my.toml --from model.safetensors

    With --from, or a task of your own, it also writes the initial parameters beside the manifest, for the
    bootstrap peer.

    Then start the swarm's first peer: gossamer bootstrap my.toml.
    """
    from gossamer.bootstrap import genesis, invites, manifests
    from gossamer.protocol.identity import Identity

    if not path.name or path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file, for example {path / 'my.toml'}")
    if path.suffix == invites.SUFFIX:
        raise ConfigError(f"{path}: *{invites.SUFFIX} are owners' keys; give the manifest another name")
    first, key = genesis.beside(path), path.with_suffix(invites.SUFFIX)
    for file in (path, first):
        if file.exists() and not force:
            raise ConfigError(f"{file} already exists; choose another name or replace it with --force")
    owner = invites.read_owner(owner_key) if owner_key is not None else None
    secret = os.urandom(32) if invited and owner is None else b""
    if secret:
        invites.check_free(key)
        owner = Identity.from_seed(secret)
    manifest, phi = manifests.create(
        name=name or path.stem,
        task=task,
        settings=all_settings(option, preset),
        weights=weights,
        data=data or (),
        same_data=same_data,
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
        genesis.write(manifest, phi, first)
    else:
        first.unlink(missing_ok=True)  # that of the replaced manifest
    if secret:
        invites.write_owner(key, secret)  # before the manifest that names it
    manifests.write(manifest, path, replace=force)
    typer.echo(f"wrote {path}: swarm {manifest.swarm_id.hex()}")
    if has_first:
        typer.echo(f"wrote {first}: the initial parameters, which gossamer bootstrap reads from there")
    if secret:
        typer.echo(f"wrote {key}: the owner's key, which no node needs; back it up together with {path}")
    if owner is not None:
        typer.echo(f"the owner's public key, as listed in admission.owners:  {owner.public_key.hex()}")
    typer.echo(f"next, on a machine that the others can reach:  gossamer bootstrap {shlex.quote(str(path))}")
