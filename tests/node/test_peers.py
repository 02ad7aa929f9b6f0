"""`gossamer.bootstrap.top`: the table of members."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console

from gossamer.bootstrap.top import GIVE_WAY, as_told, show_peers
from gossamer.protocol.merge.contributions import Conduct, Figures, RoundFigures


def shown(status: dict[str, Any], width: int = 250) -> str:
    out = io.StringIO()
    show_peers(status, Console(file=out, width=width, force_terminal=True, color_system=None))
    return out.getvalue()


def in_one_line(status: dict[str, Any]) -> str:
    return " ".join(shown(status).split())


def status(**changes: Any) -> dict[str, Any]:
    conduct = Conduct()
    for round_ in range(1, 21):
        figures = {
            bytes([1]) * 32: Figures(clipped=9.8, pace=30.0, agreement=-0.7),
            bytes([2]) * 32: Figures(),
        }
        conduct.note(round_, RoundFigures(figures, 0.25))
    member = {"health": "alive", "round": 20, "tokens": 1_234_567, "tokens_per_s": 4321.0}
    return {
        "swarm": "s",
        "name": "me",
        "node_id": "ab" * 32,
        "round": 21,
        "conduct": conduct.of(bytes(32))._asdict(),
        "agreement": conduct.agreement,
        "members": [
            {
                **member,
                "node_id": "01" * 32,
                "name": "liar [red]",
                "conduct": conduct.of(b"\1" * 32)._asdict(),
            },
            {**member, "node_id": "02" * 32, "name": "", "conduct": conduct.of(b"\2" * 32)._asdict()},
        ],
        **changes,
    }


def test_members_with_their_figures_and_verdicts() -> None:
    text = shown(status())
    lines = [line for line in text.splitlines() if "alive" in line or "itself" in line]
    assert "me" in lines[0] and "itself" in lines[0] and "21" in lines[0]
    for part in (
        "liar [red]",
        "1.2M",
        "4,321",
        "-0.70",
        "clipped 20 by 9.8x, opposed 20",
    ):
        assert part in lines[1], part
    assert "liar [red]: clipped in 20 of the last 20 rounds" in text
    assert "02020202" in lines[2] and "clipped" not in lines[2]
    assert "agreement 0.25 in the newest round with two deltas" in text


def test_the_table_fits_a_terminal_and_says_what_was_bad() -> None:
    told = status()
    few = Conduct()
    few.note(1, RoundFigures({bytes([2]) * 32: Figures(clipped=9.8, pace=30.0, agreement=-0.7)}, 0.25))
    told["members"][1]["conduct"] = few.of(bytes([2]) * 32)._asdict()
    lines = shown(told, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if line.startswith(" 02020202")]
    assert "clipped 1" in line and "by 9.8x" in "\n".join(lines)


def test_a_long_name_gives_way_and_not_the_figures() -> None:
    told = status()
    told["members"][1]["name"] = "gpu-box-17.cluster.example.university.edu" + 23 * "x"
    text = shown(told, width=80)
    for part in ("member", "health", "round", "tokens/s", "agrees", "bad in", "4,321", "-0.70", "liar [red]"):
        assert part in text


def test_a_narrow_terminal_shows_who_it_is_and_what_was_bad() -> None:
    told = status()
    told["members"][0].update(name="workstation-7", round=123_456, tokens_per_s=1_234_567.0)
    for width in range(36, 120):
        lines = shown(told, width).splitlines()
        assert max(map(len, lines)) <= width
        (line,) = [line for line in lines if " workstation-7 " in line]
        assert "clipped" in line and "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
        head = next(line for line in lines if line.startswith(" member")).split()
        left = [name for name in GIVE_WAY if name in head]
        assert left == list(GIVE_WAY[len(GIVE_WAY) - len(left) :]), "the first goes first"
    assert len(left) == len(GIVE_WAY)


def test_what_is_no_terminal_has_no_width() -> None:
    told = status()
    told["members"][0]["name"] = "gpu-box-17.cluster.example.university.edu" + 23 * "x"
    out = io.StringIO()
    show_peers(told, Console(file=out))
    name = told["members"][0]["name"]
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith(f" {name} ")]
    assert "clipped 20 by 9.8x, opposed 20" in line


def test_programs_are_told_what_the_table_says() -> None:
    told = as_told(status(trainer={"tokens": 5, "tokens_per_s": 2.5}))
    assert told["swarm"] == "s" and len(told["members"]) == 2 and told["agreement"] == 0.25
    own = told["itself"]
    assert (own["name"], own["round"], own["tokens"], own["tokens_per_s"]) == ("me", 21, 5, 2.5)


def test_what_others_say_is_shown_as_it_is_and_commands_no_terminal() -> None:
    said = "\x1b]0;owned\x07[/nope]"
    told = status(swarm=said, name=said, round=said)
    told["members"][0].update(name=said, health=said, round=said)
    told["members"][0]["conduct"].update(verdict=said, judged=said, void=said)
    told["members"][1]["health"] = 5
    text = shown(told)
    assert "\x1b" not in text and "\x07" not in text
    assert text.count("\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}[/nope]") >= 8


def test_a_node_that_has_merged_nothing() -> None:
    text = shown(status(agreement=None, members=[], trainer=None))
    assert "agreement" not in text and "itself" in text


def test_for_how_long_the_asked_node_is_invited_still() -> None:
    now = int(time.time())
    assert ", invited for another 2.0 days" in in_one_line(status(invited_until=now + 172_800 + 60))
    assert ", its invitation has run out" in in_one_line(status(invited_until=now - 1))
    for none in (None, "soon", 10**400):
        assert "invit" not in shown(status(invited_until=none))
