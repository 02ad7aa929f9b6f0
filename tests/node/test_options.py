"""`gossamer.node.options`: what a child is started with survives its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.node.options import DaemonOptions, TrainerOptions


@pytest.mark.parametrize(
    "options",
    [
        DaemonOptions(folder=Path("/tmp/ü n")),
        DaemonOptions(
            folder=Path("d"),
            listen="0.0.0.0:1",
            advertise=("a:1", "b:2"),
            join=("c:3",),
            name='naïve "quotes" \'',
            trains=False,
            plaintext=True,
            debug=True,
            log_json=True,
            log_level="error",
        ),
        TrainerOptions(folder=Path("d"), data=("x", "y z"), threads=3, device="cuda:1", stop_round=9),
    ],
)
def test_round_trip(options: DaemonOptions | TrainerOptions) -> None:
    assert type(options).from_json(options.to_json()) == options


def test_options_of_a_newer_version_are_passed_over() -> None:
    text = DaemonOptions(folder=Path("d")).to_json().replace("{", '{"novel": 1, ', 1)
    assert DaemonOptions.from_json(text) == DaemonOptions(folder=Path("d"))
