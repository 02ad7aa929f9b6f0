"""Phi on one node: the fold of its records, kept up incrementally, and once more from scratch.

``Phi += Merge(old set) - Merge(new set)`` whenever a round's set changes, as the daemon does it; the
simulator then compares with ``Phi_0 - sum of Merge(round)`` computed from nothing. Written from
`gossamer.protocol.merge` alone, so that it is a second opinion on the daemon's merger.
"""

from collections.abc import Callable, Sequence

import numpy as np

from gossamer.protocol import merge
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.layout import Fragment, Layout
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payload import Payload
from gossamer.protocol.records import Delta

ReadChunk = Callable[[bytes], bytes]
MergeRound = Callable[[tuple[Delta, ...], Sequence[bytes], Fragment, Manifest], Ints]


def contribution(delta: Delta, data: bytes, fragment: Fragment, fragments: int) -> merge.Contribution | None:
    """A record as Merge sees it; None if its payload does not decode, which weighs nothing anywhere."""
    try:
        payload = Payload(delta.body.codec, fragment, data)
        norms = merge.norms_of(payload)
    except PayloadError:
        return None
    return merge.Contribution(
        author=delta.author,
        tokens=delta.body.tokens,
        steps=delta.body.steps,
        staleness=delta.staleness(fragments),
        norms=norms,
        tensor=payload.tensor,
    )


def merged(
    deltas: tuple[Delta, ...], payloads: Sequence[bytes], fragment: Fragment, manifest: Manifest
) -> Ints:
    """Merge one round's records, given in any order, with their payloads."""
    fragments = manifest.layout.fragments
    pairs = zip(deltas, payloads, strict=True)
    found = [c for delta, data in pairs if (c := contribution(delta, data, fragment, fragments)) is not None]
    return merge.merge_round(found, fragment, manifest.outer)


class Fold:
    """Phi and the records in it."""

    def __init__(
        self, manifest: Manifest, layout: Layout, phi: Ints, read: ReadChunk, merge_round: MergeRound
    ) -> None:
        self._manifest = manifest
        self._layout = layout
        self._read = read
        self._merge_round = merge_round
        self.phi = phi.copy()
        self.rounds: dict[int, tuple[Delta, ...]] = {}
        self.key = 0
        """Exclusive or of the ids of the records merged: equal for equal sets."""

    def change(self, round_: int, new: tuple[Delta, ...]) -> bool:
        """Make `new` what is merged of a round. Returns whether that is news. Raises as `read` does."""
        old = self.rounds.get(round_, ())
        if new == old:
            return False
        fragment = self._layout.of_round(round_)
        before = self._result(old, fragment)
        after = self._result(new, fragment)
        view = self.phi[fragment.offset : fragment.offset + fragment.numel]
        if before is not None:
            view += before
        if after is not None:
            view -= after
        for delta in (*old, *new):
            self.key ^= int.from_bytes(delta.record_id, "big")
        if new:
            self.rounds[round_] = new
        else:
            del self.rounds[round_]
        return True

    def highest(self, index: int) -> int:
        """The highest round merged into a fragment; its first base if none."""
        count = len(self._layout.fragments)
        rounds = [round_ for round_ in self.rounds if round_ % count == index]
        return max(rounds, default=index - count if index else 0)

    def from_scratch(self, phi: Ints) -> Ints:
        """The same, computed from Phi_0 and the payloads on disk with nothing remembered."""
        result = phi.copy()
        for round_, deltas in self.rounds.items():
            fragment = self._layout.of_round(round_)
            ordered = tuple(sorted(deltas, key=lambda delta: delta.author))
            payloads = [self._payload(delta) for delta in ordered]
            view = result[fragment.offset : fragment.offset + fragment.numel]
            view -= merged(ordered, payloads, fragment, self._manifest)
        return result

    def _payload(self, delta: Delta) -> bytes:
        return b"".join(self._read(blob) for blob in delta.body.chunks)

    def _result(self, deltas: tuple[Delta, ...], fragment: Fragment) -> Ints | None:
        if not deltas:
            return None
        payloads = [self._payload(delta) for delta in deltas]
        return self._merge_round(deltas, payloads, fragment, self._manifest)


def digest_of(phi: Ints) -> bytes:
    """Phi's bytes, to be compared: these models are so small that hashing would gain nothing."""
    return np.ascontiguousarray(phi).tobytes()
