"""`gossamer.node.daemon.trainer_port` and `gossamer.node.trainer.daemon_link`, over a real Unix socket.

The daemon may die at any moment; the trainer goes on, and hands a delta over again exactly once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from gossamer.node.daemon import trainer_port
from gossamer.node.ipc import messages as control
from gossamer.node.ipc.messages import SharedMemory
from gossamer.node.trainer import daemon_link
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import TensorSpec
from tests.node.trainer_side import NODE_ID, FakeDaemon, daemon_at, link_to, publish, until, values_of
from tests.protocol import builders
from tests.protocol.builders import LAYOUT, SMALL

pytestmark = pytest.mark.usefixtures("reconnects_at_once")


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[FakeDaemon]:
    async with daemon_at(tmp_path) as daemon:
        yield daemon


def fragment_values(rng: np.random.Generator, index: int) -> np.ndarray:
    return rng.integers(-1000, 1000, LAYOUT.fragments[index].numel).astype(np.int32)


# -- the daemon lives


async def test_a_trainer_of_many_tensors_is_welcomed_at_once(tmp_path: Path) -> None:
    """Its manifest is longer than what may wait for a trainer that does not read."""
    tensors = tuple(TensorSpec(f"experts.{number}.weight", (2, 2), "mean") for number in range(20_000))
    async with daemon_at(tmp_path, builders.manifest(tensors)) as daemon:
        daemon.trainer_changed = lambda: daemon.port.send(control.Clock(0, 0))  # type: ignore[method-assign]
        async with link_to(daemon) as link:
            daemon.port.send(control.Clock(8, 0))
            await until(lambda: link.clock == 8)
            assert daemon.port.attachments == 1


async def test_attaching_hands_over_what_a_trainer_needs(daemon: FakeDaemon) -> None:
    daemon.signed[4] = b""
    daemon.clock = 6
    assert oct(os.stat(daemon.path).st_mode & 0o777) == "0o600"
    async with link_to(daemon) as link:
        assert (link.node_id, link.own_last, link.clock) == (NODE_ID, 4, 6)
        assert link.can_publish and daemon.port.attached and not daemon.port.done.is_set()
        daemon.port.send(control.Clock(8, 12345))
        await until(lambda: link.clock == 8)
        assert link.swarm_tokens == 12345
        daemon.port.send(control.Stop())
        await until(link.stop_asked.is_set)
    await until(lambda: not daemon.port.attached)
    assert daemon.port.done.is_set()


async def test_offers_pass_through_shared_memory_each_once(
    daemon: FakeDaemon, rng: np.random.Generator
) -> None:
    async with link_to(daemon) as link:
        assert link.take_offer() is None
        phi = [fragment_values(rng, index) for index in range(2)]
        for index in range(2):
            await daemon.offer(index, phi[index], merged=3 + index, own=2, version=9)
        await until(lambda: len(link._offers) == 2)
        newer = fragment_values(rng, 0)
        await daemon.offer(0, newer)
        assert not daemon.port.is_free(0), "not taken yet: its memory is the trainer's"
        offers = {offer.fragment: offer for _ in range(2) if (offer := link.take_offer())}
        assert link.take_offer() is None
        for index, offer in offers.items():
            assert np.array_equal(values_of(offer), phi[index])
            assert (offer.merged_round, offer.own_round, offer.version) == (3 + index, 2, 9)
        link.took(offers[0])
        await until(lambda: daemon.port.is_free(0))
        assert not daemon.port.is_free(1)
        await daemon.offer(0, newer)
        await until(lambda: link._offers)
        offer = link.take_offer()
        assert offer is not None and np.array_equal(values_of(offer), newer)


async def test_a_delta_is_ours_until_acknowledged(daemon: FakeDaemon) -> None:
    daemon.acknowledges = False
    async with link_to(daemon) as link:
        publish(link, 1, b"delta one")
        assert link.own_last == 1 and not link.can_publish
        await until(lambda: daemon.signed)
        daemon.port.send(control.Published(0))  # a delta of the trainer before it
        assert not await asyncio.to_thread(link.wait_acknowledged, 0.05)
        daemon.port.send(control.Published(1))
        assert await asyncio.to_thread(link.wait_acknowledged, 60)
        assert link.can_publish
    assert daemon.signed == {1: b"delta one"}


async def test_a_delta_that_is_being_stored_is_not_handed_over_again_nor_taken_for_stored(
    daemon: FakeDaemon,
) -> None:
    """The connection broke, or another trainer had it meanwhile; and then the daemon dies."""
    daemon.answers = False
    async with link_to(daemon) as link:
        publish(link, 1, b"delta one")
        await until(lambda: daemon.seen == [1])
        daemon.handed_in = 1
        await daemon.die()
        daemon.start()
        await until(lambda: link.is_attached)
        assert not link.can_publish and link.own_last == 1 and daemon.seen == [1]
        daemon.handed_in, daemon.answers = 0, True
        await daemon.die()
        daemon.start()
        await until(lambda: link.can_publish)
        assert daemon.signed == {1: b"delta one"} and daemon.seen == [1, 1]


async def test_a_daemon_of_another_release_is_said_and_costs_no_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where what is installed is upgraded while a script runs, and its daemon is started again."""
    frame = control.encode(control.Applied(3))  # nothing that a daemon would begin with
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    listener.settimeout(60)
    link = DaemonLink(str(tmp_path / "s"), builders.SMALL)

    def welcome() -> None:
        connection, _ = listener.accept()
        with connection, open(os.devnull) as file:
            socket.send_fds(connection, [frame], [file.fileno()])
            connection.settimeout(60)
            connection.recv(1)

    try:
        await asyncio.to_thread(welcome)
        await until(lambda: link.is_outdated)
        before = psutil.Process().num_fds()
        for _ in range(5):
            await asyncio.to_thread(welcome)
        await until(lambda: psutil.Process().num_fds() <= before + 1)  # it may have connected again
        assert link.stop_asked.is_set() and caplog.text.count("a different release of Gossamer") == 1
    finally:
        await asyncio.to_thread(link.close)
        listener.close()


async def test_a_daemon_that_hangs_up_without_a_word_is_of_no_other_release(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that has no memory or files left for us just now: a script would end for nothing."""
    monkeypatch.setattr(trainer_port, "ACCEPT_RETRY_S", 0.01)
    create, refused = SharedMemory.create, 0

    def refuse(manifest: Manifest) -> SharedMemory:
        nonlocal refused
        refused += 1
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async with link_to(daemon) as link:
        monkeypatch.setattr(SharedMemory, "create", refuse)
        await daemon.die()
        daemon.start()
        await until(lambda: refused > 2)
        assert not link.is_outdated and not link.stop_asked.is_set()
        assert caplog.text.count("a trainer could not attach: Cannot allocate memory") == 1
        monkeypatch.setattr(SharedMemory, "create", create)
        await until(lambda: link.is_attached)


async def test_a_daemon_that_is_away_for_long_is_said_once(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted from its end: how long it had been there is no part of that."""
    monkeypatch.setattr(daemon_link, "LOG_AFTER_S", 0.05)
    async with link_to(daemon) as link:
        for times in (1, 2):
            await until(lambda: link.is_attached)
            await asyncio.sleep(0.1)
            died_at = time.time()
            await daemon.die()
            await until(lambda times=times: caplog.text.count("has not answered for") == times)
            told = [record for record in caplog.records if "has not answered for" in record.getMessage()]
            assert told[-1].created >= died_at + 0.05
            await asyncio.sleep(0.1)
            assert caplog.text.count("has not answered for") == times
            daemon.start()


async def test_nobody_waits_for_a_dead_daemon_to_free_its_memory(daemon: FakeDaemon) -> None:
    daemon.acknowledges = False
    async with link_to(daemon) as link:
        publish(link, 1, b"delta one")
        assert not await asyncio.to_thread(link.wait_acknowledged, 0.05), "it may still be read"
        await daemon.die()
        async with asyncio.timeout(60):
            await asyncio.to_thread(lambda: link.wait_acknowledged(3600, only_attached=True))
        assert not link.can_publish
        daemon.start()


async def test_a_trainer_that_hangs_has_no_speed(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_port, "SILENT_S", 0.1)
    report = control.Report("training", 1, 2, 3.5, 4.5, None, None, 1.5, -1, 0, 0.01, "cpu")
    told: list[control.Report | None] = []
    daemon.trainer_changed = lambda: told.append(daemon.port.report)  # type: ignore[method-assign]
    async with link_to(daemon) as link:
        for _ in range(2):
            link.send(report)
            await until(lambda: report in told and told[-1] == replace(report, tokens_per_s=0.0))
            told.clear()
        assert daemon.port.attached


async def test_what_a_joining_trainer_reports_is_no_step(daemon: FakeDaemon) -> None:
    """It says 0 until it has the model, and then how far it had come: the wait between is no stride."""
    noted = control.Report("joining", 0, 0, 0.0, 0.0, None, None, None, -1, 0, 0.0, "cpu")
    async with link_to(daemon) as link:
        for report in (noted, replace(noted, state="training", inner_steps=500)):
            link.send(report)
            await until(lambda report=report: daemon.port.report == report)
        assert daemon.port.pulse.usual_s == 0.0
        link.send(replace(noted, state="training", inner_steps=501))
        await until(lambda: daemon.port.pulse.usual_s > 0.0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        control.encode(control.Stop()),
        b"\x00\x00\x00\x02\x91\x91",
        b"\x00",
    ],
)
async def test_a_trainer_that_talks_nonsense_is_dropped(daemon: FakeDaemon, garbage: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(daemon.path)
    await reader.readexactly(4)
    writer.write(garbage)
    writer.write_eof()
    await until(daemon.port.done.is_set)
    writer.close()
    await writer.wait_closed()
    async with link_to(daemon) as link:
        assert link.can_publish


async def test_a_trainer_that_reads_nothing_is_cut_off(daemon: FakeDaemon) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(daemon.path)
    await until(lambda: daemon.port.attached)
    for number in range(400_000):
        daemon.port.send(control.Clock(number, number))
        if not daemon.port.attached:
            break
        if number % 10_000 == 0:
            await asyncio.sleep(0)
    await until(lambda: not daemon.port.attached)
    connection.close()


async def test_a_daemon_that_reads_nothing_holds_nobody_up_and_is_found_again(daemon: FakeDaemon) -> None:
    async with link_to(daemon) as link:
        before = daemon.port.attachments
        for _ in range(5_000):  # the daemon, on this event loop, gets no turn
            link.send(control.Applied(0))
        await until(lambda: daemon.port.attachments > before and link.can_publish)
        publish(link, 1, b"delta one")
        await until(lambda: daemon.signed == {1: b"delta one"})


async def test_a_new_trainer_replaces_the_old(daemon: FakeDaemon, rng: np.random.Generator) -> None:
    async with link_to(daemon) as old:
        await daemon.offer(0, fragment_values(rng, 0))
        before = daemon.port.attachments
        async with link_to(daemon) as new:
            await until(old.stop_asked.is_set)
            await asyncio.to_thread(old.close)
            await until(lambda: new.can_publish and daemon.port.attached)
            assert daemon.port.attachments > before, "so that the new one is offered everything"
            assert daemon.port.is_free(0)
            publish(new, 1, b"by the new one")
            await until(lambda: daemon.signed)
    assert daemon.signed == {1: b"by the new one"}


async def test_a_frozen_trainer_does_not_keep_the_next_one_out(daemon: FakeDaemon) -> None:
    frozen = socket.socket(socket.AF_UNIX)
    frozen.connect(daemon.path)
    await until(lambda: daemon.port.attached)
    async with link_to(daemon) as link:
        assert link.can_publish
    frozen.close()


async def test_of_trainers_that_come_at_once_each_connection_is_closed(daemon: FakeDaemon) -> None:
    """As to a daemon that was busy for a moment. One that is left open is a warning, and so an error here."""
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for connection in (first, second):
            connection.connect(daemon.path)
        await until(lambda: daemon.port.attached)


# -- the daemon dies


async def test_without_a_daemon_it_closes_all_the_same(tmp_path: Path) -> None:
    link = DaemonLink(str(tmp_path / "nobody"), SMALL)
    assert not await asyncio.to_thread(link.wait_connected, 0.1)
    assert link.problem == "no such file or directory"
    link.close()
    link._thread.join(60)
    assert not link._thread.is_alive()


@pytest.mark.parametrize("stored", [False, True])
async def test_an_unacknowledged_delta_is_signed_exactly_once(daemon: FakeDaemon, stored: bool) -> None:
    """The daemon dies before, or after, it has made the record durable."""
    daemon.answers = stored
    daemon.acknowledges = False
    async with link_to(daemon) as link:
        publish(link, 3, b"precious")
        await until(lambda: daemon.seen == [3])
        await daemon.die()
        await until(lambda: not link.is_attached)
        assert not link.can_publish
        daemon.answers = daemon.acknowledges = True
        daemon.start()
        assert await asyncio.to_thread(link.wait_acknowledged, 60)
        await until(lambda: link.can_publish)
        assert link.own_last == 3
        assert daemon.seen == ([3] if stored else [3, 3])
        assert daemon.signed == {3: b"precious"}
        await daemon.die()
        daemon.start()
        await until(lambda: daemon.port.attached and link.can_publish)
        publish(link, 4, b"next")  # closing the link sends what is left
    await until(lambda: 4 in daemon.signed)
    assert daemon.seen.count(3) == (1 if stored else 2), "never again"


@pytest.mark.parametrize("is_back", [False, True])
async def test_a_delta_encoded_while_the_daemon_died_is_not_lost(daemon: FakeDaemon, is_back: bool) -> None:
    """Encoding takes a while; the area that it was written to may be the last daemon's by then."""
    async with link_to(daemon) as link:
        area = link.payload_area
        area[:5] = b"bytes"
        await daemon.die()
        await until(lambda: not link.is_attached)
        if is_back:
            daemon.start()
            await until(lambda: link.can_publish)
        link.publish(control.Publish(1, -1, 100, 10, 2.0, "int8", 5), area)
        if not is_back:
            daemon.start()
        assert await asyncio.to_thread(link.wait_acknowledged, 60)
    assert daemon.signed == {1: b"bytes"}


async def test_what_a_dead_daemon_offered_is_still_its_own(
    daemon: FakeDaemon, rng: np.random.Generator
) -> None:
    """Taken before it died and read after the next one came: neither an error nor the next one's memory."""
    phi = fragment_values(rng, 0)
    async with link_to(daemon) as link:
        await daemon.offer(0, phi)
        await until(lambda: link._offers)
        offer = link.take_offer()
        assert offer is not None
        await daemon.die()
        await until(lambda: not link.is_attached)
        assert np.array_equal(values_of(offer), phi)
        daemon.start()
        await until(lambda: link.can_publish)
        assert np.array_equal(values_of(offer), phi)
        await daemon.offer(0, fragment_values(rng, 0))
        link.took(offer)
        link.send(control.Report("", 0, 0, 0.0, 0.0, None, None, None, 0, 0, 0.0, ""))
        await until(lambda: daemon.port.report is not None)
        assert not daemon.port.is_free(0), "it was not the new daemon's memory that was given back"


async def test_many_deaths_leave_nothing_open(daemon: FakeDaemon) -> None:
    async with link_to(daemon) as link:
        process = psutil.Process()
        counts = []
        for _ in range(4):
            await daemon.die()
            await until(lambda: not link.is_attached)
            daemon.start()
            await until(lambda: link.can_publish)
            gc.collect()
            counts.append((process.num_fds(), threading.active_count()))
        assert counts[-1] <= counts[0]
    gc.collect()


async def test_the_socket_goes_with_its_daemon_which_ends_also_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = FakeDaemon(str(tmp_path / "s"), SMALL)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for is_read_only in (False, True):
        daemon.start()
        await asyncio.sleep(0)
        assert (tmp_path / "s").exists()
        if is_read_only:
            monkeypatch.setattr(Path, "unlink", refused)
        serving = daemon._task
        await daemon.die()
        assert serving is not None and serving.cancelled()
        assert (tmp_path / "s").exists() == is_read_only
