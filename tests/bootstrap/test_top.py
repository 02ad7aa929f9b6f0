"""`gossamer.bootstrap.live_table`: the tables of `gossamer peers` and `gossamer top`."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gossamer.bootstrap.live_table import drawn, frame, show_peers, show_top
from gossamer.node.daemon.monitoring.status import to_json
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.merge.contributions import ContributionStats, Figures, RoundFigures
from tests.node import statuses
from tests.node.daemons import facts, founded, get, publish, running, training
from tests.node.trainer_side import until

ESC = "\x1b]0;owned\x07[/nope]"
SHOWN = "\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}[/nope]"
LONG = "gpu-box-17.cluster.example.university.edu" + 23 * "x"


def status(*names: str, **changes: Any) -> dict[str, Any]:
    """A node's status with members of these names. Deltas of the first are clipped and opposed."""
    stats = ContributionStats()
    for round_ in range(1, 21):
        found = {b"\1": Figures(clipped=9.8, pace=30.0, agreement=-0.7), b"\2": Figures()}
        stats.note(round_, RoundFigures(found, 0.25))
    members = tuple(
        statuses.member(
            number,
            name=name,
            contributions=stats.of(bytes([number]))._asdict(),
            replica=("same", "records", "other")[number % 3],
        )
        for number, name in enumerate(names, 1)
    )
    facts: dict[str, Any] = {
        "agreement": stats.agreement,
        "trainer": statuses.trainer(),
        "links": (statuses.link(1),),
    }
    return to_json(statuses.status(members=members, **{**facts, **changes}))


# -- peers


def peers(status: dict[str, Any], width: int = 250) -> str:
    out = io.StringIO()
    show_peers(status, Console(file=out, width=width, force_terminal=True, color_system=None))
    return out.getvalue()


def test_members_with_their_figures_and_verdicts() -> None:
    text = peers(status("liar [red]", ""))
    lines = [line for line in text.splitlines() if "alive" in line or "itself" in line]
    assert "me" in lines[0] and "itself" in lines[0]
    for part in ("liar [red]", "1.23M", "4,321", "-0.70", "clipped 20 by 9.8x, opposed 20"):
        assert part in lines[1], part
    assert "liar [red]: clipped in 20 of the last 20 rounds" in text
    assert "02020202" in lines[2] and "clipped" not in lines[2]
    assert "agreement 0.25 in the newest round with two deltas" in text
    assert "agreement" not in peers(status(agreement=None))


@pytest.mark.parametrize("name", ["workstation-7", LONG])
def test_a_narrow_terminal_shows_who_it_is_and_what_was_bad(name: str) -> None:
    found = status(name)
    for width in range(40, 120, 5):
        lines = peers(found, width).splitlines()
        assert max(map(len, lines)) <= width
        assert name[:10] in "".join(lines) and "20ofthelast20rounds" in "".join(" ".join(lines).split())
    assert next(line for line in lines if "node" in line).split()[:2] == ["node", "health"]


# -- top


def screen(state: dict[str, Any], width: int, height: int, lines: int = 3) -> list[str]:
    log = [{"time": 0, "level": "warning", "text": f"line {n} {ESC}"} for n in range(lines)]
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(frame({**state, "log": log}, "", width, height), end="")
    return out.getvalue().splitlines()


@pytest.mark.parametrize("members", [0, 3, 40])
@pytest.mark.parametrize("height", [24, 50])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_screen_fits_and_shows_members_and_log(width: int, height: int, members: int) -> None:
    state = status(*(f"node-{n}" for n in range(members)), problem="the disk is full")
    lines = screen(state, width, height)
    text = "\n".join(lines)
    assert len(lines) <= height and max(map(len, lines)) <= width
    for part in ("itself", "round 3 (swarm 4)", "2.000", "the disk is full", "line 2", "Ctrl-C quits"):
        assert part in text, part
    assert ("more" in text) == (members == 40 and height == 24)
    if members == 3:
        assert "node-2" in text and "alive" in text
        assert ("differs" in text and "1 kB" in text) == (width >= 120)


def test_nothing_that_others_say_moves_the_cursor() -> None:
    said = status("a", "b", name=ESC, swarm=ESC, swarm_id=ESC, state=ESC, round=ESC)
    said["members"][0].update(dict.fromkeys(("name", "health", "round", "device", "replica"), ESC))
    said["members"][0]["contributions"].update(judged=ESC, void=ESC, verdict=ESC)
    for text in ("".join(screen(said, 200, 40)), peers(said)):
        assert "\x1b" not in text and "\x07" not in text and SHOWN in text


@pytest.mark.parametrize(
    "part",
    [
        {"members": 7},
        {"log": ["x"]},
        {"log": [{"time": 1e300, "text": "x", "level": "info"}]},
        {"model": None},
        {"itself": {}},
    ],
)
def test_a_server_that_is_no_node_is_one_line(part: dict[str, Any]) -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(drawn(status("a") | {"log": []} | part, "", 120, 40))
    assert out.getvalue() == "what answers there is no admin server of this Gossamer release\n"


def test_it_wants_a_terminal_to_draw_on() -> None:
    with pytest.raises(ConfigError, match="needs a terminal"):
        show_top(lambda: "127.0.0.1:7780")


async def shows(fd: int, parts: Sequence[str]) -> None:
    """Wait until each part has been written to a pseudo-terminal."""
    text = ""
    os.set_blocking(fd, False)
    async with asyncio.timeout(60):
        while not all(part in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for part in parts):
            try:
                text += os.read(fd, 65536).decode("utf-8", "replace")
            except BlockingIOError:
                await asyncio.sleep(0.02)


async def test_a_run_on_a_real_terminal(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    main, side = pty.openpty()
    termios.tcsetwinsize(main, (24, 100))
    before = termios.tcgetattr(side)
    async with running(home, name="watched") as daemon, training(home) as trainer:
        await publish(home, trainer, 1, loss=3.0)
        await until(lambda: daemon.phi.loop.ready)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gossamer.bootstrap.cli.main", "top", "--dir", str(home.root)),
            stdin=side,
            stdout=side,
            stderr=side,
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"},
            start_new_session=True,
        )
        try:
            await shows(main, ["watched", "round 1 (swarm 1)", "Ctrl-C quits"])
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                assert await process.wait() == 0
            assert termios.tcgetattr(side)[3] == before[3], "the terminal is as it was"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(main)
            os.close(side)
        assert (await get(home, "/healthz"))[0] == 200 and facts(home)["admin"]
