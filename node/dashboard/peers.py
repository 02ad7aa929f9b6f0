"""`gossamer peers`: the members that a node knows, and what it has seen of their deltas, as a table."""

import time
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from gossamer.node.commands.shown import harmless, harmless_line
from gossamer.protocol.admission import UNIX_S_MAX
from gossamer.protocol.unix_time import span


def peers_table(status: dict[str, Any]) -> Table:
    """The members in a status, the asked node first."""
    agreement = status.get("agreement")
    title = f"swarm {status['swarm']} as {_name(status)} sees it" + (
        f", agreement of the last round {agreement:.2f}" if agreement is not None else ""
    )
    title += _invited(status.get("invited_until"))
    members = [_itself(status), *status["members"]]
    verdicts = [f"{_name(m)}: {m['conduct']['verdict']}" for m in members if m["conduct"]["verdict"]]
    table = Table(
        title=Text(harmless_line(title), style="table.title"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=Text(harmless("\n".join(verdicts)), style="table.caption") if verdicts else None,
        caption_justify="left",
    )
    table.add_column("member", overflow="fold")  # a name may be long: it gives way, and the figures do not
    table.add_column("health", no_wrap=True)
    for column in ("round", "tokens", "tokens/s", "judged", "agrees"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bad in")
    for member in members:
        table.add_row(*_row(member))
    return table


def _invited(until: Any) -> str:
    """For how long the asked node is invited still, where that has an end."""
    if not isinstance(until, int) or not 0 < until <= UNIX_S_MAX:
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


def _row(member: dict[str, Any]) -> list[Text]:
    conduct = member["conduct"]
    agrees = conduct["agreement"]
    cells = [
        _name(member),
        str(member["health"]),
        str(member["round"]),
        _compact(member["tokens"]),
        f"{member['tokens_per_s']:,.0f}",
        str(conduct["judged"]),
        f"{agrees:+.2f}" if agrees is not None else "-",
    ]
    style = "red" if conduct["verdict"] else ""
    return [*map(Text, map(harmless_line, cells)), Text(harmless_line(_faults(conduct)), style=style)]


def _faults(conduct: dict[str, Any]) -> str:
    """In how many rounds its deltas were bad, and by how much: "void 1, clipped 18 by 9.8x"."""
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
