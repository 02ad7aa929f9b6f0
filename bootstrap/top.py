"""What `gossamer peers` and `gossamer top` show of a node and its swarm: tables made from the node's status.

Whatever other nodes have said goes through `line`, so that it cannot steer the terminal.
"""

import asyncio
import os
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

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gossamer.bootstrap.live_table import cell, fitted, line
from gossamer.node.daemon.dashboard.client import AdminClient
from gossamer.node.daemon.monitoring.status import one_line
from gossamer.node.formatting import (
    UNBOUNDED,
    WRONG_SHAPE,
    count,
    size,
    three_decimals,
)
from gossamer.protocol.errors import ConfigError, UnreachableError
from gossamer.protocol.limits import UNIX_S_MAX
from gossamer.protocol.unix_time import span

Json = dict[str, Any]

RECONNECT_S = 1.0
LINES_KEPT = 100
LINES_MIN = 6
"""How many lines of the log are shown even if there are more members than fit."""

HEALTH_STYLES = {"itself": "bold", "alive": "green", "suspect": "yellow", "down": "red", "left": "dim"}
REPLICAS = {"same": ("same", "green"), "records": ("merging", ""), "other": ("differs", "red")}
LEVEL_STYLES = {"warning": "yellow", "error": "red"}
GIVE_WAY = ("up", "down", "replica", "loss", "tokens", "judged", "tokens/s", "agrees", "round", "health")
"""Columns that are left out where a terminal is narrow, in this order."""


def member_row(member: Json, link: Json | None = None) -> dict[str, Text]:
    """A member's line in the tables; with the bytes of our link to it, if there is one."""
    found = member["contributions"]
    agrees, health = found["agreement"], str(member["health"])
    bad = "red" if found["verdict"] else ""
    return {
        "member": cell(_name(member), bad),
        "health": cell(health, HEALTH_STYLES.get(health, "")),
        "round": cell(member["round"]),
        "tokens": cell(count(member["tokens"])),
        "tokens/s": cell(f"{member['tokens_per_s']:,.0f}"),
        "loss": cell(three_decimals(member["loss"])),
        "replica": cell(*REPLICAS.get(member["replica"], ("",))),
        "up": cell(size(link["sent"] + link["payload_sent"]) if link else ""),
        "down": cell(size(link["received"] + link["payload_received"]) if link else ""),
        "judged": cell(found["judged"]),
        "agrees": cell(f"{agrees:+.2f}" if agrees is not None else "-"),
        "bad in": cell(_bad_in(found), bad),
    }


def _bad_in(found: Json) -> str:
    """In how many rounds a member's deltas were bad, and by how much: "void 1, clipped 18 by 9.8x"."""
    factors = {"capped": found["cap_factor"], "clipped": found["clip_factor"]}
    return ", ".join(
        f"{fault} {found[fault]}" + (f" by {factors[fault]:,.1f}x" if fault in factors else "")
        for fault in ("void", "stale", "capped", "clipped", "opposed")
        if found[fault]
    )


def _name(member: Json) -> str:
    return str(member["name"] or member["node_id"][:8])


def _members(status: Json) -> list[dict[str, Text]]:
    links = {link["node_id"]: link for link in status["links"]}
    others = [member_row(member, links.get(member["node_id"])) for member in status["members"]]
    return [member_row({**status["itself"], "health": "itself"}), *others]


def show_peers(status: Json, console: Console) -> None:
    """Print the members in a status, with as many columns as there is room for."""
    if not console.is_terminal:
        console.width = UNBOUNDED
    agreement = status["agreement"]
    title = f"swarm {status['swarm']} as {_name(status)} sees it" + (
        f", agreement {agreement:.2f} in the newest round with two deltas" if agreement is not None else ""
    )
    console.print(line((title + _invited(status.get("invited_until")), "italic"), fold=True))
    console.print(fitted(_members(status), console.width, GIVE_WAY))
    for member in (status["itself"], *status["members"]):
        if verdict := member["contributions"]["verdict"]:
            console.print(line((f"{_name(member)}: {verdict}", "dim italic"), fold=True))


def _invited(until: Any) -> str:
    """For how long the asked node is still invited; empty if its invitation does not end."""
    if not isinstance(until, int) or not 0 < until <= UNIX_S_MAX:
        return ""
    left_s = until - time.time()
    return f", invited for another {span(left_s)}" if left_s > 0 else ", its invitation has run out"


# --- `gossamer top`: a node and its swarm, live.


@dataclass(slots=True)
class Watched:
    """What has been heard of a node."""

    address: str
    state: Json | None = None
    lines: deque[Json] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    problem: str = ""
    """Why nothing new comes; empty if it does."""


def frame(watched: Watched, width: int, height: int) -> RenderableType:
    """The whole screen, in at most `height` lines of `width` columns. Raises WRONG_SHAPE."""
    state = watched.state
    if state is None:
        return line((watched.problem or f"asking {watched.address} ...", ""), fold=True)
    head = _head(watched, state)
    members = _members(state)
    room = height - len(head) - 2  # without the table's heading, and the foot
    rows = max(1, room - min(LINES_MIN, len(watched.lines)))
    shown = members[:rows]
    if len(members) > rows:
        left_out = cell(f"+ {len(members) - rows + 1} more", "dim")
        shown[-1] = {**dict.fromkeys(members[0], Text("")), "member": left_out}
    lines = list(watched.lines)[-max(1, room - len(shown)) :]
    return Group(
        *head,
        fitted(shown, width, ("bad in", *GIVE_WAY), folds=False),
        *map(_log_line, lines),
        line(("q quits", "dim")),
    )


def _head(watched: Watched, state: Json) -> list[Text]:
    model = state["model"]
    found = [member["replica"] for member in state["members"] if member["replica"]]
    chunks = f", {state['fetching'][0]} of {state['fetching'][1]} chunks here" if state["fetching"] else ""
    same = f", replica same as {found.count('same')} of {len(found)}" if found else ""
    return [
        line(
            (f"{state['swarm']} ", "bold"),
            (f"{state['swarm_id'][:12]}  {count(model['parameters'])} parameters, {model['codec']}", "dim"),
        ),
        line((one_line(state) + chunks + same, "")),
        line((watched.problem or state["problem"] or "", "red")),
    ]


def _log_line(notice: Json) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(notice["time"]))
    return line((f"{clock} ", "dim"), (notice["text"], LEVEL_STYLES.get(notice["level"], "")))


class Top:
    """Listens to an admin server and draws, until it is stopped."""

    def __init__(self, where: Callable[[], str], console: Console) -> None:
        """`where` finds the server, and is called again when it has gone; it may raise ConfigError."""
        self._where = where
        self._console = console
        self.watched = Watched(where())
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Draw until `over`."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            listening = asyncio.create_task(self._listen(live))
            listening.add_done_callback(lambda _: self.over.set())  # it only ends by a fault
            await self.over.wait()
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    async def _listen(self, live: Live) -> None:
        """Take in what the server says; look for it again when it has gone."""
        while True:
            self.draw(live)
            try:
                async with AdminClient(self.watched.address) as client:
                    self.watched.lines.clear()
                    async for name, data in client.events():
                        self.take(name, data)
                        if name == "state":
                            self.draw(live)
                self.watched.problem = "the node closed the connection"
            except UnreachableError as error:
                self.watched.problem = str(error)
            self.draw(live)
            await asyncio.sleep(RECONNECT_S)
            with suppress(ConfigError):  # it may have come back elsewhere
                self.watched.address = self._where()

    def take(self, name: str, data: Json) -> None:
        """Take in one event of the server."""
        if name == "state":
            self.watched.state, self.watched.problem = data, ""
        elif name == "notice":
            self.watched.lines.append(data)

    def draw(self, live: Live) -> None:
        """Draw what is known."""
        width, height = self._console.size
        try:
            drawn = frame(self.watched, width, height)
        except (*WRONG_SHAPE, OSError):
            problem = f"{self.watched.address} is not an admin server of this Gossamer release"
            self.watched = Watched(self.watched.address, problem=problem)
            drawn = frame(self.watched, width, height)
        live.update(drawn, refresh=True)


def show_top(where: Callable[[], str]) -> None:
    """Run on this process's terminal, until q or Ctrl-C. Raises ConfigError if there is none."""
    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        raise ConfigError(
            "gossamer top needs a terminal that it can draw on; in scripts, use gossamer status --json"
        )
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)  # keys come as they are pressed, and are not shown
        asyncio.run(_run(Top(where, console), fd))
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _run(top: Top, fd: int) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        if os.read(fd, 1024) in (b"q", b"Q", b""):
            top.over.set()

    loop.add_reader(fd, read)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, top.over.set)
    await top.run()
