"""`gossamer.bootstrap.display`: it renders whatever a status lacks, and what a node calls itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gossamer.bootstrap.display import Display, minutes, show_summary, sparkline
from gossamer.bootstrap.processes import NodeProcess
from tests.bootstrap.test_summary import status as ended
from tests.bootstrap.test_summary import summary


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([9.0, 1.0]) == "█▁"
    assert len(sparkline(list(map(float, range(100))), width=10)) == 10


def test_minutes() -> None:
    assert [minutes(s) for s in (0, 59.9, 60, 3599)] == ["0:00", "0:59", "1:00", "59:59"]


def process(name: str, status: dict[str, Any] | None) -> NodeProcess:
    made = NodeProcess(name, Path("/nowhere"), [], {})
    made.status = status
    return made


def minimal(**more: Any) -> dict[str, Any]:
    return {
        "state": "joining",
        "round": 0,
        "clock": 0,
        "trains": True,
        "members": [],
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
            members=[{"health": "alive"}, {"health": "down"}],
            trainer={"inner_steps": 9, "loss": 1.5, "tokens_per_s": 1234.5, "val_loss": 2.5},
        ),
    ),
    process("partly", minimal(trainer={"val_loss": None, "loss": 0.0, "tokens_per_s": 0.0})),
]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("count", range(len(PROCESSES) + 1))
def test_it_renders_with_whatever_is_missing(terminal: bool, count: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with Display(console, 10, "a title") as display:
        for phase in ("starting", "training", "exchanging"):
            display.update(PROCESSES[:count], phase)
    text = out.getvalue()
    assert "a title" in text and "exchanging" in text
    if count == len(PROCESSES) and terminal:
        for part in ("[bold]odd", "ab12cd34", "1,234", "1.500", "2.500"):
            assert part in text, part


@pytest.mark.parametrize("statuses", [[ended(0)], [ended(0), ended(1, phi_digest="q")], [ended(0, trainer={
    "val_loss": None, "val_loss_start": None}, payload_bytes_sent=0)]])  # fmt: skip
def test_the_summary_renders(statuses: list[dict[str, Any]]) -> None:
    out = io.StringIO()
    found = summary(*statuses)
    show_summary(Console(file=out, width=100), found)
    assert ("bit-identical" if found.identical else "NOT identical") in out.getvalue()
