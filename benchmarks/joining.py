"""How soon a joiner trains, and how much of the donors' lines it uses.

Daemons run on hosts of their own (network namespaces on one bridge, see tests/net/hosts.py). The donors hold
the model and may send 50 Mbit/s each (`tc tbf`); the joiner's own line is not limited. A joiner joins one
donor, and then four. For comparison the same bytes are copied from one donor's host by plain HTTP. The swarm
is idle: what others published meanwhile would add to all three times.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.daemons import new_home, swarm_of
from benchmarks.goals import Goal
from benchmarks.plots import axes, save
from benchmarks.tables import Table
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.node.trainer.outer import OuterLoop
from gossamer.protocol.manifest import Manifest
from tests.net import hosts as namespaces
from tests.net.hosts import NET, Hosts

why_not = namespaces.why_not
"""Why this benchmark cannot run here, if it cannot."""

RATE = "50mbit"
BYTES_PER_S = 50e6 / 8
PORT, HTTP_PORT = 7700, 7701
PARAMETERS = (12_500_000, 50_000_000, 100_000_000)
GOAL_PARAMETERS = 50_000_000
"""The size that the goals are about; with larger models the start of a process matters less."""

DONORS = (1, 4)
STANDING_S = 4.0
"""Time for donors to find each other once they listen."""

GIVE_UP_S = 300.0
POLL_S = 0.02
COPY = (
    "import sys, time, urllib.request; begun = time.monotonic(); body = urllib.request.urlopen(sys.argv[1])\n"
    "while body.read(1 << 20): pass\n"
    "print(time.monotonic() - begun)"
)


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Join swarms of one and of four donors, with models of several sizes."""
    sizes = (2_000_000,) if quick else PARAMETERS
    return [_measure(parameters) for parameters in sizes]


def _measure(parameters: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        row: dict[str, Any] = {"parameters": parameters, "bytes": 4 * parameters}
        row["joins"] = [asyncio.run(_join(Path(folder) / str(n), parameters, n)) for n in DONORS]
        row["copy_s"] = _copy(Path(folder) / "copy", 4 * parameters)
        return row


async def _join(folder: Path, parameters: int, donors: int) -> dict[str, Any]:
    """One joiner; times are seconds from the start of its process."""
    manifest, phi = swarm_of(parameters)
    homes: list[Home] = []
    with Hosts() as hosts:
        for _ in range(donors):
            genesis = homes[0].chunks_path if homes else None
            homes.append(new_home(folder / f"donor{len(homes)}", manifest, genesis))
            if genesis is None:
                snapshots.store(phi, ChunkStore(homes[0].chunks_path))
            n = hosts.add()
            hosts.shape(n, RATE)
            _start(hosts, n, homes[-1], trains=False)
        while any(home.read_daemon() is None for home in homes):
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(STANDING_S)
        home = new_home(folder / "joiner", manifest)
        outer = _untrained(manifest)
        begun = time.time()
        _start(hosts, hosts.add(), home, trains=True)
        await _load(home, manifest, outer)
        trains_s = time.time() - begun
    written = sorted(path.stat().st_mtime - begun for path in home.chunks_path.glob("??/" + "?" * 64 + "*"))
    return {
        "donors": donors,
        "trains_s": trains_s,
        "fetch_begins_s": written[0],
        "fetch_s": written[-1] - written[0],
    }


def _untrained(manifest: Manifest) -> OuterLoop:
    """A trainer's parameters and its outer loop's state: a script has its model before it joins."""
    return OuterLoop({spec.name: torch.ones(spec.shape) for spec in manifest.layout.tensors}, manifest)


async def _load(home: Home, manifest: Manifest, outer: OuterLoop) -> None:
    """Load the swarm's model into the parameters as soon as the daemon offers it, as `Peer.begin` does."""
    link = DaemonLink(str(home.socket_path()), manifest)
    try:
        async with asyncio.timeout(GIVE_UP_S):
            missing = set(range(len(outer.fragments)))
            while missing:
                while (offer := link.take_offer()) is not None:
                    values = offer.shared.phi(outer.fragments[offer.fragment].fragment)
                    outer.apply(offer.fragment, values, offer.merged_round, keep_progress=False)
                    link.took(offer)
                    missing.discard(offer.fragment)
                await asyncio.sleep(POLL_S)
    finally:
        await asyncio.to_thread(link.close)


def _start(hosts: Hosts, n: int, home: Home, *, trains: bool) -> None:
    options = NodeOptions(
        folder=home.root,
        listen=f"{NET}.{n}:{PORT}",
        join=(f"{NET}.1:{PORT}",) if n > 1 else (),
        name=home.root.name,
        observe=not trains,
        admin="off",
    )
    hosts.start(
        n, "gossamer.node.daemon.daemon", options.model_dump_json(), log=home.root.with_suffix(".log")
    )


def _copy(folder: Path, size: int) -> float:
    """Seconds to copy a file of `size` bytes from one donor's host, by HTTP."""
    folder.mkdir()
    with open(folder / "model", "wb") as file:
        file.truncate(size)
    with Hosts() as hosts:
        donor, joiner = hosts.add(), hosts.add()
        hosts.shape(donor, RATE)
        log = folder.with_suffix(".log")
        hosts.start(donor, "http.server", str(HTTP_PORT), "--directory", str(folder), log=log)
        url = f"http://{NET}.{donor}:{HTTP_PORT}/model"
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            done = hosts.run_on(joiner, ["python3", "-c", COPY, url], timeout=GIVE_UP_S)
            if not done.returncode:
                return float(done.stdout)
            if time.monotonic() > deadline:
                raise TimeoutError(done.stderr)


# -- what is shown


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """By size of the model: a copy, one donor, four."""
    lines = []
    for row in rows:
        one, four = row["joins"]
        lines.append(
            (
                f"{row['bytes'] / 1e6:.0f} MB",
                f"{row['copy_s']:.1f} s",
                f"{one['fetch_s']:.1f} s",
                f"{four['fetch_s']:.1f} s",
                f"{one['trains_s']:.1f} s",
                f"{four['trains_s']:.1f} s",
                f"{one['trains_s'] / four['trains_s']:.2f}",
            )
        )
    columns = ("model", "a copy", "model from 1", "from 4", "trains, 1 donor", "4 donors", "faster")
    return [Table("a joiner; donors that send 50 Mbit/s each", columns, lines)]


def _goal_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next((row for row in rows if row["parameters"] == GOAL_PARAMETERS), rows[-1])


def _fetch_ratio(rows: list[dict[str, Any]]) -> float:
    one, four = _goal_row(rows)["joins"]
    return float(one["fetch_s"] / four["fetch_s"])


def _copy_ratio(rows: list[dict[str, Any]]) -> float:
    row = _goal_row(rows)
    return float(row["copy_s"] / row["joins"][1]["trains_s"])


GOALS = (
    Goal(
        what="joining: the model from 4 donors of 50 Mbit/s, times faster than from 1",
        measured=_fetch_ratio,
        at_least=3.5,
    ),
    Goal(
        what="joining: until it trains, 4 donors of 50 Mbit/s, times faster than copying the bytes from 1",
        measured=_copy_ratio,
        at_least=3.5,
        reason="a process starts and links itself to members, and at the end its daemon hands Phi to its"
        " trainer; a copy just begins, and is done with the last byte",
    ),
)


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Seconds until a joiner trains, by size."""
    figure, plots = axes(len(rows))
    for axis, row in zip(plots, rows, strict=True):
        one, four = row["joins"]
        values = (row["copy_s"], one["trains_s"], four["trains_s"])
        axis.bar(("a copy", "1 donor", "4 donors"), values)
        axis.set(title=f"{row['bytes'] / 1e6:.0f} MB, 50 Mbit/s a donor", ylabel="seconds until it trains")
    save(figure, folder / "joining.svg")
