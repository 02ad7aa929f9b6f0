"""When a node that has just started knows enough to train."""

import math
from collections.abc import Callable

from gossamer.protocol import limits
from gossamer.protocol.fetching.wants import Wants
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.membership.links import Links

LOOK_INTERVAL_S = 1.0


class CatchUp:
    """Watches from the first event on how a node learns what the others have."""

    def __init__(
        self,
        ledger: Ledger,
        links: Links,
        anti_entropy: AntiEntropy,
        wants: Wants,
        *,
        is_first: bool,
        signs: bool,
        clock_is_wrong: Callable[[], bool],
    ) -> None:
        """`is_first`: there is nobody to join. `signs`: the node is to train. `clock_is_wrong`: whether most
        of the others contradict our clock."""
        self._clock_is_wrong = clock_is_wrong
        self._ledger = ledger
        self._links = links
        self._anti_entropy = anti_entropy
        self._wants = wants
        self._is_first = is_first
        self._signs = signs
        self._now = 0.0
        self._began = math.inf
        self._linked_at = -math.inf
        """When there was last somebody to learn from."""
        self._synced_at: float | None = None
        self._refuses = False
        """Whether we have refused what others publish, because by our clock it cannot exist yet."""
        self._lacking = math.inf
        """The smallest number of chunks so far that were missing of what we wait for."""
        self._moved_at = math.inf
        """When that number was reached."""
        self._few_since = math.inf
        """Since when only a minority's payloads have been missing of what we wait for."""
        self._next_look = -math.inf

    def observe(self, now: float) -> None:
        """After each event, look whether a peer's ledger has been seen, and how its payloads get on."""
        self._now = now
        self._began = min(self._began, now)
        if self._links:
            self._linked_at = now
        if self._synced_at is not None and (not self._lacking or now < self._next_look):
            return
        self._next_look = now + LOOK_INTERVAL_S
        if self._is_misled():
            self._synced_at, self._refuses = None, True
            self._lacking = self._moved_at = self._few_since = math.inf
        elif self._refuses:  # what was refused is asked for again
            self._refuses = self._anti_entropy.synced_once = False
        elif self._synced_at is None:
            self._synced_at = now if self._anti_entropy.synced_once else None
        else:
            self._count_lacking(self._synced_at)

    def _is_misled(self) -> bool:
        """Whether we refuse what the others publish, and still hope that our clock will be set."""
        return self._now <= self._began + limits.CLOCK_PATIENCE_S and self._clock_is_wrong()

    def _count_lacking(self, synced_at: float) -> None:
        lacking = self._wants.chunks_lacking(synced_at)
        if lacking < self._lacking:
            self._lacking, self._moved_at = lacking, self._now
        self._few_since = min(self._few_since, self._now) if self._lacks_few(synced_at) else math.inf

    def is_done(self, *, has_signed: bool) -> bool:
        """Whether we may train: there is nobody to learn from, or we have a peer's ledger and its payloads.

        * Payloads of which nothing comes any more are not waited for: the peer that says it holds them may be
          a liar that withholds its own. Payloads of a minority of the authors are waited for only a while: a
          liar may hand its own out ever so slowly. Whatever comes after all is merged late. Payloads that are
          published meanwhile do not count: on a slow line some of them are always under way.
        * A node with deltas of its own on its own disk (`has_signed`) goes on once it has compared notes with
          a peer, or has found none for a while: its folder may be an old copy, and no round may be signed
          twice. For a node whose folder is known to be a copy, or that lost its disk and hears of its own
          deltas from others, `has_signed` is false: it must learn of all of them first.
        * A node that signs nothing goes on with what it has once it has had nobody to learn from for a while.
        * A node whose clock is wrong would refuse what the others publish as too early. It waits until the
          clock has been set, as happens a moment after a machine without a clock battery starts, but not for
          ever, since the others may be liars.
        """
        return self._has_learned(has_signed) and not self._refuses

    def _has_learned(self, has_signed: bool) -> bool:
        long_alone = self._now > max(self._began, self._linked_at) + limits.RESUME_PATIENCE_S
        if not self._links and (self._is_first or (long_alone and not self._signs)):
            return True
        if has_signed:
            return self._synced_at is not None or self._now > self._began + limits.RESUME_PATIENCE_S
        if self._synced_at is None:
            return False
        stalled = self._now > self._moved_at + limits.STALL_PATIENCE_S
        dribbled = self._now > self._few_since + limits.MINORITY_PATIENCE_S
        return stalled or dribbled or not self._wants.lacking(self._synced_at, self._now)

    def _lacks_few(self, by: float) -> bool:
        """Whether only payloads of at most half of the authors are missing."""
        deltas = [self._ledger.get(key) for key in self._wants.lacking(by, self._now)]
        missing = {delta.author for delta in deltas if delta is not None}
        return None not in deltas and 2 * len(missing) <= len({delta.author for delta in self._ledger})
