"""What all nodes of one simulation share, and the traits of each."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.messages import Message
from gossamer.protocol.payloads import Layout, chunk_hashes, root_of
from tests.sim.audit import Audit
from tests.sim.fold import MergeRound
from tests.sim.loop import Loop
from tests.sim.network import Network
from tests.sim.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The surroundings of every node."""

    seed: int
    loop: Loop
    net: Network
    trace: Trace
    audit: Audit
    manifest: Manifest
    layout: Layout
    phi: Ints
    """Phi_0."""
    unix_start: float
    encode: Callable[[Message], bytes]
    merge_round: MergeRound

    def dice(self, name: str) -> random.Random:
        """A separate source of randomness for each purpose, so that one does not disturb another."""
        return random.Random(f"{self.seed}/{name}")

    def genesis_chunks(self) -> dict[bytes, bytes]:
        """Phi_0 as a chunk, and the index that lists it, both by hash."""
        data = self.phi.tobytes()
        hashes = chunk_hashes(data)
        return {root_of(hashes): b"".join(hashes), hashes[0]: data}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What distinguishes a node from the others, for as long as it exists."""

    index: int
    identity: Identity
    address: str
    listens: bool
    """Whether others can dial it; if not, it lives behind a router and dials out."""
    trains: bool
    step_s: float
    """Time of one inner step."""
    batch_tokens: int
    sync_s: float
    """How long a durable write takes."""
    gather_s: float
    """Arrivals within this time are merged together."""
    clock_start: float
    clock_drift: float
    unix_error_s: float
    """How wrong its wall clock is, seconds."""
    is_liar: bool = False
    is_fast: bool = False
    """Whether it is many times as fast as the others."""

    def clock(self, time: float) -> float:
        """The reading of the node's monotonic clock at a time."""
        return self.clock_start + time * (1.0 + self.clock_drift)

    def time(self, clock: float) -> float:
        """The time at which the node's monotonic clock shows this reading."""
        return (clock - self.clock_start) / (1.0 + self.clock_drift)
