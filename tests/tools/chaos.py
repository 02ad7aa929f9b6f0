"""A storm over a local swarm of real processes while it trains: ``make chaos ARGS="--nodes 6"``.

A node is killed and comes back from its own folder, another joins late, the network splits in halves and
heals, and the bootstrap peer dies for good. Faults come at fractions of the rounds, to fit any ``--rounds``.

Every fault has a recovery time, measured by asking all nodes twice a second:

=============== =======================================================================================
killed, split,  until every living node has published a round later than its last one before the fault: the
bootstrap_died  others, both halves and the orphans train on
returned,       until that node trains and its last round is at most one behind the swarm's (the median of
joined          the nodes' last rounds); the start of its processes and importing torch count
healed          until all living nodes have merged exactly the same records up to the highest round that
                any of them had published when the network became whole (equal digests)
=============== =======================================================================================
"""

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median_low
from typing import Any

import psutil

from gossamer.bootstrap.live_table import Display, Output, show_summary
from gossamer.bootstrap.local_swarm import LocalSwarm, SwarmOptions, founded
from gossamer.bootstrap.processes import STOP_S, NodeProcess
from gossamer.node.address import parse_address
from gossamer.node.home import Home
from gossamer.protocol.errors import ConfigError, LocalError
from tests.tools.fault_proxy import FaultProxy, own_loopback

NODES_MIN = 2
PAUSE_S = 4.0
"""The least time between two faults: near the end of a short run, the rounds for several may have passed."""

RECOVERY_S_MAX = 120.0
"""How long to wait after the last fault for what has not recovered."""

AWAY_ROUNDS_MAX = 100
"""The longest absence or split in rounds: a split must stay well under the history's `retain`, or one side
would start over."""


class Kind(StrEnum):
    """What a storm does."""

    KILLED = "killed"
    RETURNED = "returned"
    JOINED = "joined"
    SPLIT = "split"
    HEALED = "healed"
    BOOTSTRAP_DIED = "bootstrap_died"


@dataclass(slots=True)
class Fault:
    """One fault, and how long its consequences lasted."""

    kind: Kind
    node: str | None
    """The node that it struck; None for all."""
    text: str
    cure: str
    """What has happened once the swarm has recovered."""
    t_s: float
    """Seconds since the swarm began."""
    is_over: Callable[[], bool]
    recovered_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "t_s": round(self.t_s, 2),
            "kind": self.kind.value,
            "node": self.node,
            "text": self.text,
            "recovered_s": self.recovered_s,
        }


class Storm:
    """Strikes, and watches how the swarm recovers: in `check`, after every refresh."""

    def __init__(
        self,
        rounds: int,
        boot: NodeProcess,
        nodes: list[NodeProcess],
        start_another: Callable[[], NodeProcess],
    ) -> None:
        """`start_another` starts one more node and adds it to `nodes`."""
        self._rounds = rounds
        self._boot = boot
        self._nodes = nodes
        self._start_another = start_another
        self._proxy = FaultProxy()
        self._begun = time.monotonic()
        self._last_at = self._begun
        self.faults: list[Fault] = []
        self.log: list[str] = []
        """What struck and what recovered, one line of text each."""
        self.up_to: int | None = None
        """A round whose prefix digest the nodes should be asked for."""
        kill, split = self._at(0.15), self._at(0.5)
        self._script = deque(
            [
                (kill, self._kill),
                (min(self._at(0.3), kill + AWAY_ROUNDS_MAX), self._bring_back),
                (self._at(0.35), self._let_join),
                (split, self._split),
                (min(self._at(0.7), split + AWAY_ROUNDS_MAX), self._heal),
                (self._at(0.8), self._kill_bootstrap),
            ]
        )

    def _at(self, fraction: float) -> int:
        return max(1, round(fraction * self._rounds))

    # -- the network

    async def listen(self, number: int, process: NodeProcess) -> str:
        """Put the proxy in front of a node, and tell it by its arguments; returns its address there.

        Raises ConfigError if the system has only one loopback address.
        """
        source = own_loopback(number)
        home = Home(process.folder)

        def target() -> tuple[str, int] | None:
            facts = home.read_daemon()
            return parse_address(str(facts["address"])) if facts is not None else None

        address = await self._proxy.add(process.name, source, target)
        process.args += ["--listen", f"{source}:0", "--advertise", address]
        return address

    async def close(self) -> None:
        await self._proxy.close()

    # -- the script

    @property
    def over(self) -> bool:
        """Whether every fault has struck, and everything has recovered or taken too long."""
        recovered = all(fault.recovered_s is not None for fault in self.faults)
        return not self._script and (recovered or time.monotonic() - self._last_at > RECOVERY_S_MAX)

    def check(self) -> None:
        """After statuses were refreshed: note what has recovered, and start what is due."""
        now = time.monotonic()
        for fault in self.faults:
            if fault.recovered_s is None and fault.is_over():
                fault.recovered_s = round(now - self._begun - fault.t_s, 2)
                self.log.append(f"{fault.cure}, after {fault.recovered_s:.1f} s")
        if self._script and now - self._last_at >= PAUSE_S and self._progress() >= self._script[0][0]:
            _, action = self._script.popleft()
            self._last_at = now
            action()

    def _note(self, kind: Kind, node: str | None, text: str, cure: str, is_over: Callable[[], bool]) -> None:
        at = time.monotonic() - self._begun
        self.faults.append(Fault(kind, node, text, cure, at, is_over))
        self.log.append(text)

    def _kill(self) -> None:
        victim = self._nodes[1]
        kill(victim)
        text = f"{victim.name} is killed with all its processes (SIGKILL)"
        self._note(Kind.KILLED, victim.name, text, "the other nodes train on", self._all_advance())

    def _bring_back(self) -> None:
        victim = self._nodes[1]
        victim.start()
        text, cure = f"{victim.name} restarts from its own folder", f"{victim.name} trains in step again"
        self._note(Kind.RETURNED, victim.name, text, cure, lambda: self._in_step(victim))

    def _let_join(self) -> None:
        late = self._start_another()
        text, cure = f"{late.name} joins late", f"{late.name} trains in step with the others"
        self._note(Kind.JOINED, late.name, text, cure, lambda: self._in_step(late))

    def _split(self) -> None:
        names = [process.name for process in self._nodes]
        one, other = [self._boot.name, *names[::2]], names[1::2]
        self._proxy.rules.split(one, other)
        text = f"the network splits: {', '.join(one)} | {', '.join(other)}"
        self._note(Kind.SPLIT, None, text, "both sides train on", self._all_advance())

    def _heal(self) -> None:
        self._proxy.rules.heal()
        self.up_to = up_to = max(self._rounds_of(self._trainers()).values(), default=0)
        text, cure = "the network is whole again", f"all are identical up to round {up_to}"
        self._note(Kind.HEALED, None, text, cure, lambda: self._same_up_to(up_to))

    def _kill_bootstrap(self) -> None:
        kill(self._boot)
        text = "the bootstrap peer is killed, for good (SIGKILL)"
        self._note(Kind.BOOTSTRAP_DIED, self._boot.name, text, "all nodes train on", self._all_advance())

    # -- recovery

    def _trainers(self) -> list[NodeProcess]:
        """The living nodes that answer."""
        return [process for process in self._nodes if not process.killed and process.status is not None]

    @staticmethod
    def _rounds_of(processes: list[NodeProcess]) -> dict[str, int]:
        return {process.name: process.status["round"] for process in processes if process.status is not None}

    def _progress(self) -> int:
        """The median of the last rounds of all nodes that have published any."""
        return median_low([r for r in self._rounds_of(self._trainers()).values() if r] or [0])

    def _all_advance(self) -> Callable[[], bool]:
        """A test whether all nodes that live now have since published a later round, or have no more to
        publish."""
        before = self._rounds_of(self._trainers())

        def advanced() -> bool:
            after = self._rounds_of(self._trainers())
            return all(
                after[name] > round_ or round_ >= self._rounds
                for name, round_ in before.items()
                if name in after
            )

        return advanced

    def _in_step(self, process: NodeProcess) -> bool:
        status = process.status
        return (
            status is not None
            and status["state"] in ("training", "finished")
            and status["round"] >= self._progress() - 1
        )

    def _same_up_to(self, up_to: int) -> bool:
        prefixes = [(process.status or {}).get("prefix") for process in self._trainers()]
        found = {prefix["digest"] for prefix in prefixes if prefix and prefix["up_to"] == up_to}
        return len(found) == 1 and None not in found and None not in prefixes


def kill(process: NodeProcess) -> None:
    """Send SIGKILL to all processes of a node at once, like a power cut."""
    if process.child is None:
        return
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(process.child.pid)
        for each in (whole, *whole.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.child.end(STOP_S)
    process.child = None
    process.status = None
    process.killed = True


class StormySwarm(LocalSwarm):
    """A local swarm that a storm passes over."""

    def __init__(self, options: SwarmOptions, *args: Any) -> None:
        super().__init__(options, *args)
        self.storm = Storm(options.rounds, self.boot, self.nodes, self._start_another)
        self._late = self.node(f"node-{options.nodes + 1}")
        self._shown = 0

    async def start(self) -> None:
        """Put the proxy in front of every node, then start them; they join each other through it."""
        everyone = [self.boot, *self.nodes, self._late]
        addresses = [await self.storm.listen(number, process) for number, process in enumerate(everyone)]
        self.boot.start()
        await self.boot.address()
        for process in everyone[1:]:
            process.args += ["--join", addresses[0]]
        for process in self.nodes:
            process.start()

    def _start_another(self) -> NodeProcess:
        self._late.start()
        self.nodes.append(self._late)
        return self._late

    def refreshed(self, display: Display) -> None:
        self.storm.check()
        self.up_to = self.storm.up_to
        for line in self.storm.log[self._shown :]:
            display.tell(line)
        self._shown = len(self.storm.log)

    def is_over(self) -> bool:
        return super().is_over() and self.storm.over


def main() -> int:
    """Run a swarm in a storm and show its summary; returns 0 only if all recovered and agree at the end."""
    parser = argparse.ArgumentParser(prog="make chaos ARGS=...", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--every-steps", type=int, default=30)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", action="append", default=[])
    parser.add_argument("--dir", type=Path, help="folder to keep the nodes' folders in")
    parser.add_argument("--json", type=Path, help="write the summary and the faults to this file")
    given = parser.parse_args()
    options = SwarmOptions(
        nodes=given.nodes,
        rounds=given.rounds,
        data=[Path(path) for path in given.data],
        codec=given.codec,
        every_steps=given.every_steps,
        fragments=given.fragments,
        seed=given.seed,
        folder=given.dir,
        json_path=given.json,
    )
    try:
        return asyncio.run(_run(options))
    except LocalError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2


async def _run(options: SwarmOptions) -> int:
    if options.nodes < NODES_MIN:
        raise ConfigError(f"a storm needs --nodes {NODES_MIN} or more: the others must train on")
    console = Output()
    with founded(options) as (manifest, folder):
        swarm = StormySwarm(options, manifest, folder, console)
        try:
            summary = await swarm.run()
        finally:
            await swarm.storm.close()
    faults = swarm.storm.faults
    if options.json_path is not None:
        result = {**summary.to_json(), "faults": [fault.to_json() for fault in faults]}
        options.json_path.write_text(json.dumps(result, indent=2) + "\n")
    show_summary(console, summary)
    for fault in faults:
        recovered = (
            "NOT recovered" if fault.recovered_s is None else f"recovered in {fault.recovered_s:.1f} s"
        )
        console.print(f"at {fault.t_s:.0f} s: {fault.text}; {recovered}", markup=False, highlight=False)
    return 0 if summary.ok and all(fault.recovered_s is not None for fault in faults) else 1


if __name__ == "__main__":
    sys.exit(main())
