"""How many files a node may open, and what is left for connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from gossamer.node.daemon.network import listening as open_files


def test_a_daemon_takes_the_open_files_that_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: asked.append(limits))
    open_files.ask_for_open_files()
    assert asked == [(1024, 4096)]
    monkeypatch.setattr("resource.getrlimit", lambda which: (4096, -1))
    open_files.ask_for_open_files()
    assert asked == [(1024, 4096)], "more is left as it is"


@pytest.mark.parametrize(("files", "connections"), [(1024, 768), (512, 256), (256, 64), (16, 64)])
def test_a_machine_that_allows_few_open_files_has_some_left_for_the_nodes_own(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int
) -> None:
    monkeypatch.setattr(open_files, "open_files_allowed", lambda: files)
    assert open_files.connections_allowed() == connections


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """asyncio's, as a daemon has it."""
    log, seldom = logging.getLogger("asyncio"), open_files.NothingLeft()
    log.addFilter(seldom)
    yield log
    log.removeFilter(seldom)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EMFILE, "Too many open files (ulimit -n)"),
        (errno.ENOBUFS, os.strerror(errno.ENOBUFS)),
        (errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_that_nothing_is_left_for_a_connection_is_said_in_one_line(
    caplog: pytest.LogCaptureFixture, log: logging.Logger, number: int, said: str
) -> None:
    """By asyncio, for each of them."""
    for met in (number, number, errno.EPERM):
        error = OSError(met, os.strerror(met))
        log.error("socket.accept() out of system resource", exc_info=error)
    waiting, other = (record for record in caplog.records if record.name == "asyncio")
    assert waiting.getMessage() == f"connections wait: {said}"
    assert waiting.exc_info is None
    assert other.exc_info is not None and "system resource" in other.getMessage()


async def test_who_stops_while_connections_wait_for_files_shows_no_traceback(
    caplog: pytest.LogCaptureFixture, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio stops listening for a second then, and tries to go on also if the server is closed by then."""
    loop = asyncio.get_running_loop()
    met, over = asyncio.Event(), asyncio.Event()

    def no_file(listening: socket.socket) -> NoReturn:
        loop.call_soon(met.set)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def in_a_moment(delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        loop.call_at(loop.time() + 0.02, over.set)
        return loop.call_at(loop.time() + 0.01, callback, *args)

    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    monkeypatch.setattr(socket.socket, "accept", no_file)
    monkeypatch.setattr(loop, "call_later", in_a_moment)
    with socket.create_connection((host, port)):
        await met.wait()
    server.close()
    await over.wait()
    said = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert said == ["connections wait: Too many open files (ulimit -n)"]
