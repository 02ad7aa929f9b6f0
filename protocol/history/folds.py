"""What the swarm decides together, besides the model: each a fold over the records merged.

Like Phi, it is a function of the set, so all nodes agree on it without a message. Its state as of a round is
part of that round's snapshot, at the end of its index, and so a joiner has it before it trains.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossamer.protocol import pace
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.history.data_claims import DataClaims
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import PACE_BYTES, PaceFold, PaceState, Windows
from gossamer.protocol.records import Delta


class Folds(NamedTuple):
    """The states of all folds as of a round at the end of an epoch."""

    pace: PaceState
    data: DataClaims

    def pack(self, manifest: Manifest) -> bytes:
        """As many bytes as `folds_bytes`: of what a manifest fixes, none."""
        return (self.pace.pack() if manifest.pace.is_fold else b"") + self.data.pack()


def begin(manifest: Manifest) -> Folds:
    """As of round 0."""
    return Folds(pace.BEGIN, DataClaims(manifest.data.blocks))


def folds_bytes(manifest: Manifest) -> int:
    """How many bytes the folds take in the index of a snapshot."""
    return len(begin(manifest).pack(manifest))


def unpack(data: bytes, manifest: Manifest) -> Folds:
    """Inverse of `Folds.pack`; of no bytes, those as of round 0. Raises PayloadError."""
    if not data:
        return begin(manifest)
    if len(data) != folds_bytes(manifest):
        raise PayloadError("a snapshot with folds of another length than the manifest makes them")
    of_pace = PACE_BYTES if manifest.pace.is_fold else 0
    blocks = manifest.data.blocks
    return Folds(
        PaceState.unpack(data[:of_pace]) if of_pace else pace.BEGIN,
        DataClaims.unpack(data[of_pace:], blocks) if blocks else DataClaims(0),
    )


class Folding:
    """All folds, kept up to date while rounds are merged."""

    def __init__(self, manifest: Manifest) -> None:
        self._pace = PaceFold(manifest)
        self._cap = manifest.outer.weight_cap

    def changed(self, round_: int) -> None:
        """Other records are merged of a round now."""
        self._pace.changed(round_)

    def as_of(self, round_: int, base: int, folds: Folds, rounds: Mapping[int, Sequence[Delta]]) -> Folds:
        """The folds as of a round at the end of an epoch, from those as of an earlier one, `base`, and the
        records merged in the rounds since."""
        return Folds(
            self._pace.as_of(round_, base, folds.pace, rounds),
            folds.data.as_of(round_, base, rounds, self._cap),
        )

    def windows(self, round_: int, base: int, folds: Folds, rounds: Mapping[int, Sequence[Delta]]) -> Windows:
        """See `PaceFold.windows`."""
        return self._pace.windows(round_, base, folds.pace, rounds)
