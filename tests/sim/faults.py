"""Storms: what can go wrong, as schedules of actions between two moments.

A storm does not clean up after itself; everything is healed when the calm after it begins. Each kind is named
after what it stresses: splits of all shapes and FoundationDB's swizzle (links closed one by one and reopened
in another order), crashes with and without the page cache, lost disks, stopped and starved processes,
trainers that hang, machines that sleep, clocks that are set wrong, a node that is stuck while the others
restart, members that come and go, and a network that does what TCP never would.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.weather import SHAPES, Mischief, between

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

Brew = Callable[["World", float, float, random.Random], None]


def _split(shape: str) -> Brew:
    def brew(world: "World", begin: float, end: float, rng: random.Random) -> None:
        pairs = SHAPES[shape](world.hosts(), rng)
        world.loop.at(begin, world.close, shape, pairs)

    return brew


def _swizzle(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """A random subset of hosts is cut off one by one, and comes back in another order."""
    hosts = world.hosts()
    chosen = rng.sample(hosts, rng.randrange(2, len(hosts) + 1))
    half = (end - begin) / 2
    for order, act in ((chosen, world.close), (rng.sample(chosen, len(chosen)), world.reopen)):
        for place, host in enumerate(order):
            time = begin + half * (place + rng.random()) / len(order)
            args = (between([host], hosts),) if act == world.close else ()
            world.loop.at(time, act, f"swizzle {host}", *args)
        begin += half


def _flapping(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """Splits of random shapes that last seconds."""
    time, number = begin, 0
    while time < end:
        shape = SHAPES[rng.choice(sorted(SHAPES))]
        number += 1
        world.loop.at(time, world.close, f"flap {number}", shape(world.hosts(), rng))
        time += rng.uniform(1.0, 12.0)
        world.loop.at(min(time, end), world.reopen, f"flap {number}")
        time += rng.uniform(0.5, 8.0)


def _slow(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """Long latencies and much loss."""
    world.loop.at(begin, world.worsen, rng.uniform(2.0, 10.0), rng.uniform(0.05, 0.3))


def _lines(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """Lines that are ten times as slow now, and as fast as before then, again and again."""
    time, slowness = begin, 10.0
    while time < end:
        world.loop.at(time, world.worsen, slowness, 0.0)
        time, slowness = time + rng.uniform(10.0, 60.0), 11.0 - slowness


def _rough(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """Messages dropped, doubled, swapped and damaged, as no stream would do."""
    mischief = Mischief(
        drop=rng.uniform(0.0, 0.2),
        double=rng.uniform(0.0, 0.1),
        swap=rng.uniform(0.0, 0.2),
        damage=rng.uniform(0.0, 0.01),
    )
    world.loop.at(begin, world.make_mischief, mischief)
    if rng.random() < 0.5:
        world.loop.at(begin, world.close, "rough", SHAPES["oneway"](world.hosts(), rng))


def _each(kill: Callable[["World", "Node"], None], seconds: tuple[float, float]) -> Brew:
    """Some nodes fail, each at its own moment, and come back after a while."""

    def brew(world: "World", begin: float, end: float, rng: random.Random) -> None:
        hosts = world.hosts()

        def strike(node: "Node") -> None:
            if node.running:
                kill(world, node)

        for host in rng.sample(hosts, rng.randrange(1, max(2, len(hosts) // 2))):
            time = rng.uniform(begin, end)
            world.loop.at(time, strike, world.nodes[host])
            world.loop.at(min(end, time + rng.uniform(*seconds)), world.revive, world.nodes[host])

    return brew


def _lose_disk(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """A node loses its disk and comes back with its key, soon or after a while.

    Its last records have reached the others by then. If they had not (a partition at the same time), no
    protocol could tell it which rounds it had signed. So this storm is not mixed with others. Not all nodes
    lose their disks either: nobody would know the model any more.
    """
    hosts = world.hosts()
    for host in rng.sample(hosts, min(len(hosts) - 1, 1 + rng.randrange(2))):
        time = rng.uniform(begin, max(begin, end - 20.0))
        world.loop.at(time, world.lose_disk, world.nodes[host])
        absence = rng.choice((rng.uniform(2.0, 6.0), rng.uniform(6.0, 40.0)))
        world.loop.at(time + absence, world.revive, world.nodes[host])


def _stops(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """SIGSTOP, for one to 40 seconds."""
    for _ in range(rng.randrange(1, 8)):
        node = world.nodes[rng.choice(world.hosts())]
        time = rng.uniform(begin, end)
        world.loop.at(time, world.stop, node)
        world.loop.at(
            min(end, time + rng.choice((rng.uniform(1, 8), rng.uniform(8, 40)))), world.resume, node
        )


def _starved(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """Event loops that get their turn late, again and again."""
    hosts = world.hosts()
    for host in rng.sample(hosts, min(len(hosts), rng.randrange(1, 4))):
        time = begin
        while time < end:
            length = rng.uniform(0.1, 2.5)
            world.loop.at(time, world.stop, world.nodes[host])
            world.loop.at(min(time + length, end), world.resume, world.nodes[host])
            time += length + rng.uniform(0.1, 3.0)


def _away(leave: Callable[["World", "Node"], None], come_back: Callable[["World", "Node"], None]) -> Brew:
    """Some nodes do not train for a while: each for its own while, or all but one for the whole storm.

    That one (`World.watch`) is always the same node. It must never have to wait for the others, and its work
    must not be lost.
    """

    def brew(world: "World", begin: float, end: float, rng: random.Random) -> None:
        hosts = [host for host in world.hosts() if host != world.watch]
        together = rng.random() < 0.5
        for host in hosts if together else rng.sample(hosts, rng.randrange(1, len(hosts) + 1)):
            node = world.nodes[host]
            first, last = sorted(rng.uniform(begin, end) for _ in range(2))
            world.loop.at(begin + rng.random() if together else first, leave, world, node)
            world.loop.at(end - rng.random() if together else last, come_back, world, node)

    return brew


def _clocks(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """Clocks are set wrong, by minutes to years, some again and again; some nodes restart with that."""
    hosts = world.hosts()
    for host in rng.sample(hosts, rng.randrange(1, len(hosts) + 1)):
        node = world.nodes[host]
        for _ in range(rng.choice((1, 1, 3))):
            time = rng.uniform(begin, end)
            error_s = rng.choice((-1.0, 1.0)) * rng.choice((300.0, 3_600.0, 86_400.0, 50 * 365 * 86_400.0))
            world.loop.at(time, world.set_clock, node, error_s * rng.uniform(0.5, 1.0))
            if rng.random() < 0.25:
                world.loop.at(time, world.crash, node, True)
                world.loop.at(min(end, time + rng.uniform(1.0, 30.0)), world.revive, node)


def _stuck(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """One node trains on but cannot publish; late in the storm all others but one (`World.watch`) restart."""
    stuck, *others = rng.sample(
        [host for host in world.hosts() if host != world.watch], len(world.hosts()) - 1
    )
    world.loop.at(begin, world.block, world.nodes[stuck])
    for host in others:
        time = end - rng.uniform(5.0, 15.0)
        world.loop.at(time, world.crash, world.nodes[host], True)
        world.loop.at(time + rng.uniform(1.0, 4.0), world.revive, world.nodes[host])


def _churn(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """Members leave, for ever or not, and new ones join."""
    hosts = world.hosts()
    for host in rng.sample(hosts, min(len(hosts), rng.randrange(1, 4))):
        time = rng.uniform(begin, end)
        world.loop.at(time, world.leave, world.nodes[host])
        if rng.random() < 0.5:
            world.loop.at(min(end, time + rng.uniform(1.0, 30.0)), world.come_back, world.nodes[host])
    for _ in range(rng.randrange(0, 3)):
        world.loop.at(rng.uniform(begin, end), world.join)


def _liars_only(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """One node reaches liars only; it may restart there, with its disk or without."""
    victim = rng.choice(world.honest())
    world.surround("liars only", begin, [victim])
    _strike(world, victim, begin + rng.uniform(1.0, 5.0), rng, ("no harm", "restart", "disk"))


def _liars_mostly(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """A split in which liars are the majority of one side."""
    few = rng.sample(world.honest(), max(1, len(world.liars()) - 1))
    world.surround("liars mostly", begin, few)
    if rng.random() < 0.5:
        _strike(world, rng.choice(few), rng.uniform(begin, end - 10.0), rng, ("restart",))


def _liars_first(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """A restarted node knows addresses of liars only; one that joins, those of a liar and an honest node."""
    liar = world.nodes[rng.choice(world.liars()[1:])].traits.address  # the first may not listen
    other = rng.choice([world.nodes[host] for host in world.honest() if world.nodes[host].traits.listens])
    victim = rng.choice([host for host in world.honest() if host != other.index])
    told = (liar, other.traits.address) if rng.random() < 0.5 else (other.traits.address, liar)
    world.loop.at(rng.uniform(begin, end), world.join, told)
    time = rng.uniform(begin, end - 10.0)
    if rng.random() < 0.5:
        world.told[victim] = told
        _strike(world, victim, time, rng, ("disk",))
    else:
        world.told[victim] = tuple(world.nodes[host].traits.address for host in world.liars())
        _strike(
            world, victim, time, rng, ("kill",)
        )  # a power cut might cost it its model, and it would have to join


def _strike(world: "World", host: int, time: float, rng: random.Random, ways: tuple[str, ...]) -> None:
    """Make a node restart, in one of the given ways."""
    way, node = rng.choice(ways), world.nodes[host]
    if way == "kill":
        world.loop.at(time, world.crash, node, True)
    elif way != "no harm":
        world.loop.at(time, world.lose_disk if way == "disk" else world.cut_power, node)
    if way != "no harm":
        world.loop.at(time + rng.choice((rng.uniform(1.0, 4.0), rng.uniform(4.0, 40.0))), world.revive, node)


def _run_away(world: "World", begin: float, end: float, rng: random.Random) -> None:
    """The fast nodes are cut off, each by itself, or together and with another one perhaps."""
    hosts = world.hosts()
    fast = [host for host in hosts if world.nodes[host].traits.is_fast]
    if rng.random() < 0.5:
        for host in fast:
            world.loop.at(begin, world.close, f"runaway {host}", between([host], hosts))
    else:
        slow = rng.sample([host for host in hosts if host not in fast], rng.choice((0, 0, 1)))
        world.loop.at(begin, world.close, "runaways", between(fast + slow, set(hosts) - {*fast, *slow}))


RUNAWAY: dict[str, Brew] = {"runaway": _run_away}
"""The storm in which fast nodes are alone."""

AMBUSHES: dict[str, Brew] = {
    "liars only": _liars_only,
    "liars mostly": _liars_mostly,
    "liars first": _liars_first,
}
"""Storms in which a node meets liars first, or only liars."""

STORMS: dict[str, Brew] = {
    **{shape: _split(shape) for shape in SHAPES},
    "swizzle": _swizzle,
    "flapping": _flapping,
    "slow": _slow,
    "rough": _rough,
    "crashes": _each(lambda world, node: world.crash(node, world.rng.random() < 0.5), (1.0, 60.0)),
    "power": _each(lambda world, node: world.cut_power(node), (5.0, 90.0)),
    "trainers": _each(lambda _, node: node.trainer.die(), (1.0, 30.0)),
    "diskloss": _lose_disk,
    "stops": _stops,
    "starved": _starved,
    "hangs": _away(lambda world, node: world.hang(node), lambda world, node: world.go_on(node)),
    "sleep": _away(
        lambda world, node: world.sleep(node, suspended=world.rng.random() < 0.5),
        lambda world, node: world.wake(node),
    ),
    "clocks": _clocks,
    "stuck": _stuck,
    "churn": _churn,
}
"""Every kind of storm by its name."""

UNMIXED = frozenset({"diskloss"})
"""Storms that are not combined with others."""

LINES: dict[str, Brew] = {"lines": _lines}
"""What happens to a swarm that sets its own pace."""
