"""The admin server of a real daemon: what it tells, to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import aiohttp
import pytest

from gossamer.node.address import parse_address, port_of
from gossamer.node.daemon.daemon import Daemon
from gossamer.node.daemon.dashboard import server as servers
from gossamer.node.daemon.dashboard import sse
from gossamer.node.daemon.dashboard.client import fetch_state, find_admin
from gossamer.node.daemon.dashboard.server import TOKEN_VARIABLE, AdminServer
from gossamer.node.daemon.monitoring import round_history
from gossamer.node.daemon.monitoring.round_history import OWN
from gossamer.node.home import Home
from gossamer.protocol.errors import ConfigError, UnreachableError
from tests.node.daemons import (
    events_until,
    facts,
    founded,
    get,
    joining,
    publish,
    release,
    report,
    running,
    training,
)
from tests.node.trainer_side import until

PATHS = ("/", "/api/state", "/api/rounds", "/api/events", "/status", "/healthz", "/metrics")
LONG = f"/api/rounds?from={5000 * '9'}"
TOKEN = "a secret of some length"


def admin_server(daemon: Daemon, option: str, token: str = "") -> AdminServer:
    """Another one beside the daemon's own."""
    return AdminServer(daemon.monitor, daemon.core.layout, option, token)


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
            await until(lambda: b.phi.loop.ready and len(a.network.links) == 1)
            await until(lambda: min(node.core.clock_to_publish_by for node in (a, b)) >= 0)
            at_a.send(report())
            await publish(first, at_a, 1)
            await publish(second, at_b, 1, loss=4.0)
            await until(lambda: a.phi.loop.tokens == b.phi.loop.tokens == 200)
            _, _, state = await get(first, "/api/state")
            while (
                state["swarm_tokens"] != 200
                or state["members"][0]["replica"] != "same"  # records are sent once a second
                or state["members"][0]["health"] != "alive"
                or not state["members"][0]["contributions"]["judged"]
            ):
                await asyncio.sleep(0.1)
                _, _, state = await get(first, "/api/state")
            itself, (other,) = state["itself"], state["members"]
            assert (itself["name"], itself["tokens"], itself["replica"]) == ("a", 100, None)
            assert (other["name"], other["round"], other["role"]) == ("b", 1, "train")
            assert other["heard_s"] < 20
            assert (other["replica"], other["replica_round"]) == ("same", 0)
            root = a.core.sealing.claims[-1].root.hex()
            assert (state["sealed_round"], state["sealed_digest"]) == (0, root)
            assert state["links"][0]["node_id"] == other["node_id"] and not state["links"][0]["outbound"]
            assert state["reachable"] is True and state["state"] == "training"
            assert state["trainer"]["loss"] == 2.0 and state["trainer"]["val_loss"] == 2.5
            assert state["trainer"]["val_loss_average"] == 2.25
            assert state["model"]["averaging"] == ["mean", "rda"] and state["model"]["pace"] == "30 steps"
            assert other["contributions"]["judged"] == 1
            _, _, rounds = await get(first, "/api/rounds?from=1")
            (line,) = rounds["rounds"]
            assert line[0] == 1 and line[2:5] == [3.0, 200, 200] and -1 <= line[5] <= 1
            assert {rounds["authors"][entry[0]]: entry[5] for entry in line[6]} == {
                itself["node_id"]: OWN,
                other["node_id"]: 0,
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
        await until(lambda: daemon.phi.loop.ready)
        address = facts(home)["admin"]
        listening = asyncio.create_task(events_until(address, "rounds", lambda d: d["rounds"][0][4]))
        await until(lambda: len(daemon.admin.feed))
        await publish(home, link, 1)
        seen = await listening
        assert seen[0][0] == "state"
        assert seen[-1][1]["rounds"][0][3:5] == [100, 100]
        again = await events_until(address, "notice")
        assert again[0][0] == "state" and "watch this node at http://" in again[-1][1]["text"]
        await until(lambda: not len(daemon.admin.feed))


# -- to whom


async def test_every_answer_has_the_headers_and_only_get_is_answered(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
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
            assert answer in await asyncio.wait_for(reader.readline(), 60)
            writer.close()
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
        assert (await events_until(f"127.0.0.1:{port}", "state"))[0][0] == "state"
        assert (await fetch_state(f"127.0.0.1:{port}"))["name"] == "", "top gives it, too"
        monkeypatch.delenv(TOKEN_VARIABLE)
        with pytest.raises(UnreachableError, match=f"requires a token: set {TOKEN_VARIABLE}"):
            await fetch_state(f"127.0.0.1:{port}")
        address = {"Host": f"10.1.2.3:{port}", "Authorization": f"Bearer {TOKEN}"}
        assert (await get(home, "/status", headers=address))[0] == 200
        name = {"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}
        assert (await get(home, "/status", headers=name))[0] == 200
        for wrong in ({}, {"Authorization": "Bearer wrong"}):
            assert (await get(home, "/healthz", headers={"Host": "evil.example", **wrong}))[0] == 401


@pytest.mark.parametrize("token", ["", TOKEN])
async def test_probes_need_no_token_and_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    home = founded(tmp_path / "a")
    async with running(home, observe=True) as daemon:
        await until(lambda: daemon.phi.loop.ready)
        by_address = {"Host": "10.1.2.3:7780", "Authorization": ""}
        assert (await get(home, "/livez", headers=by_address))[::2] == (200, {"live": True})
        answer = await get(home, "/readyz", headers=by_address)
        assert answer[::2] == (200, {"ready": True, "reason": "serving"}), "though it is alone"
        for path in ("/healthz", "/livez/", "//livez", "/metrics"):
            assert (await get(home, path, headers=by_address))[0] == (401 if token else 421), path


async def test_a_node_that_joins_is_live_and_not_ready(tmp_path: Path) -> None:
    home = joining(tmp_path / "b", founded(tmp_path / "a"))
    async with running(home, join=("127.0.0.1:1",)):
        assert (await get(home, "/livez"))[0] == 200
        assert (await get(home, "/readyz"))[::2] == (503, {"ready": False, "reason": "joining"})


async def test_a_node_that_has_been_away_is_not_ready_before_it_has_merged_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        await until(lambda: daemon.phi.loop.ready)
        assert (await get(home, "/readyz"))[2]["reason"] == "starting", "a trainer is not waited for"
        monkeypatch.setattr(type(daemon.core), "rounds_behind", 11)
        status, _, said = await get(home, "/readyz")
        assert status == 503 and said["reason"] == "starting: 11 rounds wait to be merged"


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
    monkeypatch.setattr(sse, "LISTENERS_MAX", 2)
    home = founded(tmp_path / "a")
    async with running(home) as daemon, aiohttp.ClientSession(read_bufsize=1024) as session:
        url, feed = f"http://{facts(home)['admin']}/api/events", daemon.admin.feed
        slow, other = await session.get(url), await session.get(url)
        assert slow.status == other.status == 200 and len(feed) == 2
        refused = await session.get(url)
        assert refused.status == 503
        large = b"x" * (1 << 20)

        came = published = 0

        async def read_on() -> None:
            nonlocal came
            async for data in other.content.iter_any():
                came += len(data)

        reading = asyncio.create_task(read_on())
        while len(feed) == 2:
            feed.publish([large])
            published += len(large)
            await until(lambda so_far=published: came >= so_far)
        assert len(feed) == 1 and not reading.done(), "who reads is kept"
        daemon.stop()
        with pytest.raises(aiohttp.ClientError):
            await reading
        await until(lambda: not len(feed))
        for response in (slow, other, refused):
            response.close()


def test_what_json_cannot_say_is_not_sent() -> None:
    assert sse.event("a", {"b": [1, "\n"]}) == b'event: a\ndata: {"b":[1,"\\n"]}\n\n'
    with pytest.raises(ValueError):
        round_history.dump(float("nan"))


async def test_a_diverged_loss_is_none(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        nothing = float("nan")
        link.send(report(loss=nothing, val_loss=float("inf"), tokens_per_s=nothing))
        await until(lambda: daemon.phi.port.report)
        _, _, status = await get(home, "/status")
        assert status["trainer"]["loss"] is None and status["trainer"]["val_loss"] is None


# -- finding it


def test_finding_the_admin_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    assert find_admin("localhost:7780", None) == "localhost:7780"
    with pytest.raises(ConfigError, match="not an address"):
        find_admin("7780", None)
    with pytest.raises(ConfigError, match="no node with an admin server runs in"):
        find_admin(None, None)
    admins = {"boot": "127.0.0.1:1", "one": "127.0.0.1:2", "off": None, "stopped": "127.0.0.1:3"}
    homes = {name: Home(tmp_path / name) for name in (*admins, "starting")}
    for name, home in homes.items():
        home.create()
        home.lock()
        if name in admins:
            home.write_daemon(admin=admins[name], trains=name == "one")
    release(homes["stopped"])  # its port may be another node's now
    assert find_admin(None, None) == admins["one"], "it alone trains"
    assert find_admin(None, tmp_path / "boot") == admins["boot"]
    for name in ("stopped", "starting", "off"):
        with pytest.raises(ConfigError, match=f"no node with an admin server runs in .*{name}; start one"):
            find_admin(None, tmp_path / name)
    homes["boot"].write_daemon(admin=admins["boot"], trains=True)
    with pytest.raises(ConfigError, match=r"which node\? Give one of --dir .*boot, --dir .*one$"):
        find_admin(None, None)
    release(homes["one"])
    assert find_admin(None, None) == admins["boot"]
    for name in ("boot", "off", "starting"):
        release(homes[name])


@pytest.mark.parametrize("body", ["{oops", "[" * 100_000, "7"])
async def test_a_server_that_is_none_is_said(body: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UnreachableError, match="is not an admin server"):
        await fetch_state(f"127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    with pytest.raises(UnreachableError, match="no answer from"):
        await fetch_state(f"127.0.0.1:{port}")


async def asked(home: Home, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of its own on which this has been asked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(facts(home)["admin"]))
    writer.write(f"GET {head}\r\n\r\n".encode())
    return reader, writer


async def test_connections_are_bounded_and_the_oldest_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens many, and says nothing, would leave the node no file to open."""
    monkeypatch.setattr(servers, "CONNECTIONS_MAX", 4)
    home = founded(tmp_path / "a")
    async with running(home):
        host, port = parse_address(facts(home)["admin"])
        silent = [await asyncio.open_connection(host, port) for _ in range(8)]
        for reader, _ in silent[:4]:
            assert await asyncio.wait_for(reader.read(), 20) == b"", "it was closed"
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
    monkeypatch.setattr(servers, "CONNECTIONS_MAX", 4)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN if option.startswith("0.") else "")
    home = founded(tmp_path / "a")
    known = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}"
    async with running(home, admin=option) as daemon:
        page, writer = await asked(home, f"/api/events {known}")
        writers = [writer]
        assert b" 200 " in await asyncio.wait_for(page.readline(), 60)
        for _ in range(8):
            reader, writer = await asked(home, f"/api/state HTTP/1.1\r\n{stranger}")
            writers.append(writer)
            answer = await asyncio.wait_for(reader.read(), 20)  # to its end: nothing is kept of it
            assert refusal in answer.splitlines()[0]
        idle = []
        for _ in range(8):
            reader, writer = await asked(home, f"/healthz {known}")
            writers.append(writer)
            assert b"HTTP/1.1 " in await asyncio.wait_for(reader.readline(), 60)
            idle.append(reader)
        assert await asyncio.wait_for(idle[0].read(), 20) and idle[0].at_eof(), "the oldest gave way"
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(facts(home)["admin"]))
            writers.append(writer)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await session.get(f"http://{facts(home)['admin']}/healthz")  # by then all are accepted
        daemon.admin.feed.publish([b"event: still here\n\n"])
        await asyncio.wait_for(page.readuntil(b"event: still here"), 60)
        for writer in writers:
            writer.close()
