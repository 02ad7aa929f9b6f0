"""`gossamer.node.daemon.monitoring.monitor`: what is read from a running daemon, and kept of what happens."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.node.daemon.monitoring import monitor, round_history
from gossamer.node.daemon.monitoring.round_history import OWN
from gossamer.node.home import Home
from gossamer.protocol.membership.members import Health
from tests.node.daemons import events_until, facts, founded, get, joining, publish, report, running, training
from tests.node.full_disk import FullDisk
from tests.node.trainer_side import until
from tests.protocol import builders


async def test_a_founder_that_is_alone_knows_whom_it_dials(tmp_path: Path) -> None:
    """It was given nobody to join, and whom it met is down for it as soon as its network is gone."""
    async with running(founded(tmp_path / "a")) as daemon:
        assert daemon.monitor.read().vitals.known_addresses == 0
        members = [builders.identity(number) for number in (1, 2, 3)]
        for number, member in enumerate(members):
            row = builders.row(member, addresses=(f"10.0.0.{number}:7700",))
            daemon.core.roster.update(row, 0.0)
        daemon.core.roster.judge(members[0].node_id, Health.DOWN, 1.0)
        daemon.core.roster.judge(members[1].node_id, Health.LEFT, 1.0)
        assert daemon.monitor.read().vitals.known_addresses == 2, "nobody dials who has left"


async def test_a_full_disk_is_seen_also_where_chunks_have_one_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = founded(tmp_path / "a")
    disk = SimpleNamespace(
        f_bavail=10**9, f_frsize=4096, f_files=0, f_favail=0
    )  # as btrfs: no bound on files
    full = SimpleNamespace(f_bavail=3, f_frsize=1 << 20, f_files=100, f_favail=7)
    monkeypatch.setattr(os, "statvfs", lambda path: full if path == home.chunks_path else disk)
    async with running(home, observe=True) as daemon:
        await until(lambda: daemon.monitor.health.problem)
        status, _, said = await get(home, "/healthz")
        assert (status, said["reason"]) == (503, daemon.monitor.health.problem)
        assert said["reason"].startswith("the disk is full: 3 MiB, 7 files are free")
        assert "\ngossamer_disk_free_bytes 3.145728e+06\n" in (await get(home, "/metrics"))[2]


async def test_what_cannot_be_stored_is_a_problem_though_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a quota, a limit on the size of files, or a database that another program holds."""
    monkeypatch.setattr("gossamer.node.daemon.monitoring.monitor.TICK_S", 0.02)
    monkeypatch.setattr("gossamer.node.daemon.storage.disk.PROBE_S", 0.05)
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await until(lambda: daemon.monitor.is_healthy()[0])
        disk = FullDisk(daemon.store.chunks, 10**6, monkeypatch, errno.EFBIG)
        publishing = asyncio.create_task(publish(home, link, 1))
        said = "File too large; nothing is stored, fetched or published"
        await until(lambda: said in daemon.monitor.is_healthy()[1])
        status, _, answer = await get(home, "/healthz")
        assert (status, answer["healthy"]) == (503, False) and said in answer["reason"]
        monkeypatch.setattr("gossamer.node.logs.CALM_S", 0.0)
        disk.left = 0
        await publishing
        await until(lambda: daemon.monitor.is_healthy()[0])


async def test_what_happened_is_known_after_a_restart(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await publish(home, link, 1)
        link.send(report())
        await until(lambda: daemon.monitor.history.losses_as_json()["losses"])
        await publish(home, link, 2)
        before = await rounds_of(home, [100, 100])
    async with running(home):
        assert await rounds_of(home, [100, 100]) == before
        _, (_, kept) = await events_until(facts(home)["admin"], "evaluations")
        assert kept["losses"] == [[1, 2.5, 2.25]], "held-out losses too, for pages that were not open"
        assert (await get(home, "/api/rounds?to=1"))[2]["rounds"] == before["rounds"][:1]
        _, headers, _ = await get(home, "/api/rounds")
        assert headers["Content-Encoding"] in ("deflate", "gzip")
        plain = await get(home, "/api/rounds", headers={"Accept-Encoding": "identity"})
        assert plain[2] == before and "Content-Encoding" not in plain[1]


async def test_what_could_not_be_written_of_the_past_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "TICK_S", 3600.0)  # the first look saves
    home = founded(tmp_path / "a")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with running(home) as daemon, training(home) as link:
        await publish(home, link, 1)
        before = await rounds_of(home, [100])
        with monkeypatch.context() as full:
            full.setattr(round_history, "write_atomically", fail)
            await daemon.monitor._save()
        assert not home.history_path.exists()
    async with running(home):
        assert await rounds_of(home, [100]) == before


async def test_what_is_about_to_be_written_of_the_past_when_the_node_stops_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all threads are busy: what has not begun when it is cancelled never does."""
    monkeypatch.setattr(monitor, "TICK_S", 3600.0)  # the first look saves
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await publish(home, link, 1)
        before = await rounds_of(home, [100])
        never = asyncio.Event().wait
        with monkeypatch.context() as busy:
            busy.setattr(asyncio, "to_thread", lambda *_, **__: never())
            saving = asyncio.create_task(daemon.monitor._save())
            await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait([saving])
    async with running(home):
        assert await rounds_of(home, [100]) == before


async def test_one_answer_holds_so_many_rounds_and_the_next_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 members' rounds at once would take hundreds of MiB to serialise."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        for round_ in range(1, 6):
            await publish(home, link, round_)
        whole = await rounds_of(home, [100] * 5)
        assert [line[0] for line in whole["rounds"]] == [1, 2, 3, 4, 5]
        monkeypatch.setattr(round_history, "ANSWER_ENTRIES_MAX", 3)
        newest = (await get(home, "/api/rounds"))[2]
        older = (await get(home, "/api/rounds?from=1&to=2"))[2]
        assert older["rounds"] + newest["rounds"] == whole["rounds"] and len(newest["rounds"]) == 3
        assert newest["oldest"] == older["oldest"] == daemon.monitor.history.oldest() == 1


async def test_our_delta_is_not_void_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        written = threading.Event()
        add = daemon.store.records.add
        monkeypatch.setattr(daemon.store.records, "add", lambda *a, **kw: (written.wait(60), add(*a, **kw)))
        publishing = asyncio.create_task(publish(home, link, 1))
        await until(lambda: daemon.store.writer._waiting or not daemon.store.writer._idle.is_set())
        daemon.monitor.merged(1, (), None)  # as when another's delta of the round is merged
        written.set()
        await publishing
        (line,) = (await get(home, "/api/rounds"))[2]["rounds"]
        assert [entry[5] for entry in line[6]] == [OWN]


async def rounds_of(home: Home, tokens: list[int]) -> dict[str, Any]:
    """What the page is told of rounds, once the tokens merged in each are these."""
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await get(home, "/api/rounds"))[2]
            if [line[4] for line in found["rounds"]] == tokens:
                return found
            await asyncio.sleep(0.05)


async def test_closed_rounds_stay_as_they_were(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await publish(home, link, 1)
        before = await rounds_of(home, [100])
        daemon.core.ledger.close(1)
        await daemon.phi.loop.close_up_to(1, lambda: True)
        daemon.monitor.merged(1, (), None)
        assert (await get(home, "/api/rounds"))[2] == before
        await publish(home, link, 2)
        after = await rounds_of(home, [100, 100])
        assert after["rounds"][0] == before["rounds"][0]


async def test_a_joiner_is_not_healthy_yet(tmp_path: Path) -> None:
    home = joining(tmp_path / "b", founded(tmp_path / "a"))
    async with running(home, join=("127.0.0.1:1",), observe=True):
        status, _, said = await get(home, "/healthz")
        assert (status, said) == (503, {"healthy": False, "reason": "joining"})


async def test_who_waits_for_its_trainer_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes seconds to import torch, on a machine up for weeks. One that hangs is told of."""
    monkeypatch.setattr("gossamer.node.daemon.monitoring.monitor.TICK_S", 0.02)
    monkeypatch.setattr("gossamer.node.daemon.monitoring.health.STANDSTILL_S", 0.4)
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
        for _ in range(60):
            await daemon.monitor.next_look()
        assert (await get(home, "/healthz"))[::2] == (200, {"healthy": True, "reason": "starting"})
        assert "is it stuck" not in caplog.text
        async with training(home):
            await until(lambda: "is it stuck" in caplog.text)
            assert (await get(home, "/healthz"))[0] == 503
        await until(lambda: daemon.monitor.health.problem is None)


async def test_who_has_the_model_is_not_joining_while_its_trainer_has_not_begun(tmp_path: Path) -> None:
    """The first evaluation of a large model takes minutes, and so may what a script does after `attach`."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await until(lambda: daemon.phi.loop.ready)
        link.send(report(state="joining"))
        await until(lambda: daemon.phi.port.report)
        assert (await get(home, "/healthz"))[::2] == (200, {"healthy": True, "reason": "starting"})


async def test_a_trainer_that_has_no_step_to_do_is_not_late_with_it(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await until(lambda: daemon.phi.loop.ready)
        for state in ("training", "finished"):
            link.send(report(state=state))
            await until(lambda state=state: daemon.monitor.read().state == state)
            status = daemon.monitor.read()
            assert status.vitals.has_trainer and (status.vitals.step_overdue_s != 0.0) == (
                state == "training"
            )


async def test_a_fault_in_the_monitor_does_not_stop_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gossamer.node.daemon.monitoring.monitor.TICK_S", 0.01)
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        monkeypatch.setattr(daemon.monitor, "events", None)
        monkeypatch.setattr(daemon.monitor.history, "heard", None)
        await until(lambda: "an error while watching" in caplog.text)
        await until(lambda: daemon.phi.loop.ready)
        async with training(home) as link:
            await publish(home, link, 1)
            await until(lambda: daemon.phi.loop.version)
        assert (await get(home, "/api/state"))[0] == 200
    assert caplog.text.count("an error while watching") == 1
