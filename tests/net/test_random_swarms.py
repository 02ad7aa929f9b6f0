"""Random swarms of real processes: whatever manifest, model, loops and faults are drawn, all nodes end alike.

One seed makes a manifest, a model of odd parts, nodes with loops of their own, and what befalls them. In the
end all that are there rest with the swarm's model. Then their parameters are the same bits, and so is what
each folder holds; no delta of theirs is missing; all processes end in good order; no log has a traceback.

    python -m tests.net.test_random_swarms SEED [COUNT]

plays one, or several from that seed on. The folder of one that failed is kept and named.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.bootstrap import manifests
from gossamer.bootstrap.invites import invite
from gossamer.models.task import named_tensors
from gossamer.node.daemon.network.rpc import asker_of, fetch_status
from gossamer.node.daemon.phi.restore import replay
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.home import Home, manifest_of
from gossamer.protocol.access.acl import Role
from gossamer.protocol.errors import UnreachableError
from gossamer.protocol.fixedpoint import to_float
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest, from_values
from tests.net.processes import assert_all_gone, processes_naming, wait_for
from tests.net.random_node import OPTIMIZERS, PARTS, Zoo, digest, run

START_S, FINISH_S, AGREE_S, LEAVE_S = 120, 150, 90, 30
"""Bounds on what takes a few seconds where nothing else runs."""

BEGIN_UNTIL_S = 60.0
"""The test plays another swarm until then, so that it takes about two minutes."""

OWNER = Identity.from_seed(bytes(range(32)))

BAD = re.compile(r"Traceback|[Ee]rror\b|misbehaved|are void|a bug in|DIFFERENT|TWO LINEAGES|damaged")
"""What no log has here."""

FAULTS = {
    "kill script": (signal.SIGKILL, True, False),
    "kill daemon": (signal.SIGKILL, False, True),
    "kill both": (signal.SIGKILL, True, True),
    "freeze script": (signal.SIGSTOP, True, False),
    "freeze daemon": (signal.SIGSTOP, False, True),
    "freeze both": (signal.SIGSTOP, True, True),
    "interrupt": (signal.SIGINT, True, False),
    "terminate": (signal.SIGTERM, True, False),
    "gone": (signal.SIGKILL, True, True),
}
"""The signal, and whether script and daemon get it. All but the last are back some seconds later."""


def draw(seed: int) -> dict[str, Any]:
    """All that a swarm is, as plain data."""
    rng = random.Random(seed)
    dtype = rng.choice(["float32"] * 4 + ["float64", "bfloat16", "float16"])
    parts = sorted(rng.sample(PARTS, rng.randrange(7)))
    plain = dtype == "float32" and "rare" not in parts
    seal, every = rng.choice([(1, 1), (2, 2), (4, 4), (8, 16), (3, 7)])
    steps, seconds = rng.choice([(1, 0.0), (5, 0.0), (15, 0.0), (40, 0.0), (0, 0.1), (0, 0.4), (0, 1.0)])
    train_s = rng.uniform(4, 12)
    count = rng.randrange(2, 6)

    def node(number: int) -> dict[str, Any]:
        return {
            "optimizer": rng.choice(OPTIMIZERS if plain else OPTIMIZERS[:-1]),
            "scaler": plain and rng.random() < 0.2,
            "schedule": rng.random() < 0.2,
            "accumulate": rng.choice([1, 1, 3]),
            "batch": rng.choice([2, 8, 32]),
            "pause": rng.choice([0.005, 0.01, 0.02, 0.1, 0.3]),
            "steps": rng.randrange(1, 200) if rng.random() < 0.25 else -1,
            "leaves": number > 0 and rng.random() < 0.1,
            "explodes_at": rng.randrange(10, 60) if rng.random() < 0.15 else 0,
            "explosion": rng.choice(["nan", "inf", "1e4"]),
            "replaces_at": rng.randrange(5, 50) if rng.random() < 0.1 else -1,
            "begins": rng.uniform(0, train_s) if number > 0 and rng.random() < 0.4 else 0.0,
            "data_seed": rng.randrange(1000),
        }

    return {
        "seed": seed,
        "model": {
            "parts": parts,
            "dtype": dtype,
            "width": rng.choice([1, 3, 17, 64]),
            "model_seed": rng.randrange(100),
        },
        "rules": rng.choice([None, "mean", "centered-clip", "each its own"]),
        "fragments": rng.choice([1, 1, 2, 3, 4]),
        "invited": rng.random() < 0.3,
        "outer": {
            "codec": rng.choice(["exact", "int8", "int4", "int4", "int2", "topk"]),
            "clip": rng.choice([0.0, 1.5, 3.0]),
            "weight_cap": rng.choice([0.0, 1.0, 4.0]),
            "staleness_max": rng.choice([0, 1, 16]),
        },
        "pace": {
            "every_steps": steps,
            "every_seconds": seconds,
            "min_round_seconds": rng.choice([0.02, 0.05, 0.3]),
        },
        "history": {"seal_after": seal, "snapshot_every": every, "retain": rng.choice([0, 2000])},
        "train_s": train_s,
        "nodes": [node(number) for number in range(count)],
        "faults": sorted(
            [rng.uniform(0, train_s + 2), rng.randrange(count), rng.choice(list(FAULTS)), rng.uniform(0.2, 8)]
            for _ in range(rng.choice([0, 1, 1, 2, 3, 4]))
        ),
    }


def describe(case: dict[str, Any]) -> Manifest:
    model = Zoo(**case["model"])
    names = [name for name, parameter in named_tensors(model) if parameter.requires_grad]
    rng = random.Random(case["seed"])
    rules = {name: rng.choice(["rda", "mean", "centered-clip"]) for name in names}
    described = manifests.describe(
        model,
        name=f"random {case['seed']}",
        codec=case["outer"]["codec"],
        fragments=min(case["fragments"], len(names)),
        averaging=rules if case["rules"] == "each its own" else case["rules"],
        invited=case["invited"],
        owners=(OWNER.public_key.hex(),) if case["invited"] else (),
    )
    values = described.model_dump()
    for section in ("outer", "pace", "history"):
        values[section].update(case[section])
    values["layout"]["tensors"] = described.layout.tensors
    return from_values(values, "a random swarm")


class Node:
    """A script and its daemon, through all their lives."""

    def __init__(self, base: Path, number: int, case: dict[str, Any], manifest: Manifest) -> None:
        self.home = Home(base / f"n{number}")
        self.options = {**case["nodes"][number], **case["model"]}
        self.founds = number == 0
        self.is_gone = False
        self._is_invited = case["invited"]
        self._swarm_id = manifest.swarm_id
        self._log = self.home.root.with_suffix(".log")
        self._process: ForkServerProcess | None = None

    def start(self, contacts: tuple[str, ...]) -> None:
        """Start the script; one that founds the swarm joins nobody."""
        contacts = () if self.founds else contacts
        options = {
            **self.options,
            "folder": str(self.home.root),
            "manifest": str(self.home.root.parent / "swarm.toml"),
            "join": contacts,
            "invite": self._invitation(contacts) if self._is_invited else None,
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.net.random_node"])  # torch is imported once
        self._process = context.Process(target=run, args=(json.dumps(options), str(self._log)))
        self._process.start()

    def _invitation(self, contacts: tuple[str, ...]) -> str:
        self.home.create()
        node_id = self.home.identity().node_id
        given = invite(OWNER, self._swarm_id, node_id, role=Role.TRAIN, days=1, contacts=contacts)
        return given.to_text()

    @property
    def has_begun(self) -> bool:
        return self._process is not None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def status(self) -> int | None:
        """The script's exit status."""
        return self._process.exitcode if self._process else None

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def has_attached(self) -> bool:
        return '"attached"' in self.log or not self.runs

    @property
    def has_finished(self) -> bool:
        return self.home.root.with_suffix(".finished").exists() or not self.runs

    @property
    def result(self) -> dict[str, Any] | None:
        path = self.home.root.with_suffix(".json")
        return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None

    def signal(self, number: signal.Signals, *, script: bool = True, daemon: bool = True) -> None:
        pids = [process.pid for process in processes_naming(self.home.root)] if daemon else []
        if script and self._process is not None and self._process.pid is not None:
            pids.insert(0, self._process.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_ended(self, timeout: float) -> None:
        wait_for(lambda: not self.runs, timeout, f"{self.home.root.name} ended")

    def address(self) -> str | None:
        facts = self.home.read_daemon()
        return str(facts["address"]) if facts else None

    async def replica(self) -> tuple[Any, ...]:
        """What its daemon holds; empty if it does not answer."""
        address = self.address()
        if address is None:  # it starts, or has just ended
            return ()
        asker = asker_of(self.home) if self._is_invited else None
        try:
            async with asyncio.timeout(10):
                status = await fetch_status(address, digest=True, asker=asker)
        except (UnreachableError, TimeoutError):
            return ()
        kinds = ("merged_digest", "phi_digest", "rounds_behind", "payloads_missing")
        return tuple(status.get(kind) for kind in kinds)

    def records(self) -> tuple[int, set[tuple[bytes, int]]]:
        """The round up to which its folder holds a snapshot only, and author and round of every delta."""
        manifest = manifest_of(self.home)
        store = RecordStore(self.home.ledger_path, manifest.swarm_id, read_only=True)
        try:
            deltas = store.load(manifest.plan())
            found = {(delta.author, delta.round) for delta in deltas}
            assert len(found) == len(deltas), "somebody has signed two deltas for one round"
            return store.load_history().base.round, found
        finally:
            store.close()

    def exported(self) -> str:
        """Digest of the model that its folder holds."""
        manifest, merger = replay(self.home)
        model = Zoo(**{key: self.options[key] for key in ("parts", "dtype", "width", "model_seed")})
        tensors = dict(named_tensors(model))
        for fragment in manifest.plan().fragments:
            for slot in fragment.slots:
                values = torch.from_numpy(to_float(merger.view(fragment)[slot.span]))
                tensors[slot.spec.name].data.copy_(values.view(slot.spec.shape))
        return digest(model)

    def published(self) -> set[int]:
        """Rounds that were signed for certain: the same script went on to the next, or finished."""
        certain: set[int] = set()
        last: set[int] = set()
        for line in self.log.splitlines():
            said = json.loads(line) if line.startswith("{") else {}
            if said.keys() & {"published", "finished"}:
                certain |= last
            if said.keys() & {"published", "attached"}:
                last = {said["published"]} if "published" in said else set()
        return certain


class Swarm:
    """A drawn swarm, in a folder of its own. Ends with the test, whatever happened."""

    def __init__(self, case: dict[str, Any], base: Path) -> None:
        self.base = base
        self._case = case
        manifest = describe(case)
        manifests.write(manifest, base / "swarm.toml")
        self.nodes = [Node(base, number, case, manifest) for number in range(len(case["nodes"]))]

    def play(self) -> None:
        """From the first start to the last process's end. Raises AssertionError."""
        self._begin()
        for at, act in self._events():
            time.sleep(max(0.0, at - time.monotonic()))
            act()
        self._end([node for node in self.nodes if not node.is_gone])

    def _begin(self) -> None:
        """All are there that are from the beginning."""
        first, *others = self.nodes
        early = [node for node in others if not node.options["begins"]]
        self._start(first)
        wait_for(lambda: first.has_attached, START_S, "the first attached")
        for node in early:
            self._start(node)
        wait_for(lambda: all(node.has_attached for node in early), START_S, "the early ones attached")

    def _start(self, node: Node) -> None:
        if not node.is_gone:
            node.start(tuple(a for other in self.nodes if other is not node and (a := other.address())))

    def _events(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """What happens when, by the monotonic clock; what follows from one is put in between."""
        begun = time.monotonic()
        due: list[tuple[float, int, Callable[[], None]]] = []

        def later(seconds: float, act: Callable[[], None]) -> None:
            due.append((begun + seconds, len(due), act))
            due.sort()

        later(self._case["train_s"], (self.base / "stop").touch)
        for node in self.nodes:
            if node.options["begins"]:
                later(node.options["begins"], partial(self._start, node))
        for at, number, fault, seconds in self._case["faults"]:
            later(at, partial(self._hit, self.nodes[number], fault, seconds, at, later))
        while due:
            at, _, act = due.pop(0)
            yield at, act

    def _hit(
        self, node: Node, fault: str, seconds: float, at: float, later: Callable[[float, Any], None]
    ) -> None:
        number, script, daemon = FAULTS[fault]
        others = [other for other in self.nodes if other is not node and other.runs]
        if not node.runs or (fault == "gone" and (node.founds or not others)):
            return
        node.signal(number, script=script, daemon=daemon)
        node.is_gone = fault == "gone"
        if number == signal.SIGSTOP:
            later(at + seconds, partial(node.signal, signal.SIGCONT))
        elif script:
            later(at + seconds, partial(self._again, node))

    def _again(self, node: Node) -> None:
        """Start a node again that a signal has ended."""
        node.signal(signal.SIGCONT)
        node.wait_ended(LEAVE_S)
        self._start(node)

    def _end(self, nodes: list[Node]) -> None:
        wait_for(lambda: all(node.has_finished for node in nodes), FINISH_S, "all have finished")
        staying = [node for node in nodes if node.runs]
        assert all(node.status == 0 for node in nodes if node not in staying), [n.status for n in nodes]
        wait_for(partial(self._agree, staying), AGREE_S, "all daemons hold the same")
        (self.base / "again").touch()
        wait_for(lambda: all(node.result or not node.runs for node in staying), FINISH_S, "all rest")
        (self.base / "leave").touch()
        for node in staying:
            node.wait_ended(LEAVE_S)
        assert all(node.status == 0 for node in staying), [node.status for node in staying]
        assert_all_gone(self.base, LEAVE_S)
        self._look(staying)

    def _agree(self, nodes: list[Node]) -> bool:
        async def ask() -> list[tuple[Any, ...]]:
            return await asyncio.gather(*(node.replica() for node in nodes))

        replicas = set(asyncio.run(ask()))
        return len(replicas) == 1 and replicas != {()}

    def _look(self, staying: list[Node]) -> None:
        """Whether all that the nodes left behind is as it should be."""
        results = [node.result for node in staying]
        assert all(result and result["rests"] for result in results)
        digests = {result["digest"] for result in results if result}
        assert len(digests) == 1, f"they rest with {len(digests)} different models"
        assert {node.exported() for node in staying} == digests, "what a folder holds"
        self._look_for_lost(staying)
        for node in self.nodes:
            bad = [line for line in node.log.splitlines() if BAD.search(line) and '"diverged"' not in line]
            assert not bad, bad

    def _look_for_lost(self, staying: list[Node]) -> None:
        """Whether every folder has all deltas of those who are there, as far back as it reaches."""
        held = {node: node.records() for node in staying}
        for node, (_, own) in held.items():
            node_id = node.home.identity().node_id
            signed = {round_ for author, round_ in own if author == node_id}
            assert node.published() <= signed | set(range(held[node][0] + 1)), "a delta is lost"
            for floor, records in held.values():
                lacking = [round_ for round_ in signed if round_ > floor and (node_id, round_) not in records]
                assert not lacking, f"rounds {lacking} are not everywhere"

    def close(self) -> None:
        for node in self.nodes:
            node.signal(signal.SIGCONT)
            node.signal(signal.SIGKILL)
            node.wait_ended(10)


@contextmanager
def swarm_of(seed: int, base: Path) -> Iterator[Swarm]:
    swarm = Swarm(draw(seed), base)
    (base / "case.json").write_text(json.dumps(swarm._case, indent=1))
    try:
        yield swarm
    finally:
        swarm.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_swarms_end_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    for number in range(seed % 2**31, seed % 2**31 + 3):
        if time.monotonic() - begun > BEGIN_UNTIL_S:
            break
        print(f"replay this one with: python -m tests.net.test_random_swarms {number}")
        base = tmp_path / str(number)
        base.mkdir()
        with swarm_of(number, base) as swarm:
            swarm.play()


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for number in range(seed, seed + count):
        begun = time.monotonic()
        base = Path(tempfile.mkdtemp(prefix=f"randomswarms-{number}-"))
        with swarm_of(number, base) as swarm:
            try:
                swarm.play()
                said = "ok"
            except AssertionError as error:
                said = f"FAILED in {base}: {error}"
        print(f"{number}: {said} ({time.monotonic() - begun:.0f} s)", flush=True)
        if said == "ok":
            shutil.rmtree(base)


if __name__ == "__main__":
    main()
