"""Claims of the data: their packed form, and the fold over them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.blocks import pack_blocks, pack_runs, runs_in, size_of
from gossamer.protocol.errors import MalformedError, PayloadError
from gossamer.protocol.history.data_claims import DataClaims, Taken, taken
from gossamer.protocol.records import Delta
from tests.protocol.builders import body_of, identity, manifest, signed

BLOCKS = 40
CAP = 4.0
OURS = manifest(data={"samples": 400, "blocks": BLOCKS})


def delta(author: int, round_: int, epoch: int, *blocks: int) -> Delta:
    body = body_of(b"1", "int8", round_, 2, epoch=epoch, blocks=pack_blocks(blocks)[0])
    return signed(identity(author), body, OURS)


def blocks_of(claims: DataClaims) -> list[int]:
    return np.flatnonzero(claims.current.claimed).tolist()


@given(st.sets(st.integers(0, limits.BLOCKS_MAX - 1), max_size=300))
def test_a_claim_holds_the_lowest_blocks_that_fit_and_says_which_are_left(blocks: set[int]):
    data, left = pack_blocks(blocks)
    packed = [block for first, stop in runs_in(data) for block in range(first, stop)]
    assert packed + left == sorted(blocks)
    assert len(data) <= limits.CLAIM_BYTES_MAX
    assert not left or len(data) > limits.CLAIM_BYTES_MAX - 7  # the next run did not fit


def test_a_walk_of_any_length_takes_six_bytes_at_most():
    data, left = pack_blocks(range(30_000, limits.BLOCKS_MAX))
    assert (len(data), left) == (6, [])


@given(st.binary(max_size=12))
def test_no_other_bytes_stand_for_runs(data: bytes):
    try:
        runs = runs_in(data)
    except ValueError:
        return
    assert pack_runs(runs) == data
    ends = [end for run in runs for end in run]
    assert all(a < b for a, b in pairwise(ends))
    assert not ends or ends[-1] <= limits.BLOCKS_MAX


CLAIM = st.tuples(st.integers(0, 2), st.sets(st.integers(0, BLOCKS - 1), min_size=1))


@given(st.lists(st.lists(CLAIM, max_size=4), max_size=12), st.integers(0, 12), st.randoms())
def test_the_fold_is_a_function_of_the_set_wherever_it_is_cut(rounds: list, cut: int, rng: random.Random):
    """Whatever order the records of a round come in, and through whatever snapshot a joiner has begun."""
    held = {
        round_: tuple(
            delta(author, round_ + 2, epoch, *blocks) for author, (epoch, blocks) in enumerate(claims)
        )
        for round_, claims in enumerate(rounds, 1)
    }
    whole = DataClaims(BLOCKS).as_of(12, 0, held, CAP)
    shuffled = {round_: rng.sample(deltas, len(deltas)) for round_, deltas in held.items()}
    before = DataClaims(BLOCKS).as_of(cut, 0, shuffled, CAP).pack()
    assert DataClaims.unpack(before, BLOCKS).as_of(12, cut, shuffled, CAP).pack() == whole.pack()


def test_an_epoch_ends_when_all_but_one_percent_is_claimed_and_late_claims_count_for_it():
    claims = DataClaims(200)
    claims.add([(0, pack_blocks(range(100))[0]), (0, pack_blocks(range(90, 197))[0])], CAP)
    assert (claims.epoch, claims.current.again) == (0, 10), "three blocks are left"
    claims.add([(0, pack_blocks([197])[0]), (1, pack_blocks([5])[0]), (7, pack_blocks([6])[0])], CAP)
    assert (claims.epoch, blocks_of(claims)) == (1, [5]), "which was claimed early; epoch 7 is nowhere near"
    claims.add([(0, pack_blocks([3, 198])[0])], CAP)
    assert claims.before.claimed.sum() == 199
    assert claims.before.again == 11


def test_a_claim_far_beyond_the_others_counts_as_much_as_a_few_of_theirs():
    honest = [(0, pack_blocks([30 + 2 * n, 31 + 2 * n])[0]) for n in range(3)]
    claims = DataClaims(BLOCKS)
    claims.add([*honest, (0, pack_blocks(range(BLOCKS))[0])], CAP)
    assert blocks_of(claims) == [*range(8), *range(30, 36)]
    free = DataClaims(BLOCKS)
    free.add([*honest, (0, pack_blocks(range(BLOCKS))[0])], 0.0)
    assert free.epoch == 1, "among friends, where weights are not capped"


def test_what_others_walk_towards_is_taken_and_each_has_a_part_of_its_own():
    recent = [delta(1, 8, 0, 10, 11), delta(2, 8, 0, 20), delta(1, 9, 0, 12, 13)]
    claims = DataClaims(BLOCKS).as_of(9, 0, {8: recent[:2], 9: recent[2:]}, CAP)
    ours = identity(1).node_id
    found = taken(claims, recent, ours)
    assert np.flatnonzero(found.now).tolist() == [10, 11, 12, 13, 20, 21]
    assert (found.part, found.parts) == (sorted([ours, identity(2).node_id]).index(ours), 2)
    stranger = taken(claims, recent, identity(3).node_id)
    assert np.flatnonzero(stranger.now).tolist() == [*range(10, 18), 20, 21], "4 in these rounds, so 4 more"
    assert (stranger.part, stranger.parts) == (0, 0)
    again = Taken.unpack(stranger.pack(), BLOCKS)
    assert (again.now == stranger.now).all()
    assert again.pack() == stranger.pack()


def test_bytes_of_another_length_are_no_claims():
    packed = DataClaims(BLOCKS).pack()
    assert DataClaims(0).pack() == b""
    for data in (b"", packed[:-1], packed + b"1"):
        with pytest.raises(PayloadError):
            DataClaims.unpack(data, BLOCKS)


def test_a_delta_with_an_impossible_claim_is_malformed():
    for changes in ({"blocks": b"\x00"}, {"blocks": b"\x00\x00"}, {"epoch": 9, "blocks": b"\x00\x01"}):
        with pytest.raises(MalformedError):
            signed(identity(1), body_of(b"1", "int8", 8, 2, **changes), OURS)
    assert size_of(runs_in(b"\x00\x01")) == 1
