"""What `gossamer top` shows, as a function of what is known and the size of the terminal."""

import re
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gossamer.node.dashboard.board import Board
from gossamer.node.dashboard.figures import averaged, chart, count, duration, plural, size, three_decimals
from gossamer.node.dashboard.shown import harmless_line

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
    table = _table()
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
    table = _table()
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


def _table() -> Table:
    return Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold underline", pad_edge=False)
