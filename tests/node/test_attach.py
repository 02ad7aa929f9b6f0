"""`gossamer.node.trainer.attach`: mistakes come to light before a daemon is started, as one line each, and
SIGTERM is an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.node.processes import Service
from gossamer.node.trainer import attach as attaching
from gossamer.node.trainer import peer as peer_module
from gossamer.node.trainer.attach import TERMINATED, DaemonProcess
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.errors import ConfigError, StorageError, UnreachableError
from gossamer.protocol.manifest import Manifest


def build_model(width: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(width, 2)


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path / "home"))

    class NoDaemon(DaemonProcess):
        def start(self) -> None:
            raise AssertionError("no daemon is started before all is in order")

    monkeypatch.setattr(attaching, "DaemonProcess", NoDaemon)


@pytest.fixture
def manifest() -> Manifest:
    return manifests.describe(build_model(), name="mine")


def attach(model: nn.Module | None = None, **options: Any) -> Peer:
    model = model or build_model()
    return Peer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_nothing_says_which_swarm() -> None:
    with pytest.raises(ConfigError, match="which swarm"):
        attach()


def test_a_folder_of_another_swarm(manifest: Manifest, tmp_path: Path) -> None:
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(manifests.describe(build_model(), name="other"))
    with pytest.raises(ConfigError, match="belongs to swarm .* Give the first one, or another folder$"):
        attach(manifest=manifest, folder=tmp_path / "d")


def test_a_model_of_another_shape(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"'weight' has shape \[2, 5\]; the manifest says \[2, 4\]"):
        attach(build_model(5), manifest=manifest, join=["127.0.0.1:1"])


def test_a_founder_with_other_first_values_is_told_so(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"names and shapes fit, but the values have digest") as found:
        attach(build_model(seed=1), manifest=manifest)
    assert manifest.genesis.digest[:12] in str(found.value)


def test_what_the_swarm_cannot_hold_of_a_founders_values_is_told(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model()
    with torch.no_grad():
        model.bias.fill_(1e-8)
    with pytest.raises(AssertionError, match="no daemon is started"):
        attach(model, manifest=manifests.describe(model, name="mine"))
    assert [line for line in caplog.messages if "below 3e-8" in line and "2 of 2 values of 'bias'" in line][
        1:
    ]
    with torch.no_grad():
        model.bias.fill_(100.0)
    with pytest.raises(ConfigError, match=r"tensor 'bias': a value is not finite or outside \+-64"):
        attach(model, manifest=manifest)


def test_a_worker_that_imports_the_script_is_no_node(tmp_path: Path) -> None:
    """As a DataLoader's do that are spawned; the default of Python 3.14 is like that."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "def work(): pass\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "else:\n"
        "    from torch import nn, optim\n"
        "    from gossamer.node import Peer\n"
        "    model = nn.Linear(2, 1)\n"
        "    Peer.attach(model, optim.SGD(model.parameters()), folder='d', join=['127.0.0.1:1'])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert 'under if __name__ == "__main__":' in done.stderr
    assert not (tmp_path / "d").exists()


def test_inference_mode_is_left_first(manifest: Manifest) -> None:
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"attach outside torch\.inference_mode"):
        attach(manifest=manifest)


def test_a_folder_that_another_node_runs_in(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "FREE_TIMEOUT_S", 0.2)
    other = Home(tmp_path / "d")
    other.create()
    other.lock()
    with pytest.raises(StorageError, match=r"another node is running in .*leave\(\) it"):
        attach(manifest=manifest, folder=tmp_path / "d")


def test_a_folder_is_waited_for_whose_node_is_ending(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([False, False, True])
    monkeypatch.setattr(Home, "is_free", lambda _: next(free))
    with pytest.raises(AssertionError, match="no daemon"):
        attach(manifest=manifest, folder=tmp_path / "d")
    assert next(free, None) is None


def test_the_daemon_says_no_more_than_the_script_wants_to_hear(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[NodeOptions] = []

    def start(options: NodeOptions) -> None:
        given.append(options)
        raise AssertionError("no daemon")

    monkeypatch.setattr(attaching, "DaemonProcess", start)
    monkeypatch.setattr(logging.getLogger("gossamer"), "level", logging.ERROR)
    with pytest.raises(AssertionError, match="no daemon"):
        attach(manifest=manifest)
    assert given[0].log_level == "error"


def test_a_scripts_daemon_listens_where_the_script_looks_for_it(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a folder's path is too long for a socket, that hangs on TMPDIR, which a script may set late."""
    monkeypatch.setattr(attaching, "DaemonProcess", DaemonProcess)
    tempfile.gettempdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / ("d" * 100)
    with attach(manifest=manifest, folder=folder, listen="127.0.0.1:0", plaintext=True) as peer:
        assert len(peer.node_id) == 32
    assert not list(tmp_path.glob("gossamer-*"))


@pytest.mark.parametrize(
    ("advertise", "host"),
    [((), r"127\.0\.0\.1:\d+"), (["a.example:7700", "b.example:7700"], r"a\.example:7700")],
)
def test_others_join_where_the_node_is_said_to_be(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, advertise: list[str], host: str
) -> None:
    monkeypatch.setattr(attaching, "DaemonProcess", DaemonProcess)
    with attach(manifest=manifest, listen="127.0.0.1:0", advertise=advertise, plaintext=True) as peer:
        assert re.fullmatch(f"gossamer://{peer.node_id.hex()}@{host}", peer.contact)


async def test_it_can_be_called_where_an_event_loop_runs() -> None:
    """As in a notebook: the manifest is fetched all the same."""
    assert asyncio.get_running_loop().is_running()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
        attach(join=["127.0.0.1:1"])


def test_of_two_scripts_that_start_at_once_one_is_told_and_the_other_trains_on(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the folder free. The one whose daemon comes too late must not find the other's."""
    monkeypatch.setattr(attaching, "DaemonProcess", DaemonProcess)
    answers, is_free = iter([True, True]), Home.is_free
    monkeypatch.setattr(Home, "is_free", lambda home: next(answers, False) or is_free(home))
    where: dict[str, Any] = {"folder": tmp_path / "d", "listen": "127.0.0.1:0", "plaintext": True}
    with attach(manifest=manifest, **where) as first:
        with pytest.raises(StorageError, match=r"another node is running in .*or give another folder="):
            attach(manifest=manifest, **where)
        first.step(1, 0.0)
        assert not first.should_stop
        assert first._role._link.is_attached  # type: ignore[attr-defined]


@contextlib.contextmanager
def our_logger(level: int = logging.NOTSET) -> Iterator[logging.Logger]:
    """As in a script that has arranged for no logs yet; pytest does."""
    root, ours = logging.getLogger(), logging.getLogger("gossamer")
    before = ours.level
    with pytest.MonkeyPatch.context() as patched:
        for logger in (root, ours):
            patched.setattr(logger, "handlers", [])
        ours.setLevel(level)
        yield ours
    ours.setLevel(before)


def test_what_happens_is_shown_unless_the_script_says_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with our_logger() as ours:
        peer_module.show_log()
        ours.info("listens")
    assert "listens" in capsys.readouterr().err


# -- the daemon of a script, and SIGTERM


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
def test_the_first_sigterm_asks_and_the_second_would_kill() -> None:
    daemon = DaemonProcess()
    daemon.start()
    assert not daemon.must_stop
    signal.raise_signal(signal.SIGTERM)
    assert daemon.must_stop
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ending = daemon.ending()
    assert isinstance(ending, SystemExit) and ending.code == TERMINATED
    daemon.stop()


@pytest.mark.usefixtures("_signals")
def test_a_script_that_handles_sigterm_itself_keeps_it() -> None:
    caught: list[int] = []
    mine = lambda *_: caught.append(1)  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    daemon = DaemonProcess()
    daemon.start()
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) != mine, "it is called after ours"
    daemon.stop()
    assert caught == [1] and not daemon.must_stop and signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.usefixtures("_signals")
def test_all_peers_of_a_process_are_asked() -> None:
    first, second, third = DaemonProcess(), DaemonProcess(), DaemonProcess()
    for daemon in (first, second, third):
        daemon.start()
    first.stop()
    signal.raise_signal(signal.SIGTERM)
    assert [one.must_stop for one in (first, second, third)] == [False, True, True]
    second.stop()
    third.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("_signals")
def test_ctrl_c_while_the_daemon_is_ended_does_not_keep_it_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Event(), threading.Event()

    class Daemon:
        def poll(self) -> None:
            pass

        def terminate(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def end(self, grace_s: float) -> None:
            ended.set()

    def start() -> Any:
        started.set()
        return Daemon()

    monkeypatch.setattr(attaching, "daemon_service", lambda _: Service("daemon", start))
    monkeypatch.setattr(attaching, "DAEMON_POLL_S", 0.01)
    daemon = DaemonProcess(NodeOptions(folder=tmp_path))
    daemon.start()
    assert started.wait(60)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            daemon.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.wait(60)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("_signals")
def test_a_forked_worker_dies_of_sigterm_as_ever() -> None:
    if "jax" in sys.modules:
        pytest.skip("another test has begun JAX in this process, which may not fork any more")
    daemon = DaemonProcess()
    daemon.start()
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    assert not daemon.must_stop
    daemon.stop()
