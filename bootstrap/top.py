"""What `gossamer peers` and `gossamer top` show of a node and its swarm: tables made from the node's status.

Whatever other nodes have said goes through `line`, so that it cannot steer the terminal.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gossamer.bootstrap.live_table import Row, cell, line, table
from gossamer.node.daemon.dashboard.client import fetch_state
from gossamer.node.daemon.monitoring.status import one_line
from gossamer.node.formatting import UNBOUNDED, WRONG_SHAPE, count, size, three_decimals
from gossamer.node.processes import stop_signals
from gossamer.protocol.errors import ConfigError, UnreachableError

Json = dict[str, Any]

REFRESH_S = 1.0
LINES_MIN = 6
"""How many lines of the log are shown even if there are more members than fit."""

HEALTH_STYLES = {"itself": "bold", "alive": "green", "suspect": "yellow", "down": "red", "left": "dim"}
REPLICAS = {"same": ("same", "green"), "records": ("merging", ""), "other": ("differs", "red")}
LEVEL_STYLES = {"warning": "yellow", "error": "red"}


def member_row(member: Json, link: Json | None = None) -> Row:
    """A member's line in the tables; with the bytes of our link to it, if there is one."""
    found = member["contributions"]
    agrees, health = found["agreement"], str(member["health"])
    bad = "red" if found["verdict"] else ""
    return {
        "node": cell(_name(member), bad),
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


def _members(status: Json) -> list[Row]:
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
    console.print(line((title, "italic"), fold=True))
    console.print(table(_members(status), console.width))
    for member in (status["itself"], *status["members"]):
        if verdict := member["contributions"]["verdict"]:
            console.print(line((f"{_name(member)}: {verdict}", "dim italic"), fold=True))


# --- `gossamer top`: a node and its swarm, live.


def frame(state: Json, problem: str, width: int, height: int) -> RenderableType:
    """The whole screen, in at most `height` lines of `width` columns. Raises WRONG_SHAPE or OSError.

    `state` is empty if there is none yet, and `problem` why nothing new comes.
    """
    if not state:
        return line((problem, ""), fold=True)
    model, lines = state["model"], state["log"]
    found = [member["replica"] for member in state["members"] if member["replica"]]
    chunks = f", {state['fetching'][0]} of {state['fetching'][1]} chunks here" if state["fetching"] else ""
    same = f", replica same as {found.count('same')} of {len(found)}" if found else ""
    members, room = _members(state), height - 5  # without the head, the table's heading, and the foot
    rows = min(len(members), max(1, room - min(LINES_MIN, len(lines))))
    return Group(
        line(
            (f"{state['swarm']} ", "bold"),
            (f"{state['swarm_id'][:12]}  {count(model['parameters'])} parameters, {model['codec']}", "dim"),
        ),
        line((one_line(state) + chunks + same, "")),
        line((problem or state["problem"] or "", "red")),
        table(members, width, rows),
        *map(_log_line, lines[-max(1, room - rows) :]),
        line(("Ctrl-C quits", "dim")),
    )


def _log_line(notice: Json) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(notice["time"]))
    return line((f"{clock} ", "dim"), (notice["text"], LEVEL_STYLES.get(notice["level"], "")))


def show_top(where: Callable[[], str]) -> None:
    """Run on this process's terminal, until Ctrl-C. Raises ConfigError if there is none."""
    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise ConfigError(
            "gossamer top needs a terminal that it can draw on; in scripts, use gossamer status --json"
        )
    asyncio.run(_watch(where, console))


async def _watch(where: Callable[[], str], console: Console) -> None:
    """Draw each second, until a signal."""
    over = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    state: Json = {}
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not over.is_set():
            problem = ""
            try:
                state = await fetch_state(where())  # it may have come back elsewhere
            except (ConfigError, UnreachableError) as error:
                problem = str(error)
            live.update(drawn(state, problem, *console.size), refresh=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await over.wait()


def drawn(state: Json, problem: str, width: int, height: int) -> RenderableType:
    """As `frame`, or one line if that is no node's state."""
    try:
        return frame(state, problem, width, height)
    except (*WRONG_SHAPE, OSError):
        return line(("what answers there is no admin server of this Gossamer release", ""), fold=True)
