"""A made-up swarm as a node's admin server would report it, for developing and testing the page.

Everything follows from the seed. Members differ in speed; some die, one is suspect, one has a different
replica. Now and then deltas are late, void or clipped. Rounds are a tuple of JSON rows, as in the API.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, field
from typing import Any

from gossamer.node.daemon.monitoring.members import LISTED
from gossamer.node.daemon.monitoring.status import LinkStatus, MemberStatus, to_json
from gossamer.protocol.merge.contributions import NOTHING_SENT
from tests.node import statuses

LATE, VOID, CLIPPED, OWN = 1, 2, 4, 8
ROUND_S = 6.0
STEPS = 30

Json = dict[str, Any]


def node_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _curve(number: int) -> float:
    """About the loss after so many rounds."""
    return 1.45 + 4.1 * (1 + number / 14) ** -0.62


@dataclass
class Recorded:
    """A swarm of `members` at some round; `step` moves it on by one round."""

    members: int = 4
    rounds: int = 60
    seed: int = 1
    now: float = 1_800_000_000.0
    rows: list[list[Any]] = field(default_factory=list)
    state: str = "training"

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.names = [f"node-{i + 1}" for i in range(self.members)]
        self.ids = [node_id(name) for name in self.names]
        self.speed = [round(self.random.lognormvariate(9.2, 0.6)) for _ in self.names]
        self.dies = {i: self.rounds * (2 + i % 7) // 10 for i in range(5, self.members, 9)}
        self.joins = {i: self.rounds * (i % 5) // 12 for i in range(3, self.members, 4)}
        self.turn = max(1, self.members // LISTED)
        """Every how many rounds a member contributes."""
        self.swarm_tokens = 0
        self.links = self._web()
        start = self.now - self.rounds * ROUND_S
        for number in range(1, self.rounds + 1):
            self._round(number, start + number * ROUND_S)

    def _web(self) -> list[tuple[int, int]]:
        """Links: a ring and random chords, none of them to dead members."""
        alive = [i for i in range(self.members) if i not in self.dies]
        pairs = {tuple(sorted((a, b))) for a, b in zip(alive, alive[1:] + alive[:1], strict=True) if a != b}
        for a in alive:
            wanted = min(2, len(alive) - 1)
            pairs |= {(min(a, b), max(a, b)) for b in self.random.sample(alive, wanted) if b != a}
        return sorted((a, b) for a, b in pairs)

    def step(self) -> Json:
        """Make one more round. Returns it as the `rounds` event does, with the one before (a late delta)."""
        self.now += ROUND_S
        self._round(len(self.rows) + 1, self.now)
        if self.members > 2 and len(self.rows) > 1 and self.random.random() < 0.3:
            self._late(self.rows[-2])
        return {"authors": self.ids, "rounds": self.rows[-2:]}

    def _round(self, number: int, time: float) -> None:
        deltas = [
            self._delta(i, number)
            for i in range(number % self.turn, self.members, self.turn)
            if self.joins.get(i, 0) < number <= self.dies.get(i, number) and self.random.random() > 0.03
        ]
        tokens = sum(d[1] for d in deltas)
        self.swarm_tokens += tokens
        weighed = [d for d in deltas if not d[5] & VOID]
        loss = sum(d[4] * d[1] for d in weighed) / sum(d[1] for d in weighed) if weighed else None
        agreement = 0.12 + 0.5 * math.exp(-number / 400) + self.random.gauss(0, 0.025)
        self.rows.append(
            [
                number,
                time,
                loss and round(loss, 4),
                tokens,
                tokens,
                round(agreement, 4) if len(weighed) > 1 else None,
                deltas,
            ]
        )

    def _delta(self, i: int, number: int) -> list[Any]:
        flags = OWN if i == 0 else 0
        flags |= LATE * (self.random.random() < 0.02)
        flags |= CLIPPED * (self.random.random() < 0.015 + 0.2 * (i % 16 == 6))
        flags |= VOID * (self.random.random() < (0.03 if i % 16 == 11 else 0.0005))
        staleness = min(4, int(self.random.expovariate(1.6)))
        loss = round(_curve(number) + self.random.gauss(0, 0.05) + 0.02 * (i % 5), 4)
        return [i, int(self.speed[i] * ROUND_S), STEPS, staleness, loss, flags]

    def _late(self, row: list[Any]) -> None:
        there = {d[0] for d in row[6]}
        missing = [i for i in range(1, self.members) if i not in there and i not in self.dies]
        if missing:
            row[6].append([missing[0], int(self.speed[missing[0]] * ROUND_S), STEPS, 2, 2.2, LATE])

    def rounds_between(self, first: int, last: int) -> Json:
        oldest = self.rows[0][0] if self.rows else None
        rows = self.rows[max(0, first - 1) : max(0, last)]
        return {"oldest": oldest, "authors": self.ids, "rounds": rows[-512:]}

    def evaluations(self) -> Json:
        """The evaluations event's data: every fourth round."""
        losses = [
            [row[0], round(row[2] + 0.06, 4), round(0.93 * _curve(row[0]) + 0.06, 4)]
            for row in self.rows[3::4]
            if row[2]
        ]
        return {"version": len(self.rows) // 4, "losses": losses}

    def snapshot(self) -> Json:
        """The state event's data."""
        clock = len(self.rows)
        newest = self.rows[-1] if self.rows else None
        trains = self.state == "training"
        loss = newest[2] if newest and trains else None
        sealed = clock // 16 * 16
        evaluated = self.evaluations()["losses"][-1:] if loss else []
        members = [self._member(i, clock) for i in range(1, self.members)]
        linked = {self.ids[b] for a, b in self.links if a == 0}
        order = {"suspect": 0, "down": 1, "alive": 3, "left": 4}
        listed = sorted(members, key=lambda one: 2 if one.node_id in linked else order[one.health])[:LISTED]
        _, live, average = evaluated[0] if evaluated else (0, None, None)
        trainer = statuses.trainer(
            device="cuda:0",
            inner_steps=clock * STEPS,
            tokens=sum(d[1] for row in self.rows for d in row[6] if d[0] == 0),
            tokens_per_s=self.speed[0],
            loss=loss,
            val_loss=live,
            val_loss_average=average,
            val_version=clock // 4,
            val_round=clock // 4 * 4,
            wait_fraction=0.012,
        )
        return to_json(
            statuses.status(
                time=self.now,
                swarm_id=node_id("swarm"),
                swarm="stdlib-tiny",
                node_id=self.ids[0],
                name=self.names[0],
                state=self.state,
                uptime_s=clock * ROUND_S + 40,
                addresses=("192.0.2.1:7700",),
                reachable=True if trains else None,
                folder="~/.gossamer/0f2aa9b7d875",
                round=clock,
                clock=clock,
                swarm_tokens=self.swarm_tokens if trains else None,
                trainer=trainer if trains else None,
                payloads_missing=0 if trains else 31,
                sealed_round=sealed or None,
                closed_round=max(0, sealed - 256),
                records=sum(len(row[6]) for row in self.rows[-272:]),
                version=clock * 3,
                fetching=(17, 48) if self.state == "joining" else None,
                sealed_digest=node_id(f"phi {sealed}"),
                itself=self._member(0, clock),
                members=tuple(members if len(members) <= LISTED else listed),
                swarm_tokens_per_s=sum(one.tokens_per_s for one in members),
                **statuses.figures(members),
                links=tuple(self._link(a, b) for a, b in self.links if 0 in (a, b)),
            )
        )

    def _replica(self, i: int) -> str | None:
        """How member `i` compares with this node."""
        if i == 0 or i in self.dies or self.state != "training" or not self.rounds:
            return None
        return {22: "other", 30: "records", 37: None}.get(i, "same")

    def _member(self, i: int, clock: int) -> MemberStatus:
        dead = i in self.dies
        health = ("left" if i % 2 else "down") if dead else "suspect" if i % 16 == 9 else "alive"
        newest = self.rows[-1] if self.rows else None
        contributions = NOTHING_SENT._asdict()
        if not dead:
            void = 3 if i % 16 == 11 else 0
            contributions |= {
                "judged": min(20, clock),
                "void": void,
                "clipped": 5 if i % 16 == 6 else 0,
                "clip_factor": 2.4 if i % 16 == 6 else 1.0,
                "agreement": round(0.3 + 0.01 * (i % 9), 3),
                "verdict": "3 of its latest 20 rounds are void" if void else None,
            }
        return statuses.member(
            node_id=self.ids[i],
            name=self.names[i],
            health=health,
            trains=i % 21 != 20,
            role="observe" if i % 21 == 20 else "train",
            round=self.dies.get(i, clock),
            tokens=int(self.speed[i] * ROUND_S * self.dies.get(i, clock)),
            tokens_per_s=0.0 if dead else self.speed[i],
            loss=None if dead or not newest or newest[2] is None else round(newest[2] + 0.02 * (i % 5), 4),
            device=["cuda:0", "cpu", "", "mps"][i % 4],
            addresses=() if i % 6 == 5 else (f"192.0.2.{i + 1}:7700",),
            dialled=tuple(self.ids[b][:8] for a, b in self.links if a == i),
            heard_s=0.0 if i == 0 else 3600.0 if dead else 0.4 + (i % 7),
            replica=self._replica(i),
            replica_round=clock // 16 * 16 if self._replica(i) else None,
            contributions=contributions,
        )

    def _link(self, a: int, b: int) -> LinkStatus:
        other = b if a == 0 else a
        sent, received = ((each + other) * 800 * len(self.rows) for each in (7, 11))
        return statuses.link(
            node_id=self.ids[other],
            outbound=other % 2 == 0,
            sent=sent,
            received=received,
            payload_sent=sent * 14,
            payload_received=received * 17,
        )

    def notices(self) -> list[Json]:
        def said(ago: float, level: str, text: str) -> Json:
            return {"time": self.now - ago, "level": level, "text": text}

        found = [said(3000, "info", "node-1 began training on cuda:0")]
        found += [
            said(2400 - 60 * i, "info", f"node-{i + 1} joined the swarm") for i in range(1, self.members)
        ]
        found += [said(900 - i, "warning", f"node-{i + 1} is down: not heard for 40 s") for i in self.dies]
        if self.members > 11:
            found.append(said(300, "error", "node-12: 3 of its latest 20 rounds are void"))
        found.append(said(20, "info", "snapshot of the sealed rounds made: all members agree"))
        return sorted(found, key=lambda notice: notice["time"])
