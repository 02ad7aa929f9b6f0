"""One simulation from start to end: the nodes, the network between them, and what happens to them."""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from unittest import mock

from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol.access.acl import Role
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import Identity
from tests.protocol.builders import grant, revocation
from tests.sim import memo
from tests.sim.audit import CONTROL_BYTES_PER_S_MAX, Audit
from tests.sim.faults import AMBUSHES, LINES, RUNAWAY, STORMS
from tests.sim.liar import Gang, Liar
from tests.sim.loop import Loop
from tests.sim.network import Network
from tests.sim.node import Node
from tests.sim.scenario import CALM_S, CREATED, REST_S, Scenario, Storm
from tests.sim.stage import Stage
from tests.sim.trace import Trace, Violation
from tests.sim.verdicts import Verdicts
from tests.sim.weather import SHAPES, Mischief, Pair, Weather, between

STARTED_BY_S = 12.0
"""By now all members of the start are there."""

LOOK_S = 2.0

LEFT_MIN = 4
"""Nobody is revoked where no more members than these would be left."""

HEARING_S = 15.0
"""For this long after a storm, a node that was alone with liars may still go by what they have said."""

SETTLED_MAX_S = 960.0
"""How long a difference of histories may last at most, see `limits.FORK_DOUBLINGS_MAX`."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from scanning a world that has few cycles and is freed as a whole."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one seed, in a form that can be sent between processes."""

    seed: int
    about: str
    failure: str | None
    trace: str
    """The trace's hash: equal for equal seeds."""
    cpu_s: float
    virtual_s: float
    events: int
    rounds: int
    deltas: int
    recoveries: tuple[tuple[str, float], ...]
    """Each storm, and the seconds that convergence took after it."""
    control_bytes_per_s: float
    """Bytes per second that an average node sends besides payloads."""
    wakes_per_s: float
    """Wakes per second of the busiest node in its busiest seconds."""
    damaged_refused: int


class World:
    """A swarm under one scenario. Storms act on it through its methods."""

    def __init__(self, scenario: Scenario, show: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.loop = Loop()
        self.trace = Trace(show)
        self.weather = Weather()
        self.net = Network(self.loop, self.weather, scenario.paths, f"{scenario.seed}/network")
        self.audit = Audit(self.loop, scenario.manifest.swarm_id)
        encoder = memo.Encoder(self.trace)
        self.remembered = memo.remembered(encoder)
        self.stage = Stage(
            seed=scenario.seed,
            loop=self.loop,
            net=self.net,
            trace=self.trace,
            audit=self.audit,
            manifest=scenario.manifest,
            layout=scenario.manifest.plan(),
            phi=scenario.phi,
            unix_start=CREATED + 3600.0,
            encode=encoder,
            merge_round=memo.MergeMemo(),
        )
        self.rng: random.Random = self.stage.dice("world")
        self.verdicts = Verdicts(self)
        self.nodes: list[Node] = []
        self.lost_disks: set[int] = set()
        self.revoked: set[int] = set()
        """Indices of the members that an owner has revoked, whether or not they know."""
        self.told: dict[int, tuple[str, ...]] = {}
        """Join addresses that a storm has given some nodes, by index."""
        self.fine_since = 0.0
        """Since when all paths have worked as they should, so that all live nodes can talk; infinite while
        they do not."""

    # -- the run

    def run(self) -> Result:
        """Play the scenario to its end, or to the first violation."""
        begun = time.process_time()
        failure = None
        links = mock.patch.object(limits, "LINKS_MAX", self.scenario.links_max)
        chunks = mock.patch.object(limits, "PAYLOAD_CHUNK_BYTES_MIN", self.scenario.chunk_bytes)
        with self.remembered, no_collections(), links, chunks:
            try:
                self._play()
            except (Violation, GossamerError) as error:
                failure = str(error) or type(error).__name__
            except Exception as error:  # the core must not raise anything, whatever it is fed
                if self.trace.is_shown:
                    raise
                failure = f"at {self.loop.now:.3f} s: {type(error).__name__}: {error}"
        return self._result(failure, time.process_time() - begun)

    def _play(self) -> None:
        self.say(self.scenario.describe())
        self._begin()
        for storm in self.scenario.storms:
            self.loop.at(storm.begin, self._storm_begins, storm)
            self.loop.at(storm.end, self._storm_ends, storm)
        self.loop.at(self.scenario.seconds - REST_S, self._rest)
        self.loop.after(LOOK_S, self._look)
        self.loop.run(self.scenario.seconds)
        if self.scenario.is_forgetful:
            self._settle()
        self.verdicts.finish()
        if self.net.dropped:
            self.audit.fail(None, f"{self.net.dropped} messages did not fit into a link's queue")
        if self._control_bytes_per_s() > CONTROL_BYTES_PER_S_MAX:
            self.audit.fail(None, f"{self._control_bytes_per_s():.0f} bytes of control a second and node")

    def _settle(self) -> None:
        """Run until all agree: a node that gave up several histories waits long before the next."""
        while not self.verdicts.are_at_one and self.loop.now < self.scenario.seconds + SETTLED_MAX_S:
            self.loop.run(self.loop.now + LOOK_S)

    def _begin(self) -> None:
        genesis = self.stage.genesis_chunks()
        for _ in range(self.scenario.nodes):
            node = self._add_node()
            if node.index == 0 or self.rng.random() < 0.5:
                for blob, data in genesis.items():
                    node.disk.put(blob, data, 0.0, durable=True)
            self.loop.at(0.0 if node.index == 0 else self.rng.uniform(0.1, 8.0), self._start, node)
        liars = [self.nodes[host] for host in self.liars()]
        self.audit.liars.update(liar.traits.identity.node_id for liar in liars)
        quiet_after = self.scenario.seconds - 2 * REST_S
        if self.scenario.name == "liars":
            self.loop.at(15.0, Gang(liars, self._honest_nodes, quiet_after).begin)
        elif liars:
            self.loop.at(15.0, Liar(liars[0], quiet_after).act)
        self.loop.at(STARTED_BY_S, self.verdicts.calm_begins, "the start")

    def _look(self) -> None:
        for node in self.nodes:
            if node.running:
                self.audit.check_bounds(node, LOOK_S)
        self.verdicts.check_beliefs()
        self.loop.after(LOOK_S, self._look)

    def _rest(self) -> None:
        self.say("all trainers rest")
        self._calm_ends()
        for node in self.nodes:
            node.trainer.resting = True

    def _control_bytes_per_s(self) -> float:
        return sum(self.audit.bytes_by_kind) / max(1.0, self.loop.now) / self.scenario.nodes

    def _result(self, failure: str | None, cpu_s: float) -> Result:
        cores = [node.core for node in self.nodes if node.running and not node.traits.is_liar]
        return Result(
            seed=self.scenario.seed,
            about=self.scenario.describe(),
            failure=failure,
            trace=self.trace.digest,
            cpu_s=cpu_s,
            virtual_s=self.loop.now,
            events=self.loop.events,
            rounds=max((core.own_last for core in cores), default=0),
            deltas=max((len(core.ledger) for core in cores), default=0),
            recoveries=tuple(self.verdicts.recoveries),
            control_bytes_per_s=self._control_bytes_per_s(),
            wakes_per_s=self.audit.wakes_per_s,
            damaged_refused=self.audit.refused,
        )

    def say(self, text: str) -> None:
        """A line of the trace."""
        self.trace.say(self.loop.now, text)

    @property
    def is_fine(self) -> bool:
        return self.fine_since < inf

    @property
    def watch(self) -> int:
        """The index of the node that goes on while others are away."""
        return next(node.index for node in self.nodes if node.traits.trains and not node.traits.is_liar)

    def hosts(self) -> list[int]:
        """Indices of all members that have not gone for ever."""
        return [node.index for node in self.nodes if not node.gone]

    def liars(self) -> list[int]:
        return [host for host in self.hosts() if self.nodes[host].traits.is_liar]

    def honest(self) -> list[int]:
        return [host for host in self.hosts() if not self.nodes[host].traits.is_liar]

    def _honest_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.running and not node.traits.is_liar]

    # -- storms

    def _storm_begins(self, storm: Storm) -> None:
        self._calm_ends()
        self.say(f"storm: {' and '.join(storm.names)} until {storm.end:.0f} s")
        self.audit.surrounded.clear()
        brews = {**STORMS, **AMBUSHES, **RUNAWAY, **LINES}
        if owner := self.scenario.owner:
            time = self.rng.uniform(storm.begin, storm.end + CALM_S / 2)
            self.loop.at(time, self._revoke_somebody, owner)
        for name in storm.names:
            brews[name](self, storm.begin, storm.end, self.stage.dice(f"{name} {storm.begin}"))
        if len(storm.names) == 1 and storm.names[0] in SHAPES:
            self.verdicts.watch_sides(storm.end)

    def _calm_ends(self) -> None:
        self.verdicts.calm_ends()
        for node in self.nodes:
            node.cannot_publish = False

    def _storm_ends(self, storm: Storm) -> None:
        """Heal everything."""
        dropped = self.weather.mischief is not None
        self.weather.clear()
        if not self.is_fine:
            self.fine_since = self.loop.now
        for node in self.nodes:
            if node.gone:
                node.set_clock(node.traits.unix_error_s)  # it may come back as the storm ends
                continue
            if node.index in self.revoked:
                node.expelled()
                continue
            self.revive(node)
            self.resume(node)
            node.trainer.go_on()
            node.set_clock(node.traits.unix_error_s)
        self.net.changed()
        self.loop.after(HEARING_S, self.audit.surrounded.clear)
        name = "+".join(storm.names)
        self.say(f"all is well after {name}")
        storms = 1 + self.scenario.storms.index(storm)
        self.verdicts.calm_begins(name, dropped=dropped, storms=storms)

    def close(self, layer: object, pairs: set[Pair]) -> None:
        """Close directed pairs of hosts."""
        self.say(f"{layer}: {len(pairs)} of {len(self.hosts()) * (len(self.hosts()) - 1)} ways close")
        self.weather.close(layer, pairs)
        self.fine_since = inf
        self.audit.spread.look_away()
        self.net.changed()

    def surround(self, layer: object, time: float, few: list[int]) -> None:
        """From `time` on these nodes reach only each other and liars; liars reach everybody."""
        self.audit.surrounded.update(self.nodes[host] for host in few)
        others = [host for host in self.honest() if host not in few]
        self.loop.at(time, self.close, layer, between(few, others))

    def reopen(self, layer: object) -> None:
        """Take one of the closures away."""
        self.say(f"{layer}: open again")
        self.weather.reopen(layer)
        self.net.changed()

    def worsen(self, slowness: float, loss: float) -> None:
        self.say(f"latencies times {slowness:.1f}, {loss:.0%} lost")
        self.weather.slowness, self.weather.loss = slowness, loss
        self.fine_since = inf

    def make_mischief(self, mischief: Mischief) -> None:
        self.say(f"{mischief}")
        self.weather.mischief = mischief
        self.fine_since = inf
        self.net.changed()

    # -- the owner

    def _grant_to(self, node: Node, owner: Identity) -> bytes:
        role = Role.TRAIN if node.traits.trains else Role.OBSERVE
        return grant(node.traits.identity, self.scenario.manifest, role=role, by=owner)

    def _revoke_somebody(self, owner: Identity) -> None:
        """The owner tells one member that another one is out, or two members, each of another last round.

        Rounds that anybody may close before all have heard of it stay as they are: what is closed cannot be
        voided.
        """
        told = [node for node in self._honest_nodes() if node.responsive and node.index not in self.revoked]
        if len(told) <= LEFT_MIN:
            return
        victim, *judges = self.rng.sample(told, self.rng.choice((2, 3)))
        clock = max(node.core.clock for node in told)
        never_closes = not self.scenario.manifest.history.retain
        self.revoked.add(victim.index)
        self.audit.spread.look_away()  # its links are cut, with whatever is under way on them
        for issued, judge in enumerate(judges):
            last = max(0, clock + self.rng.randrange(-8 if never_closes else -1, 3))
            self.say(f"{victim.name} is revoked after round {last}; {judge.name} is told")
            out, of = victim.traits.identity, self.scenario.manifest
            judge.dispatch(ev.Deliver(revocation(out, of, last_round=last, issued=issued, by=owner)))

    # -- nodes

    def _add_node(self) -> Node:
        node = Node(self.stage, self.scenario.traits[len(self.nodes)])
        if owner := self.scenario.owner:
            node.grant = self._grant_to(node, owner)
        self.nodes.append(node)
        self.net.parties[node.traits.address] = node
        return node

    def _bootstrap(self, node: Node) -> tuple[str, ...]:
        """The join addresses that a node is told: of one or two members that have not gone for ever."""
        if node.index in self.told:
            return self.told[node.index]
        if node.index == 0 and 0 not in self.lost_disks:
            return ()  # it founded the swarm; without its disk it has to be told, like any other
        gone = {n.index for n in self.nodes if n.gone} | self.revoked
        others = [n for n in self.nodes if n is not node and n.traits.listens and n.index not in gone]
        return tuple(other.traits.address for other in others[: 2 if node.index % 3 == 2 else 1])

    def _start(self, node: Node) -> None:
        self.say(f"{node.name} starts")
        node.start(self._bootstrap(node))
        if not node.trainer.running:
            node.trainer.start()
        self.net.changed()

    def join(self, told: tuple[str, ...] = ()) -> None:
        """A new member joins. `told`: its join addresses, if not the usual ones."""
        if len(self.nodes) < len(self.scenario.traits):
            node = self._add_node()
            if told:
                self.told[node.index] = told
            self._start(node)

    def crash(self, node: Node, with_trainer: bool) -> None:
        """Its daemon dies if it runs, and its trainer too if `with_trainer`."""
        if not node.running:
            return
        self.say(f"{node.name} crashes{'' if with_trainer else ', its trainer goes on'}")
        node.crash()
        if with_trainer:
            node.trainer.die()
        self.verdicts.died(node)

    def cut_power(self, node: Node) -> None:
        """Its host loses power: what was not synced may be lost."""
        self.say(f"{node.name} loses power")
        node.power_cut()
        self.net.changed()
        self.verdicts.died(node)

    def lose_disk(self, node: Node) -> None:
        """Its host loses power, and its disk is lost with everything on it."""
        if node.running:
            self.say(f"{node.name} loses its disk")
            self.lost_disks.add(node.index)
            node.power_cut()
            node.disk.wipe()
            self.net.changed()
            self.verdicts.died(node)

    def revive(self, node: Node) -> None:
        """Start a node's daemon or trainer again if it does not run."""
        if node.gone or not node.life:
            return
        if not node.running:
            self._start(node)
        elif not node.trainer.running:
            node.trainer.start()

    def stop(self, node: Node) -> None:
        if node.responsive:
            self.say(f"{node.name} stops")
            node.stop()

    def resume(self, node: Node) -> None:
        if node.running and not node.responsive:
            self.say(f"{node.name} goes on")
            node.resume()

    def hang(self, node: Node) -> None:
        """Its trainer does no more steps, while its daemon goes on."""
        if node.trainer.running:
            self.say(f"{node.name}: its trainer hangs")
            node.trainer.hang()

    def go_on(self, node: Node) -> None:
        """Its trainer does steps again."""
        if node.trainer.hangs:
            self.say(f"{node.name}: its trainer goes on")
            node.trainer.go_on()

    def set_clock(self, node: Node, error_s: float) -> None:
        """Set its wall clock wrong, as people do, and machines without a battery.

        Set forward, it takes this for a sleep: it gives up its links, and rows take longer to spread.
        """
        self.fine_since = inf
        self.say(f"{node.name}: its clock is off by {error_s:.0f} s")
        node.set_clock(error_s)

    def block(self, node: Node) -> None:
        """It trains on, but publishes nothing until the calm after the storm is over: nobody may need it."""
        self.say(f"{node.name}: cannot publish")
        node.cannot_publish = True

    def sleep(self, node: Node, *, suspended: bool) -> None:
        """A whole machine stops. `suspended`: its monotonic clock stops too, and nothing reaches it."""
        if not node.responsive:
            return
        self.say(f"{node.name} {'is suspended' if suspended else 'stops, and its trainer'}")
        node.trainer.hang()
        if suspended:
            node.suspend()
            self.fine_since = inf
            self.weather.close(f"{node.name} sleeps", between([node.index], self.hosts()))
            self.net.changed()
        else:
            node.stop()

    def wake(self, node: Node) -> None:
        """A machine wakes up, and may publish for the round it was at before it hears of a newer one."""
        self.weather.reopen(f"{node.name} sleeps")
        self.net.changed()
        node.trainer.go_on(hastily=self.rng.random() < 0.5)
        self.resume(node)

    def leave(self, node: Node) -> None:
        if node.responsive and self._can_do_without(node):
            self.say(f"{node.name} leaves")
            node.leave()

    def _can_do_without(self, node: Node) -> bool:
        """Whether enough others are there, one can be dialled, and who is new has met one of them."""
        others = [other for other in self.nodes if other.running and other is not node]
        can_be_dialled = any(other.traits.listens for other in others)
        return len(others) > 2 and can_be_dialled and all(other.core.roster.members() for other in others)

    def come_back(self, node: Node) -> None:
        if node.gone:
            node.gone = False
            self._start(node)


def simulate(scenario: Scenario, show: Callable[[str], None] | None = None) -> Result:
    """Run one scenario."""
    return World(scenario, show).run()
