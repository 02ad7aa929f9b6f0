"""`gossamer top`: what is drawn at every size, what keys do, and one run on a real terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from rich.live import Live

from gossamer.bootstrap.top import (
    SORTS,
    Board,
    Choices,
    Top,
    _agreement_style,
    keys_in,
    screen,
    show_top,
    sorted_members,
    window,
)
from gossamer.node.formatting import averaged, chart, count, duration, harmless_line, size
from gossamer.protocol.errors import ConfigError
from tests.node.daemons import facts, founded, get, publish, running, training


def member(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"{number:02x}" * 32,
        "name": f"node-{number:02}",
        "health": "alive",
        "self": number == 0,
        "trains": True,
        "round": 100 + number,
        "tokens": 1_234_567 * number,
        "tokens_per_s": 1000.0 * number,
        "loss": 3.0 - number / 100,
        "device": "cuda:0 NVIDIA Something Long",
        "version": "0.1.0",
        "addresses": [f"192.168.1.{number}:7700"],
        "heard_s": 1.5,
        "role": "train",
        "claim": "same",
        "conduct": None,
        **changes,
    }


def link(number: int) -> dict[str, Any]:
    return {
        "id": f"{number:02x}" * 32,
        "outbound": number % 2 == 0,
        "sent": 1000,
        "received": 2000,
        "payload_sent": 10**9,
        "payload_received": 10**8,
        "sent_per_s": 1e5 * number,
        "received_per_s": 2e5,
        "dropped": 0,
    }


def board(members: int = 20, **now: Any) -> Board:
    shown = Board("127.0.0.1:7780")
    state = {
        "time": 1.0,
        "swarm": {
            "id": "ab" * 32,
            "name": "evil\x1b[2Jname",
            "parameters": 124_000_000,
            "fragments": 4,
            "codec": "int4",
        },
        "node": {
            "id": "00" * 32,
            "name": "node-00",
            "trains": True,
            "state": "training",
            "uptime_s": 4000.0,
            "reachable": True,
            "device": "cpu",
        },
        "now": {
            "round": 120,
            "clock": 121,
            "swarm_tokens": 10**9,
            "swarm_tokens_per_s": 123456.0,
            "tokens_per_s": 1000.0,
            "inner_steps": 1000,
            "loss": 2.5,
            "val_loss": None,
            "wait_fraction": 0.021,
            "rounds_behind": 0,
            "payloads_missing": 0,
            "sealed_round": None,
            "closed_round": 0,
            "fetching": None,
            "agree": {"same": 3, "of": 4, "round": 112},
            **now,
        },
        "members": [member(number) for number in range(members)],
        "links": [link(number) for number in range(1, min(members, 7))],
        "edges": [],
    }
    shown.take("state", state)
    rounds = [[r, 1.0, 5.0 - r / 50 if r % 7 else None, 100, 100 * r, 0.5, []] for r in range(1, 121)]
    shown.take("rounds", {"authors": [], "rounds": rounds})
    for number in range(30):
        shown.take("notice", {"time": float(number), "level": "warning", "text": f"line {number}\x07"})
    return shown


def drawn(shown: Board, width: int, height: int, choices: Choices | None = None) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None, legacy_windows=False)
    console.print(screen(shown, choices or Choices(), width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("members", [1, 3, 20, 300])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (120, 30), (60, 14), (40, 10), (250, 90)])
def test_it_fits_every_terminal(members: int, width: int, height: int) -> None:
    lines = drawn(board(members), width, height)
    assert len(lines) == height, "to the last line, where the keys are told"
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert text.replace("\n", "").isprintable(), "no control character of a peer reaches the terminal"
    assert "round 120" in lines[2] and "*node-00" in text and "q quit" in lines[-1]


@pytest.mark.parametrize("width", range(1, 15))
def test_a_pane_too_narrow_for_anything_is_no_fault(width: int) -> None:
    assert max(map(len, drawn(board(), width, 24))) <= width


def test_what_is_shown_where_there_is_room() -> None:
    text = "\n".join(drawn(board(), 160, 60))
    for part in (
        "124M parameters",
        "training  up 1h06m, reachable",
        "model same as 3 of 4",
        "loss 2.500",
        "held-out -",
        "node-19",
        "← node-05",
        "500 kB",
        "█",
        "line 29",
    ):
        assert part in text, part
    assert "of 300 MiB" in "\n".join(drawn(board(fetching=[20, 300]), 100, 30))


def test_a_node_that_does_not_train_is_where_the_swarm_is() -> None:
    shown = board(round=0)
    assert shown.state is not None
    assert "round 0 (swarm 121)" in drawn(shown, 160, 60)[2]
    shown.state["node"]["trains"] = False
    assert drawn(shown, 160, 60)[2].startswith("round 121  tokens")


def test_an_accused_member_is_marked_and_its_verdict_told() -> None:
    shown = board(3)
    assert shown.state is not None
    verdict = {"agreement": -0.5, "verdict": "clipped in 18 of the last 20 rounds"}
    shown.state["members"][1]["conduct"] = verdict
    text = "\n".join(drawn(shown, 140, 40, Choices(member="01" * 32)))
    assert "!node-01" in text and "clipped in 18 of the last 20 rounds" in text and "-0.50" in text


def test_nothing_is_known_yet_or_any_more() -> None:
    shown = Board("127.0.0.1:7780")
    assert "asking 127.0.0.1:7780" in drawn(shown, 80, 24)[0]
    shown.problem = "no answer"
    assert "no answer" in drawn(shown, 80, 24)[0]
    known = board()
    known.problem = "the node closed the connection"
    assert "the node closed the connection" in drawn(known, 80, 24)[1]
    assert known.state is not None
    known.take("state", known.state)
    assert "went away" not in drawn(known, 80, 24)[1]


def test_the_selection_stays_with_its_member_and_in_sight() -> None:
    shown, choices = board(300), Choices()
    drawn(shown, 80, 24, choices)
    choices.step = 250
    text = "\n".join(drawn(shown, 80, 24, choices))
    chosen = choices.member
    assert f"node-{int(chosen[:2], 16):02}" in text or chosen[:16] in text
    choices.sort = SORTS.index("round")
    drawn(shown, 80, 24, choices)
    assert choices.member == chosen
    choices.step = -1000
    drawn(shown, 80, 24, choices)
    assert shown.state is not None
    assert choices.member == sorted_members(shown.state["members"], "round")[0]["id"]


def test_orders() -> None:
    members = [
        member(0, health="alive", loss=None),
        member(1, health="down"),
        member(2, health="suspect"),
        member(3, name=""),
    ]
    orders = {by: [int(m["id"][:2], 16) for m in sorted_members(members, by)] for by in SORTS}
    assert orders == {
        "name": [0, 3, 2, 1],
        "round": [3, 2, 1, 0],
        "tokens/s": [3, 2, 1, 0],
        "loss": [3, 2, 1, 0],
        "health": [3, 0, 2, 1],
    }
    numbered = [member(n, name=name) for n, name in enumerate(("b", "n10", "n2", "n", "n2x"))]
    assert [m["name"] for m in sorted_members(numbered, "name")] == ["b", "n", "n2", "n2x", "n10"]


def test_charts() -> None:
    assert chart([1.0, 2.0, 3.0], 1) in (["▁▄█"], ["▁▅█"])
    assert chart([1.0, 3.0], 2) == [" █", "▁█"]
    assert chart([2.0, 2.0], 1) == ["▄▄"]
    assert averaged([1.0, 2.0, 3.0], 10) == [1.0, 2.0, 3.0]
    means = averaged([float(value) for value in range(1000)], 20)
    assert means[0] == 24.5 and means[-1] == 974.5
    many = chart(means, 3)
    assert [len(row) for row in many] == [20, 20, 20] and many[0][-1] == "█" and many[2][0] == "▁"


def with_losses(losses: list[float]) -> Board:
    shown = board(4, clock=len(losses))
    shown.losses = dict(enumerate(losses, 1))
    return shown


def test_the_chart_is_labelled_with_what_its_bars_show() -> None:
    """More rounds than columns are averaged: of one outlier among many little is left."""
    lines = drawn(with_losses([2.0] * 200 + [9.0] + [2.0] * 199), 40, 40)
    bars = [line for line in lines if set(line) & set("▁▂▃▄▅▆▇█")]
    top, bottom = (float(line.split()[0]) for line in (bars[0], bars[-1]))
    assert bottom == 2.0 and 2.3 < top < 3.0


def test_large_losses_leave_the_chart_in_line() -> None:
    lines = drawn(with_losses([1e5, 123_456_789.0, 5e6] * 30), 60, 40)
    bars = [line for line in lines if set(line) & set("▁▂▃▄▅▆▇█")]
    assert bars[0].split()[0] == "6.42e+07"
    assert len({len(line) for line in bars}) == 1 and {line[9] for line in bars} == {" "}


def test_another_node_at_this_address_has_another_curve() -> None:
    shown = board()
    assert shown.state is not None and shown.curve()
    shown.take("state", {**shown.state, "time": 2.0})
    assert shown.curve(), "the same node"
    shown.take("state", {**shown.state, "swarm": {**shown.state["swarm"], "id": "cd" * 32}})
    assert not shown.curve()


def test_only_who_differs_is_red() -> None:
    members = [member(0), member(1, claim="records"), member(2)]
    agree = {"same": 1, "of": 2}
    assert _agreement_style(agree, members) == ""
    assert _agreement_style(agree, [*members, member(3, claim="other")]) == "red"
    assert _agreement_style({"same": 2, "of": 2}, members) == "green"


def test_words_and_numbers() -> None:
    assert [count(n) for n in (0, 7, 999, 1000, 12_345, 999_600, 4.56e6, 10**13)] == [
        "0", "7", "999", "1k", "12.3k", "1000k", "4.56M", "10T",
    ]  # fmt: skip
    assert [size(n) for n in (5, 12_345)] == ["5 B", "12.3 kB"]
    assert [duration(s) for s in (5, 65, 3700, 90_000)] == ["5s", "1m", "1h01m", "1d1h"]
    assert harmless_line("a\x1b[31m\u202eb") == "a\ufffd[31m\ufffdb"
    assert [window(100, selected, 10) for selected in (0, 3, 50, 99)] == [0, 0, 45, 90]
    assert window(5, 2, 10) == 0


# -- what no node of ours would say

ESC = "\x1b]0;owned\x07"


def test_nothing_that_others_say_moves_the_cursor() -> None:
    shown = board(2)
    state = shown.state
    assert state is not None
    state["node"].update(state=ESC, name=ESC, id=ESC)
    state["swarm"].update(id=ESC, codec=ESC)
    state["members"][1].update(
        dict.fromkeys(("id", "name", "health", "round", "device", "role", "version"), ESC), addresses=[ESC]
    )
    state["links"][0]["id"] = ESC
    state["now"].update(round=ESC, inner_steps=ESC, sealed_round=ESC)
    for width in (80, 160):
        for selected in range(2):
            assert "\x1b" not in "".join(drawn(shown, width, 40, Choices(step=selected)))


def test_rounds_that_the_swarm_has_not_reached_are_no_part_of_the_curve() -> None:
    shown = board(2, clock=500)
    rows = [[r, 1.0, 2.0, 100, 100 * r, 0.5, []] for r in range(1, 501)]
    ahead = [[r, 1.0, 1e6, 100, 100 * r, 0.5, []] for r in range(502, 566)]
    shown.take("rounds", {"authors": [], "rounds": [*rows, *ahead]})
    assert shown.curve() == [2.0] * 400


@pytest.mark.parametrize(
    "said",
    [
        ("state", {}),
        ("state", {"now": {"clock": 1}}),
        ("state", []),
        ("rounds", {"rounds": [[1]]}),
        ("rounds", {"rounds": [[1, 1.0, "x", 1, 1, 1, []], [2, 1.0, 1.0, 1, 1, 1, []]]}),
        ("notice", "x"),
        ("notice", {"time": 1e300, "text": "x", "level": "info"}),
    ],
)
async def test_a_server_that_is_no_node_is_one_line(said: tuple[str, Any]) -> None:
    out = io.StringIO()
    top = Top(lambda: "127.0.0.1:7780", Console(file=out, width=120, height=40), lambda: None)

    class Server:
        async def events(self) -> AsyncIterator[tuple[str, Any]]:
            yield "state", board(2).state
            yield said
            yield "state", said[1] if said[0] == "state" else board(2).state

        async def rounds(self, _: int) -> AsyncIterator[dict[str, Any]]:
            yield {"rounds": []}

    with Live(console=top._console, auto_refresh=False) as top._live:
        await top._hear(Server())  # type: ignore[arg-type]
        assert top._board.state is None
        top._draw()
    assert "the server at 127.0.0.1:7780 is not an admin server of this Gossamer release (" in out.getvalue()


# -- keys


def test_keys_that_a_terminal_sends() -> None:
    assert keys_in("j\x1b[Aq\x1bOB\x1b") == ["j", "\x1b[A", "q", "\x1bOB", "\x1b"]


def test_what_keys_do() -> None:
    top = Top(lambda: "127.0.0.1:7780", Console(file=io.StringIO()), lambda: None)
    choices = top._choices
    for key in ("s", "j", "\x1b[B", "k", "x"):
        top.press(key)
    assert (choices.sort, choices.step) == (1, 1)
    top.press("?")
    assert choices.help
    top.press("j")
    assert not choices.help and choices.step == 1, "any key ends the help, and does nothing else"
    top._board.take("notice", {"text": "before"})
    top.press("p")
    top._board.take("notice", {"text": "after"})
    assert top._paused is not None and len(top._paused.notices) == 1 and len(top._board.notices) == 2
    top.press(" ")
    assert top._paused is None and not choices.paused
    assert not top._over.is_set()
    top.press("q")
    assert top._over.is_set()
    assert "q " in "\n".join(drawn(board(), 80, 24, Choices(help=True)))


def test_it_wants_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ConfigError, match="needs a terminal"):
        show_top(lambda: "127.0.0.1:7780")


def test_it_wants_a_terminal_to_draw_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On others, such as an editor's, nothing would ever be shown."""
    main, side = pty.openpty()
    with open(main, "rb"), open(side, "r+b", buffering=0) as both:
        words = io.TextIOWrapper(both, write_through=True)
        monkeypatch.setattr(sys, "stdin", words)
        monkeypatch.setattr(sys, "stdout", words)
        monkeypatch.setenv("TERM", "dumb")
        with pytest.raises(ConfigError, match="a terminal that it can draw on"):
            show_top(lambda: "127.0.0.1:7780")


# -- a real one


class Terminal:
    """A pseudo-terminal with `gossamer top` on it, and all that it has written there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.text = ""
        os.set_blocking(fd, False)

    async def shows(self, *parts: str) -> None:
        """Wait until each part has been written since the last call."""
        await self._read(parts, lambda text: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))

    async def writes(self, *parts: str) -> None:
        """The same of what moves the cursor, too."""
        await self._read(parts, lambda text: text)

    async def _read(self, parts: Sequence[str], seen: Callable[[str], str]) -> None:
        async with asyncio.timeout(40):
            while not all(part in seen(self.text) for part in parts):
                try:
                    self.text += os.read(self._fd, 65536).decode("utf-8", "replace")
                except BlockingIOError:
                    await asyncio.sleep(0.02)
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        termios.tcsetwinsize(self._fd, (lines, columns))


async def test_a_run_on_a_real_terminal(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    main, side = pty.openpty()
    terminal = Terminal(main)
    terminal.resize(80, 24)
    before = termios.tcgetattr(side)
    async with running(home, name="watched") as _, training(home) as trainer:
        await publish(home, trainer, 1, loss=3.0)
        await publish(home, trainer, 2, loss=2.0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gossamer.bootstrap.cli.main", "top", "--dir", str(home.root)),
            stdin=side,
            stdout=side,
            stderr=side,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "0", "LINES": "0"},
            start_new_session=True,
        )
        try:
            await terminal.shows("watched", "round 2 (swarm 2)", "2.000", "q quit")
            terminal.type("?")
            await terminal.shows("gossamer top", "this help")
            terminal.type("?s")
            await terminal.shows("s sort: round")
            terminal.resize(130, 40)
            process.send_signal(signal.SIGWINCH)
            await terminal.shows("agrees", "down/s")
            process.send_signal(signal.SIGTSTP)  # Ctrl-Z, where it is the terminal's own
            await terminal.writes("\x1b[?1049l", "\x1b[?25h")
            async with asyncio.timeout(20):
                while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                    await asyncio.sleep(0.02)
            assert termios.tcgetattr(side)[3] == before[3], "the shell's again"
            process.send_signal(signal.SIGCONT)
            await terminal.writes("\x1b[?1049h", "watched")
            terminal.type("q")
            async with asyncio.timeout(20):
                assert await process.wait() == 0
            assert termios.tcgetattr(side)[3] == before[3], "the terminal is as it was"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(main)
            os.close(side)
        assert (await get(home, "/healthz"))[0] == 200 and facts(home)["admin"]
