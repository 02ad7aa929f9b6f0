"""Options that several commands have."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from gossamer.models.registry import task_names
from gossamer.node.config import option_values
from gossamer.protocol.errors import ConfigError

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
