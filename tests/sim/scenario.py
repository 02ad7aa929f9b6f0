"""Draws everything from a seed: the swarm, its machines, its network and what will go wrong.

Time is divided into *storms*, in which things go wrong, and *calms*, in which everything is healed and the
promises about recovery are checked. The seed picks each storm from the list, unless one is named.
"""

import random
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import FORK_DOUBLINGS_MAX, LINKS_MAX, LINKS_WANTED, PAYLOAD_CHUNK_BYTES_MIN
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.payloads import TensorSpec, chunk_hashes, root_of
from tests.protocol.builders import admission
from tests.sim.audit import MIN_ROUND_S
from tests.sim.faults import AMBUSHES, STORMS, UNMIXED
from tests.sim.network import Path
from tests.sim.stage import Traits
from tests.sim.verdicts import DROPPED_S, SETTLED_S

CREATED = 1_700_000_000
WARM_UP_S = 60.0
CALM_S = 75.0
ROUGH_CALM_S = CALM_S + DROPPED_S
REST_S = 40.0
"""At the end no node publishes for this long, and all nodes must become equal."""

CRAMPED = 0.2
"""Share of the mixed scenarios in which each node has few links."""

PARTED = 0.2
"""Share of the scenarios that have payloads of several chunks."""

RETAIN = 17
"""Rounds that are retained: some 200 s in the fastest swarm, and no storm lasts longer than 180 s."""

LADDER = ("int4", "topk8", "topk16", "topk")

OTHERS = (
    "calm",
    "mixed",
    "liar",
    "liars",
    "lineages",
    "nights",
    "runaways",
    "invited",
    "cramped",
    "parts",
    "lines",
    "turns",
)
"""Scenarios that are not one kind of storm. "liars": several liars, each for itself and together, and
ambushes that leave a node alone with them. "lineages": splits that outlast the rounds retained. "nights":
machines that sleep for as long. "runaways": one or two nodes, many times as fast as the others, that are cut
off for as long, and may have closed rounds then that the others are yet to come to. "invited": a swarm with
an owner, who revokes a member now and then. "cramped": few links per node, so that all nodes that a latecomer
can dial may be full. "parts": payloads always have several chunks. "lines": a swarm that sets its own pace,
whose machines are five times as fast and far apart, over lines that become ten times as slow and fast again.
"turns": few of the members contribute to a round.
"""

LIARS_MAX = 5

FORGETFUL = {"lineages": "halves", "nights": "sleep", "runaways": "runaway"}
"""Scenarios in which storms outlast the rounds retained, and the kind of storm in each."""

_TENSORS = (
    TensorSpec("embed", (8, 6), "mean"),
    TensorSpec("weight", (6, 8), "rda"),
    TensorSpec("bias", (10,), "mean"),
)


@dataclass(frozen=True, slots=True)
class Storm:
    """What goes wrong, from when to when."""

    names: tuple[str, ...]
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One seed's choices."""

    seed: int
    name: str
    nodes: int
    """Members at the start; more may join."""
    minutes: float
    codec: str
    manifest: Manifest
    phi: Ints
    traits: tuple[Traits, ...]
    paths: dict[tuple[int, int], Path]
    storms: tuple[Storm, ...]
    liars: int
    """How many of the members at the start are liars: the last ones."""
    links_max: int
    """Links per node: few if "cramped", so that nodes turn others away, as in a swarm of hundreds."""
    chunk_bytes: int
    """Size of a payload's chunks: small in "parts", so that payloads are dealt and passed on in parts."""

    @property
    def owner(self) -> Identity | None:
        """The owner of an invited swarm."""
        return _owner(self.seed) if self.manifest.admission.owners else None

    @property
    def is_forgetful(self) -> bool:
        """Whether a storm may outlast the rounds retained, so that the work of some nodes is given up."""
        return self.name in FORGETFUL

    def settling_s(self, storms: int) -> float:
        """See `_settling_s`."""
        return _settling_s(self.name, storms)

    @property
    def seconds(self) -> float:
        return self.minutes * 60.0

    def describe(self) -> str:
        storms = (
            ", ".join(f"{'+'.join(s.names)} {s.begin:.0f}-{s.end:.0f} s" for s in self.storms) or "no storm"
        )
        liar = ("", ", one liar")[self.liars] if self.liars < 2 else f", {self.liars} liars"
        cramped = f", {self.links_max} links each" if self.links_max != LINKS_MAX else ""
        parted = (
            f", chunks of {self.chunk_bytes} bytes" if self.chunk_bytes != PAYLOAD_CHUNK_BYTES_MIN else ""
        )
        model = f"{self.codec} in {self.manifest.layout.fragments}"
        return f"{self.nodes} nodes, {model}{liar}{cramped}{parted}: {storms}"


def choose(seed: int, nodes: int, minutes: float, name: str | None) -> Scenario:
    """Draw a scenario. `name` asks for one kind of storm, or for one of OTHERS.

    If only two nodes train, neither is a liar: nobody could tell which of them it is. Raises ValueError for
    an unknown name, or if there are too few nodes.
    """
    if nodes < 2:
        raise ValueError("a swarm has two nodes at least")
    if name == "liars" and nodes < 7:
        raise ValueError("two liars, and more who are none even without one: a swarm of seven nodes at least")
    rng = random.Random(f"{seed}/scenario")
    codec = rng.choice(("int4", "int4", "topk", "exact", "int8", "int2"))
    fragments = random.Random(f"{seed}/fragments").choice((1, 2, 2, 3))
    manifest, phi = _manifest(rng, seed, codec, fragments, name)
    total = nodes + 4
    has_liar = name == "liar" or (name in (None, "mixed", "parts") and rng.random() < 0.25)
    bootstrap_trains = rng.random() < 0.5
    liars = _liars(seed, nodes if bootstrap_trains else nodes - 1, name) if has_liar or name == "liars" else 0
    traits = _traits(rng, seed, total, range(nodes - liars, nodes), bootstrap_trains=bootstrap_trains)
    if name == "lines":
        traits = tuple(replace(one, step_s=one.step_s / 5, gather_s=0.02, is_fast=True) for one in traits)
    if name == "runaways":
        traits = _with_runaways(random.Random(f"{seed}/runaways"), traits, nodes)
    scenario = Scenario(
        seed=seed,
        name=name or "mixed",
        nodes=nodes,
        minutes=minutes,
        codec=codec,
        manifest=manifest,
        phi=phi,
        traits=traits,
        paths=_paths(rng, total, 0.15 if name == "lines" else None),
        storms=_storms(rng, minutes * 60.0, name),
        liars=liars,
        links_max=LINKS_WANTED + 2 if name == "cramped" else LINKS_MAX,
        chunk_bytes=_chunk_bytes(random.Random(f"{seed}/chunks"), name, manifest),
    )
    if name in (None, "mixed", "parts") and rng.random() < CRAMPED:
        return replace(scenario, links_max=LINKS_WANTED + 2)
    return scenario


def _liars(seed: int, trainers: int, name: str | None) -> int:
    """How many nodes lie: fewer than half of those that train; at least two in "liars".

    In "liars" they are fewer than half even while one of the others has lost its disk, and so says nothing
    about the past.
    """
    if name != "liars":
        return int(trainers > 2)
    return random.Random(f"{seed}/liars").randrange(2, min(LIARS_MAX, (trainers - 2) // 2) + 1)


def _chunk_bytes(rng: random.Random, name: str | None, manifest: Manifest) -> int:
    """The size of a payload's chunks. Where there are several, the largest fragment's payload has 4 to 12."""
    if name != "parts" and rng.random() >= PARTED:
        return PAYLOAD_CHUNK_BYTES_MIN
    return -(-manifest.payload_max // rng.randrange(4, 13))


TURNS = 0.2
"""The share of mixed scenarios in which members take turns."""

BLOCKS = 40
"""Of the data: a few rounds of claims make an epoch."""


def _manifest(
    rng: random.Random, seed: int, codec: str, fragments: int, name: str | None
) -> tuple[Manifest, Ints]:
    """The manifest and Phi_0. How long a round takes does not depend on the number of fragments."""
    early = name in FORGETFUL or name == "liars"  # liars lie about the past only once some of it is sealed
    numel = sum(spec.numel for spec in _TENSORS)
    phi = np.random.default_rng(rng.randrange(2**32)).integers(-(2**24), 2**24, numel, dtype=np.int32)
    by_steps = rng.random() < 0.6 or name == "runaways"
    is_fixed = name != "lines"
    values = {
        "swarm": {"name": "simulated", "created": CREATED},
        "task": {"name": "none"},
        "outer": {
            "codecs": [{"name": name} for name in (LADDER if codec == "int4" else (codec,))],
            "clip": rng.choice((0.0, 3.0)),
            "weight_cap": rng.choice((0.0, 4.0)),
        },
        "pace": {
            "every_steps": is_fixed * fragments * rng.randrange(12, 21) if by_steps else 0,
            "every_seconds": 0.0 if by_steps else is_fixed * fragments * rng.uniform(16.5, 30.0),
            "min_round_seconds": MIN_ROUND_S,
            "contributors": _contributors(random.Random(f"{seed}/turns"), name),
        },
        "history": {
            "seal_after": 2 if early else rng.randrange(2, 7),
            "snapshot_every": 2 if early else rng.randrange(2, 7),
            "retain": _retain(rng, seed, name),
        },
        "data": {"samples": 100 * BLOCKS, "blocks": BLOCKS},
        "layout": {"fragments": fragments, "tensors": _TENSORS},
        "admission": admission("invited", _owner(seed)) if name == "invited" else {},
        "genesis": {"digest": root_of(chunk_hashes(phi.tobytes())).hex()},
    }
    return from_values(values, "the simulator"), phi


def _contributors(rng: random.Random, name: str | None) -> int:
    return rng.choice((3, 4, 6)) if name == "turns" or (name is None and rng.random() < TURNS) else 64


def _retain(rng: random.Random, seed: int, name: str | None) -> int:
    if name == "runaways":  # where all rounds are retained, nobody is given up
        return random.Random(f"{seed}/retain").choice((4, 4, 0))
    return 4 if name in FORGETFUL else rng.choice((0, RETAIN, RETAIN + 5)) * (8 if name == "lines" else 1)


def _owner(seed: int) -> Identity:
    return Identity.from_seed(sha256(f"{seed}/owner".encode()).digest())


def _traits(
    rng: random.Random, seed: int, total: int, liars: range, *, bootstrap_trains: bool
) -> tuple[Traits, ...]:
    behind_routers = rng.choice((0.0, 0.0, 0.25))
    return tuple(
        Traits(
            index=index,
            identity=Identity.from_seed(sha256(f"{seed}/key {index}".encode()).digest()),
            address=f"10.0.0.{index}:7700",
            listens=index < 2 or rng.random() >= behind_routers or index in liars[1:],
            trains=index > 0 or bootstrap_trains,
            step_s=1.0 * 4.0 ** rng.random(),
            batch_tokens=rng.randrange(1, 64),
            sync_s=rng.uniform(0.001, 0.05),
            gather_s=rng.choice((0.2, 1.0, 2.0)),
            clock_start=rng.uniform(1.0, 1e6),
            clock_drift=rng.uniform(-2e-4, 2e-4),
            unix_error_s=rng.uniform(-30.0, 30.0),
            is_liar=index in liars,
        )
        for index in range(total)
    )


def _with_runaways(rng: random.Random, traits: tuple[Traits, ...], nodes: int) -> tuple[Traits, ...]:
    """Make one node many times as fast; of more than seven, two perhaps."""
    trainers = [one.index for one in traits[:nodes] if one.trains]
    fast = rng.sample(trainers, rng.choice((1, 2)) if nodes > 7 else 1)
    return tuple(
        replace(one, step_s=0.5 / rng.uniform(1.0, 8.0), listens=True, is_fast=True)
        if one.index in fast
        else one
        for one in traits
    )


def _paths(rng: random.Random, total: int, far: float | None = None) -> dict[tuple[int, int], Path]:
    """Latency and uplink by host, as in one building, one country or worldwide; jitter and loss by path."""
    far = rng.choice((0.001, 0.02, 0.15)) if far is None else far
    places = [far * rng.random() for _ in range(total)]
    uplinks = [10 ** rng.uniform(5.0, 7.0) for _ in range(total)]
    loss = rng.choice((0.0, 0.001, 0.02))
    return {
        (a, b): Path(0.0002 + places[a] + places[b], far * rng.random(), uplinks[a], loss * rng.random())
        for a in range(total)
        for b in range(total)
    }


def _storms(rng: random.Random, seconds: float, name: str | None) -> tuple[Storm, ...]:
    if name == "calm":
        return ()
    if name is not None and name not in (*STORMS, *OTHERS):
        raise ValueError(f"unknown scenario {name!r}; choose one of {', '.join((*OTHERS, *STORMS))}")
    found: list[Storm] = []
    begin = WARM_UP_S
    while True:
        end = begin + rng.choice((rng.uniform(8, 40), rng.uniform(40, 120), rng.uniform(100, 180)))
        if name == "lines":
            names: tuple[str, ...] = ("lines",)
        elif name in FORGETFUL:
            names = (FORGETFUL[name],)
            end = begin + rng.uniform(120.0, 180.0)
        elif name == "liars":
            names = (rng.choice(sorted(AMBUSHES)),)
        elif name in STORMS:
            names = (name,)
        elif rng.random() < 0.3:
            names = tuple(rng.sample([kind for kind in STORMS if kind not in UNMIXED], 2))
        else:
            names = (rng.choice(tuple(STORMS)),)
        calm = end + (ROUGH_CALM_S if "rough" in names else CALM_S)
        calm += _settling_s(name, len(found) + 1)
        if calm + REST_S > seconds:
            return tuple(found)
        found.append(Storm(names, begin, end))
        begin = calm


def _settling_s(name: str | None, storms: int) -> float:
    """What is added to CONVERGENCE_S after the last of so many storms.

    A storm may leave a node, cut off or alone with liars, with another history than most, until it has heard
    from those for long enough: for twice as long each time that it has given one up before. Liars hardly ever
    find the same victim three times.
    """
    if name == "liars":
        return SETTLED_S
    return SETTLED_S * 2.0 ** min(max(0, storms - 2), FORK_DOUBLINGS_MAX - 1) if name in FORGETFUL else 0.0
