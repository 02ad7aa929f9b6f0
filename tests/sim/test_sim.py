"""Many swarms under many storms, and the proof that a seed repeats itself.

`make test` runs as many seeds as BUDGET_CPU_S allows, and says how many; `make sim SEEDS=10000` runs more.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from os import cpu_count
from pathlib import Path
from typing import cast

import pytest

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.effects import Get
from gossamer.protocol.membership.links import Links
from gossamer.protocol.records import Delta
from tests.sim.faults import STORMS
from tests.sim.liar import Liar
from tests.sim.network import End
from tests.sim.node import Node
from tests.sim.scenario import FORGETFUL, Storm, choose
from tests.sim.seeds import Job, run, run_all
from tests.sim.transfers import Transfers
from tests.sim.weather import between
from tests.sim.world import World, simulate

ROOT = Path(__file__).parents[2]

BUDGET_CPU_S = 60.0
"""Half a minute on two processors: all tests together should take less than four minutes."""

LARGE = [Job(seed, 16, 10.0, None) for seed in range(1, 201)]
LARGE_MIN = 5
"""How many are run however slow the machine is."""

KINDS = ("calm", "liar", "lineages", *STORMS, "cramped", "parts", "parts", "nights")
EACH = [Job(1000 + number, 8, 6.0 if name in FORGETFUL else 5.0, name) for number, name in enumerate(KINDS)]
EACH += [Job(1028, 8, 6.0, "liars"), Job(1029, 8, 8.0, "runaways"), Job(1030, 8, 6.0, "invited")]
EACH += [Job(700_100, 4, 17.0, "runaways")]
"""Every kind of storm at least once, and one in which a node gives up three histories within the hour."""


@pytest.mark.timeout(1800)
def test_swarms_keep_their_promises(record_property: Callable[[str, object], None]) -> None:
    spent_s, large, failures = 0.0, 0, []

    def affordable() -> Iterator[Job]:
        yield from (*EACH, *LARGE[:LARGE_MIN])
        yield from takewhile(lambda _: spent_s < BUDGET_CPU_S, LARGE[LARGE_MIN:])

    for job, result in run_all(affordable(), cpu_count() or 1):
        spent_s += result.cpu_s
        large += job in LARGE
        if result.failure:
            failures.append(f"{result.failure}\n  replay: {job.replay}")
    record_property("said", f"{large} large swarms were simulated, and {len(EACH)} smaller ones")
    assert not failures, f"{len(failures)} seeds failed:\n" + "\n".join(failures)


def test_a_seed_repeats_itself_in_another_process() -> None:
    """Another process has a different salt for hashes of bytes: the order of sets must not show."""
    job = Job(42, 8, 4.0, None)
    here = run(job)
    assert here.failure is None
    assert run(job).trace == here.trace
    for salt in ("1", "2"):
        command = [sys.executable, *"-m tests.sim --seed 42 --nodes 8 --minutes 4 --trace".split()]
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        told = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout
        assert f"trace {here.trace}" in told


def test_a_violation_is_reported_with_its_replay() -> None:
    scenario = choose(3, 4, 1.5, "calm")
    world = World(scenario)
    world.loop.at(30.0, world.audit.fail, None, "something is wrong")
    result = world.run()
    assert result.failure == "at 30.000 s: something is wrong"
    assert Job(3, 4, 1.5, "calm").replay.endswith("--seed 3 --nodes 4 --minutes 1.5 --scenario calm --trace")


@pytest.mark.parametrize("nodes", [7, 12])
def test_fewer_than_half_lie_though_one_of_the_others_is_lost(nodes: int) -> None:
    for seed in range(9):
        scenario = choose(seed, nodes, 2.0, "liars")
        trainers = sum(traits.trains for traits in scenario.traits[:nodes])
        assert 1 < scenario.liars < (trainers - 1) / 2
    with pytest.raises(ValueError, match="seven nodes at least"):
        choose(1, 6, 2.0, "liars")


@pytest.mark.parametrize(("seed", "nodes"), [(537, 3), (521, 5)])
def test_what_died_with_its_disk_before_anybody_had_heard_of_it_is_signed_again(
    seed: int, nodes: int
) -> None:
    assert run(Job(seed, nodes, 9.0, "diskloss")).failure is None


def test_two_deltas_of_one_round_are_found_out_once_somebody_has_the_first() -> None:
    world = World(choose(1, 4, 2.0, "calm"))
    signed = world.audit.spoken

    def again(node: Node, delta: Delta) -> None:
        signed(node, delta)
        node.soon(5.0, signed, node, replace(delta, record_id=bytes(32)))

    world.audit.spoken = again  # type: ignore[method-assign]
    assert "signed two deltas for round" in (world.run().failure or "")


def test_who_leaves_with_a_wrong_clock_and_comes_back_as_the_storm_ends_has_a_right_one() -> None:
    storm = Storm((), 60.0, 90.0)
    world = World(replace(choose(1, 6, 5.0, "calm"), storms=(storm,)))
    world.loop.at(70.0, lambda: world.set_clock(world.nodes[3], -86_400.0))
    world.loop.at(75.0, lambda: world.leave(world.nodes[3]))
    world.loop.at(90.5, lambda: world.come_back(world.nodes[3]))
    assert world.run().failure is None


def test_a_liar_gets_round_to_all_its_deeds() -> None:
    lines: list[str] = []
    result = simulate(choose(5, 6, 5.0, "liar"), lines.append)
    assert result.failure is None
    done = {line.rsplit(" ", 1)[-1] for line in lines if "does wrong" in line}
    assert len(done) >= 6


def test_a_founder_that_lost_its_disk_and_is_told_of_nobody_comes_back_to_its_swarm() -> None:
    """It begins its own history, of rounds that the others have closed: the lighter of two lineages."""
    lines: list[str] = []
    world = World(replace(choose(1, 6, 6.0, "lineages"), storms=()), lines.append)
    told = world._bootstrap
    world._bootstrap = lambda node: () if node.index == 0 else told(node)  # type: ignore[method-assign]
    world.loop.at(200.0, lambda: world.lose_disk(world.nodes[0]))
    world.loop.at(210.0, lambda: world.revive(world.nodes[0]))
    assert world.run().failure is None
    assert any("n0: A FORK" in line for line in lines)
    assert not any("both are void" in line for line in lines), "it signed no round again"


def _world(
    lines: list[str],
    nodes: int,
    minutes: float,
    step_s: Callable[[int], float],
    pace: dict[str, float],
    trains_from: int = 0,
) -> World:
    """A swarm of "lineages" without storms, whose nodes train at speeds that the test chooses."""
    scenario = choose(1, nodes, minutes, "lineages")
    manifest = scenario.manifest
    pace = {"every_steps": 0, "every_seconds": 0.0, **pace}
    manifest = manifest.model_copy(update={"pace": manifest.pace.model_copy(update=pace)})
    traits = tuple(
        replace(node, trains=node.index >= trains_from, listens=True, step_s=step_s(node.index))
        for node in scenario.traits
    )
    return World(replace(scenario, storms=(), traits=traits, manifest=manifest), lines.append)


def _one_runs_ahead_alone(lines: list[str], minutes: float) -> World:
    """One node, ten times as fast, is cut off. After 400 s it has closed, by its own clock, the rounds that
    the others are at."""
    world = _world(lines, 3, minutes, lambda index: 5.0 if index else 0.5, {"every_steps": 16})
    world.loop.at(150.0, world.close, "alone", between([0], [0, 1, 2]))
    world.loop.at(400.0, lambda: world.reopen("alone"))
    return world


def test_who_ran_ahead_alone_for_longer_than_rounds_are_kept_comes_back_to_the_others() -> None:
    lines: list[str] = []
    world = _one_runs_ahead_alone(lines, 12.0)
    standing: list[tuple[int, int]] = []

    def look() -> None:
        fast, slow, _ = world.nodes
        standing.append((fast.core.ledger.floor, slow.core.clock))

    for time in (399.0, 440.0):
        world.loop.at(time, look)
    assert world.run().failure is None
    (floor, clock), (floor_later, clock_later) = standing
    assert floor > clock + 20, "it had closed what the others are at"
    assert floor_later < clock_later < floor, "it is where they are"
    assert sum("n0: A FORK" in line for line in lines) == 1
    assert not any("both are void" in line for line in lines), "it signed no round again"


def test_who_went_back_ends_as_the_others_though_all_stop_long_before_they_are_as_far_as_it_was() -> None:
    """Then all merge what they hold, and no other takes what it signed in rounds so far ahead."""
    lines: list[str] = []
    world = _one_runs_ahead_alone(lines, 8.0)
    assert world.run().failure is None
    assert sum("n0: A FORK" in line for line in lines) == 1
    fast, slow, _ = world.nodes
    assert fast.core.own_last > slow.core.own_last + limits.ROUND_SLACK


def test_who_went_back_and_starts_again_seals_what_the_others_do() -> None:
    """After its restart it is alone for a moment, so that its clock reads its own last round."""
    lines: list[str] = []
    world = _one_runs_ahead_alone(lines, 16.0)
    newest: list[int] = []

    def look() -> None:
        assert world.nodes[0].core.clock < world.nodes[0].core.own_last, "the others have yet to come so far"
        newest.append(max(claim.round for claim in world.nodes[0].core.sealing.claims))
        newest.append(max(claim.round for claim in world.nodes[1].core.sealing.claims))

    world.loop.at(450.0, lambda: world.crash(world.nodes[0], True))
    world.loop.at(455.0, lambda: world.revive(world.nodes[0]))
    world.loop.at(500.0, look)
    assert world.run().failure is None
    assert sum("n0: A FORK" in line for line in lines) == 1
    assert newest[0] == newest[1]


def test_who_gave_its_history_up_took_no_records_until_then() -> None:
    """It gets payloads late, which is no fault in how they spread."""
    assert simulate(choose(5143, 5, 10.0, "lineages")).failure is None


def test_three_that_start_together_keep_what_one_of_them_did_alone() -> None:
    """The other two are the majority of the swarm, and were away for longer than rounds are retained.

    With seed 1 the one comes back without its newest claim, and a fork heals what follows from that.
    """
    lines: list[str] = []
    world = World(replace(choose(2, 3, 9.0, "lineages"), storms=()), lines.append)
    alone, *away = range(3)
    for host in away:
        world.loop.at(100.0, lambda host=host: world.cut_power(world.nodes[host]))
    world.loop.at(300.0, lambda: world.cut_power(world.nodes[alone]))
    for host in (*away, alone):
        world.loop.at(302.0 + host, lambda host=host: world.revive(world.nodes[host]))
    assert world.run().failure is None
    assert {line.split()[1] for line in lines if "we were away since round" in line} == {"n1:", "n2:"}
    assert not any("A FORK" in line for line in lines)


def test_those_whose_network_comes_later_than_they_do_keep_what_went_on_without_them() -> None:
    """After a power cut. They are the majority, and had no time to publish before they heard of the other."""
    fragments = choose(1, 3, 40.0, "lineages").manifest.layout.fragments
    lines: list[str] = []
    world = _world(lines, 3, 40.0, lambda index: 1.0, {"every_seconds": 100.0 * fragments})
    for host in (1, 2):
        layer = f"no network at {host}"
        world.loop.at(600.0, lambda host=host: world.cut_power(world.nodes[host]))
        world.loop.at(1699.0, world.close, layer, between([host], [0, 1, 2]))
        world.loop.at(1700.0 + host, lambda host=host: world.revive(world.nodes[host]))
        world.loop.at(1770.0, world.reopen, layer)
    assert world.run().failure is None
    assert {line.split()[1] for line in lines if "we were away since round" in line} == {"n1:", "n2:"}
    assert not any("A FORK" in line for line in lines)


def _two_come_back_to_a_bootstrap_peer(lines: list[str]) -> World:
    """Of three that train, two crash. The last goes on far beyond what is retained, and leaves. Then the two
    come back, the majority of all that train, to the bootstrap peer, which has what the last one did."""
    world = _world(lines, 4, 10.0, lambda n: 0.1 if n == 3 else 1.0, {"every_steps": 8}, trains_from=1)
    for host in (1, 2):
        world.loop.at(100.0, lambda host=host: world.crash(world.nodes[host], True))
        world.loop.at(360.0 + host, lambda host=host: world.revive(world.nodes[host]))
    world.loop.at(300.0, lambda last=3: world.nodes[last].leave())
    return world


@pytest.mark.parametrize("named", [True, False])
def test_those_who_come_back_to_a_bootstrap_peer_go_on_where_the_swarm_was(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not it is at a join address: the signed records of who went on show how far that was."""
    if not named:
        monkeypatch.setattr(Links, "given_ids", lambda links: set())
    lines: list[str] = []
    world = _two_come_back_to_a_bootstrap_peer(lines)
    assert world.run().failure is None
    assert {line.split()[1] for line in lines if "we were away since round" in line} == {"n1:", "n2:"}
    assert not any("A FORK" in line for line in lines)
    went_on = world.nodes[3].traits.identity.node_id
    assert all(world.nodes[n].core.ledger.last_round(went_on) > 300 for n in (0, 1, 2)), "nothing is lost"


def test_a_liar_that_hands_nothing_out_keeps_nobody_in_a_history_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It signs for each round, and claims all the time to hold the payloads. So some payload that might
    explain why claims differ is always still to come."""
    monkeypatch.setattr(limits, "FORK_MINORITY_PATIENCE_S", 60.0)
    get, asked = Transfers.get, Transfers.asked

    def get_in_vain(self: Transfers, end: End | None, effect: Get) -> None:
        if end is None or not cast(Node, end.peer.party).traits.is_liar:
            get(self, end, effect)

    def asked_in_vain(self: Transfers, end: End | None, blob: bytes) -> None:
        if not self._node.traits.is_liar:
            asked(self, end, blob)

    monkeypatch.setattr(Transfers, "get", get_in_vain)
    monkeypatch.setattr(Transfers, "asked", asked_in_vain)
    scenario = choose(1, 6, 8.0, "lineages")
    traits = [replace(node, is_liar=node.index == 5) for node in scenario.traits]
    lines: list[str] = []
    world = World(replace(scenario, storms=(), traits=tuple(traits)), lines.append)
    told = world._bootstrap
    world._bootstrap = lambda node: () if node.index == 0 else told(node)  # type: ignore[method-assign]
    withheld: dict[int, Delta] = {}

    def sign() -> None:
        node = world.nodes[5]
        liar = Liar(node, scenario.seconds)
        world.audit.liars.add(node.traits.identity.node_id)
        for round_ in range(max(1, node.core.clock - 3), node.core.clock + 2):
            if round_ not in withheld:
                withheld[round_] = liar._sign(liar._body(round_, liar._nonsense(round_)))
                liar._to_some(msg.Records(((withheld[round_].data, True),)))
        world.loop.after(20.0, sign)

    def insist() -> None:
        for end in list(world.nodes[5].links.values()):
            end.send(msg.encode(msg.Have(tuple(delta.record_id for delta in withheld.values()))))
        world.loop.after(0.3, insist)

    world.loop.at(20.0, sign)
    world.loop.at(200.0, lambda: world.lose_disk(world.nodes[0]))
    world.loop.at(210.0, lambda: world.revive(world.nodes[0]))
    world.loop.at(211.0, insist)
    assert world.run().failure is None
    assert any("n0: A FORK" in line for line in lines)
