"""`gossamer.node.ipc.messages`: every message survives the wire, and nothing else is taken for one."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.node.ipc import messages as control
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.wire import pack

MESSAGES: list[control.ControlMessage] = [
    control.Welcome(bytes(32), 7, 9, 6, 5),
    control.Phi(1, -3, 0, 12),
    control.Published(4),
    control.Clock(5, 2**40),
    control.Data(b"taken"),
    control.Stop(),
    control.Publish(3, -1, 1000, 10, 2.5, "int4", 12345),
    control.Applied(0),
    control.Report("training", 1, 2, 3.5, 4.5, None, 1.25, 1.5, -1, 0, 0.01, "cpu"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: control.ControlMessage) -> None:
    frame = control.encode(message)
    assert control.frame_length(frame[:4]) == len(frame) - 4
    assert control.decode(frame[4:]) == message


@pytest.mark.parametrize(
    "value",
    [None, 1, [], [99], [-1], ["Stop"], [[1]], [{}], [None], [True], [5, 1], [0], [2], [2, 1, 2], b"x"],
)
def test_what_is_no_message_is_malformed(value: object) -> None:
    with pytest.raises(MalformedError):
        control.decode(pack(value) if not isinstance(value, dict) else b"\x80")


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_malformed(data: bytes) -> None:
    try:
        control.decode(data)
    except MalformedError:
        pass


def test_an_impossible_length_is_malformed() -> None:
    with pytest.raises(MalformedError, match="frame"):
        control.frame_length((control.FRAME_BYTES_MAX + 1).to_bytes(4, "big"))


def test_messages_are_read_one_after_another_however_they_are_cut() -> None:
    here, there = socket.socketpair()
    data = b"".join(map(control.encode, MESSAGES))

    def dribble() -> None:
        for i in range(0, len(data), 7):
            there.sendall(data[i : i + 7])
        there.close()

    thread = threading.Thread(target=dribble)
    thread.start()
    with here, here.makefile("rb") as stream:
        assert [control.receive(stream) for _ in MESSAGES] == MESSAGES
        with pytest.raises(ConnectionError):
            control.receive(stream)
    thread.join()
