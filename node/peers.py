"""`gossamer peers`: the members that a node knows, and what it has seen of their deltas, as a table."""

from typing import Any

from rich.markup import escape
from rich.table import Table


def peers_table(status: dict[str, Any]) -> Table:
    """The members in a status, the asked node first."""
    agreement = status.get("agreement")
    title = f"swarm {status['swarm']} as {_name(status)} sees it" + (
        f", agreement of the last round {agreement:.2f}" if agreement is not None else ""
    )
    table = Table(title=escape(title), title_justify="left", caption_justify="left")
    for column in ("member", "health"):
        table.add_column(column)
    for column in ("round", "tokens", "tokens/s", "judged", "void", "stale", "capped", "clipped", "opposed"):
        table.add_column(column, justify="right")
    table.add_column("agrees", justify="right")
    table.add_column("verdict")
    for member in (_itself(status), *status["members"]):
        table.add_row(*_row(member))
    return table


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


def _row(member: dict[str, Any]) -> list[str]:
    conduct = member["conduct"]
    agrees = conduct["agreement"]
    return [
        escape(_name(member)),
        member["health"],
        str(member["round"]),
        f"{member['tokens']:,}",
        f"{member['tokens_per_s']:,.0f}",
        str(conduct["judged"]),
        _count(conduct["void"]),
        _count(conduct["stale"]),
        _count(conduct["capped"], conduct["cap_factor"]),
        _count(conduct["clipped"], conduct["clip_factor"]),
        _count(conduct["opposed"]),
        f"{agrees:+.2f}" if agrees is not None else "",
        escape(conduct["verdict"] or ""),
    ]


def _count(count: int, factor: float | None = None) -> str:
    """ "18", or "18 by 9.8x"; nothing for none."""
    if not count:
        return ""
    return f"{count} by {factor:,.1f}x" if factor is not None else str(count)
