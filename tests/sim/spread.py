"""A checker of how payloads spread while nothing is wrong: soon, and each chunk to each node once.

If dealing or offers of parts fail, guesses and offers of whole payloads make up for it: a swarm without them
still converges, only later and after requests in vain. So convergence does not show whether they work, but
the time that a payload takes does.
"""

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from gossamer.protocol.records import Delta
from tests.sim.loop import Loop

if TYPE_CHECKING:
    from tests.sim.node import Node

PROMPT_S = 0.6
WAYS = 8
"""Half of all payloads arrive within PROMPT_S plus this many times the longest latency: a record, offers of
its parts, requests and chunks take several hops. A node that has to guess holders begins after 1 s."""

TWICE_MAX = 0.1
"""Share of chunks that may come to a node that has them, as when a link breaks at the wrong moment."""

LATE_S = 10.0
LATE_MAX = 0.01
"""Share of payloads that may take longer than LATE_S, however many a liar claims to hold: now and then a
silent holder costs each node some seconds."""

ENOUGH = 50
"""How many arrivals a judgement needs."""


class Spread:
    """Follows payloads from their publication to each node, in the calms between storms."""

    def __init__(self, loop: Loop, fail: Callable[["Node | None", str], None]) -> None:
        self._loop = loop
        self._fail = fail
        self._is_watching = False
        self._born: dict[bytes, float] = {}
        self._took: list[float] = []
        self._came = self._twice = 0

    def watch(self) -> None:
        """Nothing is wrong from now on."""
        self._is_watching = True

    def look_away(self) -> None:
        """Something is wrong: payloads under way may be delayed now."""
        self._is_watching = False
        self._born.clear()

    def published(self, delta: Delta) -> None:
        """A node's own delta is durable."""
        if self._is_watching:
            self._born[delta.record_id] = self._loop.now

    def held(self, node: "Node", delta: Delta) -> None:
        """A payload is complete on a node."""
        born = self._born.get(delta.record_id)
        if born is None or node.traits.is_liar:
            return
        began = max(node.linked_at, node.adopted_at)  # having given up its history, it took no records before
        if delta.author != node.traits.identity.node_id and began < born:
            self._took.append(self._loop.now - born)

    def chunk_came(self, *, twice: bool) -> None:
        """A node received a chunk."""
        self._came += 1
        self._twice += twice

    def judge(self, latency_s: float) -> None:
        """Judge, at the end. `latency_s`: the longest of all paths, seconds."""
        patience = PROMPT_S + WAYS * latency_s
        if len(self._took) >= ENOUGH and median(self._took) > patience:
            self._fail(None, f"half of all payloads took over {median(self._took):.1f} s, not {patience:.1f}")
        late = sum(took > LATE_S for took in self._took)
        if len(self._took) >= ENOUGH and late > LATE_MAX * len(self._took):
            self._fail(None, f"{late} of {len(self._took)} payloads took over {LATE_S:.0f} s")
        if self._came >= ENOUGH and self._twice > TWICE_MAX * self._came:
            self._fail(None, f"{self._twice} of {self._came} chunks came to nodes that had them")
