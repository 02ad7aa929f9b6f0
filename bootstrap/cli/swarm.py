"""`gossamer swarm`: a local one, to see it work."""

from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli.flags import (
    Codec,
    Data,
    Debug,
    EverySteps,
    Fragments,
    Plaintext,
    Preset,
    Seed,
    TaskName,
    TaskSettings,
    given,
)


def swarm(
    nodes: Annotated[
        int, typer.Option(min=1, max=64, help="Number of training nodes, each a process with its own key.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of rounds to train.")] = 40,
    task: TaskName = "text",
    option: TaskSettings = None,
    preset: Preset = None,
    data: Data = None,
    codec: Codec = "int4",
    every_steps: EverySteps = 30,
    fragments: Fragments = 1,
    seed: Seed = 0,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder to keep the nodes' folders in. Default: a temporary one."),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the summary to this file as JSON; /dev/stdout then gets nothing else."
        ),
    ] = None,
    chaos: Annotated[
        bool,
        typer.Option(
            "--chaos",
            help="Kill and restart a node, add one late, split the network and kill the bootstrap peer.",
        ),
    ] = False,
    plaintext: Plaintext = False,
    debug: Debug = False,
) -> None:
    """Try it: train a local swarm and watch it live.

    It starts a bootstrap peer and nodes as real processes, trains on Python's own source, shows losses and
    rounds as they change, and checks at the end that all nodes hold the same model.

        gossamer swarm
        gossamer swarm --nodes 6 --rounds 60 --codec topk

    With a killed node, a late joiner, a split network and a dead bootstrap peer along the way:

        gossamer swarm --chaos
    """
    from gossamer.bootstrap.local_swarm import SwarmOptions, run_swarm

    options = SwarmOptions(
        nodes=nodes,
        rounds=rounds,
        task=task,
        options=given(option, preset=preset),
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
