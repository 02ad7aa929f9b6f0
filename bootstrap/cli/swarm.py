"""`gossamer swarm`: a local one, to see it work."""

from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli.flags import (
    FRAGMENTS,
    Codec,
    Data,
    Debug,
    EverySteps,
    Plaintext,
    Preset,
    Seed,
    TaskName,
    TaskSettings,
    a_folder,
    all_settings,
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
    every_steps: EverySteps = None,
    fragments: Annotated[int, FRAGMENTS] = 1,
    seed: Seed = 0,
    folder: Annotated[
        Path | None, a_folder("Folder to keep the nodes' folders in. Default: a temporary one.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the summary to this file, as JSON."),
    ] = None,
    plaintext: Plaintext = False,
    debug: Debug = False,
) -> None:
    """Try it: train a local swarm and watch it live.

    It starts a bootstrap peer and nodes as real processes, trains on Python's own source, shows losses and
    rounds as they change, and checks at the end that all nodes hold the same model.

        gossamer swarm
        gossamer swarm --nodes 6 --rounds 60 --codec topk
    """
    from gossamer.bootstrap.local_swarm import EVERY_STEPS, SwarmOptions, run_swarm

    options = SwarmOptions(
        nodes=nodes,
        rounds=rounds,
        task=task,
        settings=all_settings(option, preset),
        data=data or (),
        codec=codec,
        every_steps=every_steps or EVERY_STEPS,
        fragments=fragments,
        seed=seed,
        folder=folder,
        json_path=json_path,
        plaintext=plaintext,
        debug=debug,
    )
    raise typer.Exit(run_swarm(options))
