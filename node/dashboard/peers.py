"""`gossamer peers`: a table of the members that a node knows, and what it has seen of their deltas."""

import time
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossamer.node.dashboard.shown import UNBOUNDED, harmless_line
from gossamer.protocol import limits
from gossamer.protocol.unix_time import span

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
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:,.1f}{unit}"
    return str(count)
