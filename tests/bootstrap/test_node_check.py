"""`--check`: the real way of a start, up to listening and the first batch, by the real processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.node.home import Home
from tests.net.processes import BootstrapPeer, assert_all_gone, gossamer, write_text

pytestmark = pytest.mark.slow


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[list[object]]:
    """What checks a node that joins a swarm."""
    assert gossamer("init", tmp_path / "my.toml").returncode == 0
    check = ("bootstrap", tmp_path / "my.toml", "--check", "--dir", tmp_path / "b", "--listen", "127.0.0.1:0")
    done = gossamer(*check)
    assert (done.returncode, done.stdout) == (0, f"this node can start, in {tmp_path / 'b'}\n"), done.stderr
    peer = BootstrapPeer(tmp_path / "my.toml", tmp_path / "b")
    address = peer.wait_listening()
    yield ["node", "--check", "--join", address, "--dir", tmp_path / "d", "--admin", "off"]
    assert peer.stop() == 0


def test_a_check_says_that_a_node_can_start_and_leaves_nothing_running(
    joined: list[object], tmp_path: Path
) -> None:
    text = write_text(tmp_path / "text.txt")
    done = gossamer(*joined, "--data", text, "--listen", "127.0.0.1:0")
    assert (done.returncode, done.stdout) == (0, f"this node can start, in {tmp_path / 'd'}\n"), done.stderr
    assert "can train on" in done.stderr
    assert Home(tmp_path / "d").is_free()
    assert_all_gone(tmp_path / "d", 1.0)


def test_a_check_fails_with_the_line_with_which_a_start_would(joined: list[object], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "binary").write_bytes(bytes(10_000))
        for flags, part in (
            (["--listen", f"127.0.0.1:{port}"], f"127.0.0.1:{port}"),
            (["--listen", "127.0.0.1:0", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
            (["--listen", "127.0.0.1:0", "--data", tmp_path / "binary"], "NUL"),
        ):
            done = gossamer(*joined, *flags)
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            assert part in done.stderr.strip().splitlines()[-1]
