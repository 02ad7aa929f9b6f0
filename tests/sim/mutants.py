"""Deliberately broken variants of the protocol, which show that the checkers can fail.

Each patches one thing, for as long as a `with` block lasts. It names the scenario in which the fault should
come to light, and the verdict that should find it. `tests/sim/test_mutants.py` demands that this happens
within a few seeds. A mutant that nothing finds is a hole in the checkers, or a line of the protocol that
nothing needs. One that another verdict finds breaks more than it says, or is stale.
"""

import builtins
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from types import ModuleType
from typing import Any

from gossamer.protocol import ledger, limits, records, replica
from gossamer.protocol.access import acl
from gossamer.protocol.effects import Effect, Send, Store
from gossamer.protocol.events import Event, Publish, Stored
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.fetching.requests import Wants
from gossamer.protocol.gossip import announce, anti_entropy
from gossamer.protocol.history import average, clock, forks, joining, snapshots
from gossamer.protocol.manifest import HistorySection
from gossamer.protocol.membership import links, member_records, swim
from gossamer.protocol.membership.members import Health
from gossamer.protocol.merge import merge
from gossamer.protocol.messages import HaveChunks
from gossamer.protocol.records import Claim, Delta

Patch = tuple[type | ModuleType, str, Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken variant, the scenario in which it should be found, and the verdict that should find it."""

    patches: Callable[[], list[Patch]]
    scenario: str
    verdict: str
    """A regular expression that matches the expected violation."""
    nodes: int = 8
    minutes: float = 4.0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Break the protocol for a while."""
        originals = []
        for target, name, broken in self.patches():
            assert hasattr(target, name) or hasattr(builtins, name), (
                f"{target.__name__} has no {name} to break"
            )
            originals.append((target, name, target.__dict__.get(name)))
            setattr(target, name, broken)
        try:
            yield
        finally:
            for target, name, original in reversed(originals):
                if original is None:
                    delattr(target, name)
                else:
                    setattr(target, name, original)


MUTANTS: dict[str, Mutant] = {}
"""All of them, by the names of the functions that make their patches."""


def _mutant(
    scenario: str, verdict: str, *, nodes: int = 8, minutes: float = 4.0
) -> Callable[[Callable[[], list[Patch]]], None]:
    def enter(patches: Callable[[], list[Patch]]) -> None:
        name = patches.__name__.replace("_", " ")
        MUTANTS[name] = Mutant(patches, scenario, verdict, nodes, minutes)

    return enter


# --- the set and its merge ---------------------------------------------------------------------------------


@_mutant("calm", "another Phi than")
def merge_in_order_of_arrival() -> list[Patch]:
    """The order of arrival matters: no sorting, and the weight cap goes by the first delta alone."""

    def unsorted(items: Any, key: Any = None) -> list[Any]:
        return list(items) if key is not None else builtins.sorted(items)

    def valid(self: ledger.Ledger, round_: int) -> list[Delta]:
        authors = self._rounds.get(round_, {})
        return [held[0] for held in authors.values() if len(held) == 1]

    def ceiling(stated: Sequence[float], times: float) -> float:
        return times * stated[0] if times and stated else inf

    return [(merge, "sorted", unsorted), (ledger.Ledger, "valid", valid), (merge, "ceiling", ceiling)]


@_mutant("calm", "has merged other records than")
def merge_the_first_three() -> list[Patch]:
    """A quorum of three: later deltas are too late."""

    def valid(self: ledger.Ledger, round_: int) -> list[Delta]:
        authors = self._rounds.get(round_, {})
        first = [held[0] for held in authors.values() if len(held) == 1][:3]
        return sorted(first, key=lambda delta: delta.author)

    return [(ledger.Ledger, "valid", valid)]


@_mutant("liar", r"ends with other records of round|lacks .* \([1-9]\d* records,")
def forget_equivocation() -> list[Patch]:
    """An author's first record for a round counts, whatever else it signed."""
    original = ledger.Ledger.add

    def add(self: ledger.Ledger, delta: Delta) -> ledger.Added:
        if delta.author in self._rounds.get(delta.round, {}):
            return ledger.Added.IGNORED
        return original(self, delta)

    return [(ledger.Ledger, "add", add)]


@_mutant("liar", "which its author has not on disk")
def trust_any_signature() -> list[Patch]:
    return [(records, "verify", lambda public_key, signature, message: None)]


@_mutant("halves", "the swarm has lost it", minutes=8.0)
def close_what_is_sealed() -> list[Patch]:
    """Retain nothing: rounds under an agreed snapshot are closed at once, late records or not."""

    def closable(agreed_round: int, clock: int, section: HistorySection) -> int:
        return agreed_round

    return [(snapshots, "closable_round", closable), (joining, "closable_round", closable)]


@_mutant("lineages", "has merged other records than", minutes=8.0)
def any_other_history_wins() -> list[Patch]:
    """Two lineages: each side gives up its own for the other's."""

    def winning_claim(own: Claim, others: Any) -> Claim | None:
        said = [claim for claims in others for claim in claims]
        return max((claim for claim in said if claim != own and claim.round <= own.round), default=None)

    return [(forks, "winning_claim", winning_claim)]


@_mutant("liar", r"starts from a past up to round \d+ that never was", minutes=16.0)
def believe_a_lone_voice() -> list[Patch]:
    """Two lineages: the claim with the most tokens wins, whoever makes it."""

    def winning_claim(own: Claim, others: Any) -> Claim | None:
        said = [claim for claims in others for claim in claims]
        return max((claim for claim in said if claim.round == own.round and claim > own), default=None)

    return [(forks, "winning_claim", winning_claim)]


# --- writing before speaking -------------------------------------------------------------------------------


@_mutant("power", "which its author has not on disk")
def speak_before_it_is_stored() -> list[Patch]:
    original = replica.Replica._dispatch

    def dispatch(self: replica.Replica, event: Event, now: float) -> None:
        original(self, event, now)
        for effect in list(self.outbox):
            if isinstance(event, Publish) and isinstance(effect, Store):
                self._stored(Stored(effect.delta), now)

    return [(replica.Replica, "_dispatch", dispatch)]


@_mutant("diskloss", "signed two deltas for round", minutes=8.0)
def forget_own_rounds() -> list[Patch]:
    """A node that lost its disk does not learn from others what it has signed before."""
    return [(announce.Author, "last_round", property(lambda self: self._signed))]


# --- the clock, and who was away ---------------------------------------------------------------------------


@_mutant("hangs", "and waits: all are at", nodes=3, minutes=10.0)
def who_comes_back_keeps_its_say() -> list[Patch]:
    """Two nodes whose trainers hung hold the third one back at the round where they were."""

    def progress(self: clock.SwarmClock, inner_steps: int, now: float) -> None:
        self._inner_steps = inner_steps
        self._own.note(inner_steps, self._author.last_round, now)

    return [(clock.SwarmClock, "progress", progress)]


@_mutant("stuck", "no round since .*, though nothing is wrong", minutes=10.0)
def who_is_behind_takes_all_back() -> list[Patch]:
    """What returning nodes had published before counts for nothing."""
    original = clock.SwarmClock._latest_of_others
    Latest = list[tuple[int, bytes]]

    def latest(self: clock.SwarmClock, now: float) -> tuple[Latest, Latest]:
        known, said = original(self, now)
        return [*said, *[(0, b"")] * (len(known) - len(said))], said

    return [(clock.SwarmClock, "_latest_of_others", latest)]


@_mutant("nights", "the swarm has lost it", nodes=4, minutes=8.0)
def sleep_unnoticed() -> list[Patch]:
    """Two nodes that slept replace the third one's history with theirs, which has a hole."""
    return [(replica.Replica, "_woke", lambda self, now: None)]


# --- gossip and fetching -----------------------------------------------------------------------------------


@_mutant("halves", r"lacks .* \([1-9]\d* records,")
def no_anti_entropy() -> list[Patch]:
    """A node that has caught up once, as it must before it trains, starts no further ledger comparison."""
    original = anti_entropy.AntiEntropy.open_exchange

    def open_exchange(self: anti_entropy.AntiEntropy, link: int, above: int = 0) -> None:
        if not self.synced_once:
            original(self, link, above)

    return [(anti_entropy.AntiEntropy, "open_exchange", open_exchange)]


@_mutant("liar", r"lacks .* \(0 records, [1-9]\d* payloads\)")
def never_give_up_a_fetch() -> list[Patch]:
    """A fetch that failed, or that gets no answer, stays under way for as long as its link."""
    return [
        (Fetcher, "failed", lambda self, link, blob, now: None),
        (limits, "FETCH_PATIENCE_S", 1e9),
    ]


@_mutant("liar", "payloads took over 10 s", minutes=5.0)
def wait_for_the_silent() -> list[Patch]:
    """No hedged requests: a holder that never sends a chunk is waited for until the fetch is given up."""
    return [(Fetcher, "_find_late", lambda self, now: set())]


@_mutant("liar", r"lacks .* \(0 records, [1-9]\d* payloads\)", minutes=5.0)
def believe_the_smallest_size() -> list[Patch]:
    """A chunk counts as no longer than the smallest size that any payload that lists it states."""

    def size_of(self: Wants, blob: bytes) -> int:
        return min((self._wants[key].missing[blob] for key in self.keys_of(blob)), default=0)

    return [(Wants, "size_of", size_of)]


@_mutant("parts", "half of all payloads took over", minutes=3.0)
def deal_half() -> list[Patch]:
    """The dealer offers every other chunk, and never the rest."""
    original = announce.Announcer.deal

    def deal(self: announce.Announcer, delta: Delta, now: float, chunk: bytes = b"") -> Set[int]:
        told = original(self, delta, now, chunk)
        outbox = self._context.outbox
        outbox.extend([_halved(effect) for effect in outbox.drain()])
        return told

    def end_deal(self: announce.Announcer, record_id: bytes, now: float) -> None:
        del self._deals[record_id]

    return [(announce.Announcer, "deal", deal), (announce.Announcer, "_end_deal", end_deal)]


def _halved(effect: Effect) -> Effect:
    if isinstance(effect, Send) and isinstance(effect.message, HaveChunks):
        even = tuple(place for place in effect.message.places if place % 2 == 0)
        return Send(effect.link, HaveChunks(effect.message.record_id, even))
    return effect


@_mutant("parts", "half of all payloads took over", minutes=3.0)
def forget_who_holds_parts() -> list[Patch]:
    """A fetcher takes note of holders of whole payloads only."""
    return [(Fetcher, "hint_part", lambda self, link, key, blob: None)]


@_mutant("parts", "half of all payloads took over", minutes=3.0)
def keep_parts_to_oneself() -> list[Patch]:
    """A payload is offered to others only once all of it is here."""
    return [(announce.Announcer, "part", lambda self, record_id, place, links_, now: None)]


# --- membership and links ----------------------------------------------------------------------------------


@_mutant("power", "believes that .* though it died", minutes=16.0)
def nobody_is_ever_down() -> list[Patch]:
    """Silent members hold the clock back for ever, and their links are kept."""

    return [(swim.Swim, "_judge_silence", lambda self, now: None)]


@_mutant("starved", "takes n.* for down, which has been there")
def suspect_hastily() -> list[Patch]:
    """A few seconds of silence raise a suspicion, which hardly has to last."""

    def patience(self: swim.Swim, seconds: float) -> float:
        return 0.2 * seconds

    return [(swim.Swim, "_patience", patience)]


@_mutant("ring", "keeps a link to .* on which nothing has moved", nodes=12, minutes=8.0)
def keep_silent_links() -> list[Patch]:
    """A link to a member that others vouch for is kept even if nothing comes through it."""
    return [(swim.Swim, "silent_links", lambda self, now: set())]


@_mutant(
    "runaways", "have not converged|ends with other records|has merged other records", nodes=5, minutes=10.0
)
def keep_what_ran_ahead() -> list[Patch]:
    """A node that goes back to the others' history keeps all records of its own."""
    return [(ledger.Ledger, "drop_beyond", lambda self, round_: [])]


@_mutant("invited", r"keeps round .* which was revoked before|lacks .* \([1-9]\d* records,", minutes=8.0)
def void_what_came_and_not_what_comes() -> list[Patch]:
    """What a revoked member signed is taken out, and taken in again from who has not heard of it."""
    return [(acl.AccessList, "counts", lambda self, author, round_: True)]


@_mutant("halves", r"lacks .* \([1-9]\d* records,", nodes=12, minutes=8.0)
def the_dead_stay_dead() -> list[Patch]:
    """Nobody dials a member that is down: partition amnesia."""
    original = links.Links._candidates

    def candidates(self: links.Links, members: Any, now: float) -> Any:
        alive, _ = original(self, members, now)
        down = {
            address
            for member in self._roster.members()
            if member.health is not Health.ALIVE
            for address in member.record.body.addresses
        }
        return [(address, node_id) for address, node_id in alive if address not in down], []

    return [(links.Links, "_candidates", candidates)]


@_mutant("calm", "ends with another average|sealed round .* otherwise than", nodes=4)
def keep_what_a_stretch_has_summed() -> list[Patch]:
    """The averaged model's sums of a stretch are added to when the next one begins."""
    return [(average, "carried", lambda sums, since, upto: sums)]


@_mutant("calm", "spins: next_wake has not moved on", nodes=4, minutes=1.5)
def spin() -> list[Patch]:
    """A deadline that never moves on."""
    return [(member_records.Presence, "deadline", lambda self: 0.0)]
