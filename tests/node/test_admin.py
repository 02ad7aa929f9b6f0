"""The admin server of a real daemon: what it tells, to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from gossamer.node.address import parse_address, port_of
from gossamer.node.daemon import Daemon
from gossamer.node.dashboard import admin_client, bulletin, connections
from gossamer.node.dashboard import feed as feeds
from gossamer.node.dashboard.admin import TOKEN_VARIABLE, AdminServer
from gossamer.node.dashboard.admin_client import AdminClient, admin_of, find_admin
from gossamer.node.monitoring import watching
from gossamer.node.monitoring.rounds import OWN
from gossamer.node.network.client import fetch_status
from gossamer.node.storage.home import Home
from gossamer.protocol.core.merge_schedule import MergeSchedule
from gossamer.protocol.errors import ConfigError, StorageError, UnreachableError
from tests.node.daemons import facts, founded, get, joining, publish, report, running, training
from tests.node.full_disk import FullDisk
from tests.node.recorded_swarm import Recorded
from tests.node.trainer_side import until

PATHS = ("/", "/api/state", "/api/rounds", "/api/events", "/status", "/healthz", "/metrics")
LONG = f"/api/rounds?from={5000 * '9'}"
TOKEN = "a secret of some length"


def admin_server(daemon: Daemon, option: str, token: str = "") -> AdminServer:
    """Another one beside the daemon's own."""
    return AdminServer(daemon.view, daemon.watching, daemon.bulletin, option, token)


async def events_until(address: str, name: str, condition: Any = lambda data: True) -> list[tuple[str, Any]]:
    """All events up to the first of a name that fulfils a condition."""
    seen = []
    async with asyncio.timeout(10), AdminClient(address) as client:
        async for event in client.events():
            seen.append(event)
            if event[0] == name and condition(event[1]):
                return seen
    raise AssertionError("the server ended first")


def shape(value: Any) -> Any:
    """Which keys there are, at every depth; of a list, those of its last item."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(value[-1])] if isinstance(value, list) and value and isinstance(value[-1], dict) else None


# -- what it tells


async def test_the_state_of_two_nodes_that_train(tmp_path: Path) -> None:
    first, second = founded(tmp_path / "a"), None
    async with running(first, name="a") as a:
        second = joining(tmp_path / "b", first)
        async with (
            running(second, name="b", join=(facts(first)["address"],)) as b,
            training(first) as at_a,
            training(second) as at_b,
        ):
            await until(lambda: b.merging.ready and len(a.links) == 1, 20)
            at_a.send(report())
            await publish(first, at_a, 1)
            await publish(second, at_b, 1, loss=4.0)
            await until(lambda: a.merging.tokens == b.merging.tokens == 200, 10)
            _, _, state = await get(first, "/api/state")
            while (
                state["now"]["swarm_tokens"] != 200
                or not state["links"][0]["sent_per_s"]
                or state["members"][1]["claim"] != "same"  # rows are told once a second
                or state["members"][1]["conduct"] is None  # judged when merged
            ):
                await asyncio.sleep(0.1)
                _, _, state = await get(first, "/api/state")
            itself, other = state["members"]
            assert (itself["self"], itself["name"], itself["tokens"]) == (True, "a", 100)
            assert (other["self"], other["name"], other["round"]) == (False, "b", 1)
            assert other["health"] == "alive" and other["heard_s"] < 20
            assert (itself["claim"], other["claim"], other["claim_round"]) == (None, "same", 0)
            root = a.core.sealing.claims[-1].root.hex()
            assert state["now"]["agree"] == {"same": 1, "of": 1, "rounds": [0, 0], "digest": root}
            assert state["edges"] == [[0, 1]]
            assert state["links"][0]["id"] == other["id"] and not state["links"][0]["outbound"]
            assert state["node"]["reachable"] is True and state["node"]["state"] == "training"
            assert state["now"]["loss"] == 2.0 and state["now"]["val_loss"] == 2.5
            assert state["swarm"]["averaging"] == ["mean", "rda"] and state["swarm"]["pace"] == "30 steps"
            assert other["conduct"]["judged"] == 1 and other["role"] == "train"
            assert shape(state) == shape(Recorded(4, 60).snapshot()), "what the page's tests make up"
            _, _, rounds = await get(first, "/api/rounds?from=1")
            (line,) = rounds["rounds"]
            assert line[0] == 1 and line[2:5] == [3.0, 200, 200] and -1 <= line[5] <= 1
            assert {rounds["authors"][entry[0]]: entry[5] for entry in line[6]} == {
                itself["id"]: OWN,
                other["id"]: 0,
            }
            nothing = {"oldest": 1, "authors": [], "rounds": []}
            assert (await get(first, "/api/rounds?from=2"))[2] == nothing
            assert (await get(first, "/api/rounds?to=0"))[2] == nothing
            assert (await get(first, "/healthz"))[::2] == (200, {"healthy": True, "reason": "training"})


async def test_events_begin_with_the_state_and_go_on_with_what_is_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gossamer")
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await until(lambda: daemon.merging.ready)
        address = facts(home)["admin"]
        listening = asyncio.create_task(events_until(address, "rounds", lambda d: d["rounds"][0][4]))
        await until(lambda: len(daemon.bulletin.feed))
        await publish(home, link, 1)
        seen = await listening
        assert seen[0][0] == "state"
        assert seen[-1][1]["rounds"][0][3:5] == [100, 100]
        again = await events_until(address, "notice")
        assert again[0][0] == "state" and "watch this node at http://" in again[-1][1]["text"]
        await until(lambda: not len(daemon.bulletin.feed))


async def test_a_full_disk_is_seen_also_where_chunks_have_one_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = founded(tmp_path / "a")
    spaces = {home.root: (10**12, None), home.chunks_path: (3 << 20, None)}
    monkeypatch.setattr("gossamer.node.monitoring.watching._free_at", spaces.__getitem__)
    async with running(home, trains=False) as daemon:
        await until(lambda: daemon.watching.vitals.problem)
        assert (await get(home, "/healthz"))[::2] == (
            503,
            {"healthy": False, "reason": "the disk is full: 3 MiB are free"},
        )
        assert "\ngossamer_disk_free_bytes 3.145728e+06\n" in (await get(home, "/metrics"))[2]


async def test_what_cannot_be_stored_is_a_problem_though_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a quota, a limit on the size of files, or a database that another program holds."""
    monkeypatch.setattr("gossamer.node.monitoring.watching.TICK_S", 0.02)
    monkeypatch.setattr("gossamer.node.ipc.publisher.DISK_RETRY_S", 0.05)
    monkeypatch.setattr("gossamer.node.seldom.CALM_S", 0.5)
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        disk = FullDisk(daemon.chunks, 10**6, monkeypatch, errno.EFBIG)
        publishing = asyncio.create_task(publish(home, link, 1))
        await until(lambda: daemon.watching.vitals.problem)
        status, _, said = await get(home, "/healthz")
        assert (status, said["healthy"]) == (503, False)
        assert said["reason"].startswith("cannot store our own delta: File too large; publishing pauses")
        disk.left = 0
        await publishing
        await until(lambda: daemon.watching.vitals.problem is None)


def test_a_file_system_without_a_bound_on_files_has_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As btrfs: it says that there are 0 in all, and 0 free."""
    found = SimpleNamespace(f_bavail=10, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert watching._free_at(tmp_path) == (40_960, None)


async def test_what_happened_is_known_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await publish(home, link, 1)
        link.send(report())
        await until(lambda: daemon.watching.evaluations.to_json()["losses"], 5)
        await publish(home, link, 2)
        before = (await get(home, "/api/rounds"))[2]
        while before["rounds"][-1][4] is None:
            await asyncio.sleep(0.05)
            before = (await get(home, "/api/rounds"))[2]
    async with running(home):
        assert (await get(home, "/api/rounds"))[2] == before
        _, (_, kept) = await events_until(facts(home)["admin"], "evaluations")
        assert kept["losses"] == [[1, 2.5]], "held-out losses too, for pages that were not open"
    monkeypatch.setattr("gossamer.node.monitoring.chroniclestore.ENTRIES_MAX", 1)
    async with running(home) as daemon:
        assert daemon.watching.chronicle.oldest() == 2
        _, headers, after = await get(home, "/api/rounds")
        assert after == before, "from memory and from the disk"
        assert headers["Content-Encoding"] in ("deflate", "gzip")
        assert (await get(home, "/api/rounds?to=1"))[2]["rounds"] == before["rounds"][:1]
        plain = await get(home, "/api/rounds", headers={"Accept-Encoding": "identity"})
        assert plain[2] == before and "Content-Encoding" not in plain[1]


async def test_what_could_not_be_written_of_the_past_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "TICK_S", 0.02)
    monkeypatch.setattr(watching, "SAVE_TICKS", 10**6)  # the first, and then when the test has it so
    home = founded(tmp_path / "a")

    def fail(*_: object) -> None:
        raise StorageError("No space left on device")

    async with running(home) as daemon, training(home) as link:
        watched = daemon.watching
        await until(lambda: watched.vitals._lags)
        save = watched.store.save
        monkeypatch.setattr(watched.store, "save", fail)
        await publish(home, link, 1)
        link.send(report())
        await until(lambda: watched.evaluations.to_json()["losses"], 5)
        await watched._save()
        saved: list[tuple[list[int], list[int]]] = []

        def note(rounds: Any, evaluations: Any) -> None:
            saved.append(([row.number for row in rounds], list(evaluations)))
            save(rounds, evaluations)

        monkeypatch.setattr(watched.store, "save", note)
        await watched._save()
        assert saved == [([1], [1])]


async def test_what_is_about_to_be_written_of_the_past_when_the_node_stops_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all threads are busy: what has not begun when it is cancelled never does."""
    monkeypatch.setattr(watching, "SAVE_TICKS", 10**6)
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await publish(home, link, 1)
        before = await rounds_of(home, [100])
        watched, in_thread, never = daemon.watching, asyncio.to_thread, asyncio.Event().wait
        save = watched.store.save
        with monkeypatch.context() as busy:
            busy.setattr(asyncio, "to_thread", lambda do, *a: never() if do == save else in_thread(do, *a))
            saving = asyncio.create_task(watched._save())
            await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait([saving])
    async with running(home):
        assert (await get(home, "/api/rounds"))[2] == before


async def test_a_file_that_is_lost_is_said_while_the_node_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "TICK_S", 0.02)
    monkeypatch.setattr(watching, "DISK_TICKS", 1)
    home = founded(tmp_path / "a")
    async with running(home, trains=False) as daemon:
        home.key_path.unlink()
        await until(lambda: daemon.watching.vitals.problem)
        assert f"{home.key_path} no longer exists" in str(daemon.watching.vitals.problem)


async def test_one_answer_tells_of_so_many_rounds_and_the_next_of_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory and from the disk. 1,000 members' rounds at once would take hundreds of MiB to tell."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        for round_ in range(1, 6):
            await publish(home, link, round_)
        whole = await rounds_of(home, [100, 200, 300, 400, 500])
        assert [line[0] for line in whole["rounds"]] == [1, 2, 3, 4, 5]
        await daemon.watching._save()
    monkeypatch.setattr("gossamer.node.monitoring.chroniclestore.ENTRIES_MAX", 2)
    async with running(home) as daemon:
        assert daemon.watching.chronicle.oldest() == 4
        for bound, parts in (
            ("TOLD_ROUNDS_MAX", [[3, 4, 5], [1, 2]]),
            ("TOLD_ENTRIES_MAX", [[3, 4, 5], [1, 2]]),
        ):
            with monkeypatch.context() as bounded:
                bounded.setattr(bulletin, bound, 3)
                async with AdminClient(facts(home)["admin"]) as client:
                    found = [told async for told in client.rounds(0)]
                    newest = [told async for told in client.rounds(4)]
            assert [[line[0] for line in told["rounds"]] for told in found] == parts
            assert [line for told in found[::-1] for line in told["rounds"]] == whole["rounds"]
            assert [[line[0] for line in told["rounds"]] for told in newest] == [[4, 5]]
            assert {told["oldest"] for told in found} == {1}


async def test_our_delta_is_not_void_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        written = threading.Event()
        add = daemon.records.add
        monkeypatch.setattr(daemon.records, "add", lambda *a, **kw: (written.wait(10), add(*a, **kw)))
        publishing = asyncio.create_task(publish(home, link, 1))
        await until(lambda: daemon.writer._waiting or not daemon.writer._idle.is_set())
        daemon.merging.on_judged(1, (), None)  # as when another's delta of the round is merged
        written.set()
        await publishing
        (line,) = (await get(home, "/api/rounds"))[2]["rounds"]
        assert [entry[5] for entry in line[6]] == [OWN]


async def rounds_of(home: Home, tokens: list[int]) -> dict[str, Any]:
    """What the page is told of rounds, once the swarm's tokens after each are these."""
    async with asyncio.timeout(10):
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
        await daemon.merging.close_up_to(1, lambda: True)
        daemon.merging.on_judged(1, (), None)
        assert (await get(home, "/api/rounds"))[2] == before
        await publish(home, link, 2)
        after = await rounds_of(home, [100, 200])
        assert after["rounds"][0] == before["rounds"][0]


async def test_sums_stay_as_they_were_until_all_rounds_are_merged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the newest round is merged first, and there may be very many."""
    monkeypatch.setattr("gossamer.node.monitoring.watching.TICK_S", 0.02)
    home = founded(tmp_path / "a")
    async with running(home), training(home) as link:
        for round_ in (1, 2, 3):
            await publish(home, link, round_)
        before = await rounds_of(home, [100, 200, 300])
    due = MergeSchedule.look
    monkeypatch.setattr(MergeSchedule, "look", lambda self, now: due(self, now)[2:])
    monkeypatch.setattr(MergeSchedule, "look_whether_ready", lambda self, now: None)
    async with running(home) as daemon:
        await until(lambda: daemon.merging.version)
        looks = len(daemon.watching.vitals._lags)
        await until(lambda: len(daemon.watching.vitals._lags) > looks + 3)
        assert (await get(home, "/api/rounds"))[2] == before


async def test_a_joiner_is_not_healthy_yet(tmp_path: Path) -> None:
    home = joining(tmp_path / "b", founded(tmp_path / "a"))
    async with running(home, join=("127.0.0.1:1",), trains=False):
        status, _, said = await get(home, "/healthz")
        assert (status, said) == (503, {"healthy": False, "reason": "joining"})


async def test_who_waits_for_its_trainer_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes seconds to import torch, on a machine up for weeks. One that hangs is told of."""
    monkeypatch.setattr("gossamer.node.monitoring.watching.TICK_S", 0.02)
    monkeypatch.setattr("gossamer.node.monitoring.trainerwatch.STANDSTILL_S", 0.4)
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        looks = daemon.watching.vitals._lags
        await until(lambda: len(looks) == 60)
        assert (await get(home, "/healthz"))[::2] == (200, {"healthy": True, "reason": "starting"})
        assert "is it stuck" not in caplog.text
        async with training(home):
            await until(lambda: "is it stuck" in caplog.text)
            assert (await get(home, "/healthz"))[0] == 503
        await until(lambda: daemon.watching.vitals.problem is None)


async def test_who_only_looks_on_has_no_trainer_to_lack(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home, trains=False) as daemon:
        assert not daemon.watching._look(0.0).lacks_trainer
    async with running(home) as daemon:
        assert daemon.watching._look(0.0).lacks_trainer


async def test_who_has_the_model_is_not_joining_while_its_trainer_has_not_begun(tmp_path: Path) -> None:
    """The first evaluation of a large model takes minutes, and so may what a script does after `attach`."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await until(lambda: daemon.merging.ready)
        link.send(report(state="joining"))
        await until(lambda: daemon.port.report)
        assert (await get(home, "/healthz"))[::2] == (200, {"healthy": True, "reason": "starting"})


async def test_a_trainer_that_has_no_step_to_do_is_not_late_with_it(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        await until(lambda: daemon.merging.ready)
        link.send(report())
        await until(lambda: daemon.view.state == "training")
        assert daemon.watching._look(0.0).overdue_s != 0.0
        link.send(report(state="finished"))
        await until(lambda: daemon.view.state == "finished")
        assert daemon.watching._look(0.0).overdue_s == 0.0


async def test_a_fault_in_watching_does_not_stop_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gossamer.node.monitoring.watching.TICK_S", 0.01)
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        monkeypatch.setattr(daemon.watching, "_look", None)
        monkeypatch.setattr(daemon.watching.chronicle, "heard", None)
        await until(lambda: "an error while watching" in caplog.text)
        await until(lambda: daemon.merging.ready)
        async with training(home) as link:
            await publish(home, link, 1)
            await until(lambda: daemon.merging.version)
        assert (await get(home, "/api/state"))[0] == 200
    assert caplog.text.count("an error while watching") == 1


# -- to whom


async def test_every_answer_has_the_headers_and_only_get_is_answered(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        await until(lambda: daemon.merging.ready)
        for path in (*PATHS, "/nowhere", "/api/rounds?from=x", "/api/rounds?to=-1", LONG):
            if path == "/api/events":
                continue
            status, headers, _ = await get(home, path)
            assert status == (404 if path == "/nowhere" else 400 if "?" in path else 200), path
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert ("script-src" in headers["Content-Security-Policy"]) == (path == "/"), path
            assert not [name for name in headers if name.lower().startswith("access-control-")]
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await get(home, "/api/state", method=method))[0] == 405
        for path in PATHS:  # events have no end
            assert (await get(home, path, method="HEAD"))[0] == (405 if path == "/api/events" else 200)


async def test_what_is_no_http_costs_no_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = founded(tmp_path / "a")
    async with running(home):
        many = b"".join(b"X%d: y\r\n" % number for number in range(5000))
        for headers, answer in (
            (many, b" 400 "),
            (b"Host: x\r\nExpect: \xff\r\n", b" 500 "),
            (b"Host: \xff\r\n", b" 421 "),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(facts(home)["admin"]))
            writer.write(b"GET / HTTP/1.1\r\n" + headers + b"\r\n")
            assert answer in await asyncio.wait_for(reader.readline(), 10)
            writer.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_connection_that_takes_no_options_costs_no_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS refuses them all with an error once the other side has closed it."""
    set_option = socket.socket.setsockopt

    def refuse(connection: socket.socket, level: int, option: int, value: int) -> None:
        if option in (socket.SO_KEEPALIVE, socket.SO_SNDBUF):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        set_option(connection, level, option, value)

    home = founded(tmp_path / "a")
    async with running(home, plaintext=False):
        monkeypatch.setattr(socket.socket, "setsockopt", refuse)
        assert (await events_until(facts(home)["admin"], "state"))[0][0] == "state"
        assert (await fetch_status(facts(home)["address"]))["round"] == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_names_that_lead_here_by_rebinding_are_refused(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home):
        port = facts(home)["admin"].rsplit(":", 1)[1]
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:1", "127.9.9.9"):
            assert (await get(home, "/status", headers={"Host": host}))[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "localhost.x",
        ):
            for path in PATHS:
                assert (await get(home, path, headers={"Host": host}))[0] == 421, (host, path)


async def test_other_sites_may_link_to_the_page_and_nothing_else(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home):
        foreign = {"Sec-Fetch-Site": "cross-site"}
        assert (await get(home, "/", headers=foreign))[0] == 200
        for path in PATHS[1:]:
            assert (await get(home, path, headers=foreign))[0] == 403
        assert (await get(home, "/api/state", headers={"Sec-Fetch-Site": "same-origin"}))[0] == 200
        for origin, status in ((f"http://{facts(home)['admin']}", 200), ("http://evil.example", 403)):
            assert (await get(home, "/api/state", headers={"Origin": origin}))[0] == status


async def test_a_token_is_asked_for_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, f"{TOKEN}\n")
    home = founded(tmp_path / "a")
    async with running(home, admin="0.0.0.0:0"):
        port = facts(home)["admin"].rsplit(":", 1)[1]
        home.write_daemon(admin=f"127.0.0.1:{port}")
        for path in PATHS:
            assert (await get(home, path))[0] == 401, path
            assert (await get(home, path, headers={"Authorization": "Bearer wrong"}))[0] == 401
        assert (await get(home, "/status", headers={"Authorization": f"Bearer {TOKEN}"}))[0] == 200
        assert (await get(home, "/metrics", params={"token": TOKEN}))[0] == 200
        status, headers, _ = await get(home, "/", params={"token": TOKEN})
        cookie = headers["Set-Cookie"]
        assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        name, own = cookie.partition("=")[0], home.identity().node_id[:4].hex()
        assert name.endswith(own), "browsers send it to all of this machine's nodes"
        assert (await get(home, "/api/state", headers={"Cookie": cookie.split(";")[0]}))[0] == 200
        assert (await events_until(f"127.0.0.1:{port}", "state"))[0][0] == "state", "top gives it, too"
        address = {"Host": f"10.1.2.3:{port}", "Authorization": f"Bearer {TOKEN}"}
        assert (await get(home, "/status", headers=address))[0] == 200
        name = {"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}
        assert (await get(home, "/status", headers=name))[0] == 200
        for wrong in ({}, {"Authorization": "Bearer wrong"}):
            assert (await get(home, "/healthz", headers={"Host": "evil.example", **wrong}))[0] == 421


async def test_a_token_in_base64_may_be_typed_into_an_address_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "+a+secret/of+some+length==")
    home = founded(tmp_path / "a")
    async with running(home):
        assert (await get(home, "/metrics?token=+a+secret/of+some+length=="))[0] == 200
        assert (await get(home, "/metrics?token=%2Ba%2Bsecret%2Fof%2Bsome%2Blength%3D%3D"))[0] == 200
        assert (await get(home, "/metrics?token=+a-secret/of+some+length=="))[0] == 401


async def test_addresses_that_may_not_be_used(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        with pytest.raises(ConfigError, match=f"set {TOKEN_VARIABLE}"):
            admin_server(daemon, "0.0.0.0:0")
        with pytest.raises(ConfigError, match="too short"):
            admin_server(daemon, "0.0.0.0:0", "short")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            option = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ConfigError, match="choose another --admin"):
                await admin_server(daemon, option).start()


async def test_nodes_of_one_machine_share_out_ports_and_keep_theirs(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        one, two = admin_server(daemon, ""), admin_server(daemon, "")
        try:
            first, second = await one.start(), await two.start()
            assert first != second and first and second
            await one.stop()
            await two.stop()
            again = admin_server(daemon, "")
            try:
                assert await again.start(last=port_of(second)) == second
            finally:
                await again.stop()
        finally:
            await one.stop()


async def test_no_admin_server_where_it_is_off(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home, admin="off"):
        assert facts(home)["admin"] is None
        with pytest.raises(ConfigError, match="no node with an admin server runs in"):
            find_admin(None, home.root)


# -- those who listen


async def test_listeners_are_bounded_and_slow_ones_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "LISTENERS_MAX", 2)
    home = founded(tmp_path / "a")
    async with running(home) as daemon, aiohttp.ClientSession(read_bufsize=1024) as session:
        url, feed = f"http://{facts(home)['admin']}/api/events", daemon.bulletin.feed
        slow, other = await session.get(url), await session.get(url)
        assert slow.status == other.status == 200 and len(feed) == 2
        refused = await session.get(url)
        assert refused.status == 503
        large = b"x" * (1 << 20)

        async def read_on() -> None:
            async for _ in other.content.iter_any():
                pass

        reading = asyncio.create_task(read_on())
        while len(feed) == 2:
            feed.publish([large])
            await asyncio.sleep(0.02)
        assert len(feed) == 1 and not reading.done(), "who reads is kept"
        feed.close()
        with pytest.raises(aiohttp.ClientError):
            await reading
        await until(lambda: not len(feed))
        for response in (slow, other, refused):
            response.close()


async def test_who_reads_nothing_loses_its_place_within_minutes(tmp_path: Path) -> None:
    """The system would take megabytes for it, some twenty minutes of events."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        host, _, port = facts(home)["admin"].rpartition(":")
        with socket.create_connection((host, int(port))) as page:
            page.sendall(f"GET /api/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            feed, told = daemon.bulletin.feed, 0
            await until(lambda: len(feed) == 1)
            while len(feed):
                feed.publish([b"x" * 4096])
                told += 4096
                assert told < 1_500_000, "it keeps its place"
                await asyncio.sleep(0)


def test_what_json_cannot_say_is_not_sent() -> None:
    assert feeds.event("a", {"b": [1, "\n"]}) == b'event: a\ndata: {"b":[1,"\\n"]}\n\n'
    with pytest.raises(ValueError):
        feeds.to_json(float("nan"))


async def test_a_diverged_loss_is_none(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        nothing = float("nan")
        link.send(report(loss=nothing, val_loss=float("inf"), tokens_per_s=nothing))
        await until(lambda: daemon.port.report)
        _, _, state = await get(home, "/api/state")
        assert state["now"]["loss"] is None and state["now"]["val_loss"] is None
        _, _, status = await get(home, "/status")
        assert status["trainer"]["loss"] == 0.0 and status["trainer"]["val_loss"] is None


# -- finding it


def test_finding_the_admin_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    assert find_admin("localhost:7780", None) == "localhost:7780"
    with pytest.raises(ConfigError, match="not an address"):
        find_admin("7780", None)
    with pytest.raises(ConfigError, match="no node runs in"):
        find_admin(None, None)
    with socket.socket() as one, socket.socket() as two, socket.socket() as silent:
        for each in (one, two, silent):
            each.bind(("127.0.0.1", 0))
        one.listen()
        where = {each: f"127.0.0.1:{each.getsockname()[1]}" for each in (one, two, silent)}
        told = (("one", where[one]), ("off", None), ("odd", 7), ("worse", "x"), ("killed", where[silent]))
        homes = {name: Home(tmp_path / name) for name, _ in (*told, ("stopped", ""), ("two", ""))}
        for home in homes.values():
            home.create()
            home.lock.take()
        for name, admin in (*told, ("stopped", where[one])):  # its port is another node's now
            homes[name].write_daemon(admin=admin)
        homes["stopped"].lock.let_go()
        assert find_admin(None, None) == admin_of(tmp_path / "one") == where[one]
        with pytest.raises(ConfigError, match="no node with an admin server runs in .*stopped"):
            find_admin(None, tmp_path / "stopped")
        two.listen()
        homes["two"].write_daemon(admin=where[two])
        with pytest.raises(ConfigError, match=r"which node\? Give one of --dir .*one, --dir .*two$"):
            find_admin(None, None)
        for name, home in homes.items():
            if name != "stopped":
                home.lock.let_go()


def test_of_a_swarms_nodes_on_this_machine_the_one_that_trains_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a bootstrap peer; `generate` and `export` do not ask there, either."""
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_server(("127.0.0.1", 0)) as trainer:
        where = [f"127.0.0.1:{each.getsockname()[1]}" for each in (peer, trainer)]
        homes = [first := founded(tmp_path / "peer"), joining(tmp_path / "trainer", first)]
        for home, admin, trains in zip(homes, where, (False, True), strict=True):
            home.write_daemon(admin=admin, trains=trains)
            home.lock.take()
        assert find_admin(None, None) == where[1]
        homes[0].manifest_path.write_bytes(b"of another swarm")
        with pytest.raises(ConfigError, match="which node"):
            find_admin(None, None)
        homes[0].manifest_path.write_bytes(homes[1].manifest_path.read_bytes())
        homes[0].write_daemon(admin=where[0])
        homes[0].set_daemon_aside()
        with pytest.raises(ConfigError, match=r"which node\? Give one of --dir .*peer, --dir .*trainer$"):
            find_admin(None, None)
        homes[1].lock.let_go()
        with pytest.raises(ConfigError, match="the node in .*peer is still starting"):
            find_admin(None, None)
        homes[0].daemon_path.mkdir()
        with pytest.raises(ConfigError, match=r"^cannot read .*daemon\.json: .*; does the node belong to"):
            find_admin(None, homes[0].root)
        homes[0].daemon_path.rmdir()
        homes[1].lock.take()
        homes[0].write_daemon(admin=where[0], trains=True)
        with pytest.raises(ConfigError, match="which node"):
            find_admin(None, None)
        for home in homes:
            home.lock.let_go()


async def test_what_a_daemon_says_of_itself_tells_whether_it_trains(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        assert facts(home)["trains"] is daemon.core.info.trains


@pytest.mark.parametrize("body", ["data: {oops\n", "data" * 1000])
async def test_a_server_that_is_none_is_said(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    monkeypatch.setattr(admin_client, "EVENT_BYTES_MAX", 1000)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UnreachableError, match="is not an admin server"):
        await events_until(f"127.0.0.1:{port}", "state")
    server.close()
    await server.wait_closed()
    with pytest.raises(UnreachableError, match="no answer from"):
        await events_until(f"127.0.0.1:{port}", "state")


async def asked(home: Home, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of its own on which this has been asked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(facts(home)["admin"]))
    writer.write(f"GET {head}\r\n\r\n".encode())
    return reader, writer


async def test_connections_are_bounded_and_the_oldest_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens many, and says nothing, would leave the node no file to open."""
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 4)
    home = founded(tmp_path / "a")
    async with running(home):
        host, port = parse_address(facts(home)["admin"])
        silent = [await asyncio.open_connection(host, port) for _ in range(8)]
        for reader, _ in silent[:4]:
            assert await asyncio.wait_for(reader.read(), 5) == b"", "it was closed"
        assert (await get(home, "/healthz"))[0] in (200, 503), "and others are answered"
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    ("option", "stranger", "refusal"),
    [
        ("127.0.0.1:0", "Host: localhost\r\nSec-Fetch-Site: cross-site", b" 403 "),
        ("127.0.0.1:0", "Host: evil.example", b" 421 "),
        ("0.0.0.0:0", "Host: 127.0.0.1", b" 401 "),
    ],
)
async def test_who_is_refused_or_idle_takes_no_place_from_who_looks_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, stranger: str, refusal: bytes
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 4)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN if option.startswith("0.") else "")
    home = founded(tmp_path / "a")
    known = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}"
    async with running(home, admin=option) as daemon:
        page, writer = await asked(home, f"/api/events {known}")
        writers = [writer]
        assert b" 200 " in await asyncio.wait_for(page.readline(), 5)
        for _ in range(8):
            reader, writer = await asked(home, f"/api/state HTTP/1.1\r\n{stranger}")
            writers.append(writer)
            answer = await asyncio.wait_for(reader.read(), 5)  # to its end: nothing is kept of it
            assert refusal in answer.splitlines()[0]
        idle = []
        for _ in range(8):
            reader, writer = await asked(home, f"/healthz {known}")
            writers.append(writer)
            assert b"HTTP/1.1 " in await asyncio.wait_for(reader.readline(), 5)
            idle.append(reader)
        assert await asyncio.wait_for(idle[0].read(), 5) and idle[0].at_eof(), "the oldest gave way"
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(facts(home)["admin"]))
            writers.append(writer)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await session.get(f"http://{facts(home)['admin']}/healthz")  # by then all are accepted
        assert not idle[-1].at_eof(), "who says nothing gives way before who has asked, and may"
        daemon.bulletin.feed.publish([b"event: still here\n\n"])
        await asyncio.wait_for(page.readuntil(b"event: still here"), 5)
        for writer in writers:
            writer.close()
