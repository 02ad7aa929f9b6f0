"""What `gossamer top` shows, as a function of what is known and the size of the terminal."""

import asyncio
import os
import re
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gossamer.node.daemon.dashboard.client import AdminClient
from gossamer.node.formatting import (
    UNBOUNDED,
    WRONG_SHAPE,
    averaged,
    chart,
    count,
    duration,
    harmless_line,
    plural,
    size,
    three_decimals,
)
from gossamer.protocol import limits
from gossamer.protocol.errors import ConfigError, UnreachableError
from gossamer.protocol.unix_time import span

# --- What `gossamer top` has heard of a node, and of its swarm.

ROUNDS_SHOWN = 400
ROUNDS_KEPT = 2 * ROUNDS_SHOWN
NOTICES_KEPT = 100


@dataclass(slots=True)
class Board:
    """All that has been heard of a node."""

    address: str
    state: dict[str, Any] | None = None
    losses: dict[int, float] = field(default_factory=dict)
    notices: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NOTICES_KEPT))
    problem: str = ""
    """Why nothing new comes; empty if it does."""

    def take(self, name: str, data: dict[str, Any]) -> None:
        """Take in one event of the admin server."""
        if name == "state":
            if self.state is not None and _which(self.state) != _which(data):
                self.losses.clear()  # another node has this address now
            self.state, self.problem = data, ""
        elif name == "rounds":
            self.losses.update({row[0]: row[2] for row in data["rounds"] if row[2] is not None})
            for round_ in sorted(self.losses)[:-ROUNDS_KEPT]:
                del self.losses[round_]
        elif name == "notice":
            self.notices.append(data)

    def curve(self) -> list[float]:
        """Losses of the latest rounds. Rounds that the swarm has not reached are left out for now."""
        assert self.state is not None
        rounds = [round_ for round_ in sorted(self.losses) if round_ <= self.state["now"]["clock"] + 1]
        return [self.losses[round_] for round_ in rounds[-ROUNDS_SHOWN:]]

    def forget(self, problem: str) -> None:
        """Drop what has been heard, which cannot be shown, and show a problem instead."""
        self.state, self.problem = None, problem
        self.losses.clear()
        self.notices.clear()

    def copy(self) -> "Board":
        """The board as it is now, to be shown while it goes on changing."""
        return Board(
            self.address, self.state, dict(self.losses), deque(self.notices, NOTICES_KEPT), self.problem
        )


def _which(state: dict[str, Any]) -> tuple[str, str]:
    """Which swarm and node a state is of."""
    return state["swarm"]["id"], state["node"]["id"]


# --- `gossamer peers`: a table of the members that a node knows, and what it has seen of their deltas.

FIGURES = ("health", "round", "tokens", "tokens/s", "judged", "agrees")
"""The columns of each member besides its name and its faults."""

GIVE_WAY = ("tokens", "judged", "tokens/s", "agrees", "round", "health")
"""The order in which they are left out if the terminal has no room for all."""

NAME_MIN, FAULTS_MIN = 14, 12
"""Least widths, in characters: longer names and several faults are wrapped; figures are not."""

GAP = 3
"""Characters between two columns of the table."""


def as_told(status: dict[str, Any]) -> dict[str, Any]:
    """The table's content, for programs."""
    told = {key: status.get(key) for key in ("swarm", "invited_until", "agreement", "conduct", "members")}
    return {**told, "itself": _itself(status)}


def show_peers(status: dict[str, Any], console: Console) -> None:
    """Print the members in a status, with as many columns as there is room for."""
    if not console.is_terminal:
        console.width = UNBOUNDED
    members = [_itself(status), *status["members"]]
    figures = [_figures(member) for member in members]
    shown = list(FIGURES)
    for name in GIVE_WAY:
        if _least_width(figures, shown) > console.width:
            shown.remove(name)
    console.print(_title(status), _table(members, figures, shown), sep="\n")
    for verdict in _verdicts(members):
        console.print(verdict)


def _least_width(figures: list[dict[str, str]], shown: list[str]) -> int:
    widths = [max(cell_len(cell) for cell in (name, *(row[name] for row in figures))) for name in shown]
    return NAME_MIN + sum(widths) + FAULTS_MIN + GAP * (len(shown) + 2)


def _title(status: dict[str, Any]) -> Text:
    agreement = status.get("agreement")
    title = f"swarm {status['swarm']} as {_name(status)} sees it" + (
        f", agreement {agreement:.2f} in the newest round with two deltas" if agreement is not None else ""
    )
    return Text(harmless_line(title + _invited(status.get("invited_until"))), style="table.title")


def _verdicts(members: list[dict[str, Any]]) -> list[Text]:
    said = [f"{_name(m)}: {m['conduct']['verdict']}" for m in members if m["conduct"]["verdict"]]
    return [Text(harmless_line(line), style="table.caption") for line in said]


def _table(members: list[dict[str, Any]], figures: list[dict[str, str]], shown: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("member", overflow="fold", min_width=NAME_MIN)
    for figure in shown:
        table.add_column(figure, justify="left" if figure == "health" else "right", no_wrap=True)
    table.add_column("bad in", min_width=FAULTS_MIN)
    for member, row in zip(members, figures, strict=True):
        name = Text(harmless_line(_name(member)))
        table.add_row(name, *(Text(row[figure]) for figure in shown), _bad_in(member["conduct"]))
    return table


def _invited(until: Any) -> str:
    """For how long the asked node is still invited; empty if its invitation does not end."""
    if not isinstance(until, int) or not 0 < until <= limits.UNIX_S_MAX:
        return ""
    left_s = until - time.time()
    return f", invited for another {span(left_s)}" if left_s > 0 else ", its invitation has run out"


def _itself(status: dict[str, Any]) -> dict[str, Any]:
    """The asked node in the form of its members."""
    trainer = status.get("trainer") or {}
    return {
        "node_id": status["node_id"],
        "name": status["name"],
        "health": "itself",
        "round": status["round"],
        "tokens": trainer.get("tokens", 0),
        "tokens_per_s": trainer.get("tokens_per_s", 0.0),
        "conduct": status["conduct"],
    }


def _name(member: dict[str, Any]) -> str:
    return str(member["name"] or member["node_id"][:8])


def _figures(member: dict[str, Any]) -> dict[str, str]:
    conduct = member["conduct"]
    agrees = conduct["agreement"]
    figures = {
        "health": str(member["health"]),
        "round": str(member["round"]),
        "tokens": _compact(member["tokens"]),
        "tokens/s": f"{member['tokens_per_s']:,.0f}",
        "judged": str(conduct["judged"]),
        "agrees": f"{agrees:+.2f}" if agrees is not None else "-",
    }
    return {name: harmless_line(said) for name, said in figures.items()}


def _bad_in(conduct: dict[str, Any]) -> Text:
    return Text(harmless_line(_faults(conduct)), style="red" if conduct["verdict"] else "")


def _faults(conduct: dict[str, Any]) -> str:
    """In how many rounds a member's deltas were bad, and by how much: "void 1, clipped 18 by 9.8x"."""
    factors = {"capped": conduct["cap_factor"], "clipped": conduct["clip_factor"]}
    return ", ".join(
        f"{fault} {conduct[fault]}" + (f" by {factors[fault]:,.1f}x" if factors.get(fault) else "")
        for fault in ("void", "stale", "capped", "clipped", "opposed")
        if conduct[fault]
    )


def _compact(count: int) -> str:
    """A count in four characters or so: 950, 50.2k, 1.2M, 3.4G."""
    for unit, per in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= per:
            return f"{count / per:,.1f}{unit}"
    return str(count)


GONE = ("down", "left")
"""The healths of members that are no longer there."""

CHART_ROWS_MAX = 16
LABEL_COLUMNS = 9
WIDE = 120
"""From this many columns on there is room for the links beside the members, and for more about each
member."""

SORTS = ("name", "round", "tokens/s", "loss", "health")
HEALTH_STYLES = {"alive": "green", "suspect": "yellow", "down": "red", "left": "dim"}
MODEL_WORDS = {"same": "same", "other": "differs", "records": "merging"}
LEVEL_STYLES = {"info": "", "warning": "yellow", "error": "red"}

HELP = (
    ("q", "quit"),
    ("s", "sort members by name, round, speed, loss, health"),
    ("j k, arrows", "select a member"),
    ("p, space", "pause or resume"),
    ("?", "this help"),
)


@dataclass(slots=True)
class Choices:
    """What the person at the keys has chosen."""

    sort: int = 0
    member: str = ""
    """Id of the selected member."""
    step: int = 0
    """How far to move the selection down."""
    paused: bool = False
    help: bool = False


def screen(board: Board, choices: Choices, width: int, height: int) -> RenderableType:
    """The whole screen, in at most `height` lines of `width` columns."""
    if board.state is None:
        return Text(board.problem or f"asking {board.address} ...", overflow="fold")
    if choices.help:
        return _help(height)
    state = board.state
    members = sorted_members(state["members"], SORTS[choices.sort])
    selected = _selected(members, choices)
    head, detail, foot = _head(board, choices), _detail(members[selected]), _foot(choices)
    room = height - len(head) - len(detail) - 1
    links = state["links"]
    is_wide = width >= WIDE
    below = min(len(links) + 1, max(2, room // 4)) if links and not is_wide and room >= 16 else 0
    rows = max(2, min(len(members) + 1, room - below - (6 if room >= 12 else 0)))
    if is_wide:
        rows = max(rows, min(len(links) + 1, room // 2))
    spare = room - rows - below
    chart_rows = max(0, min(CHART_ROWS_MAX, spare // 2))
    table = _members(members, selected, rows, wide=is_wide)
    body: list[RenderableType] = [table]
    if is_wide:
        body = [_side_by_side(table, _links(links, members, rows), width)]
    elif below:
        body.append(_links(links, members, below))
    drawn = _chart(board, width, chart_rows)
    notices = _notices(board, spare - len(drawn))
    filling = [Text("")] * (spare - len(drawn) - len(notices))
    return Group(*head, *body, *detail, *drawn, *notices, *filling, foot)


def _selected(members: list[dict[str, Any]], choices: Choices) -> int:
    """The place of the selected member, which stays selected when others overtake it."""
    ids = [member["id"] for member in members]
    place = ids.index(choices.member) if choices.member in ids else 0
    place = max(0, min(place + choices.step, len(ids) - 1))
    choices.member, choices.step = ids[place], 0
    return place


# -- parts


def _head(board: Board, choices: Choices) -> list[Text]:
    assert board.state is not None
    swarm, node, now = board.state["swarm"], board.state["node"], board.state["now"]
    name = node["name"] or node["id"][:8]
    first = _line(
        (f"{swarm['name']} ", "bold"),
        (f"{swarm['id'][:12]}  ", "dim"),
        (f"{count(swarm['parameters'])} parameters, {swarm['codec']}, ", ""),
        (plural(swarm["fragments"], "fragment"), ""),
    )
    doing = (now["fetching"] and f" {now['fetching'][0]} of {now['fetching'][1]} MiB") or ""
    reach = {True: ", reachable", False: ", not dialled so far", None: ""}[node["reachable"]]
    second = _line(
        (f"{name} ", "bold"),
        (f"{board.problem}  " if board.problem else "", "red"),
        ("PAUSED  " if choices.paused else "", "reverse"),
        (f"{node['state']}{doing}", "green" if node["state"] in ("training", "serving") else "yellow"),
        (f"  up {duration(node['uptime_s'])}{reach}  {node['device']}", ""),
    )
    agree = now["agree"]
    same = f"  model same as {agree['same']} of {agree['of']}" if agree["of"] else ""
    behind = f"  behind {now['rounds_behind']}" if now["rounds_behind"] else ""
    missing = f"  missing {now['payloads_missing']}" if now["payloads_missing"] else ""
    third = _line(
        (f"round {now['round'] if node['trains'] else now['clock']}", "bold"),
        (f" (swarm {now['clock']})" if node["trains"] else "", ""),
        (behind + missing, "yellow"),
        (f"  tokens {count(now['swarm_tokens'])}", ""),
        (f"  {count(now['swarm_tokens_per_s'])}/s", "cyan"),
        (same, _agreement_style(agree, board.state["members"])),
    )
    fourth = _line(
        (f"loss {three_decimals(now['loss'])}", "bold"),
        (f"  held-out {three_decimals(now['val_loss'])}", ""),
        (f"  steps {now['inner_steps']}  {count(now['tokens_per_s'])} tokens/s", ""),
        (f"  waiting {100 * now['wait_fraction']:.1f}%", ""),
        (f"  sealed {now['sealed_round'] if now['sealed_round'] is not None else '-'}", ""),
        (f"  closed {now['closed_round']}" if now["closed_round"] else "", ""),
    )
    return [first, second, third, fourth]


def _agreement_style(agree: dict[str, Any], members: list[dict[str, Any]]) -> str:
    """A style for the agreement of models. A member whose snapshot is of other records so far does not
    differ."""
    if agree["same"] == agree["of"]:
        return "green"
    return "red" if any(member["claim"] == "other" for member in members) else ""


def _members(members: list[dict[str, Any]], selected: int, rows: int, *, wide: bool) -> Table:
    """A table of as many members as fit, including the selected one."""
    table = _top_view_table()
    table.add_column("member", no_wrap=True, overflow="ellipsis", ratio=3, min_width=8)
    for heading in ("health", "heard"):
        table.add_column(heading, no_wrap=True)
    for heading in ("round", "tokens", "/s", "loss"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("model", no_wrap=True)
    if wide:
        table.add_column("device", no_wrap=True, overflow="ellipsis", ratio=2, min_width=6, max_width=18)
        table.add_column("agrees", no_wrap=True, justify="right")
    first = window(len(members), selected, rows - 1)
    for place, member in list(enumerate(members))[first : first + max(0, rows - 1)]:
        cells = _member_cells(member)
        style = "reverse" if place == selected else "bold" if member["self"] else ""
        table.add_row(*(cells if wide else cells[:8]), style=style)
    return table


def _member_cells(member: dict[str, Any]) -> list[Text]:
    conduct = member["conduct"] or {}
    agrees = conduct.get("agreement")
    accused = conduct.get("verdict") is not None
    mark = "*" if member["self"] else "!" if accused else ""
    health = "observes" if member["health"] == "alive" and not member["trains"] else member["health"]
    return [
        Text(harmless_line(mark + (member["name"] or member["id"][:8])), style="red" if accused else ""),
        Text(harmless_line(health), style=HEALTH_STYLES.get(health, "")),
        Text("" if member["self"] else f"{duration(member['heard_s'])}"),
        Text(harmless_line(str(member["round"]))),
        Text(count(member["tokens"])),
        Text(count(member["tokens_per_s"])),
        Text(three_decimals(member["loss"] or None)),
        Text(MODEL_WORDS.get(member["claim"], ""), style="red" if member["claim"] == "other" else ""),
        Text(harmless_line(member["device"])),
        Text(f"{agrees:+.2f}" if agrees is not None else ""),
    ]


def _links(links: list[dict[str, Any]], members: list[dict[str, Any]], rows: int) -> Table:
    names = {member["id"]: member["name"] for member in members}
    table = _top_view_table()
    table.add_column("link", no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)
    for heading in ("up/s", "down/s", "up", "down"):
        table.add_column(heading, no_wrap=True, justify="right")
    busiest = sorted(links, key=lambda link: (-link["sent_per_s"] - link["received_per_s"], link["id"]))
    for link in busiest[: max(0, rows - 1)]:
        arrow = "→" if link["outbound"] else "←"
        sent, received = link["sent"] + link["payload_sent"], link["received"] + link["payload_received"]
        table.add_row(
            Text(harmless_line(f"{arrow} {names.get(link['id']) or link['id'][:8]}")),
            size(link["sent_per_s"]),
            size(link["received_per_s"]),
            size(sent),
            size(received),
        )
    return table


def _side_by_side(left: Table, right: Table, width: int) -> Table:
    grid = Table.grid(expand=True, padding=(0, 0, 0, 2))
    grid.add_column(width=width - 50)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _detail(member: dict[str, Any]) -> list[Text]:
    """One line with more about the selected member, and another with its verdict, if it has one."""
    where = " ".join(member["addresses"]) or "only dials out"
    said = f"{member['id'][:16]}  {member['role']}  {member['version']}  {where}"
    lines = [_line((said, "dim"))]
    conduct = member["conduct"]
    if conduct and conduct["verdict"]:
        lines.append(_line((conduct["verdict"], "red")))
    return lines


def _chart(board: Board, width: int, rows: int) -> list[Text]:
    values = board.curve()
    columns = width - LABEL_COLUMNS - 1
    if len(values) < 2 or rows < 1 or columns < 1:
        return []
    values = averaged(values, columns)
    labels = [_label(max(values))] + [""] * (rows - 1)
    if rows > 1:
        labels[-1] = _label(min(values))
    bars = zip(labels, chart(values, rows), strict=True)
    return [_line((f"{label:>{LABEL_COLUMNS}} ", "dim"), (bar, "cyan")) for label, bar in bars]


def _label(loss: float) -> str:
    text = f"{loss:.3f}"
    return text if len(text) <= LABEL_COLUMNS else f"{loss:.2e}"


def _notices(board: Board, rows: int) -> list[Text]:
    lines = []
    for notice in list(board.notices)[-rows:] if rows > 0 else ():
        clock = time.strftime("%H:%M:%S", time.localtime(notice["time"]))
        lines.append(_line((f"{clock} ", "dim"), (notice["text"], LEVEL_STYLES.get(notice["level"], ""))))
    return lines


def _foot(choices: Choices) -> Text:
    return _line(
        (
            f"q quit  s sort: {SORTS[choices.sort]}  jk select  p {'resume' if choices.paused else 'pause'}",
            "dim",
        ),
        ("  ? help", "dim"),
    )


def _help(height: int) -> Group:
    lines = [_line(("gossamer top", "bold")), Text("")]
    lines += [_line((f"  {keys:14}", "bold"), (what, "")) for keys, what in HELP]
    legend = (
        "* this node   ! its deltas are usually bad   → we dialled   ← it dialled",
        "model: whether it claims the same snapshot as this node; merging: so far it holds other records",
        "agrees: mean cosine of its deltas with the others' deltas",
        "curve: median training loss of each round",
    )
    lines += [Text(""), *(_line((text, "")) for text in legend)]
    return Group(*lines[:height])


# -- lists and lines


def sorted_members(members: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Members sorted. By name, this node comes first, and members that are gone come last."""
    names = {member["id"]: _natural(member["name"].lower() or member["id"]) for member in members}
    keys: dict[str, Any] = {
        "name": lambda m: (not m["self"], m["health"] in GONE, names[m["id"]]),
        "round": lambda m: (-m["round"], names[m["id"]]),
        "tokens/s": lambda m: (-m["tokens_per_s"], names[m["id"]]),
        "loss": lambda m: (m["loss"] or float("inf"), names[m["id"]]),
        "health": lambda m: (list(HEALTH_STYLES).index(m["health"]), names[m["id"]]),
    }
    return sorted(members, key=keys[by])


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts node-2 before node-10."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isascii() and part.isdecimal() else (-1, part) for part in parts]


def window(count_: int, selected: int, rows: int) -> int:
    """The first of `rows` items to show, so that the selected one is near the middle."""
    return max(0, min(selected - rows // 2, count_ - rows))


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(
        *((harmless_line(text), style) for text, style in parts), no_wrap=True, overflow="ellipsis"
    )


def _top_view_table() -> Table:
    return Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold underline", pad_edge=False)


# --- `gossamer top`: shows a node and its swarm on a full terminal, until a key ends it.

RECONNECT_S = 1.0

_UP = ("\x1b[A", "\x1bOA", "k")
_DOWN = ("\x1b[B", "\x1bOB", "j")
_QUIT = ("q", "Q", "\x03", "\x04")


def keys_in(data: str) -> list[str]:
    """Split a terminal's input into keys: an arrow key is three characters."""
    keys = []
    while data:
        length = 3 if data[0] == "\x1b" and data[1:2] in ("[", "O") else 1
        keys.append(data[:length])
        data = data[length:]
    return keys


class Top:
    """Listens to an admin server and draws."""

    def __init__(self, where: Callable[[], str], console: Console, sleep: Callable[[], None]) -> None:
        """`where` finds the server, and is called again each time that it has gone; it may raise ConfigError.

        `sleep` restores the terminal for as long as this process is stopped (Ctrl-Z).
        """
        self._where = where
        self._console = console
        self._sleep = sleep
        self._board = Board(where())
        self._paused: Board | None = None
        self._choices = Choices()
        self._over = asyncio.Event()
        self._live: Live | None = None

    async def run(self) -> None:
        """Draw until the person quits."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._over.set)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        loop.add_signal_handler(signal.SIGTSTP, self._pause)
        with Live(console=self._console, screen=True, auto_refresh=False) as self._live:
            self._draw()
            listening = asyncio.create_task(self._listen())
            listening.add_done_callback(lambda _: self._over.set())  # it only ends by a fault
            try:
                await self._over.wait()
            finally:
                self._live = None
                listening.cancel()
                with suppress(asyncio.CancelledError):
                    await listening

    def press(self, key: str) -> None:
        """React to a key."""
        choices = self._choices
        if key in _QUIT:
            self._over.set()
            return
        if key == "?" or choices.help:
            choices.help = not choices.help
        elif key == "s":
            choices.sort = (choices.sort + 1) % len(SORTS)
        elif key in _UP:
            choices.step -= 1
        elif key in _DOWN:
            choices.step += 1
        elif key in ("p", " "):
            choices.paused = not choices.paused
            self._paused = self._board.copy() if choices.paused else None
        self._draw()

    def _pause(self) -> None:
        """Ctrl-Z: restore the screen for the shell, until this process goes on."""
        if self._live is not None:
            self._live.stop()
            self._sleep()
            self._live.start()
            self._draw()

    async def _listen(self) -> None:
        """Take in what the server says; look for it again when it has gone."""
        while True:
            try:
                async with AdminClient(self._board.address) as client:
                    await self._hear(client)
            except UnreachableError as error:
                self._board.problem = str(error)
            self._draw()
            await asyncio.sleep(RECONNECT_S)
            with suppress(ConfigError):  # it may have come back elsewhere
                self._board.address = self._where()

    async def _hear(self, client: AdminClient) -> None:
        """Listen until the server goes away, or says what no node would."""
        try:
            await self._follow(client)
            self._board.problem = self._board.problem or "the node closed the connection"
        except WRONG_SHAPE as error:
            self._board.forget(_no_admin_server(self._board.address, error))

    async def _follow(self, client: AdminClient) -> None:
        self._board.notices.clear()
        is_first = True
        async for name, data in client.events():
            self._board.take(name, data)
            if is_first and name == "state":
                is_first = False
                first = max(0, data["now"]["clock"] - ROUNDS_SHOWN)
                async for told in client.rounds(first):
                    self._board.take("rounds", told)
            if name == "state":
                self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        width, height = self._console.size
        board = self._paused or self._board
        try:
            drawn = screen(board, self._choices, width, height)
        except (*WRONG_SHAPE, OSError) as error:
            board.forget(_no_admin_server(board.address, error))
            drawn = screen(board, self._choices, width, height)
        self._live.update(drawn, refresh=True)


def _no_admin_server(address: str, error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"the server at {address} is not an admin server of this Gossamer release ({harmless_line(said)})"


def show_top(where: Callable[[], str]) -> None:
    """Run on this process's terminal. Raises ConfigError if there is none."""
    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        raise ConfigError(
            "gossamer top needs a terminal that it can draw on; in scripts, use gossamer status --json"
        )
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def sleep() -> None:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        os.kill(os.getpid(), signal.SIGSTOP)
        tty.setcbreak(fd)

    try:
        tty.setcbreak(fd)
        asyncio.run(_run(Top(where, console, sleep), fd))
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _run(top: Top, fd: int) -> None:
    def read() -> None:
        data = os.read(fd, 1024)
        for key in keys_in(data.decode("utf-8", "replace")) or ["q"]:  # the terminal is gone
            top.press(key)

    asyncio.get_running_loop().add_reader(fd, read)
    await top.run()
