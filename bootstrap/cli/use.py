"""`gossamer generate` and `gossamer export`: what a model in a node's folder is good for."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli.flags import Used
from gossamer.node.formatting import harmless
from gossamer.node.options import flags

Live = Annotated[
    bool, typer.Option("--live", help="Use the model that is trained, not the average of its last rounds.")
]


def generate(
    folder: Used = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    length: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of characters to write.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, max=10, help="0 always takes the likeliest byte; higher is more varied.")
    ] = 0.7,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**62, help="A different seed gives a different text."),
    ] = 0,
    task: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:CLASS", help=flags()["task"].help),
    ] = None,
    live: Live = False,
) -> None:
    """Continue a prompt with the averaged model in a node's folder.

    It reads only the folder, and works while the node is running.

        gossamer generate --prompt "def "

    Of another node on this machine, longer and more even:

        gossamer generate --dir d0 --length 2000 --temperature 0.3 --seed 7
    """
    from gossamer.node.home import node_in
    from gossamer.node.trainer.data import remember_task

    home = node_in(folder)
    if task is not None:
        remember_task(home, task)
    # One byte takes many small steps. Beside a trainer on the same cores, threads that spin between the steps
    # wait longer than they work. The variable has to be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gossamer.node.exports.generate import generate as write_text

    typer.echo(prompt, nl=False)
    for piece in write_text(home, prompt, length, temperature=temperature, seed=seed, live=live):
        typer.echo(harmless(piece), nl=False)
    typer.echo()


def export(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A file that ends in .safetensors, or a folder to create.")
    ],
    folder: Used = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")
    ] = "float32",
    live: Live = False,
    sealed: Annotated[
        bool, typer.Option("--sealed", help="Write the newest sealed snapshot, not everything merged so far.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report what was written as JSON.")] = False,
) -> None:
    """Write the averaged model as a safetensors file or Hugging Face folder.

    It reads only the node's folder, and works while the node is running. Equal records give equal bytes.

    One file, for anything that reads safetensors; then one of half the size:

        gossamer export model.safetensors
        gossamer export --dir d0 model.safetensors --dtype bfloat16

    A folder, for AutoModelForCausalLM.from_pretrained:

        gossamer export my-model
    """
    from gossamer.node.exports.export import export as write_model
    from gossamer.node.home import node_in

    done = write_model(node_in(folder), out, dtype=dtype, live=live, sealed=sealed, force=force)
    if as_json:
        typer.echo(json.dumps(done.as_json(), indent=2))
    else:
        typer.echo(done.explain())
    if done.frozen:
        typer.echo(
            f"gossamer: {len(done.frozen)} frozen parameters or buffers, such as {done.frozen[0]!r}, were not"
            " written: the swarm does not hold them",
            err=True,
        )
