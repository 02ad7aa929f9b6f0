"""`gossamer.node.daemon.daemon`, in this process: what it must know before anyone speaks to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import numpy as np
import pytest

from gossamer.node.daemon.daemon import Daemon, main
from gossamer.node.daemon.dashboard import server as admin
from gossamer.node.daemon.network.rpc import deliver, fetch_status
from gossamer.node.daemon.storage import disk as disk_module
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.home import Home, manifest_of
from gossamer.node.ipc import messages as control
from gossamer.node.options import NodeOptions
from gossamer.node.processes import daemon_service
from gossamer.node.trainer import daemon_link
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import DiskFullError, NobodyThereError, RefusedError, StorageError
from gossamer.protocol.identity import Identity
from gossamer.protocol.payloads import encode_payload
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import BEFORE_ALL_ROUNDS
from tests.net.processes import wait_for
from tests.net.stranger import linked
from tests.node.chunkfiles import file_of
from tests.node.daemons import founded, publish, release, started, training
from tests.node.full_disk import FullDisk, full
from tests.node.trainer_side import until
from tests.protocol.builders import identity, row


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A folder with a manifest and the first model."""
    return founded(tmp_path / "d")


@pytest.fixture
def idle(home: Home) -> Iterator[Daemon]:
    """A daemon that does not run."""
    daemon = Daemon(NodeOptions(folder=home.root, plaintext=True, listen="127.0.0.1:0"))
    yield daemon
    daemon.store.records.close()
    release(daemon.store.home)


@contextlib.asynccontextmanager
async def running(home: Home) -> AsyncIterator[Daemon]:
    async with started(home) as (daemon, _):
        yield daemon


async def ask(home: Home) -> dict[str, Any]:
    facts = home.read_daemon()
    assert facts is not None
    return await fetch_status(str(facts["address"]), plaintext=True)


def payload(home: Home) -> bytes:
    fragment = manifest_of(home).plan().fragments[0]
    tensors = [np.full(slot.numel, 1000, dtype=np.int32) for slot in fragment.slots]
    return encode_payload("int8", fragment, tensors)


def hand_over(link: DaemonLink, round_: int, data: bytes) -> None:
    area = link.payload_area
    area[: len(data)] = data
    link.publish(control.Publish(round_, round_ - 1, 100, 10, 2.0, "int8", len(data)), area)


async def test_a_delta_is_published_merged_and_offered_back(home: Home) -> None:
    async with running(home) as daemon:
        link = DaemonLink(home.socket_path(), manifest_of(home))
        assert await asyncio.to_thread(link.wait_connected, 60)
        await until(lambda: link._offers)
        first = link.take_offer()
        assert first is not None and first.merged_round == 0
        assert np.array_equal(first.shared.phi(manifest_of(home).plan().fragments[0]), np.arange(310))
        link.took(first)
        hand_over(link, 1, payload(home))
        assert await asyncio.to_thread(link.wait_acknowledged, 60)
        await until(lambda: link._offers)
        second = link.take_offer()
        assert second is not None and (second.merged_round, second.own_round) == (1, 1)
        status = await ask(home)
        assert (status["round"], status["records"], status["state"]) == (1, 1, "starting")
        own = daemon.phi.loop.contributions.of(daemon.core.identity.node_id)
        assert status["itself"]["contributions"] == own._asdict()
        assert own.judged == 1 and status["itself"]["round"] == status["round"]
        assert status["agreement"] is None, "one delta alone agrees with nobody"
        await asyncio.to_thread(link.close)
        await until(lambda: not daemon.phi.port.attached)


async def test_what_a_trainer_handed_in_before_it_died_is_published_once_the_disk_has_room(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "PROBE_S", 0.05)
    async with running(home) as daemon:
        disk = FullDisk(daemon.store.chunks, 10**6, monkeypatch)
        async with training(home) as link:
            hand_over(link, 1, payload(home))
            await until(lambda: disk.left < 10**6)
        await until(lambda: not daemon.phi.port.attached)
        assert daemon.phi.port.done.is_set(), "that it is gone is seen at once"
        async with training(home) as link:
            assert link.own_last == 1, "so that the next is of a later round"
            hand_over(link, 2, payload(home))
            disk.left = 0
            assert await asyncio.to_thread(link.wait_acknowledged, 60)
            assert sorted(delta.round for delta in daemon.core.ledger) == [1, 2]
            assert not daemon.core.ledger.is_void(next(iter(daemon.core.ledger)))


async def test_a_restarted_daemon_never_signs_a_round_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between storing a record and saying so, and takes a while to read its records back."""
    monkeypatch.setattr(daemon_link, "RECONNECT_S", 0.02)
    async with running(home):
        link = DaemonLink(home.socket_path(), manifest_of(home))
        assert await asyncio.to_thread(link.wait_connected, 60)
        for round_ in (1, 2):
            hand_over(link, round_, payload(home))
            assert await asyncio.to_thread(link.wait_acknowledged, 60)
            await until(lambda: link.clock == round_)  # noqa: B023
        link._unacknowledged = (
            control.Publish(2, 1, 100, 10, 2.0, "int8", len(payload(home))),
            payload(home),
        )
    load = RecordStore.load

    def slow(self: RecordStore, *args: object) -> list[Delta]:
        time.sleep(0.5)
        return load(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordStore, "load", slow)
    async with running(home) as daemon:
        assert await asyncio.to_thread(link.wait_acknowledged, 60)
        await until(lambda: link.can_publish)
        assert [(d.round, daemon.core.ledger.is_void(d)) for d in daemon.core.ledger] == [
            (1, False),
            (2, False),
        ]
        assert link.own_last == daemon.core.own_last == 2
        await asyncio.to_thread(link.close)


async def test_a_full_disk_keeps_no_daemon_from_starting(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admin, "PORTS", 0)  # other tests take those
    async with running(home):
        await until(home.read_daemon)
    no_room = DiskFullError("the disk is full; free some space")
    monkeypatch.setattr("gossamer.node.home.keep", Mock(side_effect=no_room))
    monkeypatch.setattr("gossamer.node.home.write_atomically", full)
    async with started(home) as (daemon, _):
        await until(lambda: "the disk is full; free some space: other commands" in caplog.text)
        assert home.read_daemon() is None, "what the last run said is not so any more"
        (address,) = daemon.core.own_record.addresses
        status = await fetch_status(address, plaintext=True)
        assert status["node_id"] == home.identity().node_id.hex()
        link = DaemonLink(home.socket_path(), manifest_of(home))
        assert await asyncio.to_thread(link.wait_connected, 60)
        hand_over(link, 1, payload(home))
        assert await asyncio.to_thread(link.wait_acknowledged, 60), "whose payload found room"
        await asyncio.to_thread(link.close)


async def test_a_model_that_is_damaged_on_disk_is_said(home: Home) -> None:
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
    root = manifest_of(home).genesis.root
    file_of(ChunkStore(home.chunks_path), root).write_bytes(b"damaged")
    with pytest.raises(StorageError, match="damaged; fetch it again with --join"):
        async with running(home):
            pass


async def test_a_key_that_misbehaves_is_refused_with_a_reason_until_its_points_have_faded(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    liar, swarm_id = Identity.from_seed(bytes([7]) * 32), manifest_of(home).swarm_id
    forged = bytearray(row(liar, of=manifest_of(home)).data)
    forged[-1] ^= 1
    now = time.monotonic()
    async with running(home) as daemon:
        daemon.network.scores._clock = lambda: now
        await until(home.read_daemon)
        address = str(home.read_daemon()["address"])  # type: ignore[index]
        async with linked(address, swarm_id, liar, tls=False) as peer:
            for _ in range(5):
                await peer.socket.send_bytes(msg.encode(msg.Records(((bytes(forged), False),))))
            while (message := await peer.socket.receive(timeout=60)).type is aiohttp.WSMsgType.BINARY:
                pass
            assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        with pytest.raises(RefusedError, match="turned away for misbehaviour, for another 300 s"):
            async with linked(address, swarm_id, liar, tls=False):
                pass
        async with linked(address, swarm_id, tls=False):
            status = await ask(home)  # another key of the same address
            assert (status["greylisted"], status["turned_away"], status["misbehaviours_seen"]) == (1, 1, 5)
        now += limits.GREYLIST_HALF_LIFE_S + 1.0
        async with linked(address, swarm_id, liar, tls=False):
            await until(lambda: any(link.node_id == liar.node_id for link in daemon.network.links.values()))
    assert sum("misbehaved" in record.getMessage() for record in caplog.records) == 2


async def test_a_clock_that_jumps_is_noticed_while_the_node_runs(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running(home) as daemon:
        before = daemon.core._unix_time.offset_s
        monkeypatch.setattr("gossamer.node.daemon.daemon.unix_offset_s", lambda: before + 3600.0)
        await until(lambda: daemon.core._unix_time.offset_s == before + 3600.0)
    assert [r.message for r in caplog.records if "clock" in r.message] == [
        "this machine's clock has moved by 3600 s"
    ]


async def test_stopping_leaves_no_task_and_no_socket(home: Home) -> None:
    before = asyncio.all_tasks()
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
        assert Path(home.socket_path()).exists()
    await until(lambda: asyncio.all_tasks() <= before)
    assert not Path(home.socket_path()).exists()


async def test_a_daemon_that_an_error_ends_begins_nothing_more(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links take a moment to close, and what still comes over them would have it dial, say."""
    answers: list[list[fx.Effect]] = []
    with pytest.raises(StorageError, match="failed"):
        async with started(home) as (daemon, task):
            await until(lambda: daemon.phi.loop.ready)
            handle = daemon.core.handle

            def dials(event: ev.Event, now: float) -> list[fx.Effect]:
                return [fx.Dial("127.0.0.1:1", None)] if isinstance(event, ev.Paused) else handle(event, now)

            async def link() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.01)
                    answers.append(daemon.dispatch(ev.Paused()))

            async def fails() -> None:
                raise StorageError("failed")

            monkeypatch.setattr(daemon.core, "handle", dials)
            daemon.spawn(link())
            await asyncio.sleep(0)
            daemon.spawn(fails())
            await asyncio.wait([task], timeout=60)
    assert answers == [[]]


async def test_a_node_that_still_writes_its_history_takes_nobody_in(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, written = asyncio.Event(), asyncio.Event()
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
        facts = home.read_daemon()
        assert facts is not None
        close = daemon.monitor.close

        async def slowly() -> None:
            writing.set()
            await written.wait()
            await close()

        monkeypatch.setattr(daemon.monitor, "close", slowly)
        daemon.stop()
        try:
            async with asyncio.timeout(60):
                await writing.wait()
            with pytest.raises(NobodyThereError):
                await deliver(facts["address"], b"a grant", plaintext=True)
            with pytest.raises(aiohttp.ClientError):
                async with linked(facts["address"], daemon.core.swarm_id):
                    pass
            assert daemon.dispatch(ev.LinkUp(9, identity(1).node_id, False, None)) == []
        finally:
            written.set()


async def test_a_node_does_not_go_before_somebody_has_its_last_delta(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless nobody takes it for too long."""
    monkeypatch.setattr("gossamer.node.daemon.daemon.STOP_GRACE_S", 0.2)
    async with running(home) as daemon:
        await until(home.read_daemon)
        address = str(home.read_daemon()["address"])  # type: ignore[index]
        async with training(home) as link:
            await publish(home, link, 1)
        async with linked(address, daemon.core.swarm_id, tls=False):
            await until(lambda: daemon.network.links)
            daemon.stop()
            await until(lambda: daemon._has_left)
    assert "stopping before all of our last deltas were passed on to another node" in caplog.text


@pytest.mark.parametrize("full", ["chunks", "records"])
async def test_what_a_trainer_handed_in_is_signed_and_stored_before_the_node_goes(
    home: Home, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    monkeypatch.setattr(disk_module, "PROBE_S", 0.2)
    monkeypatch.setattr("gossamer.node.daemon.daemon.STOP_GRACE_S", 60.0)
    refused: list[object] = []
    async with running(home) as daemon:
        store: Any = daemon.store.chunks if full == "chunks" else daemon.store.records
        name = "put" if full == "chunks" else "add"
        write, has_room = getattr(store, name), False

        def write_if_room(*arguments: Any, **options: Any) -> Any:
            refused.append(arguments)
            if not has_room:
                raise StorageError("the disk is full")
            return write(*arguments, **options)

        monkeypatch.setattr(store, name, write_if_room)
        async with training(home) as link:
            hand_over(link, 1, payload(home))
            await until(lambda: refused)
        await until(lambda: not daemon.phi.port.attached)
        daemon.stop()
        has_room = True
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
        assert daemon.core.own_last == 1


def test_what_a_daemon_writes_is_for_its_owner_only(home: Home) -> None:
    before = os.umask(0o022)
    try:
        service = daemon_service(
            NodeOptions(folder=home.root, plaintext=True, listen="127.0.0.1:0", admin="off")
        )
        service.keep_running(0.0)
    finally:
        os.umask(before)
    child = service.child
    assert child is not None
    wait_for(home.read_daemon, 60, "the daemon listens")
    child.terminate()
    assert child.end(60) == 0
    assert [file.name for file in home.root.iterdir() if file.is_file() and file.stat().st_mode & 0o077] == []


async def test_a_folder_that_became_read_only_is_no_reason_not_to_start_or_to_stop_badly(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
    ChunkStore(home.chunks_path).put(sha256(b"orphan").digest(), b"orphan")
    unlink = Path.unlink
    readonly = [home.chunks_path]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if any(folder in path.parents for folder in readonly):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr("gossamer.protocol.history.joining.RETURN_S", 0.0)
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready and Path(home.socket_path()).exists())
        said = "Read-only file system; nothing is stored, fetched or published until that works"
        await until(lambda: said in caplog.text)
        readonly.append(home.root)


async def test_chunks_that_an_earlier_run_left_go_once_it_is_known_that_they_are_of_no_use(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
    left = sha256(b"left").digest()
    ChunkStore(home.chunks_path).put(left, b"left")
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
        assert left in daemon.store.chunks, "it may be of the snapshot from which this node has to begin anew"
        monkeypatch.setattr("gossamer.protocol.history.joining.RETURN_S", 0.0)
        await until(lambda: left not in daemon.store.chunks)


def test_a_daemon_whose_disk_is_full_is_started_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 2 would end the whole node."""
    monkeypatch.setattr(
        "sys.argv",
        ["daemon", NodeOptions(folder=home.root, plaintext=True, listen="127.0.0.1:0").model_dump_json()],
    )
    for name in ("logs.configure", "processes.reset_signals", "ask_for_open_files"):
        monkeypatch.setattr(f"gossamer.node.daemon.daemon.{name}", lambda **_: None)

    monkeypatch.setattr(
        "gossamer.node.daemon.build.RecordStore", Mock(side_effect=DiskFullError("the disk is full"))
    )
    assert main() == 1


# -- the trainer


def attach(daemon: Any) -> list[control.ControlMessage]:
    """Have a trainer attached to a daemon that does not run; returns what it is sent."""
    sent: list[control.ControlMessage] = []
    daemon.core = SimpleNamespace(
        identity=identity(0),
        own_last=3,
        clock_to_publish_by=7,
        is_contradicted=False,
        codec=SimpleNamespace(name="int8"),
    )
    daemon.phi = SimpleNamespace(
        port=SimpleNamespace(attached=True, send=sent.append),
        loop=SimpleNamespace(diverged="", tokens=100, unmerged=0, pace=(0, 64), offer_all=lambda: None),
        publisher=SimpleNamespace(handed_in=4, acknowledged=3),
        data=SimpleNamespace(tell=lambda: None),
    )
    return sent


def test_nothing_is_published_for_a_model_that_diverged(idle: Any) -> None:
    sent = attach(idle)
    for diverged, clock in (("", 7), ("fragment 1", BEFORE_ALL_ROUNDS), ("", 7)):
        idle.phi.loop.diverged = diverged
        assert idle.welcome().clock == clock
        idle.tell_clock()
        assert sent[-1] == control.Clock(clock, 100, 0, 0, "int8")
    count = len(sent)
    idle.tell_clock()
    assert len(sent) == count, "said once"
    idle.core.is_contradicted = True
    idle.tell_clock()
    assert sent[-1] == control.Clock(7, 100, 0, 1, "int8"), "what is refused is not merged"
    welcome = idle.welcome()
    assert (welcome.own_last, welcome.handed_in, welcome.acknowledged) == (4, 4, 3), "one is being stored"
    count = len(sent)
    idle.tell_clock()
    assert len(sent) == count + 1, "a new trainer does not know what the one before was sent"
