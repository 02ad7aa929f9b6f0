"""`gossamer.node.options`: what is checked of a node's options, and that they survive a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.node.options import NodeOptions, flags
from gossamer.protocol.errors import ConfigError

ID = "ab" * 32


@pytest.mark.parametrize(
    "options",
    [
        NodeOptions(folder=Path("/tmp/ü n")),
        NodeOptions(
            folder=Path("d"),
            join=(f"gossamer://{ID}@c:3",),
            trust=(ID,),
            data=(Path("x"), Path("y z")),
            name='naïve "quotes" \'',
            device="cuda:1",
            threads=3,
            stop_round=9,
            observe=True,
            restarted=True,
        ),
    ],
)
def test_options_survive_a_command_line(options: NodeOptions) -> None:
    assert NodeOptions.model_validate_json(options.model_dump_json()) == options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"join": "a:1"}, "--join: should be a valid tuple, not 'a:1'"),
        ({"join": ["a:1", "b"]}, "--join: 'b' is not an address; write HOST:PORT"),
        ({"trust": ["12"]}, "--trust: '12' is not a node id"),
        ({"swarm_id": ""}, "--swarm-id: '' is not a swarm id"),
        ({"folder": ""}, "--dir: the path is empty"),
        ({"folder": 3}, "--dir: is not a valid path"),
        ({"data": ["a\0"]}, "--data: a path has no null characters"),
        ({"name": 5}, "--name: should be a valid string, not 5"),
        ({"name": "\x1b[2J"}, "--name: a name is printable text"),
        ({"listen": "7700"}, "--listen: '7700' is not an address"),
        ({"advertise": ["0.0.0.0:1"]}, "--advertise: nobody can dial 0.0.0.0:1"),
        ({"advertise": ["a:1"] * 9}, "--advertise: Value should have at most 8 items"),
        ({"stop_round": -1}, "--rounds: should be greater than or equal to 0, not -1"),
        ({"debug": "no"}, "--debug: should be a valid boolean, not 'no'"),
        ({"admin": "on"}, "--admin: 'on' is not an address"),
        ({"log_level": "loud"}, "--log-level: should be 'debug', 'info', 'warning' or 'error', not 'loud'"),
        ({"plaintext": True}, "plaintext is for loopback only; listen on 127.0.0.1"),
        ({"jion": ["a:1"]}, "--jion: no such option"),
    ],
)
def test_the_first_wrong_value_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NodeOptions.of(**values)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_values_are_put_into_their_usual_form() -> None:
    options = NodeOptions.of(join=[f" gossamer://{ID.upper()}@a:1"], trust={ID.upper()}, folder="~/d")
    assert options.join == (f"gossamer://{ID}@a:1",)
    assert options.trust == (ID,)
    assert options.root == Path.home() / "d"


def test_every_option_but_those_for_its_own_processes_is_a_flag() -> None:
    assert set(NodeOptions.model_fields) - set(flags()) == {"socket", "restarted"}
