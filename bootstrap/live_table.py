"""What a person sees of a local swarm: a live table on a terminal, plain lines elsewhere.

A terminal on which nothing can be drawn (``TERM=dumb``) gets plain lines too.
"""

import time
from itertools import compress
from statistics import median_low
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.bootstrap.chaos import Happening, Storm
from gossamer.bootstrap.processes import NodeProcess
from gossamer.bootstrap.summary import SwarmSummary, amount
from gossamer.node.formatting import harmless, plural

PLAIN_INTERVAL_S = 5.0
NOTES_SHOWN = 5
COLUMNS = {
    "node": 0,
    "state": 0,
    "round": 0,
    "steps": 60,
    "loss": 0,
    "tokens/s": 44,
    "peers": 84,
    "in": 78,
    "out": 69,
    "replica": 53,
}
"""Columns of the live table, and the terminal width from which each is shown: a truncated one is useless."""

BARS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "training": "green",
    "finished": "cyan",
    "serving": "blue",
    "joining": "yellow",
    "starting": "yellow",
}


def sparkline(values: list[float], width: int = 32) -> str:
    """The last values as a row of bars."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in shown)


def minutes(seconds: float) -> str:
    """A duration as ``3:07``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Output(Console):
    """Standard output. A closed pipe (`| head`) is an error like any other."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich would end the process without any clean-up."""
        raise  # noqa: PLE0704 - called where it is handled


class Display:
    """Shows the swarm as it runs. Use it as a context manager."""

    def __init__(self, console: Console, rounds: int, title: str) -> None:
        self._console = console
        self._rounds = rounds
        self._title = title
        self._begun = time.monotonic()
        self._training_since: float | None = None
        self._losses: list[float] = []
        self._phase = "starting"
        self._printed_at = 0.0
        self._told = 0
        self._notes: list[str] = []
        self._live = (
            Live(console=console, auto_refresh=False, transient=False)
            if console.is_terminal and not console.is_dumb_terminal
            else None
        )

    def __enter__(self) -> "Display":
        if self._live:
            self._live.__enter__()
        else:
            self._console.print(self._title, markup=False)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.__exit__(None, None, None)

    def update(self, processes: list[NodeProcess], phase: str, storm: Storm | None = None) -> None:
        """Show the latest statuses, and what the storm does."""
        self._note(processes)
        phase = self._doing(processes, phase)
        if self._live:
            self._live.update(self._frame(processes, phase, storm), refresh=True)
            return
        now = time.monotonic()
        for line in storm.log[self._told :] if storm else ():
            self._told += 1
            self._print_event(line)
        if now - self._printed_at >= PLAIN_INTERVAL_S or phase != self._phase:
            self._printed_at = now
            self._phase = phase
            self._console.print(self._plain(processes, phase), markup=False, highlight=False)

    def tell(self, text: str) -> None:
        """Show that something unplanned happened."""
        text = harmless(text)
        self._notes.append(f"{minutes(time.monotonic() - self._begun)}  {text}")
        if not self._live:
            self._print_event(text)

    def _print_event(self, text: str) -> None:
        now = minutes(time.monotonic() - self._begun)
        self._console.print(f"{now}  * {text}", markup=False, highlight=False, soft_wrap=True)

    # -- numbers

    def _note(self, processes: list[NodeProcess]) -> None:
        round_ = self._round(processes)
        if round_ and self._training_since is None:
            self._training_since = time.monotonic()
        losses = [p.trainer["val_loss"] for p in processes if p.trainer.get("val_loss") is not None]
        if losses:
            mean = sum(losses) / len(losses)
            if not self._losses or mean != self._losses[-1]:
                self._losses.append(mean)

    @staticmethod
    def _doing(processes: list[NodeProcess], phase: str) -> str:
        """The phase, or what the nodes do instead while none of them trains yet, or any more."""
        states = {p.status["state"] for p in processes if p.status and p.status["trains"]}
        if any(p.status is None and not p.ended and not p.killed for p in processes):
            states.add("starting")
        if phase != "training" or "training" in states:
            return phase
        return next((state for state in ("joining", "starting") if state in states), phase)

    @staticmethod
    def _round(processes: list[NodeProcess]) -> int:
        rounds: list[int] = [p.status["round"] for p in processes if p.status and p.status["trains"]]
        return median_low(rounds or [0])

    def _left(self, round_: int) -> str:
        if self._training_since is None or round_ < 2:
            return "-:--"
        rate = (round_ - 1) / max(1e-3, time.monotonic() - self._training_since)
        return minutes((self._rounds - round_) / rate)

    # -- a terminal

    def _frame(self, processes: list[NodeProcess], phase: str, storm: Storm | None) -> RenderableType:
        """The whole display. What is below the nodes gets room first: on a short screen Rich cuts the end."""
        below = self._below(processes, storm)
        taken = self._console.render_lines(below, self._console.options.update_width(self._console.width - 4))
        nodes = self._nodes(processes, max(1, self._console.height - len(taken) - 3))
        return Panel(Group(nodes, below), title=f"{self._title} · {phase}", title_align="left")

    def _nodes(self, processes: list[NodeProcess], rows: int) -> RenderableType:
        """A row for each node; if there are too few rows, the last one says how many more nodes there are."""
        table = Table(expand=True, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        shown = [wanted <= self._console.width for wanted in COLUMNS.values()]
        for column in compress(COLUMNS, shown):
            table.add_column(column, justify="left" if column in ("node", "state") else "right", no_wrap=True)
        left_out = len(processes) - rows + 1 if len(processes) > rows else 0
        for process in processes[: len(processes) - left_out]:
            table.add_row(*compress(self._row(process), shown))
        if left_out:
            table.add_row(Text(f"+ {left_out} more", style="dim"))
        return table

    def _below(self, processes: list[NodeProcess], storm: Storm | None) -> RenderableType:
        """The progress, the loss, and what happened."""
        round_ = self._round(processes)
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True)
        progress.add_row(
            Text(f"round {round_}/{self._rounds}"),
            ProgressBar(total=self._rounds, completed=round_),
            Text(f"{minutes(time.monotonic() - self._begun)} gone, {self._left(round_)} left"),
        )
        loss = Text("validation loss  ")
        if self._losses:
            loss.append(f"{self._losses[-1]:.3f} ", style="bold")
            loss.append(sparkline(self._losses), style="green")
            loss.append(f"  from {self._losses[0]:.3f}", style="dim")
        else:
            loss.append("not measured yet", style="dim")
        parts: list[RenderableType] = [Text(), progress, loss]
        if storm is not None:
            parts += [Text(), _events(storm.events, time.monotonic() - self._begun)]
        parts += [Text(note, style="yellow") for note in self._notes[-NOTES_SHOWN:]]
        return Group(*parts)

    @staticmethod
    def _row(process: NodeProcess) -> list[Text]:
        status = process.status
        if status is None:
            state = (
                Text("ended", style="red")
                if process.ended
                else Text("killed", style="red")
                if process.killed
                else Text("starting", style="yellow")
            )
            return [Text(process.name), state, *[Text("-", style="dim")] * (len(COLUMNS) - 2)]
        trainer = process.trainer
        digest = status.get("phi_digest", "")[:8]
        return [
            Text(process.name),
            Text(status["state"], style=STATE_STYLES.get(status["state"], "")),
            Text(str(status["round"] if status["trains"] else status["clock"])),
            Text(str(trainer.get("inner_steps", "-"))),
            Text(f"{trainer['loss']:.3f}" if trainer.get("loss") else "-"),
            Text(f"{trainer['tokens_per_s']:,.0f}" if trainer.get("tokens_per_s") else "-"),
            Text(str(sum(member["health"] == "alive" for member in status["members"]))),
            Text(amount(status["bytes_received"])),
            Text(amount(status["bytes_sent"])),
            Text(digest or "-", style=f"#{digest[:6]}" if digest else "dim"),
        ]

    # -- anything else

    def _plain(self, processes: list[NodeProcess], phase: str) -> str:
        round_ = self._round(processes)
        speed = sum(p.trainer.get("tokens_per_s", 0.0) for p in processes)
        loss = f", validation loss {self._losses[-1]:.3f}" if self._losses else ""
        return (
            f"{minutes(time.monotonic() - self._begun)}  {phase}: round {round_}/{self._rounds}{loss},"
            f" {speed:,.0f} tokens/s, {self._left(round_)} left"
        )


def _events(events: list[Happening], now_s: float) -> RenderableType:
    """What happened, when, and what became of it."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column()
    for event in events:
        if event.recovered_s is None:
            outcome = Text(f"{max(0.0, now_s - event.t_s):.0f} s ...", style="yellow")
        else:
            outcome = Text(f"{event.cure} ({event.recovered_s:.1f} s)", style="green")
        table.add_row(Text(minutes(event.t_s), style="dim"), Text(event.text), outcome)
    return table if events else Text("no faults yet", style="dim")


def show_summary(console: Console, summary: SwarmSummary) -> None:
    """The end of the run, at a glance."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    nodes = len(summary.nodes)
    start, end = summary.val_loss_start, summary.val_loss_end
    if start is not None and end is not None:
        table.add_row(
            "validation loss", Text(f"{start:.3f} → {end:.3f} {summary.loss_unit}".rstrip(), style="bold")
        )
    digests = sorted({node.digest[:16] for node in summary.nodes})
    table.add_row(
        "replicas",
        Text(f"all {nodes} bit-identical: {digests[0]}", style="bold green")
        if summary.identical
        else Text(f"NOT identical: {', '.join(digests)}", style="bold red"),
    )
    payload = sum(node.payload_bytes_sent for node in summary.nodes)
    sent = sum(node.bytes_sent for node in summary.nodes)
    told = f"{amount(payload)} of deltas ({amount(sent)} in all, by {plural(nodes, 'node')})"
    if nodes > 1:  # a single node would send gradients to nobody
        ratio = f", {summary.data_parallel_bytes / payload:,.0f} times as much" if payload else ""
        told += f"; data-parallel training: {amount(summary.data_parallel_bytes)}{ratio}"
    table.add_row("bytes sent", told)
    worst = max(node.wait_fraction for node in summary.nodes)
    table.add_row(
        "away from training", f"{worst:.2%} of the slowest node's wall time went to publishing and merging"
    )
    table.add_row("trained", f"{summary.tokens:,} tokens in {minutes(summary.wall_s)}")
    if summary.ended:
        table.add_row("ended early", Text("; ".join(summary.ended), style="yellow"))
    for event in summary.events:
        recovered = event["recovered_s"]
        table.add_row(
            f"at {minutes(event['t_s'])}",
            Text(f"{event['text']}; recovered in {recovered:.1f} s")
            if recovered is not None
            else Text(f"{event['text']}; NOT recovered", style="bold red"),
        )
    for reason in summary.reasons:
        table.add_row("problem", Text(reason, style="bold red"))
    console.print(Panel(table, title=f"swarm {summary.swarm_id[:12]}", title_align="left"))
    if summary.sample:
        sample = Text(harmless(summary.sample).expandtabs())
        console.print(Panel(sample, title="what it writes", title_align="left"))
