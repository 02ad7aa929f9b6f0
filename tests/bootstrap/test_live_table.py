"""`gossamer.bootstrap.live_table`: it renders whatever a status lacks, and what a node calls itself."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gossamer.bootstrap.live_table import Display, show_summary
from gossamer.bootstrap.processes import NodeProcess
from gossamer.bootstrap.summary import SwarmSummary
from tests.bootstrap.summaries import status as ended
from tests.bootstrap.summaries import summary


def process(name: str, status: dict[str, Any] | None) -> NodeProcess:
    made = NodeProcess(name, Path("/nowhere"), [])
    made.status = status
    return made


def minimal(**more: Any) -> dict[str, Any]:
    return {
        "state": "joining",
        "round": 0,
        "clock": 0,
        "trains": True,
        "by_health": {},
        "bytes_received": 0,
        "bytes_sent": 0,
        **more,
    }


PROCESSES = [
    process("unborn", None),
    process("bare", minimal()),
    process("serving", minimal(trains=False, state="serving", clock=3)),
    process("[bold]odd", minimal(state="\x1b[31mnovel", trainer=None)),
    process(
        "full",
        minimal(
            state="training",
            round=5,
            phi_digest="ab12cd34" * 8,
            by_health={"alive": 1, "down": 1},
            trainer={
                "inner_steps": 9,
                "loss": 1.5,
                "tokens_per_s": 1234.5,
                "val_loss": 2.5,
                "val_loss_average": 2.25,
            },
        ),
    ),
    process("partly", minimal(trainer={"val_loss": None, "loss": 0.0, "tokens_per_s": 0.0})),
]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("count", range(1, len(PROCESSES) + 1))
def test_it_renders_with_whatever_is_missing(terminal: bool, count: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with Display(console, 10, "a title") as display:
        for phase in ("starting", "training", "exchanging"):
            display.update(PROCESSES[:count], phase)
    text = out.getvalue()
    assert "a title" in text and "exchanging" in text
    if count == len(PROCESSES) and terminal:
        for part in ("[bold]odd", "ab12cd34", "1,234", "1.500", "2.250 averaged, 2.500 live"):
            assert part in text, part


@pytest.mark.parametrize("width", [44, 60, 74, 90, 300])
def test_a_narrow_terminal_has_fewer_columns_and_none_cut_short(width: int) -> None:
    out = io.StringIO()
    full = minimal(
        state="training",
        round=12345,
        phi_digest="ab12cd34" * 8,
        bytes_sent=108.8e6,
        bytes_received=108.8e6,
        trainer={"inner_steps": 123456, "loss": 1.25, "tokens_per_s": 123456.0},
    )
    with Display(Console(file=out, force_terminal=True, width=width), 10, "t") as display:
        display.update([process("bootstrap", full), process("node-1", None)], "training")
    text = out.getvalue()
    assert "…" not in text and all(part in text for part in ("bootstrap", "training", "12345", "1.250"))
    assert ("109 MB" in text) == (width >= 90)


@pytest.mark.parametrize(("height", "shown"), [(40, 24), (20, 11), (10, 1)])
def test_a_short_terminal_has_fewer_nodes_and_all_that_is_said_of_the_swarm(height: int, shown: int) -> None:
    nodes = [process(f"node-{i}", minimal(trainer={"val_loss": 2.5})) for i in range(24)]
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=80, height=height), 10, "t")
    display.tell("a note")
    with display:
        display.update(nodes, "training")
    frame = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).rpartition("╭")[2]
    for part in ("round 0/10", "validation loss  2.500 live  from 2.500", "a note", "╯"):
        assert part in frame, part
    assert len(re.findall(r"node-\d+", frame)) == shown
    assert shown == 24 or f"+ {24 - shown} more" in frame


def test_a_terminal_on_which_nothing_can_be_drawn_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=True), 10, "a title") as display:
        display.update(PROCESSES, "training")
    assert "a title" in out.getvalue() and "training: round " in out.getvalue()


def test_what_nodes_say_cannot_steer_the_terminal() -> None:
    out = io.StringIO()
    Display(Console(file=out), 10, "t").tell("node-1: \x1b[2Jfault")
    assert "* node-1: \N{REPLACEMENT CHARACTER}[2Jfault\n" in out.getvalue()


def written(found: SwarmSummary, width: int = 100) -> str:
    out = io.StringIO()
    show_summary(Console(file=out, width=width), found)
    return out.getvalue()


def test_the_summary_says_why_all_is_not_well() -> None:
    well, flat = summary(ended(0), ended(1)), summary(ended(0), ended(1, trainer={"val_loss": 9.0}))
    assert "problem" not in written(well)
    assert "validation loss     5.000 → 1.600 averaged, 2.100 live" in written(well)
    assert "problem             the validation loss did not fall" in written(flat)


def test_one_node_alone_is_not_compared_with_data_parallel_training() -> None:
    assert "by 1 node) " in written(summary(ended(0)))
    assert "data-parallel" not in written(summary(ended(0)))
    assert "data-parallel training: 800 kB, 80,000 times" in written(summary(ended(0), ended(1)), width=200)


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    text = written(summary(ended(0), ended(1)), width=30)
    assert "…" not in text
    told = "".join(re.findall(r"│ .{20}(.*?) *│", text))
    assert "bit-identical" in told and "data-parallel" in told


def test_the_summary_renders_whatever_is_missing() -> None:
    trainer = {"val_loss": None, "val_loss_average": None, "val_loss_start": None}
    bare = ended(0, trainer=trainer, payload_bytes_sent=0)
    assert "NOT identical" in written(summary(bare, ended(1, phi_digest="q")))
