"""How many tokens all deltas merged up to each round count for."""

import math
from collections.abc import Callable
from itertools import groupby

from gossamer.protocol.claims import total
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.token_count import TokenCount
from gossamer.protocol.records import Delta


class _Stretch:
    """The rounds of one of `TokenCount`'s stretches, and the tokens that deltas up to its bounds count
    for."""

    def __init__(self, rounds: tuple[int, ...], below: int) -> None:
        self.rounds = rounds
        self.below = self.up_to_its_end = below
        self.counted = 0
        """Tokens that the stretch's own deltas count for."""


class MergedTokens:
    """Keeps these counts up to date as rounds are merged, and merged again."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._merged: dict[int, tuple[Delta, ...]] = {}
        """The deltas that Phi holds of the rounds above its base."""
        self._stretches: dict[int, _Stretch] = {}
        """The stretches of these rounds, ascending, as they were last settled."""
        self._base = (0, 0)
        """The base as it was then: its last round, and its tokens."""
        self._unsettled: set[int] = set()

    def merged(self, round_: int, deltas: tuple[Delta, ...]) -> None:
        """Note that Phi holds these deltas of a round."""
        self._merged[round_] = deltas
        self._unsettled.add(round_)

    def settle(self, base_round: int, base_tokens: int, known: Callable[[int], int | None]) -> dict[int, int]:
        """Count what has changed since the last call; returns the counts of the rounds concerned.

        `known` tells a round's last count, None if it has none. The base is the part of Phi that can no
        longer change.
        """
        changes: dict[int, int] = {}
        if not self._unsettled:
            return changes
        stretch_of = TokenCount(self._manifest).stretch_of
        first = stretch_of(min(self._unsettled))
        if (base_round, base_tokens) != self._base:
            self._merged = {r: deltas for r, deltas in self._merged.items() if r > base_round}
            self._base, first = (base_round, base_tokens), 0
        kept = {}
        while self._stretches and next(reversed(self._stretches)) >= first:
            number, stretch = self._stretches.popitem()
            kept[number] = stretch
        # Stretches before the first change keep their counts: if everything is retained, that is nearly all.
        below = next(reversed(self._stretches.values())).up_to_its_end if self._stretches else base_tokens
        begin = max(base_round, self._manifest.history.snapshot_every * first)
        for number, rounds in groupby(sorted(r for r in self._merged if r > begin), stretch_of):
            stretch = self._stretches[number] = _Stretch(tuple(rounds), below)
            self._settle_stretch(stretch, kept.get(number), known, changes)
            below = stretch.up_to_its_end
        self._unsettled.clear()
        return changes

    def _settle_stretch(
        self,
        stretch: _Stretch,
        before: _Stretch | None,
        known: Callable[[int], int | None],
        changes: dict[int, int],
    ) -> None:
        """Count the tokens of a stretch's rounds, whose deltas are capped together. `before` is the stretch
        as last settled.

        Rounds before the first that changed keep their counts, since there may be very many.
        """
        first: float = min((r for r in stretch.rounds if r in self._unsettled), default=math.inf)
        if before is None or stretch.rounds[: len(before.rounds)] != before.rounds:
            before, first = stretch, 0
        has_changed = first <= stretch.rounds[-1]
        if not has_changed and stretch.below == before.below:
            stretch.counted, stretch.up_to_its_end = before.counted, before.up_to_its_end
            return
        earlier = (d for r in stretch.rounds if has_changed and r < first for d in self._merged[r])
        count = TokenCount(self._manifest, earlier)
        for round_ in stretch.rounds:
            if round_ >= first:
                count.change((), self._merged[round_])
                changes[round_] = total((stretch.below, count.total))
            elif (tokens := known(round_)) is not None:
                changes[round_] = total((tokens - before.below, stretch.below))
        stretch.counted = count.total if has_changed else before.counted
        stretch.up_to_its_end = total((stretch.below, stretch.counted))
