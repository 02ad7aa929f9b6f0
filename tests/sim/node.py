"""One simulated node: a real protocol core, and an adapter that carries out its effects as the daemon does.

Its process can be stopped, killed or starved (see `process`), and its host can lose power. The disk is what
remains.
"""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from math import inf
from typing import Any

from gossamer.node.daemon.network.address_book import REMEMBER_FIRST_S, REMEMBER_INTERVAL_S, REMEMBERED_MAX
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.blocks import pack_runs
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.limits import CLOCK_SKEW_S, ROUND_MAX
from gossamer.protocol.membership.members import NodeInfo
from gossamer.protocol.payloads import payload_chunk_sizes, split_payload
from gossamer.protocol.records import Delta, DeltaBody
from gossamer.protocol.replica import Replica
from gossamer.protocol.sampling import EVERY_ROUND
from tests.sim.archive import Archive
from tests.sim.disk import DamagedChunkError, Disk
from tests.sim.fold import Fold
from tests.sim.network import End, Party
from tests.sim.process import Process
from tests.sim.stage import Stage, Traits
from tests.sim.trainer import Trainer, Window
from tests.sim.transfers import Transfers

BUSY_S = 0.1
"""A node that has merged a round within this time goes on with the next one at once."""

OUTLIERS = 32
"""How many of 256 deltas pass for outliers."""

_ROUNDING_S = 1e-6


class Node(Process):
    """A node's host, disk, process and trainer."""

    def __init__(self, stage: Stage, traits: Traits) -> None:
        super().__init__(stage.loop)
        self.stage = stage
        self.traits = traits
        self.grant = b""
        """Its invitation, if it needs one."""
        self.index = traits.index
        self.disk = Disk()
        self.rng = stage.dice(f"node {self.index}")
        self.adopted_at = -1e9
        """When it last started from another node's snapshot, having no history or giving its own up."""
        self.linked_at = inf
        """When its first link since its start came up; infinite before. A founder that is told no addresses
        has to wait for one."""
        self.gone = False
        """Whether it has left, or is dead for good."""
        self.links: dict[int, End] = {}
        self.core: Replica
        self.fold: Fold | None = None
        self.transfers = Transfers(self)
        self.trainer = Trainer(self)
        self.wakes = 0
        self.chunks_came = 0
        self._numbers = 0
        self._timer_due = self._wake_due = inf
        self._clock_start, self._clock_rate = traits.clock(0.0), 1.0 + traits.clock_drift
        self._latest = 0.0
        self._unix_error_s = traits.unix_error_s
        self._slept_s = 0.0
        """How long the monotonic clock has stood still, in all."""
        self._fell_asleep: float | None = None
        self.archive = Archive(self)
        self._merging: fx.Merge | None = None
        self._merged_at = -inf
        self._pace = 0, EVERY_ROUND, 0
        self.cannot_publish = False
        """Whether it cannot publish, say since another program holds its files. Its trainer goes on."""

    def __repr__(self) -> str:
        return f"n{self.index}"

    @property
    def name(self) -> str:
        return f"n{self.index}"

    # -- life

    def start(self, told: tuple[str, ...]) -> None:
        """Start the process from what its disk holds. `told`: its join addresses."""
        stored, met = self.disk.load(), self.disk.peers
        stage = self.stage
        self.begin_life()
        self.links.clear()
        self.linked_at = inf
        self.transfers, self.archive = Transfers(self), Archive(self)
        self._timer_due = self._wake_due = inf
        self._merging, self._merged_at, self._pace = None, -inf, (0, EVERY_ROUND, 0)
        self._fell_asleep = None
        self.fold = None
        now, unix = self.clock(), self._unix()
        self.core = Replica(
            identity=self.traits.identity,
            manifest=stage.manifest,
            info=NodeInfo(
                name=self.name,
                trains=self.traits.trains,
                incarnation=int(unix * 1000),
                bootstrap=tuple(dict.fromkeys((*told, *met))),
                pins={address: node_id for address, node_id in met.items() if address not in told},
                remembered=frozenset(met).difference(told),
            ),
            fits=self.disk.fits,
            unix_offset_s=unix - now,
            rng=stage.dice(f"core {self.index} {self.life}"),
        )
        for delta in stored:
            if delta.author == self.traits.identity.node_id:
                stage.audit.spoken(self, delta)
        fold = self.archive.restore(stored)
        if fold is not None:
            self.begin(fold)
        held = [d.record_id for d in stored if self.disk.holds(d)]
        restored = self.core.restore(
            stored,
            held,
            now,
            claims=self.archive.claims,
            floor=self.disk.base.round,
            own_last=self.disk.own_last,
            reach=self.disk.reach,
            is_whole=self.archive.is_whole,
            credentials=[self.grant, *self.disk.credentials] if self.grant else (),
        )
        self._carry_out(restored)
        self._carry_out(self.core.announce((self.traits.address,) if self.traits.listens else ()))
        self._set_timer()
        self.soon(REMEMBER_FIRST_S, self._remember, REMEMBER_FIRST_S)
        self.trainer.daemon_is_back()

    def _remember(self, interval: float) -> None:
        """Write down where members are, soon and then more and more rarely, as `AddressBook` does: the oldest
        that we dialled, others that are alive, then those that are gone (it may be our network that is)."""
        known = (self.core.roster.live(), self.core.roster.doubted())
        rng = self.stage.dice(f"address book {self.index} {self.life} {interval}")
        members = [member for some in known for member in rng.sample(some, len(some))]
        others = [(address, m.record.node_id) for m in members for address in m.record.body.addresses]
        if met := dict([*self.core.links.anchors(), *others][:REMEMBERED_MAX]):
            self.disk.peers = met
        interval = min(2 * interval, REMEMBER_INTERVAL_S)
        self.soon(interval, self._remember, interval)

    def crash(self) -> None:
        """The process dies; its host resets the connections."""
        self._end()
        for end in self.links.values():
            end.close()
        self.disk.process_died(self.stage.loop.now)

    def power_cut(self) -> None:
        """The host dies, without a word to its peers."""
        self._end()
        self.powered = False
        for end in self.links.values():
            end.cut()
        self.disk.power_cut(self.stage.loop.now, self.rng)
        self.trainer.die()

    def _end(self) -> None:
        self.transfers.settle_unsure(self.rng)
        self.end_life()

    def suspend(self) -> None:
        """Suspend, as when a laptop's lid closes: the process stops, and the monotonic clock with it."""
        self.stop()
        self._fell_asleep = self._loop.now

    def resume(self) -> None:
        """Go on. If its clocks have moved against each other, the daemon first tells the core so."""
        if self._fell_asleep is not None:
            self._slept_s += self._loop.now - self._fell_asleep
            self._fell_asleep = None
            self._backlog.appendleft((self._clock_moved, ()))
        super().resume()

    def set_clock(self, error_s: float) -> None:
        """Set the wall clock wrong by `error_s`, whether or not the process runs."""
        self._unix_error_s = error_s
        self.deliver(self.life, self._clock_moved)

    @property
    def clock_is_wrong(self) -> bool:
        """Whether its wall clock is wrong by more than others tolerate."""
        return abs(self._unix_error_s) > CLOCK_SKEW_S

    def _clock_moved(self) -> None:
        """Tell the core how the wall clock now differs from the monotonic one."""
        self.dispatch(ev.TimeSet(self._unix() - self.clock()))

    def leave(self) -> None:
        """Leave the swarm in good order."""
        self.trainer.die()
        self.dispatch(ev.Leave())
        self.gone = True
        self.crash()

    def expelled(self) -> None:
        """An owner has revoked it, and it knows."""
        self._tell("is revoked")
        self.trainer.die()
        self.gone = True
        if self.running:
            self.crash()

    # -- the core

    def clock(self) -> float:
        """The reading of the node's own monotonic clock, which never runs backwards."""
        now = self._clock_start + (self._loop.now - self._slept_s) * self._clock_rate
        self._latest = max(self._latest, now)
        return self._latest

    def _unix(self) -> float:
        return self.stage.unix_start + self._loop.now + self._unix_error_s

    def dispatch(self, event: ev.Event) -> list[fx.Effect]:
        """Give the core an event, and carry out the effects that it returns."""
        effects = self.core.handle(event, self.clock())
        if effects:
            self._carry_out(effects)
            self._set_timer()
        elif type(event) is not ev.Received or self.core.fetcher.deadline() < self._wake_due:
            self._set_timer()  # a message without effects can only move the deadline of a fetch
        return effects

    def _set_timer(self) -> None:
        self._wake_by(self.core.next_wake())

    def _wake_by(self, wake: float) -> None:
        if wake < self._wake_due:
            self._wake_due = wake
            self._timer_due = max(self.traits.time(wake) + self._slept_s, self.stage.loop.now)
            self.stage.loop.at(self._timer_due, self.deliver, self.life, self._wake, self._timer_due)

    def _wake(self, due: float) -> None:
        if due != self._timer_due:
            return  # an earlier timer has been set since
        self._timer_due = self._wake_due = inf
        wake = self.core.next_wake()
        if wake > self.clock() + _ROUNDING_S:
            self._wake_by(wake)
            return
        self._latest = max(self._latest, wake)
        self.wakes += 1
        self.stage.trace.note(self.stage.loop.now, self.index, 1)
        self.dispatch(ev.Wake())
        self.stage.audit.woken(self, self._wake_due - self._latest)

    def _carry_out(self, effects: Iterable[fx.Effect]) -> None:
        links, encode, sending = self.links, self.stage.encode, self.stage.audit.sending
        for effect in effects:
            if type(effect) is fx.Send:  # most are
                end = links.get(effect.link)
                if end is not None:
                    data = encode(effect.message)
                    sending(self, data)
                    end.send(data)
                continue
            match effect:
                case fx.Get():
                    self.transfers.get(self.links.get(effect.link), effect)
                case fx.Put():
                    self.transfers.asked(self.links.get(effect.link), effect.blob)
                case fx.Keep():
                    self.soon(0.0, self.transfers.keep, effect)
                case fx.Store():
                    self._store(effect)
                case fx.StoreCredential():
                    self.disk.credentials.append(effect.data)
                case fx.Expelled():
                    self.soon(0.0, self.expelled)
                case fx.Merge():
                    self._merge_soon(effect)
                case fx.Dial():
                    self.stage.net.dial(self, effect.address)
                case fx.Hangup():
                    self._hang_up(effect)
                case fx.Fetched():
                    self.archive.look()
                case fx.Seal():
                    self.archive.seal(effect.round)
                case fx.Close():
                    self.archive.close(effect)
                case fx.Adopt() | fx.Prefetch():
                    self.archive.fetch(effect.claim)
                case fx.Blame():
                    end = self.links.get(effect.link)
                    self._tell(f"blames {end.peer.party if end else 'a peer'}: {effect.reason}")
                    self.stage.audit.blamed(self, end, effect)
                case fx.Notice():
                    self._tell(f"{effect.culprit} {effect.text}".lstrip())

    def _tell(self, text: str) -> None:
        self.stage.trace.say(self.stage.loop.now, f"{self.name}: {text}")

    # -- links (the network's Party)

    def send(self, link: int, data: bytes) -> None:
        end = self.links.get(link)
        if end is not None:
            self.stage.audit.sending(self, data)
            end.send(data)

    def link_opened(self, end: End, outbound: bool, address: str | None) -> None:
        self._numbers += 1
        end.number = self._numbers
        self.linked_at = min(self.linked_at, self.stage.loop.now)
        self.links[end.number] = end
        self.transfers.link_up(end)
        peer = end.peer.party
        assert isinstance(peer, Node)
        self.stage.trace.note(self.stage.loop.now, self.index, 2, peer.traits.identity.node_id)
        self.dispatch(
            ev.LinkUp(end.number, peer.traits.identity.node_id, outbound, address, peer.credential())
        )

    def credential(self) -> bytes:
        """What it shows in a handshake to be let in."""
        return self.core.access.credential_of(self.traits.identity.node_id, self.clock())

    def admits(self, other: Party) -> bool:
        assert isinstance(other, Node)
        try:
            self.core.access.vet(other.traits.identity.node_id, other.credential(), self.clock())
        except RefusedError:
            return False
        return True

    def link_closed(self, end: End) -> None:
        if self.links.pop(end.number, None) is not None:
            self.transfers.link_down(end.number)
            self.stage.trace.note(self.stage.loop.now, self.index, 3)
            self.dispatch(ev.LinkDown(end.number))

    def _hang_up(self, effect: fx.Hangup) -> None:
        end = self.links.get(effect.link)
        if end is not None:
            self._tell(f"hangs up on {end.peer.party}: {effect.reason}")
            end.close()
            self.soon(0.0, self.link_closed, end)

    def dial_failed(self, address: str) -> None:
        self.dispatch(ev.DialFailed(address))

    def message(self, end: End, data: bytes, damaged: bool) -> None:
        if not damaged:
            self.dispatch(ev.Received(end.number, data))
            return
        with self.stage.audit.damage(self, data):
            self.dispatch(ev.Received(end.number, data))
        if end.number in self.links:  # TLS would have refused the bytes and ended the connection
            end.close()
            self.link_closed(end)

    # -- records and payloads

    def _store(self, effect: fx.Store) -> None:
        if not effect.own:
            self.stage.audit.accepted(self, effect.delta)
            self.disk.add(effect.delta, self.stage.loop.now)
            return
        self.stage.audit.signed(self, effect.delta)
        self.transfers.unsure = effect.delta
        self.soon(self.traits.sync_s * (0.5 + self.rng.random()), self._own_stored, effect.delta)

    def _own_stored(self, delta: Delta) -> None:
        self.disk.commit(delta)
        self.transfers.unsure = None
        self.stage.audit.spoken(self, delta)
        if not self.traits.is_liar:  # a liar may keep it to itself
            self.stage.audit.spread.published(delta)
        chunks = delta.body.chunks
        self.dispatch(ev.Stored(delta, (len(chunks) == 1 and self.transfers.read(chunks[0])) or b""))
        self.trainer.acknowledged(delta.round)

    def publish(self, window: Window, payload: bytes) -> None:
        """Take over a delta from the trainer: store its payload, then have the core sign for it."""
        if self.cannot_publish:
            self.soon(1.0, self.publish, window, payload)
            return
        self.keep(payload, durable=True)
        self.soon(self.traits.sync_s, self._sign, replace(window.body(payload), **self._claim(window)))

    def _claim(self, window: Window) -> dict[str, Any]:
        """What to claim of the data: any three blocks of the epoch that it is at."""
        first = (window.tokens + 7 * window.round) % (self.stage.manifest.data.blocks - 2)
        epoch = self.fold.epoch() if self.fold is not None else 0
        return {"epoch": epoch, "blocks": pack_runs([(first, first + 3)])}

    def keep(self, payload: bytes, *, durable: bool) -> None:
        """A payload came into being here: write its chunks."""
        for chunk in map(bytes, split_payload(payload)):
            blob = sha256(chunk).digest()
            self.stage.audit.keep(blob, chunk)
            self.disk.put(blob, chunk, self.stage.loop.now, durable=durable)

    def _sign(self, body: DeltaBody) -> None:
        effects = self.dispatch(ev.Publish(body))
        if not any(isinstance(effect, fx.Store) for effect in effects):
            self.trainer.acknowledged(body.round)

    def chunk_damaged(self, blob: bytes) -> None:
        """A chunk on disk turned out damaged: fetch it again."""
        for delta in self.core.ledger:
            if blob in delta.body.chunks:
                sizes = payload_chunk_sizes(delta.body.payload_bytes)
                self.dispatch(ev.Need(delta.record_id, tuple(zip(delta.body.chunks, sizes, strict=True))))
        self.soon(self.traits.gather_s, self.archive.look)

    # -- merging

    @property
    def ready(self) -> bool:
        """Whether Phi holds all that the swarm had when this node joined, so that its trainer may begin."""
        return self.core.merges.ready

    def begin(self, fold: Fold) -> None:
        """Take over a state. What was to be merged into the one before is not."""
        self.fold = fold
        self._merging = None

    def _merge_soon(self, effect: fx.Merge) -> None:
        """Merge after a while, as a large model takes; of many rounds one after another at once."""
        self._merging = effect
        is_busy = self.clock() - self._merged_at < BUSY_S
        delay = 0.001 if is_busy else self.traits.gather_s * (0.5 + self.rng.random())
        self.soon(delay, self._merge, effect)

    def _merge(self, effect: fx.Merge) -> None:
        if effect is not self._merging:
            return
        self._merging, self._merged_at = None, self.clock()
        if effect.unless_outliers and _are_outliers(effect.deltas):
            outcome = ev.MergeOutcome.OUTLIERS
        else:
            outcome = self._merge_round(effect.round, effect.deltas)
        self.dispatch(ev.Merged(effect.round, outcome))
        if outcome is ev.MergeOutcome.CHANGED:
            self.archive.merged(effect.round)
            pace = self.fold.pace(self.core.clock)
            if pace != self._pace:
                self._pace = pace
                self.dispatch(ev.Paced(*pace))
        self.archive.look()

    def _merge_round(self, round_: int, deltas: tuple[Delta, ...]) -> ev.MergeOutcome:
        assert self.fold is not None
        try:
            if not self.fold.change(round_, deltas):
                return ev.MergeOutcome.SAME
        except DamagedChunkError as error:
            self.chunk_damaged(error.blob)
            return ev.MergeOutcome.FAILED
        self.stage.audit.merged(self, self.fold, round_)
        return ev.MergeOutcome.CHANGED

    def may_wait(self, round_: int) -> bool:
        """Whether a round may be unmerged: the swarm has not reached it, or it is under way and held back."""
        if self.core.merges.is_held_back(round_):
            return round_ >= self.core.clock
        return round_ > self.core.horizon

    def merge_what_waits(self, *, rests: bool) -> None:
        """Merge now what is under way, the rounds that are held back and, unless the swarm `rests`, those
        that it has not reached."""
        if self._merging is not None:
            self._merge_round(self._merging.round, self._merging.deltas)
        for round_ in self.core.merges.waiting(ROUND_MAX):
            if self.core.merges.is_held_back(round_) if rests else self.may_wait(round_):
                self._merge_round(round_, self._complete(round_))

    def _complete(self, round_: int) -> tuple[Delta, ...]:
        """A round's valid records whose payloads are here."""
        return tuple(d for d in self.core.ledger.valid(round_) if self.core.holds(d.record_id))


def _are_outliers(deltas: Iterable[Delta]) -> bool:
    """Whether deltas pass for outliers: any may, depending on what a node has seen so far."""
    return all(delta.record_id[0] < OUTLIERS for delta in deltas)
