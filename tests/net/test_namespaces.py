"""What needs a machine of one's own, in Linux namespaces: hosts with cables to pull, and a disk to fill."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.protocol.manifest import Manifest
from tests.net.hosts import NET, Hosts, why_not
from tests.net.nodes import HEAL_S, LocalNodes, small_manifest
from tests.net.processes import COMMAND
from tests.net.puppet import Puppet

pytestmark = pytest.mark.slow

PORT = 7700


async def until(condition: Callable[[], Any], timeout: float, what: str) -> float:
    """Returns the seconds it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout, f"not within {timeout:.0f} s: {what}"
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


def new_home(folder: Path, manifest: Manifest) -> Home:
    home = Home(folder)
    home.create()
    home.adopt(manifest)
    return home


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
async def test_a_host_whose_cable_is_pulled_trains_on_and_heals(tmp_path: Path) -> None:
    """A bootstrap peer and three nodes on hosts of their own, at 100 Mbit/s; one is cut off for 30 s."""
    manifest, phi = small_manifest()
    puppets: list[Puppet] = []
    with Hosts() as hosts:
        for number in range(4):
            n = hosts.add()
            hosts.shape(n, "100mbit")
            home = new_home(tmp_path / f"host{n}", manifest)
            if not number:
                snapshots.store(phi, ChunkStore(home.chunks_path))
            options = NodeOptions(
                folder=home.root,
                listen=f"{NET}.{n}:{PORT}",
                join=(f"{NET}.1:{PORT}",) if number else (),
                name=f"host{n}",
                observe=not number,
            )
            hosts.start(
                n, "gossamer.node.daemon.daemon", options.model_dump_json(), log=tmp_path / f"host{n}.log"
            )
            if number:
                puppets.append(Puppet(home.socket_path(), manifest, step_s=0.2, seed=n))
                puppets[-1].start()
        try:
            await until(lambda: all(len(p.rounds) >= 3 for p in puppets), 40, "all train")
            hosts.cut(4)
            cut_at = [puppet.rounds[-1] for puppet in puppets]
            cut_off, left = tmp_path / "host4.log", tmp_path / "host2.log"
            await until(lambda: " down\n" in cut_off.read_text(), 60, "the one cut off has noticed")
            await until(lambda: " down\n" in left.read_text(), 60, "the others have noticed")
            goals = [(puppet, round_ + 30) for puppet, round_ in zip(puppets, cut_at, strict=True)]
            await until(lambda: all(p.rounds[-1] >= goal for p, goal in goals), 60, "all trained on")
            for puppet in puppets:
                puppet.paused = True
            await until(lambda: all(p.settled for p in puppets), 5, "all is on disk")

            hosts.plug_in(4)
            begun = time.monotonic()
            published = sum(len(puppet.rounds) for puppet in puppets)
            addresses = [f"{NET}.{n}:{PORT}" for n in (1, 2, 3, 4)]

            def whole() -> bool:
                """`gossamer verify` says so, and they hold what was published on either side."""
                done = hosts.run([*COMMAND, "verify", *addresses, "--wait", "5"])
                return done.returncode == 0 and f" {published} records" in done.stdout

            while not await asyncio.to_thread(whole):
                assert time.monotonic() - begun < HEAL_S + 5, "identical"
            took = time.monotonic() - begun
            print(f"identical {took:.1f} s after the cable was plugged in")
            assert took < HEAL_S
            asked = await asyncio.to_thread(hosts.run, [*COMMAND, "status", addresses[3], "--json"])
            assert all(member["health"] == "alive" for member in json.loads(asked.stdout)["members"])
        finally:
            for puppet in puppets:
                await puppet.stop()
    for n in (1, 2, 3, 4):
        log = (tmp_path / f"host{n}.log").read_text()
        assert "Traceback" not in log, log
        assert "misbehaved" not in log, log


# -- a full disk


def why_no_disk() -> str | None:
    """Why no small file system can be mounted here; None if one can."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    command = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no mount namespaces here: {done.stderr.strip()}"


@pytest.mark.skipif(why_no_disk() is not None, reason=str(why_no_disk()))
async def test_a_full_disk_pauses_publishing_and_nothing_else(tmp_path: Path) -> None:
    """The node says so, keeps answering, and goes on when there is space; the others do not notice."""
    manifest, phi = small_manifest(65536)
    async with LocalNodes(tmp_path, manifest, phi) as swarm:
        (first,) = await swarm.grow(1)
        other = first.puppet
        assert other is not None
        new_home(tmp_path / "seed", manifest)
        mount = tmp_path / "small"
        mount.mkdir()
        options = NodeOptions(folder=mount, listen="127.0.0.1:0", join=(swarm.addresses["n0"],), name="small")
        script = f'mount -t tmpfs -o size=12m none {mount} && cp -a {tmp_path}/seed/. {mount} && exec "$@"'
        log_path = tmp_path / "small.log"
        daemon = [sys.executable, "-m", "gossamer.node.daemon.daemon", options.model_dump_json()]
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                ["unshare", "-Urm", "sh", "-c", script, "sh", *daemon],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        inside = Path(f"/proc/{process.pid}/root{mount}")
        puppet = Puppet(inside / "trainer.sock", manifest, step_s=0.1, seed=9)
        filler = inside / "filler"

        def said(text: str) -> bool:
            return text in log_path.read_text()

        try:
            puppet.start()
            await until(lambda: len(puppet.rounds) >= 3, 40, "it trains")
            fill(filler)
            await until(lambda: said("fetched or published until that works"), 20, "it says so")
            paused_at, others_at = len(puppet.rounds), other.rounds[-1]
            await until(lambda: other.rounds[-1] >= others_at + 10, 30, "the other trains on")
            assert len(puppet.rounds) <= paused_at + 1
            assert process.poll() is None
            filler.unlink()
            await until(lambda: len(puppet.rounds) >= paused_at + 5, 40, "it publishes again")

            puppet.paused = other.paused = True
            facts = json.loads((inside / "daemon.json").read_text())
            done = await asyncio.to_thread(
                subprocess.run,
                [*COMMAND, "verify", facts["address"], swarm.addresses["n0"], "--wait", str(HEAL_S)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            await puppet.stop()
            process.terminate()
            await asyncio.to_thread(process.wait, 10)
        log_text = log_path.read_text()
        assert "Traceback" not in log_text, log_text
        assert log_text.count("\n") < 100, "it says so now and then, not a thousand times"
        swarm.assert_nobody_blamed()


def fill(path: Path) -> None:
    """Leave no byte free."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(os.urandom(size))
            except OSError:
                continue
