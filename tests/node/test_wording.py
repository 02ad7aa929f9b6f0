"""What a message calls a flag where a script reads it."""

import logging

import pytest

from gossamer.node import logs
from gossamer.node.inputs import for_a_script


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("choose another --dir", "choose another folder="),
        ("fetch it with --join ADDRESS (or --invite)", "fetch it with join=[ADDRESS] (or invite=)"),
        ("Say whom to believe: --trust NODE_ID", "Say whom to believe: trust=[NODE_ID]"),
        ("set --advertise HOST:PORT. The node trains", "set advertise=[HOST:PORT]. The node trains"),
        ("another --listen ([::]:PORT follows)", "another listen= ([::]:PORT follows)"),
        ("pin it with --swarm-id, or the", "pin it with swarm_id=, or the"),
        ("may speak TLS (leave out --insecure-plaintext)", "may speak TLS (leave out plaintext=True)"),
        ("which gossamer id --dir D names", "which gossamer id --dir D names"),
        ("gossamer invite NODE_ID --name X", "gossamer invite NODE_ID --name X"),
        ("gossamer id --dir /d --name x; --dir /e", "gossamer id --dir /d --name x; folder=/e"),
        ("gossamer node --join A:1 --swarm-id ID", "gossamer node --join A:1 --swarm-id ID"),
        ("what gossamer invite prints, --invite", "what gossamer invite prints, invite="),
        ("choose another --admin, or --admin off", "choose another --admin, or --admin off"),
        ("a -- b --- c", "a -- b --- c"),
    ],
)
def test_flags_become_arguments_and_commands_stay(said: str, read: str) -> None:
    assert for_a_script(said) == read


def test_lines_of_a_scripts_log_are_in_its_words() -> None:
    record = logging.LogRecord("gossamer", logging.INFO, "", 0, "choose another --%s", ("dir",), None)
    as_text, as_json = (logs.handler(as_json=way, wording=for_a_script) for way in (False, True))
    assert as_text.format(record).endswith("info    choose another folder=")
    assert '"text": "choose another folder="' in as_json.format(record)
    assert logs.handler().format(record).endswith("choose another --dir")
