"""`attaching`: mistakes that come to light before a daemon is started, as one line each."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.node.home import FolderLock, Home
from gossamer.node.options import NodeOptions
from gossamer.node.trainer import attach as attaching
from gossamer.node.trainer import attach as starting
from gossamer.node.trainer import peer as peer_module
from gossamer.node.trainer.beside import Beside
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.errors import ConfigError, DiskFullError, StorageError, UnreachableError
from gossamer.protocol.manifest import Manifest
from tests.node.full_disk import no_room_in
from tests.protocol.builders import SMALL


def build_model(width: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(width, 2)


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path / "home"))

    class NoDaemon(Beside):
        def start(self) -> None:
            raise AssertionError("no daemon is started before all is in order")

    monkeypatch.setattr(starting, "Beside", NoDaemon)


@pytest.fixture
def manifest() -> Manifest:
    return manifests.describe(build_model(), name="mine")


def attach(model: nn.Module | None = None, **options: Any) -> Peer:
    model = model or build_model()
    return Peer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_nothing_says_which_swarm() -> None:
    with pytest.raises(ConfigError, match="which swarm"):
        attach()


@pytest.mark.parametrize("given", [None, [build_model()], "model"])
def test_what_is_no_model(manifest: Manifest, given: Any) -> None:
    import torch.distributed.fsdp

    with pytest.raises(ConfigError, match=r"give a torch\.nn\.Module"):
        Peer.attach(given, torch.optim.SGD(build_model().parameters(), lr=0.1), manifest=manifest)


def test_what_to_give_instead_is_said_in_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--join ADDRESS \(or --invite\)"):
        attach(folder=tmp_path / "empty")


def test_one_address_is_still_a_list(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"--join: "):
        attach(manifest=manifest, join="a:1")


def test_an_address_that_is_none(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        attach(manifest=manifest, join=["nonsense"])


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml.*: No such file"):
        attach(manifest=tmp_path / "none.toml")


@pytest.mark.parametrize("given", ["", "[swarm]\nname = 'mine'\n"])
def test_a_manifest_that_names_no_file(given: str) -> None:
    with pytest.raises(ConfigError, match="manifest is .*: give a TOML file's path|cannot read"):
        attach(manifest=given)


@pytest.mark.parametrize("listen", ["[::]:0", "0.0.0.0:7700"])
def test_plaintext_beyond_loopback_needs_no_daemon_to_be_refused(manifest: Manifest, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"plaintext is for loopback only; listen on 127\.0\.0\.1, not"):
        attach(manifest=manifest, listen=listen, plaintext=True)


def test_a_disk_without_room_for_the_first_parameters(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_room_in("chunks", monkeypatch)
    with pytest.raises(DiskFullError, match=r"cannot write .*chunks: the disk is full; free some space"):
        attach(manifest=manifest, folder=tmp_path / "node")


def test_another_swarm_than_was_asked_for(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"describes swarm .*, not 1234"):
        attach(manifest=manifest, swarm_id="1234")


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


def test_a_founder_with_the_first_values_gets_as_far_as_its_daemon(manifest: Manifest) -> None:
    with pytest.raises(AssertionError, match="no daemon"):
        attach(manifest=manifest)


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
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert 'under if __name__ == "__main__":' in done.stderr
    assert not (tmp_path / "d").exists()


def test_a_python_that_does_not_know_itself_is_told_where_it_is(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its daemon could never be started, and `attach` would wait for it for ever."""
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(ConfigError, match=r"sys\.executable is empty"):
        attach(manifest=manifest)


def test_inference_mode_is_left_first(manifest: Manifest) -> None:
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"attach outside torch\.inference_mode"):
        attach(manifest=manifest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "nowhere"}, "'nowhere' is not an address"),
        ({"stop_round": -1}, "--rounds: .*, not -1"),
        ({"advertise": "a.example:1"}, r"--advertise: .*, not 'a.example:1'"),
        ({"folder": ""}, "--dir: the path is empty"),
        ({"swarm_id": ""}, "'' is not a swarm id"),
        ({"listen": 7700}, "--listen: .*, not 7700"),
        ({"name": "a\nb"}, "a name is printable text"),
        ({"advertise": ["nowhere"]}, "'nowhere' is not an address"),
        ({"join": [7700]}, "--join: .*, not 7700"),
        ({"manifest": {"swarm": {}}}, "manifest is .*: give a TOML file's path, or a Manifest"),
    ],
)
def test_options_that_are_none(manifest: Manifest, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(**{"manifest": manifest, **options})


def test_a_folder_that_another_node_runs_in(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "FREE_TIMEOUT_S", 0.2)
    other = Home(tmp_path / "d")
    other.create()
    other.lock.take()
    with pytest.raises(StorageError, match=r"another node is running in .*leave\(\) it"):
        attach(manifest=manifest, folder=tmp_path / "d")


def test_a_folder_is_waited_for_whose_node_is_ending(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([False, False, True])
    monkeypatch.setattr(FolderLock, "is_free", lambda _: next(free))
    with pytest.raises(AssertionError, match="no daemon"):
        attach(manifest=manifest, folder=tmp_path / "d")
    assert next(free, None) is None


def test_a_model_that_is_attached_already(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(eq=False)
    class Attached:
        model: nn.Module
        has_left: bool = False
        is_here: bool = True

    model = build_model()
    peer = Attached(nn.ModuleList([model]))
    monkeypatch.setattr(attaching, "_attached", [Attached(build_model()), peer])
    with pytest.raises(ConfigError, match=r"attached already: leave\(\) that peer first"):
        attach(model, manifest=manifest)
    same = build_model()
    same.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(ConfigError, match=r"attached already: .*not one that shares its memory"):
        attach(same, manifest=manifest)
    peer.is_here = False
    with pytest.raises(ConfigError, match=r"forked from: attach another, or a copy of it"):
        attach(model, manifest=manifest)
    peer.has_left = True
    with pytest.raises(AssertionError, match="no daemon"):
        attach(model, manifest=manifest)


def test_a_model_that_was_handed_to_several_processes_is_all_of_theirs(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `torch.multiprocessing.spawn` hands it over. On a GPU, `is_shared` says nothing."""
    monkeypatch.setattr(multiprocessing, "parent_process", Mock())
    for model, warns in ((build_model(), False), (build_model().share_memory(), True)):
        caplog.clear()
        with pytest.raises(AssertionError, match="no daemon"):
            attach(model, manifest=manifest)
        assert ("each takes the other's work for its own" in caplog.text) is warns


def test_ctrl_c_as_the_daemon_starts_stops_it(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []

    class Interrupted(Beside):
        def start(self) -> None:
            raise KeyboardInterrupt

        def stop(self) -> None:
            stopped.append(1)

    monkeypatch.setattr(starting, "Beside", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        attach(manifest=manifest)
    assert stopped == [1]


@pytest.mark.parametrize("at", ["_say", "_leader", "Place"])
def test_ctrl_c_once_the_daemon_listens_stops_it(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    node = Mock()
    node.link.node_id = bytes(32)
    monkeypatch.setattr(attaching, "started", lambda *_: node)
    monkeypatch.setattr(attaching, "Leader", Mock())
    monkeypatch.setattr(attaching, at, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        attach(manifest=manifest)
    node.close.assert_called_once_with()


def test_ctrl_c_as_its_peer_is_made_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Mock()
    monkeypatch.setattr(attaching, "attach", lambda *_, **__: attaching.Place(role=role))
    monkeypatch.setattr(peer_module, "Reporter", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        attach()
    role.close.assert_called_once_with()


def test_the_daemon_says_no_more_than_the_script_wants_to_hear(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[NodeOptions] = []

    def start(options: NodeOptions) -> None:
        given.append(options)
        raise AssertionError("no daemon")

    monkeypatch.setattr(starting, "Beside", start)
    monkeypatch.setattr(logging.getLogger("gossamer"), "level", logging.ERROR)
    with pytest.raises(AssertionError, match="no daemon"):
        attach(manifest=manifest)
    assert given[0].log_level == "error"


def test_a_scripts_daemon_listens_where_the_script_looks_for_it(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a folder's path is too long for a socket, that hangs on TMPDIR, which a script may set late."""
    monkeypatch.setattr(starting, "Beside", Beside)
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
    monkeypatch.setattr(starting, "Beside", Beside)
    with attach(manifest=manifest, listen="127.0.0.1:0", advertise=advertise, plaintext=True) as peer:
        assert re.fullmatch(f"gossamer://{peer.node_id.hex()}@{host}", peer.contact)


async def test_it_can_be_called_where_an_event_loop_runs() -> None:
    """As in a notebook: the manifest is fetched all the same."""
    assert asyncio.get_running_loop().is_running()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
        attach(join=["127.0.0.1:1"])


def test_ctrl_c_does_not_wait_for_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered, over = threading.Event(), threading.Event(), threading.Event()
    interrupted: list[int] = []

    def ask(*_: object) -> Home:
        asked.set()
        answered.wait(20)
        raise UnreachableError("no answer in time")

    def interrupt(*_: object) -> None:
        if asked.is_set() and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt

    def press() -> None:
        while not over.wait(0.05):  # for one that comes just before Python waits is heard afterwards
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(starting, "enter", ask)
    before = signal.signal(signal.SIGUSR1, interrupt)
    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            attach(join=["127.0.0.1:1"])
        assert "entering" in [thread.name for thread in threading.enumerate()], "it is still waiting"
    finally:
        over.set()
        pressing.join()
        answered.set()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("as_path", [str, Path, None])
def test_a_manifest_as_a_file_or_as_it_is(
    manifest: Manifest, tmp_path: Path, as_path: Callable[[Path], Any] | None
) -> None:
    path = tmp_path / "swarm.toml"
    manifests.write(manifest, path)
    options: Any = as_path(path) if as_path else manifest
    home, _ = starting._entered(NodeOptions.of(folder=tmp_path / "d"), starting._read(options))
    assert home.manifest() == manifest
    again, joins = starting._entered(NodeOptions.of(folder=tmp_path / "d", join=("127.0.0.1:1",)), None)
    assert again.manifest() == manifest, "from the folder, without asking anybody"
    assert joins == ("127.0.0.1:1",)


class SlowDaemon:
    """A daemon that begins to listen after so many looks, between which minutes pass."""

    has_died = False
    must_stop = False
    is_outdated = False
    problem = "connection refused"

    def __init__(self, looks: int, clock: pytest.MonkeyPatch) -> None:
        self.looks, self.now = looks, 0.0
        clock.setattr(starting.time, "monotonic", lambda: self.now)

    def wait_connected(self, timeout_s: float) -> bool:
        self.looks -= 1
        self.now += 45.0
        return self.looks < 0

    def ending(self) -> BaseException:
        return SystemExit(143)


def test_a_daemon_that_reads_its_model_for_long_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon: Any = SlowDaemon(20, monkeypatch)
    with caplog.at_level(logging.INFO, "gossamer.peer"):
        starting._wait_for_daemon(daemon, daemon)
    assert daemon.looks < 0
    told = [record.message for record in caplog.records]
    assert told and all("reads its model back" in text and daemon.problem in text for text in told)
    assert len(told) <= 6, "and the person is not told of it at every look"


def test_a_daemon_that_dies_again_and_again_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon: Any = SlowDaemon(20, monkeypatch)
    daemon.has_died = True
    with pytest.raises(UnreachableError, match="its lines say why"):
        starting._wait_for_daemon(daemon, daemon)
    assert daemon.now <= 2 * starting.CONNECT_TIMEOUT_S


def test_a_daemon_that_was_given_up_is_looked_for_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook would do so for as long as it runs, after each attach that failed."""

    def give_up(*_: object) -> None:
        raise UnreachableError("its lines say why")

    monkeypatch.setattr(starting, "_wait_for_daemon", give_up)
    before = set(threading.enumerate())
    with pytest.raises(UnreachableError):
        starting._connect(str(tmp_path / "socket"), SMALL, Beside())
    assert set(threading.enumerate()) <= before


def test_a_daemon_of_another_release_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon: Any = SlowDaemon(20, monkeypatch)
    daemon.is_outdated = True
    with pytest.raises(ConfigError, match="a different release .* start this script again"):
        starting._wait_for_daemon(daemon, daemon)


def test_who_is_told_to_stop_waits_for_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon: Any = SlowDaemon(20, monkeypatch)
    daemon.must_stop = True
    with pytest.raises(SystemExit):
        starting._wait_for_daemon(daemon, daemon)
    assert daemon.now <= 45.0


def test_adapters_take_what_attach_takes() -> None:
    own = get_type_hints(Peer.attach)
    assert own.items() >= get_type_hints(starting.AttachOptions).items()
    assert own.keys() - get_type_hints(starting.AttachOptions).keys() == {"model", "optimizer", "return"}


def test_of_two_scripts_that_start_at_once_one_is_told_and_the_other_trains_on(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the folder free. The one whose daemon comes too late must not find the other's."""
    monkeypatch.setattr(starting, "Beside", Beside)
    monkeypatch.setattr(starting, "_wait_until_free", lambda _: None)
    where: dict[str, Any] = {"folder": tmp_path / "d", "listen": "127.0.0.1:0", "plaintext": True}
    with attach(manifest=manifest, **where) as first:
        with pytest.raises(StorageError, match=r"another node is running in .*or give another folder="):
            attach(manifest=manifest, **where)
        first.step(1, 0.0)
        assert not first.should_stop
        assert first._role._link.is_attached  # type: ignore[attr-defined]


def test_a_tilde_is_the_home_folder(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    manifests.write(manifest, "~/m.toml")
    assert manifests.read("~/m.toml") == manifest
    with pytest.raises(AssertionError, match="no daemon"):
        attach(manifest="~/m.toml", folder="~/d")
    assert Home(tmp_path / "d").manifest() == manifest
    assert not (tmp_path / "~").exists()


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
        attaching._show_log()
        ours.info("listens")
    assert "listens" in capsys.readouterr().err


def test_what_attach_ran_in_may_capture_what_is_said_there(capsys: pytest.CaptureFixture[str]) -> None:
    """As a notebook's ``%%capture`` does, and `contextlib.redirect_stderr`."""
    with our_logger() as ours:
        with contextlib.redirect_stderr(io.StringIO()) as captured:
            attaching._show_log()
            ours.info("listens")
        assert "listens" in captured.getvalue()
        captured.close()
        ours.warning("diverges")
    told = capsys.readouterr().err
    assert "diverges" in told and "Logging error" not in told


def test_a_level_that_the_script_has_set_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with our_logger(logging.WARNING) as ours:
        attaching._show_log()
        ours.info("listens")
        ours.warning("diverges")
    told = capsys.readouterr().err
    assert "listens" not in told and "diverges" in told


@pytest.mark.parametrize("name", ["", "gossamer"])
def test_a_script_that_arranges_for_logs_later_sees_each_line_once(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    with our_logger() as ours:
        attaching._show_log()
        logging.getLogger(name).addHandler(Heard())
        ours.info("listens")
    assert heard == ["listens"] and not capsys.readouterr().err
