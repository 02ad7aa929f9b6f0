"""What a person sees on a terminal: the table of a swarm's members, for `gossamer peers` and, live, for
`gossamer top`; and that of a local swarm's nodes, for `gossamer swarm`.

A terminal on which nothing can be drawn (``TERM=dumb``) gets plain lines of a local swarm.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median_low
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gossamer.bootstrap.processes import NodeProcess
from gossamer.bootstrap.summary import SwarmSummary
from gossamer.node.daemon.dashboard.client import fetch_state
from gossamer.node.daemon.monitoring.status import one_line, unlisted
from gossamer.node.formatting import (
    UNBOUNDED,
    WRONG_SHAPE,
    both_losses,
    count,
    harmless,
    harmless_line,
    size,
    three_decimals,
)
from gossamer.node.processes import stop_signals
from gossamer.protocol.errors import ConfigError, UnreachableError

PLAIN_INTERVAL_S = 5.0
NOTES_SHOWN = 5
GAP = 2
"""Characters between two columns."""

LEFT = frozenset({"node", "state", "health", "replica", "bad in"})
"""Columns of words; the others have figures."""

NAME_MIN = 14
"""Characters of a node's name that are shown in any case."""

GIVE_WAY = (
    *("fresh", "peers", "in", "out", "steps", "up", "down", "replica", "tokens", "judged", "tokens/s"),
    *("agrees", "loss", "round", "health", "bad in"),
)
"""Columns that are left out where a terminal is narrow, in this order."""

STATE_STYLES = {
    "training": "green",
    "finished": "cyan",
    "serving": "blue",
    "joining": "yellow",
    "starting": "yellow",
}

Row = dict[str, Text]
Json = dict[str, Any]

TOP_REFRESH_S = 1.0
LINES_MIN = 6
"""How many lines of the log are shown even if there are more members than fit."""

HEALTH_STYLES = {"itself": "bold", "alive": "green", "suspect": "yellow", "down": "red", "left": "dim"}
REPLICAS = {"same": ("same", "green"), "records": ("merging", ""), "other": ("differs", "red")}
LEVEL_STYLES = {"warning": "yellow", "error": "red"}


def cell(text: object, style: str = "") -> Text:
    """A text without what would steer a terminal."""
    return Text(harmless_line(str(text)), style)


def line(*parts: tuple[str, str], fold: bool = False) -> Text:
    """One line of texts with their styles, cut off at the terminal's edge or wrapped there."""
    text = Text.assemble(*(cell(*part) for part in parts))
    text.no_wrap, text.overflow = not fold, "fold" if fold else "ellipsis"
    return text


def table(rows: Sequence[Row], width: int, lines: int | None = None, more: int = 0) -> Table:
    """A table of rows that all have the same columns, the first of which is "node".

    In `width` characters, columns of `GIVE_WAY` are left out until the others fit: figures that are cut short
    say nothing. Of more rows than `lines`, the last ones are only counted, with `more` that are not here.
    """
    room = len(rows) + 1 if lines is None else max(1, lines)
    shown = list(rows[0])
    if len(rows) + bool(more) > room:
        rows, more = rows[: room - 1], more + len(rows) - room + 1
    if more:
        rows = [*rows, dict.fromkeys(shown, Text("")) | {"node": Text(f"+ {more} more", "dim")}]
    widths = {name: max(cell_len(name), *(row[name].cell_len for row in rows)) + GAP for name in shown}
    widths["node"] = min(widths["node"], NAME_MIN)
    for name in GIVE_WAY:
        if name in shown and sum(widths[other] for other in shown) > width:
            shown.remove(name)
    found = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name in shown:
        justify = "left" if name in LEFT else "right"
        found.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    found.columns[0].max_width = width - sum(widths[name] for name in shown[1:]) - GAP
    for row in rows:
        found.add_row(*(row[name] for name in shown))
    return found


def minutes(seconds: float) -> str:
    """A duration as ``3:07``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Output(Console):
    """Standard output. A closed pipe (`| head`) is an error like any other."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich would end the process without any clean-up."""
        raise  # noqa: PLE0704 - called where it is handled


# --- `gossamer peers` and `gossamer top`, made from a node's status. Whatever other nodes have said goes
# through `line` and `cell`, so that it cannot steer the terminal.


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
        "fresh": cell(f"{member['fresh']:.0%}" if member["fresh"] is not None else "-"),
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
    console.print(table(_members(status), console.width, more=unlisted(status)))
    for member in (status["itself"], *status["members"]):
        if verdict := member["contributions"]["verdict"]:
            console.print(line((f"{_name(member)}: {verdict}", "dim italic"), fold=True))


def frame(state: Json, problem: str, width: int, height: int) -> RenderableType:
    """The whole screen, in at most `height` lines of `width` columns. Raises WRONG_SHAPE or OSError.

    `state` is empty if there is none yet, and `problem` why nothing new comes.
    """
    if not state:
        return line((problem, ""), fold=True)
    model, lines = state["model"], state["log"]
    compared = sum(map(int, state["replicas"].values())) - state["replicas"].get("unknown", 0)
    chunks = f", {state['fetching'][0]} of {state['fetching'][1]} chunks here" if state["fetching"] else ""
    same = f", replica same as {state['replicas'].get('same', 0)} of {compared}" if compared else ""
    members, room = _members(state), height - 5  # without the head, the table's heading, and the foot
    more = unlisted(state)
    rows = min(len(members) + bool(more), max(1, room - min(LINES_MIN, len(lines))))
    return Group(
        line(
            (f"{state['swarm']} ", "bold"),
            (f"{state['swarm_id'][:12]}  {count(model['parameters'])} parameters, {model['codec']}", "dim"),
        ),
        line((one_line(state) + chunks + same, "")),
        line((problem or state["problem"] or "", "red")),
        table(members, width, rows, more),
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
                async with asyncio.timeout(TOP_REFRESH_S):
                    await over.wait()


def drawn(state: Json, problem: str, width: int, height: int) -> RenderableType:
    """As `frame`, or one line if that is no node's state."""
    try:
        return frame(state, problem, width, height)
    except (*WRONG_SHAPE, OSError):
        return line(("what answers there is no admin server of this Gossamer release", ""), fold=True)


# --- `gossamer swarm`


class Display:
    """Shows the swarm as it runs. Use it as a context manager."""

    def __init__(self, console: Console, rounds: int, title: str) -> None:
        self._console = console
        self._rounds = rounds
        self._title = title
        self._begun = time.monotonic()
        self._training_since: float | None = None
        self._first_loss: float | None = None
        self._losses = ""
        self._phase = ""
        self._printed_at = 0.0
        self._notes: list[str] = []
        can_draw = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if can_draw else None

    def __enter__(self) -> "Display":
        if self._live:
            self._live.__enter__()
        else:
            self._console.print(self._title, markup=False)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.__exit__(None, None, None)

    def update(self, processes: list[NodeProcess], phase: str) -> None:
        """Show the latest statuses."""
        round_, now = _round(processes), time.monotonic()
        if round_ and self._training_since is None:
            self._training_since = now
        if (live := _mean(processes, "val_loss")) is not None:
            self._first_loss = live if self._first_loss is None else self._first_loss
            self._losses = both_losses(_mean(processes, "val_loss_average"), live)
        if self._live:
            self._live.update(self._frame(processes, round_, phase), refresh=True)
        elif now - self._printed_at >= PLAIN_INTERVAL_S or phase != self._phase:
            self._printed_at, self._phase = now, phase
            speed = sum(p.trainer.get("tokens_per_s", 0.0) for p in processes)
            loss = f", validation loss {self._losses}" if self._losses else ""
            text = f"round {round_}/{self._rounds}{loss}, {speed:,.0f} tokens/s, {self._left(round_)} left"
            self._console.print(f"{self._elapsed()}  {phase}: {text}", markup=False, highlight=False)

    def tell(self, text: str) -> None:
        """Show that something happened that was not planned."""
        text = harmless(text)
        self._notes.append(f"{self._elapsed()}  {text}")
        if not self._live:
            shown = f"{self._elapsed()}  * {text}"
            self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return minutes(time.monotonic() - self._begun)

    def _left(self, round_: int) -> str:
        """How long the rest takes, as far as that is known."""
        if self._training_since is None or round_ < 2:
            return "-:--"
        rate = (round_ - 1) / max(1e-3, time.monotonic() - self._training_since)
        return minutes((self._rounds - round_) / rate)

    def _frame(self, processes: list[NodeProcess], round_: int, phase: str) -> RenderableType:
        """The whole display. What is below the nodes gets room first: on a short screen Rich cuts the end."""
        loss = Text("validation loss  ")
        if self._losses:
            loss.append(self._losses, "bold").append(f"  from {three_decimals(self._first_loss)}", "dim")
        else:
            loss.append("not measured yet", "dim")
        below = Group(
            Text(),
            f"round {round_}/{self._rounds}, {self._elapsed()} gone, {self._left(round_)} left",
            loss,
            *(Text(note, style="yellow") for note in self._notes[-NOTES_SHOWN:]),
        )
        inside = self._console.width - 4
        taken = self._console.render_lines(below, self._console.options.update_width(inside))
        nodes = table([_row(process) for process in processes], inside, self._console.height - len(taken) - 4)
        return Panel(Group(nodes, below), title=f"{self._title} · {phase}", title_align="left")


def _round(processes: list[NodeProcess]) -> int:
    rounds: list[int] = [p.status["round"] for p in processes if p.status and p.status["trains"]]
    return median_low(rounds or [0])


def _mean(processes: list[NodeProcess], name: str) -> float | None:
    """Of what the trainers report under this name."""
    found = [value for p in processes if (value := p.trainer.get(name)) is not None]
    return sum(found) / len(found) if found else None


def _row(process: NodeProcess) -> dict[str, Text]:
    """A node's line of the live table."""
    status, trainer = process.status or {}, process.trainer
    state = status.get("state") or ("ended" if process.ended else "killed" if process.killed else "starting")
    digest = status.get("phi_digest", "")[:8]
    shown = {
        "round": status and str(status["round"] if status["trains"] else status["clock"]),
        "steps": trainer.get("inner_steps") and str(trainer["inner_steps"]),
        "loss": three_decimals(trainer.get("loss")),
        "tokens/s": trainer.get("tokens_per_s") and f"{trainer['tokens_per_s']:,.0f}",
        "peers": status and str(status["by_health"].get("alive", 0)),
        "in": status and size(status["bytes_received"]),
        "out": status and size(status["bytes_sent"]),
    }
    return {
        "node": cell(process.name),
        "state": cell(state, STATE_STYLES.get(state, "" if status else "red")),
        **{name: cell(text or "-") for name, text in shown.items()},
        "replica": cell(digest or "-", f"#{digest[:6]}" if digest else "dim"),
    }


def show_summary(console: Console, summary: SwarmSummary) -> None:
    """The end of the run, at a glance."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    nodes = summary.nodes
    start, ends = summary.val_loss_start, both_losses(summary.val_loss_average, summary.val_loss_end)
    if start is not None and ends:
        table.add_row("validation loss", Text(f"{start:.3f} → {ends}", style="bold"))
    digests = ", ".join(sorted({node["digest"][:16] for node in nodes}))
    same = f"all {len(nodes)} bit-identical: {digests}" if summary.identical else f"NOT identical: {digests}"
    table.add_row("replicas", Text(same, style="bold green" if summary.identical else "bold red"))
    payload, sent = (sum(node[name] for node in nodes) for name in ("payload_bytes_sent", "bytes_sent"))
    bytes_sent = (
        f"{size(payload)} of deltas ({size(sent)} in all, by {len(nodes)} node{'s' * (len(nodes) != 1)})"
    )
    if len(nodes) > 1:  # a single node would send gradients to nobody
        ratio = f", {summary.data_parallel_bytes / payload:,.0f} times as much" if payload else ""
        bytes_sent += f"; data-parallel training: {size(summary.data_parallel_bytes)}{ratio}"
    table.add_row("bytes sent", bytes_sent)
    worst = max(node["wait_fraction"] for node in nodes)
    away = f"{worst:.2%} of the slowest node's wall time went to publishing and merging"
    table.add_row("away from training", away)
    table.add_row("trained", f"{summary.tokens:,} tokens in {minutes(summary.wall_s)}")
    for ended in summary.ended:
        table.add_row("ended early", Text(ended, style="yellow"))
    for reason in summary.reasons:
        table.add_row("problem", Text(reason, style="bold red"))
    console.print(Panel(table, title=f"swarm {summary.swarm_id[:12]}", title_align="left"))
