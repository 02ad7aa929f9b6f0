"""`gossamer swarm --chaos`: a storm passes over the local swarm while it trains.

A node is killed and comes back from its own folder, another joins late, the network splits in halves and
heals, and the bootstrap peer dies for good. Events come at fractions of the rounds, to fit any ``--rounds``.

Every event has a recovery time, measured by asking all nodes twice a second:

=============== =======================================================================================
killed, split,  until every living node has published a round later than its last one before the event: the
bootstrap_died  others, both halves and the orphans train on
returned,       until that node trains and its last round is at most one behind the swarm's (the median of
joined          the nodes' last rounds); the start of its processes and importing torch count
healed          until all living nodes have merged exactly the same records up to the highest round that
                any of them had published when the network became whole (equal digests)
=============== =======================================================================================
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low
from typing import Any

from gossamer.bootstrap.fault_proxy import FaultProxy, own_loopback
from gossamer.bootstrap.processes import NodeProcess
from gossamer.node.address import parse_address
from gossamer.node.storage.home import Home
from gossamer.protocol.errors import ConfigError

NODES_MIN = 2
PAUSE_S = 4.0
"""The least time between two events: near the end of a short run, the rounds for several may have passed."""

RECOVERY_S_MAX = 120.0
"""How long to wait after the last event for what has not recovered."""

AWAY_ROUNDS_MAX = 100
"""The longest absence or split in rounds: a split must stay well under the history's `retain`, or one side
would start over."""


class Kind(StrEnum):
    """What can happen."""

    KILLED = "killed"
    RETURNED = "returned"
    JOINED = "joined"
    SPLIT = "split"
    HEALED = "healed"
    BOOTSTRAP_DIED = "bootstrap_died"


@dataclass(slots=True)
class Happening:
    """One event of the storm, and how long its consequences lasted."""

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
    """Makes the events happen, and watches how the swarm recovers: in `look`, after every refresh."""

    def __init__(
        self,
        rounds: int,
        boot: NodeProcess,
        nodes: list[NodeProcess],
        start_another: Callable[[], NodeProcess],
    ) -> None:
        """`start_another` starts one more node and adds it to `nodes`. Raises ConfigError."""
        if len(nodes) < NODES_MIN:
            raise ConfigError(
                f"--chaos needs --nodes {NODES_MIN} or more: when one is killed, the others must train on"
            )
        self._rounds = rounds
        self._boot = boot
        self._nodes = nodes
        self._start_another = start_another
        self._proxy = FaultProxy()
        self._begun = time.monotonic()
        self._last_at = self._begun
        self.events: list[Happening] = []
        self.log: list[str] = []
        """What happened and what recovered, one line of text each."""
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

    async def listen(self, number: int, process: NodeProcess) -> tuple[str, list[str]]:
        """Put the proxy in front of a node; returns its address there and the node's own arguments for it.

        Raises ConfigError if the system has only one loopback address.
        """
        source = own_loopback(number)
        home = Home(process.folder)

        def target() -> tuple[str, int] | None:
            facts = home.read_daemon()
            return parse_address(str(facts["address"])) if facts is not None else None

        address = await self._proxy.add(process.name, source, target)
        return address, ["--listen", f"{source}:0", "--advertise", address]

    async def close(self) -> None:
        await self._proxy.close()

    # -- the script

    @property
    def over(self) -> bool:
        """Whether every event has happened, and everything has recovered or taken too long."""
        recovered = all(event.recovered_s is not None for event in self.events)
        return not self._script and (recovered or time.monotonic() - self._last_at > RECOVERY_S_MAX)

    def look(self) -> None:
        """After statuses were refreshed: note what has recovered, and start what is due."""
        now = time.monotonic()
        for event in self.events:
            if event.recovered_s is None and event.is_over():
                event.recovered_s = round(now - self._begun - event.t_s, 2)
                self.log.append(f"{event.cure}, after {event.recovered_s:.1f} s")
        if self._script and now - self._last_at >= PAUSE_S and self._progress() >= self._script[0][0]:
            _, action = self._script.popleft()
            self._last_at = now
            action()

    def _happens(
        self, kind: Kind, node: str | None, text: str, cure: str, is_over: Callable[[], bool]
    ) -> None:
        at = time.monotonic() - self._begun
        self.events.append(Happening(kind, node, text, cure, at, is_over))
        self.log.append(text)

    def _kill(self) -> None:
        victim = self._nodes[1]
        victim.kill()
        text = f"{victim.name} is killed with all its processes (SIGKILL)"
        self._happens(Kind.KILLED, victim.name, text, "the other nodes train on", self._all_advance())

    def _bring_back(self) -> None:
        victim = self._nodes[1]
        victim.start()
        text, cure = f"{victim.name} restarts from its own folder", f"{victim.name} trains in step again"
        self._happens(Kind.RETURNED, victim.name, text, cure, lambda: self._in_step(victim))

    def _let_join(self) -> None:
        late = self._start_another()
        text, cure = f"{late.name} joins late", f"{late.name} trains in step with the others"
        self._happens(Kind.JOINED, late.name, text, cure, lambda: self._in_step(late))

    def _split(self) -> None:
        names = [process.name for process in self._nodes]
        one, other = [self._boot.name, *names[::2]], names[1::2]
        self._proxy.rules.split(one, other)
        text = f"the network splits: {', '.join(one)} | {', '.join(other)}"
        self._happens(Kind.SPLIT, None, text, "both sides train on", self._all_advance())

    def _heal(self) -> None:
        self._proxy.rules.heal()
        self.up_to = up_to = max(self._rounds_of(self._trainers()).values(), default=0)
        text, cure = "the network is whole again", f"all are identical up to round {up_to}"
        self._happens(Kind.HEALED, None, text, cure, lambda: self._same_up_to(up_to))

    def _kill_bootstrap(self) -> None:
        self._boot.kill()
        text = "the bootstrap peer is killed, for good (SIGKILL)"
        self._happens(Kind.BOOTSTRAP_DIED, self._boot.name, text, "all nodes train on", self._all_advance())

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
