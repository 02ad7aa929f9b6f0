"""Checkers of liveness: what must happen within a time, once nothing is in the way.

*Convergence*: when a storm ends everything is healed. All live honest nodes must then know, fetch and merge
within CONVERGENCE_S whatever any of them knows at that moment, while training goes on. 40 s is what is
promised: a node that believes another one down dials it every 30 s at the latest, needs some time for the
handshake, and compares ledgers with it at once. At the very end no node publishes for REST_S, and all nodes
must be equal to the last bit. After storms that drop messages on open links, as only a full send queue does,
12 s are added: a fetch whose request was lost waits that long.

*Health*: by then no member that is there is believed to be down, and links on which nothing moves are gone.
30 s later every node may train, whatever payload a liar claims to hold.

*Detection*: a member that died, with nothing else wrong, is no longer believed alive 20 s later. Either its
heartbeats stop (11.5 s of silence raise suspicion), or its host resets the links (at once). And no member
that is there, however slow at times, is taken for down over paths that work.

*Progress*: rounds advance in every calm, and on each side of a split from 40 s on, once the members that are
gone have been noticed and no longer hold the clock back. A node that went on while others hung or slept does
not wait for them, and none of its work is lost, however long they were away.
"""

from dataclasses import dataclass, field
from itertools import count
from statistics import median_low
from typing import TYPE_CHECKING

from gossamer.protocol.history.folds import Folding, begin
from gossamer.protocol.identity import short
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.limits import FETCH_PATIENCE_S, FORK_PATIENCE_S, PAYLOAD_PATIENCE_S, ROUND_MAX
from gossamer.protocol.membership.members import Health
from gossamer.protocol.pace import round_clock
from gossamer.protocol.records import Delta
from gossamer.protocol.sampling import EVERY_ROUND, is_drawn
from tests.sim.fold import Rounds, average_from_scratch, from_scratch
from tests.sim.node import Node
from tests.sim.trainer import STEP_VARIES

if TYPE_CHECKING:
    from tests.sim.world import World

CONVERGENCE_S = 40.0
DROPPED_S = FETCH_PATIENCE_S
"""Added to CONVERGENCE_S after storms that drop messages."""

PRESENT_S = 40.0
"""A node that has been there for this long is known to be there, whatever happened before."""

SETTLED_S = 2 * FORK_PATIENCE_S
"""Added to CONVERGENCE_S where a storm outlasts the rounds retained: one side starts again only once a
difference of claims has lasted, for twice as long on a node that has given up a history before. See
`Scenario.settling_s` for nodes that have given up more than one."""

DETECTION_S = 20.0
BURIAL_S = 30.0
NOTICE_S = 40.0
"""After this long each side of a split has noticed which members are gone."""

POLL_S = 0.5
ROUNDS_PER_SIDE = 3
AHEAD_MAX = 2
"""A node opens the round after its clock's, and its clock may be one ahead of others'."""


@dataclass(slots=True)
class _Calm:
    """What was known when a calm began, and which node lacks what of it."""

    name: str
    begin: float
    patience_s: float
    expected: dict[bytes, Delta]
    held: set[bytes]
    lacking: dict[Node, list[Delta]]
    round: int
    closed: int = 0
    """The newest round that any node has closed meanwhile."""
    over: bool = False


@dataclass(slots=True)
class _Side:
    """The nodes that train on one side of a split, and how far they were once they had noticed it."""

    nodes: list[Node]
    lives: list[int]
    round: int
    round_s: float


@dataclass(slots=True)
class Verdicts:
    """Liveness of one world."""

    world: "World"
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    """Name of each storm and how long convergence took after it."""
    _calm: _Calm | None = None
    _sides: list[_Side] = field(default_factory=list)

    def _fail(self, node: Node | None, text: str) -> None:
        self.world.audit.fail(node, text)

    def _live(self) -> list[Node]:
        """The honest nodes that run, without those that an owner has revoked."""
        nodes, revoked = self.world.nodes, self.world.revoked
        return [n for n in nodes if n.running and not n.traits.is_liar and n.index not in revoked]

    # -- calms

    def calm_begins(self, name: str, *, dropped: bool = False, storms: int = 0) -> None:
        """Everything has been healed just now, after so many storms."""
        live = self._live()
        expected = {delta.record_id: delta for node in live for delta in node.core.ledger}
        held = {i for i in expected if any(node.core.holds(i) for node in live)}
        self._calm = calm = _Calm(
            name,
            self.world.loop.now,
            CONVERGENCE_S + DROPPED_S * dropped + self.world.scenario.settling_s(storms),
            expected,
            held,
            {node: list(expected.values()) for node in live},
            self._round(live),
        )
        self.world.loop.after(POLL_S, self._poll, calm)

    def calm_ends(self) -> None:
        """The next storm is about to begin."""
        calm, self._calm = self._calm, None
        self.world.audit.spread.look_away()
        if calm is None:
            return
        if not calm.over:
            self._fail(None, "a calm ended before all had converged")
        training = [node for node in self._live() if node.trainer.begun and not node.trainer.resting]
        if training and self._is_overdue(training, calm.begin) and self._round(training) <= calm.round:
            self._fail(None, f"no round since {calm.begin:.0f} s, though nothing is wrong")
        if calm.name in ("hangs", "sleep"):
            self._check_nobody_waits(training)
        for node in training:
            if node.core.clock < calm.round:
                self._fail(node, f"takes round {node.core.clock} for the swarm's, which was at {calm.round}")

    def _is_overdue(self, nodes: list[Node], since: float) -> bool:
        """Whether a round has been due since then. The window of the node that sets the pace may have begun
        later: it cuts one short to follow a faster node."""
        node, round_s = self._pacemaker(nodes)
        longest = round_s * (1 + STEP_VARIES)
        return self.world.loop.now - max(since, node.trainer.published_at) > longest

    def _check_nobody_waits(self, training: list[Node]) -> None:
        """No node that went on while others were away is far ahead of the swarm now, and waits for it."""
        reached = self._round(training)
        for node in training:
            if node.core.own_last > reached + AHEAD_MAX:
                self._fail(node, f"has published round {node.core.own_last}, and waits: all are at {reached}")

    def _round(self, nodes: list[Node]) -> int:
        """The round of these: a node that ran ahead in a small part of the swarm waits for the others.

        By the turn that most take: who is a round behind or ahead of them may be in another epoch.
        """
        since, turn = self._turn(nodes)
        latest = [(n.core.own_last, n.traits.identity.node_id) for n in nodes if n.traits.trains]
        return round_clock(latest, turn=turn, since=since)

    @staticmethod
    def _turn(nodes: list[Node]) -> tuple[int, int]:
        paces = [node.fold.pace(node.core.clock) for node in nodes if node.fold is not None]
        return median_low([(since, turn) for _, turn, since in paces] or [(0, EVERY_ROUND)])

    def _poll(self, calm: _Calm) -> None:
        if calm is not self._calm or calm.over:
            return
        took = self.world.loop.now - calm.begin
        for node in list(calm.lacking):
            lacking = calm.lacking[node] = [d for d in calm.lacking[node] if self._lacks(node, d, calm)]
            if not lacking or node.index in self.world.revoked:
                del calm.lacking[node]
        if self.world.scenario.is_forgetful:
            self._leave_out_what_was_given_up(calm)
        if not calm.lacking:
            calm.over = True
            self.world.audit.spread.watch()
            self.recoveries.append((calm.name, took))
            self.world.say(f"converged {took:.1f} s after {calm.name}")
            healthy_at = calm.begin + calm.patience_s
            self.world.loop.at(healthy_at, self._check_links, calm)
            self.world.loop.at(healthy_at + PAYLOAD_PATIENCE_S, self._check_ready, calm)
        elif took >= calm.patience_s:
            self._explain(calm)
        else:
            self.world.loop.after(POLL_S, self._poll, calm)

    def _leave_out_what_was_given_up(self, calm: _Calm) -> None:
        """Nobody lacks what no node has any more: who had closed it, or run ahead alone, has gone back."""
        live = self._live()
        kept = {delta.record_id for node in live for delta in node.core.ledger}
        calm.closed = max([calm.closed, *(node.core.ledger.floor for node in live)])
        given_up_to = ROUND_MAX if self.world.scenario.name == "runaways" else calm.closed
        for node, lacking in list(calm.lacking.items()):
            calm.lacking[node] = [d for d in lacking if d.record_id in kept or d.round > given_up_to]
            if not calm.lacking[node]:
                del calm.lacking[node]

    @staticmethod
    def _lacks(node: Node, delta: Delta, calm: _Calm) -> bool:
        ledger, fold = node.core.ledger, node.fold
        if delta.round <= ledger.floor:
            return False  # records of closed rounds are compared at the end
        if delta.record_id not in ledger:
            counts = node.core.acl.counts(delta.author, delta.round)
            return counts and not ledger.is_void(delta)
        if ledger.is_void(delta) or delta.record_id not in calm.held:
            return False
        merged = fold.rounds.get(delta.round, ()) if fold is not None else ()
        is_merged = any(other.record_id == delta.record_id for other in merged)
        return not is_merged and not node.may_wait(delta.round)

    def _explain(self, calm: _Calm) -> None:
        node, lacking = next(iter(calm.lacking.items()))
        unknown = sum(d.record_id not in node.core.ledger for d in lacking)
        unheld = sum(not node.core.holds(d.record_id) for d in lacking)
        rounds = sorted({d.round for d in lacking})
        peers = sorted(end.peer.party.index for end in node.links.values())
        self._fail(
            node,
            f"and {len(calm.lacking) - 1} more have not converged {calm.patience_s:.0f} s after {calm.name}:"
            f" it lacks {len(lacking)} deltas of rounds {rounds[0]}-{rounds[-1]} ({unknown} records, {unheld}"
            f" payloads), the first {short(lacking[0].record_id)}; its links lead to {peers}",
        )

    def _check_ready(self, calm: _Calm) -> None:
        """Every node that was there when the calm began may train by now, whatever is withheld from it."""
        if calm is not self._calm:
            return
        for node in self._live():
            if node.started_at <= calm.begin and not node.ready:
                took = self.world.loop.now - calm.begin
                self._fail(node, f"may not train yet, {took:.0f} s after {calm.name}")

    def _check_links(self, calm: _Calm) -> None:
        """A link on which nothing moves, though its path is open, must have been given up by now."""
        if calm is not self._calm:
            return
        for pipe in self.world.net.stalled:
            here, there = pipe.target.peer, pipe.target
            node = self.world.nodes[here.party.index]
            both = here.is_open and there.is_open and node.responsive and there.party.responsive
            if both and not node.core.membership.local_health:
                self._fail(
                    node,
                    f"keeps a link to {there.party} on which nothing has moved for"
                    f" {self.world.loop.now - pipe.since:.0f} s, {calm.patience_s:.0f} s after {calm.name}",
                )

    # -- splits

    def watch_sides(self, end: float) -> None:
        """A lasting split began: rounds must go on, on each side."""
        self.world.loop.after(NOTICE_S, self._note_sides, end)

    def _note_sides(self, end: float) -> None:
        for hosts in self.world.weather.components(self.world.hosts()):
            nodes = [self.world.nodes[host] for host in hosts]
            nodes = [n for n in nodes if n.running and n.trainer.begun and not n.traits.is_liar]
            if nodes:
                side = _Side(nodes, [n.life for n in nodes], self._round(nodes), self._pacemaker(nodes)[1])
                self._sides.append(side)
                _, turn = self._turn(nodes)
                ids = [node.traits.identity.node_id for node in nodes]
                later = next(n for n in count() if any(is_drawn(i, side.round + 1 + n, turn) for i in ids))
                enough = self.world.loop.now + (ROUNDS_PER_SIDE + later) * (side.round_s + 2.0)
                if enough < end:
                    self.world.loop.at(enough, self._check_side, side)

    def _pacemaker(self, nodes: list[Node]) -> tuple[Node, float]:
        """Which of these sets the pace, and how long a round takes it: the clock leaves out the fastest
        third, and follows the next node."""
        pace = self.world.scenario.manifest.pace
        fragments = self.world.scenario.manifest.layout.fragments
        steps = pace.every_steps
        if pace.is_set_by_swarm:
            steps = max(node.fold.pace(node.core.clock)[0] for node in nodes if node.fold is not None)
        steps = max(1, steps / fragments)
        seconds = {node: max(steps * node.traits.step_s, pace.every_seconds / fragments) for node in nodes}
        node = sorted(nodes, key=seconds.__getitem__)[len(nodes) // 3]
        return node, seconds[node]

    def _check_side(self, side: _Side) -> None:
        undisturbed = all(
            n.responsive
            and n.life == life
            and n.disturbed_at < self.world.loop.now - NOTICE_S
            and n.trainer.begun
            for n, life in zip(side.nodes, side.lives, strict=True)
        )
        if undisturbed and self._round(side.nodes) <= side.round:
            names = ", ".join(node.name for node in side.nodes)
            self._fail(
                None, f"no round on the side of {names} since {side.round} in {ROUNDS_PER_SIDE} rounds' time"
            )

    # -- beliefs

    def check_beliefs(self) -> None:
        """All nodes that are there know it of each other: event loops may be slow."""
        since = self.world.loop.now - PRESENT_S
        if self.world.fine_since > since:
            return
        present = [node for node in self._live() if node.present_since <= since]
        for node in present:
            for other in present:
                member = node.core.roster.get(other.traits.identity.node_id)
                if other is not node and (member is None or member.health in (Health.DOWN, Health.LEFT)):
                    belief = member.health if member else "unheard of"
                    text = f"takes {other.name} for {belief}, which has been there for {PRESENT_S:.0f} s"
                    self._fail(node, text)

    # -- deaths

    def died(self, victim: Node) -> None:
        """A member died: if nothing else is wrong, all others must notice."""
        if self.world.is_fine:
            self.world.loop.after(DETECTION_S, self._check_detected, victim, victim.life, (Health.ALIVE,))
            gone = (Health.ALIVE, Health.SUSPECT)
            self.world.loop.after(BURIAL_S, self._check_detected, victim, victim.life, gone)

    def _check_detected(self, victim: Node, life: int, wrong: tuple[Health, ...]) -> None:
        if not self.world.is_fine or victim.life != life:
            return
        now = self.world.loop.now
        for node in self._live():
            undisturbed = now - max(node.started_at, node.disturbed_at) > 2 * DETECTION_S
            if not undisturbed or not node.responsive or node.core.membership.local_health:
                continue
            member = node.core.roster.get(victim.traits.identity.node_id)
            if member is not None and member.health in wrong:
                belief = f"believes that {victim.name} is {member.health}"
                self._fail(node, f"{belief}, though it died {DETECTION_S:.0f} s ago or more")

    # -- the end

    @property
    def are_at_one(self) -> bool:
        """Whether all nodes have the same history, and have merged all that they know of it."""
        folds = [node.fold for node in self._live() if not node.core.merges.unmerged]
        keys = {fold.key for fold in folds if fold is not None}
        return len(folds) == len(self._live()) and len(keys) == 1

    def finish(self) -> None:
        """All nodes have rested: they must be equal, and right."""
        live = self._live()
        floor = max(node.core.ledger.floor for node in live)
        first = live[0]
        for node in live:
            node.merge_what_waits(rests=not self.world.audit.liars)  # liars may seem to train
            self.world.audit.check_ledger(node)
            self._check_merged(node)
            self._check_equal(node, first, floor)
            self._check_revoked(node)
        assert first.fold is not None
        rounds = {**first.fold.below, **first.fold.rounds}
        scenario, read = self.world.scenario, self.world.audit.payload
        if from_scratch(scenario.manifest, scenario.phi, rounds, read).tobytes() != first.fold.phi.tobytes():
            self._fail(first, "ends with another Phi than a fold of its records from scratch")
        newest = max([0, *rounds, *(node.archive.claims[0].round for node in live)])
        average = average_from_scratch(scenario.manifest, scenario.phi, rounds, read, newest)
        every = scenario.manifest.history.snapshot_every
        upto = newest // every * every
        decided = (
            Folding(scenario.manifest)
            .as_of(upto, 0, begin(scenario.manifest), rounds)
            .pack(scenario.manifest)
        )
        for node in live:
            assert node.fold is not None
            if node.fold.base.round <= upto and node.fold.folds(upto).pack(scenario.manifest) != decided:
                self._fail(node, "ends with other folds than those of its records from scratch")
            if not node.archive.is_whole:
                self._fail(node, "ends without the sums of its snapshot")
            elif node.archive.average(newest).tobytes() != average.tobytes():
                self._fail(node, "ends with another average than one of its records from scratch")
        if scenario.liars < 2:  # several liars delay more than a few payloads
            self.world.audit.spread.judge(max(path.latency_s for path in scenario.paths.values()))
        if not scenario.is_forgetful:
            self._check_nothing_lost(live, first.core.ledger, rounds)
        elif scenario.name == "nights":  # nodes that slept may have published for closed rounds
            self._check_nothing_lost([self.world.nodes[self.world.watch]], first.core.ledger, rounds)

    def _check_merged(self, node: Node) -> None:
        ledger = node.core.ledger
        for round_ in ledger.rounds():
            wanted = {d.record_id for d in ledger.valid(round_) if node.core.holds(d.record_id)}
            if node.fold is None or wanted != {d.record_id for d in node.fold.rounds.get(round_, ())}:
                self._fail(node, f"has not merged all that it holds of round {round_}")

    def _check_equal(self, node: Node, first: Node, floor: int) -> None:
        """Nodes may have closed different rounds. Above those their ledgers must be the same."""
        ours, theirs = node.core.ledger, first.core.ledger
        for round_ in {*ours.rounds(), *theirs.rounds()}:
            if round_ > floor and ours.digests.digest(0, round_) != theirs.digests.digest(0, round_):
                self._fail(node, f"ends with other records of round {round_} than {first.name}")
        if node.fold is None or first.fold is None:
            self._fail(node, f"or {first.name} ends without a model")
            return
        if node.fold.key != first.fold.key or node.fold.chain(ROUND_MAX) != first.fold.chain(ROUND_MAX):
            self._fail(node, f"has merged other records than {first.name}")
        if node.fold.phi.tobytes() != first.fold.phi.tobytes():
            self._fail(node, f"ends with another Phi than {first.name}")

    def _check_revoked(self, node: Node) -> None:
        """Whom an owner has revoked is out for everybody, with what it signed after its last round."""
        for index in self.world.revoked:
            victim = self.world.nodes[index]
            revocation = node.core.acl.revocation_of(victim.traits.identity.node_id)
            if revocation is None:
                self._fail(node, f"has not heard that {victim.name} was revoked")
                continue
            rounds = [delta.round for delta in node.core.ledger.by(revocation.node_id)]
            if max(rounds, default=0) > revocation.last_round:
                self._fail(node, f"keeps round {max(rounds)} of {victim.name}, which was revoked before")

    def _check_nothing_lost(self, nodes: list[Node], ledger: Ledger, rounds: Rounds) -> None:
        """Every delta that one of these nodes published and kept is merged, and no honest node is void."""
        merged = {delta.record_id for deltas in rounds.values() for delta in deltas}
        for node in (node for node in nodes if node not in self.world.audit.misled):
            for delta in self.world.audit.spoken_by(node.traits.identity.node_id):
                if node.index not in self.world.lost_disks and delta.record_id not in merged:
                    self._fail(node, f"published round {delta.round}, and the swarm has lost it")
        honest = {node.traits.identity.node_id for node in self.world.nodes if not node.traits.is_liar}
        for author, round_ in ledger.voided():
            if author in honest:
                self._fail(None, f"honest {short(author)} is void in round {round_}")
