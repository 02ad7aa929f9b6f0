"""How many files a node may open, and what is left for connections."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from gossamer.node.network import open_files


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


def test_that_no_file_is_left_for_a_connection_is_said_in_one_line(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """By asyncio, for each of them."""
    log = logging.getLogger("asyncio")
    seldom = open_files.SaidSeldom()
    log.addFilter(seldom)
    request.addfinalizer(lambda: log.removeFilter(seldom))
    for number in (errno.EMFILE, errno.EMFILE, errno.EPERM):
        error = OSError(number, os.strerror(number))
        log.error("socket.accept() out of system resource", exc_info=error)
    waiting, other = (record for record in caplog.records if record.name == "asyncio")
    assert waiting.getMessage() == "connections wait: Too many open files (ulimit -n)"
    assert waiting.exc_info is None
    assert other.exc_info is not None and "system resource" in other.getMessage()
