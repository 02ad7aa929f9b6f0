"""Merge: a pure function of a set, equal to the formula in floats, and bounded against liars.

The first part is the promise the whole design rests on: same records, same bits.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from hashlib import sha256
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import VALUE_LIMIT
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Outer
from gossamer.protocol.merge.merge import Contribution, RoundMerge, measure, merge_round, weight_of
from gossamer.protocol.payloads import Fragment, Payload, TensorSpec, encode_payload, plan
from gossamer.protocol.records import Delta
from gossamer.protocol.rules import RULES
from gossamer.protocol.rules.base import PART, median_low
from gossamer.protocol.sampling import EVERY_ROUND
from tests.protocol import builders
from tests.protocol.builders import norm

LAYOUT = builders.LAYOUT
F = len(LAYOUT.fragments)
OUTER = builders.SMALL.outer
CAPPED = Outer(weight_cap=4.0)
SEEDS = st.integers(0, 2**32 - 1)


# --- Phi is a function of the set -------------------------------------------------------------------


class Phi:
    """A node's Phi, kept up to date as the protocol says: ``Phi += Merge(old set) - Merge(new set)``."""

    def __init__(self, start: list[np.ndarray], payloads: dict[bytes, bytes]) -> None:
        self.values = [values.copy() for values in start]
        self.ledger = Ledger()
        self._payloads = payloads
        self._merged: dict[int, np.ndarray] = {}
        self._dirty: set[int] = set()

    def add(self, delta: Delta) -> None:
        self.ledger.add(delta)
        self._dirty.add(delta.round)

    def merge(self) -> None:
        for round_ in self._dirty:
            fragment = LAYOUT.of_round(round_)
            new = merge_round(_contributions(self.ledger, round_, self._payloads), fragment, OUTER)
            phi = self.values[fragment.index]
            phi += self._merged.get(round_, np.int32(0)) - new
            self._merged[round_] = new
        self._dirty.clear()

    def bytes(self) -> bytes:
        return b"".join(values.tobytes() for values in self.values)


def _contributions(ledger: Ledger, round_: int, payloads: dict[bytes, bytes]) -> list[Contribution]:
    found = []
    for delta in ledger.valid(round_):
        try:
            found.append(builders.contribution(delta, payloads[delta.record_id], LAYOUT))
        except PayloadError:
            continue  # weighs nothing
    return found


RECORD = st.fixed_dictionaries(
    {
        "author": st.integers(0, 5),
        "round": st.integers(1, 4),
        "codec": st.sampled_from(["exact", "int8", "int4", "int2", "topk"]),
        "magnitude": st.sampled_from([0, 1, 1 << 14, VALUE_LIMIT - 1]),
        "tokens": st.integers(1, 10**6),
        "steps": st.integers(1, 50),
        "windows": st.sampled_from([1, 1, 2, 30]),
        "broken": st.sampled_from([False] * 9 + [True]),
        "seed": SEEDS,
    }
)


def _build(record: dict) -> tuple[Delta, bytes]:
    rng = np.random.default_rng(record["seed"])
    fragment = LAYOUT.of_round(record["round"])
    payload = encode_payload(
        record["codec"], fragment, builders.random_tensors(rng, fragment, record["magnitude"])
    )
    if record["broken"]:
        payload = payload[:-1] or b"x"
    base = record["round"] - F * record["windows"]
    body = builders.body_of(
        payload,
        record["codec"],
        record["round"],
        F,
        tokens=record["tokens"],
        steps=record["steps"],
        base=max(base, 1 - F + (record["round"] - 1) % F),
    )
    author = builders.identity(record["author"])
    digest = sha256(repr(record).encode()).digest()
    return Delta(record_id=digest, author=author.node_id, body=body, data=b""), payload


@settings(max_examples=40)
@given(
    st.lists(RECORD, min_size=1, max_size=12, unique_by=repr),
    st.lists(st.randoms(use_true_random=False), min_size=2, max_size=3),
    SEEDS,
)
def test_any_history_of_the_same_records_gives_the_same_bytes(records, histories, seed):
    """Every order, duplication, batching and split of arrival; equivocators, stale and broken ones too."""
    built = [_build(record) for record in records]
    payloads = {delta.record_id: payload for delta, payload in built}
    rng = np.random.default_rng(seed)
    # Phi near its limits, so that sums wrap around on the way.
    start = [rng.integers(-(2**31), 2**31, f.numel).astype(np.int32) for f in LAYOUT.fragments]

    scratch = Phi(start, payloads)
    for delta, _ in built:
        scratch.ledger.add(delta)
    expected = [values.astype(np.int64) for values in start]
    for round_ in scratch.ledger.rounds():
        fragment = LAYOUT.of_round(round_)
        expected[fragment.index] -= merge_round(
            _contributions(scratch.ledger, round_, payloads), fragment, OUTER
        )
    wrapped = b"".join(((v + 2**31) % 2**32 - 2**31).astype(np.int32).tobytes() for v in expected)

    for history in histories:
        arrivals = [delta for delta, _ in built] * 2
        history.shuffle(arrivals)
        phi = Phi(start, payloads)
        for delta in arrivals:
            phi.add(delta)
            if history.random() < 0.4:
                phi.merge()
        phi.merge()
        assert phi.bytes() == wrapped
        assert phi.ledger.digests.root == scratch.ledger.digests.root


@dataclass
class Sent:
    """Arguments of one author's delta, in the simplest form."""

    values: list[np.ndarray]
    tokens: int = 1000
    steps: int = 10
    staleness: int = 0
    turn: int = EVERY_ROUND


def _of(number: int, sent: Sent) -> Contribution:
    return Contribution(
        author=builders.identity(number).node_id,
        tokens=sent.tokens,
        steps=sent.steps,
        staleness=sent.staleness,
        norms=[norm(v) for v in sent.values],
        tensor=lambda index: builders.Plain(sent.values[index]),
        turn=sent.turn,
    )


def _merge(fragment: Fragment, outer: Outer, *sent: Sent) -> np.ndarray:
    return merge_round([_of(number, s) for number, s in enumerate(sent)], fragment, outer)


def _several(seed: int, fragment: Fragment, count: int, magnitude: int = 1 << 15) -> list[Sent]:
    rng = np.random.default_rng(seed)
    return [
        Sent(
            builders.random_tensors(rng, fragment, int(magnitude * rng.uniform(0.2, 1.0))),
            tokens=int(rng.integers(1, 10**6)),
            steps=int(rng.integers(1, 100)),
            staleness=int(rng.integers(0, 3)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("averaging", RULES)
@given(seed=SEEDS, numel=st.integers(1, 100), bits=st.integers(0, 30), tokens=st.integers(1, 2**40))
def test_one_record_alone_merges_to_itself(averaging, seed, numel, bits, tokens):
    magnitude = min(1 << bits, VALUE_LIMIT - 1)
    values = np.random.default_rng(seed).integers(-magnitude, magnitude + 1, numel).astype(np.int32)
    merged = _merge(builders.one_tensor(numel, averaging), CAPPED, Sent([values], tokens=tokens))
    assert np.array_equal(merged, values)


def test_nothing_merges_to_nothing():
    for fragment in LAYOUT.fragments:
        assert not merge_round([], fragment, OUTER).any()
        assert merge_round([], fragment, OUTER).dtype == np.int32


# --- in parts -------------------------------------------------------------------------------------


def _mixed(numel: int, averaging: str) -> list[Contribution]:
    """Six records of one tensor, in codecs that have parts and one that has none; one of zeros."""
    fragment = builders.one_tensor(numel, averaging)
    contributions = []
    for author, codec in enumerate(("int4", "topk", "int2", "exact", "int8", "topk")):
        bell = np.random.default_rng(author).integers(-(1 << 20), 1 << 20, numel) ** 3 >> 36
        values = (bell.astype(np.int32) >> 2 * author) * (author != 4)
        payload = Payload(codec, fragment, encode_payload(codec, fragment, [values]))
        norms, sample = measure(payload)
        contributions.append(
            Contribution(
                author=bytes([author]) * 32,
                tokens=1000 * (author + 1),
                steps=10 + author,
                staleness=author % 3,
                norms=norms,
                tensor=payload.section,
                sample=sample,
            )
        )
    return contributions


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        ("rda", "f1ca5568bc3eca4ac6c4a637fdff69c8cdaac008f69df54d3e68c2aac4c5a0c8"),
        ("mean", "5af1fe70db625ea014fa0a1764faf0e998fbd7f78ed50fae6460edf1cc066c25"),
        ("centered-clip", "6d4410579d97c354168873aaeb0d25d9db4123a5d0cacc1bb417d6b72416bbb8"),
    ],
)
def test_the_bits_of_a_tensor_of_several_parts_are_fixed(averaging, expected):
    """The same as of tensors merged whole: parts are how, and change no bit of what."""
    contributions = _mixed(300_001, averaging)
    digest = sha256(merge_round(contributions, builders.one_tensor(300_001, averaging), Outer()).tobytes())
    for contribution in contributions:
        digest.update(repr(contribution.norms).encode() + contribution.sample.tobytes())
    assert digest.hexdigest() == expected


@pytest.mark.parametrize("averaging", RULES)
@pytest.mark.parametrize("codecs", [slice(0, 2), slice(1, 2), slice(1, None, 4), slice(0, 0)])
@pytest.mark.parametrize("numel", [100, PART, PART + 1])
def test_subtracting_in_place_is_subtracting_the_tensor(averaging, codecs, numel, rng):
    """Of dense and sparse deltas, one alone, and none; and taking it back."""
    merge = RoundMerge(_mixed(numel, averaging)[codecs], builders.one_tensor(numel, averaging), OUTER)
    before = rng.integers(-(2**31), 2**31, numel).astype(np.int32)
    phi = before.copy()
    merge.subtract(0, phi)
    assert np.array_equal(phi, before - merge.tensor(0))
    merge.subtract(0, phi, back=True)
    assert np.array_equal(phi, before)


# --- weights ---------------------------------------------------------------------------------------


def test_who_contributes_more_often_than_others_weighs_less_in_proportion():
    """Twice as often is honest: the other side of a partition may have come to another turn."""
    fragment = builders.one_tensor(4, "mean")
    others = [Sent([np.full(4, 1000, np.int32)], turn=32 * EVERY_ROUND) for _ in range(7)]
    for turn, weight in ((EVERY_ROUND, 2 / 32), (16 * EVERY_ROUND, 1.0), (320 * EVERY_ROUND, 1.0)):
        merged = _merge(fragment, OUTER, *others, Sent([np.full(4, 2000, np.int32)], turn=turn))
        expected = (7 * 1000 + weight * 2000) / (7 + weight)
        assert merged[0] == pytest.approx(expected, abs=1), turn


@given(st.integers(1, 2**40), st.integers(1, 2**24), st.integers(0, 16))
def test_weight_formula(tokens, steps, staleness):
    weight = weight_of(tokens, steps, staleness, 16)
    assert weight == pytest.approx(tokens**2 / steps * (1 + staleness) ** -0.5, rel=1e-14)
    assert weight > 0


@pytest.mark.parametrize("averaging", RULES)
def test_too_stale_a_record_changes_nothing(averaging, rng):
    fragment = builders.one_tensor(50, averaging)
    fresh = [Sent([rng.integers(-1000, 1000, 50).astype(np.int32)]) for _ in range(2)]
    stale = Sent([rng.integers(-1000, 1000, 50).astype(np.int32)], staleness=OUTER.staleness_max + 1)
    assert np.array_equal(_merge(fragment, OUTER, *fresh, stale), _merge(fragment, OUTER, *fresh))
    assert np.array_equal(_merge(fragment, OUTER, fresh[0], stale), fresh[0].values[0])
    assert not _merge(fragment, OUTER, stale).any()


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
def test_median(values):
    assert median_low(values) == statistics.median_low(values)
    assert median_low(reversed(values)) == median_low(values)


# --- the formula in floats --------------------------------------------------------------------------


def _reference(fragment: Fragment, outer: Outer, sent: list[Sent]) -> np.ndarray:
    """The default rule of docs/protocol.md, *Merge*, word for word, in float64."""
    counted = [s for s in sent if s.staleness <= outer.staleness_max]
    weights = np.array([s.tokens * (s.tokens / s.steps) * (1 + s.staleness) ** -0.5 for s in counted])
    if outer.weight_cap:
        weights = np.minimum(weights, outer.weight_cap * statistics.median_low(weights))
    steps = np.array([s.steps for s in counted])
    if outer.weight_cap:
        steps = np.minimum(steps, outer.weight_cap * statistics.median_low(steps))
    changed = [[v for v in s.values if v.any()] for s in counted]
    mean_squares = [np.mean(np.concatenate(vs, dtype=np.float64) ** 2) if vs else 0.0 for vs in changed]
    whole = _usual(np.sqrt(np.array(mean_squares) * fragment.numel) / np.sqrt(steps))
    result = []
    for index, slot in enumerate(fragment.slots):
        vectors = np.array([s.values[index] for s in counted], dtype=np.float64)
        lengths = np.linalg.norm(vectors, axis=1)
        rates = lengths / np.sqrt(steps)
        shrink = np.ones(len(counted))
        if outer.clip:
            limit = outer.clip * min(whole, _usual(rates))
            over = rates > limit
            shrink[over] = limit / rates[over]
        vectors *= shrink[:, None]
        vectors, votes = vectors[lengths > 0], weights[lengths > 0]
        if slot.spec.averaging == "mean" or not len(votes):
            result.append((votes[:, None] * vectors).sum(axis=0) / max(votes.sum(), 1e-9))
            continue
        lengths = np.linalg.norm(vectors, axis=1)
        direction = (votes[:, None] * vectors / lengths[:, None]).sum(axis=0)
        size = np.linalg.norm(direction)
        independent = np.sqrt((votes**2).sum())
        mean_length = (votes * lengths).sum() / votes.sum()
        result.append(mean_length * direction / max(size, independent / 2) if size > 0 else direction)
    return np.concatenate(result)


def _usual(rates: np.ndarray) -> float:
    changed = rates[rates > 0]
    return statistics.median_low(changed) if len(changed) > 1 else np.inf


@pytest.mark.parametrize("outer", [OUTER, CAPPED, Outer(clip=0.0), Outer(clip=1.0, weight_cap=1.0)], ids=repr)
@given(seed=SEEDS, count=st.integers(2, 8))
def test_mean_is_the_weighted_mean(outer, seed, count):
    """Within half a unit of rounding, and a 16383rd of the heaviest for each of the 14-bit coefficients."""
    fragment = builders.one_tensor(80, "mean")
    sent = _several(seed, fragment, count)
    largest = max(int(np.abs(s.values[0]).max()) for s in sent)
    error = _merge(fragment, outer, *sent) - _reference(fragment, outer, sent)
    assert np.abs(error).max() <= 0.51 + count * largest * 0.5 / 16383


@pytest.mark.parametrize("outer", [OUTER, CAPPED, Outer(clip=0.0), Outer(clip=1.0, weight_cap=1.0)], ids=repr)
@given(seed=SEEDS, count=st.integers(2, 8), spread=st.integers(0, 20))
def test_rda_is_the_mean_length_along_the_mean_direction(outer, seed, count, spread):
    """Lengths may differ by a factor of a million: no delta's direction gets lost."""
    fragment = builders.one_tensor(300, "rda")
    sent = _several(seed, fragment, count)
    rng = np.random.default_rng(seed)
    for s in sent:
        factor = 2.0 ** (rng.uniform(-1, 1) * spread / 2 + 4)
        s.values[0] = np.rint(s.values[0] * factor).astype(np.int32)
    expected = _reference(fragment, outer, sent)
    error = _merge(fragment, outer, *sent) - expected
    assert np.linalg.norm(error) <= 0.51 * sqrt(300) + 1e-4 * np.linalg.norm(expected)


def test_a_whole_round_of_a_real_layout_matches_the_formula(rng):
    for fragment in LAYOUT.fragments:
        sent = _several(int(rng.integers(2**32)), fragment, 6)
        expected = _reference(fragment, CAPPED, sent)
        assert np.abs(_merge(fragment, CAPPED, *sent) - expected).max() <= 8


def test_rda_keeps_the_length_of_orthogonal_deltas():
    """Where the plain mean of n would shrink it by the square root of n."""
    for count in (2, 4, 16):
        vectors = np.eye(count, dtype=np.int32).repeat(4, axis=1) * 10_000
        sent = [Sent([v]) for v in vectors]
        lengths = {
            averaging: norm(_merge(builders.one_tensor(4 * count, averaging), OUTER, *sent))
            for averaging in ("rda", "mean")
        }
        assert lengths["rda"] == pytest.approx(20_000, rel=1e-4)
        assert lengths["mean"] == pytest.approx(20_000 / sqrt(count), rel=1e-4)


@pytest.mark.parametrize("tiny", [1, 3, 100])
def test_a_delta_next_to_nothing_does_not_take_the_direction_over(rng, tiny):
    """One liar (or a joiner that is warming up) among ten: its say is its weight's, not 1 / |v|."""
    fragment = builders.one_tensor(4096, "rda")
    common = rng.normal(0, 1e5, 4096)
    honest = [Sent([(common + rng.normal(0, 2e4, 4096)).astype(np.int32)]) for _ in range(9)]
    odd = np.zeros(4096, dtype=np.int32)
    odd[0] = tiny
    merged = _merge(fragment, CAPPED, *honest, Sent([odd])).astype(np.float64)
    cosine = merged @ common / np.linalg.norm(merged) / np.linalg.norm(common)
    assert cosine > 0.95


@pytest.mark.parametrize("averaging", RULES)
def test_zero_deltas_have_no_vote(averaging):
    fragment = builders.one_tensor(8, averaging)
    zero, some = Sent([np.zeros(8, dtype=np.int32)]), Sent([np.full(8, 1000, dtype=np.int32)])
    assert not _merge(fragment, OUTER, zero, zero).any()
    assert not _merge(fragment, OUTER, zero, zero, zero).any()
    assert np.array_equal(_merge(fragment, OUTER, zero, some), some.values[0])
    heavy = Sent(zero.values, tokens=2**40, steps=1)
    light = Sent(some.values, tokens=1, steps=2**24, staleness=16)
    assert np.array_equal(_merge(fragment, Outer(weight_cap=0.0), heavy, light), light.values[0])


@pytest.mark.parametrize("averaging", RULES)
@pytest.mark.parametrize("count", [2, 3, 64, 1024])
def test_extremes_stay_in_range(averaging, count):
    """As many members as a node can know, all at the largest value, weights as far apart as can be."""
    fragment = builders.one_tensor(5, averaging)
    # Others divide by the length that came out; here the coefficients' own rounding shows, at 17 bits.
    error = VALUE_LIMIT >> 16 if averaging == "centered-clip" else 64
    for value in (VALUE_LIMIT - 1, 1 - VALUE_LIMIT):
        vector = np.full(5, value, dtype=np.int32)
        equal = [Sent([vector])] * count
        assert np.abs(_merge(fragment, OUTER, *equal) - vector).max() <= error
        if averaging == "centered-clip":  # so long a step is to it an attack by whoever made it alone
            continue
        uneven = [
            Sent([vector], tokens=2**40, steps=1),
            *[Sent([vector], tokens=1, steps=2**24)] * (count - 1),
        ]
        assert np.abs(_merge(fragment, Outer(clip=0.0), *uneven) - vector).max() <= 64


# --- liars ------------------------------------------------------------------------------------------


def test_cap_bounds_a_claim_of_tokens(rng):
    fragment = builders.one_tensor(200, "mean")
    honest = [Sent([rng.integers(-100, 100, 200).astype(np.int32)]) for _ in range(8)]
    liar = Sent([np.full(200, 150, dtype=np.int32)], tokens=2**40, steps=1)
    without = _merge(fragment, Outer(clip=0.0, weight_cap=0.0), *honest, liar)
    capped = _merge(fragment, Outer(clip=0.0, weight_cap=4.0), *honest, liar)
    assert np.abs(without - 150).max() <= 1
    assert capped.mean() == pytest.approx(150 * 4 / 12, abs=12)


@pytest.mark.parametrize("averaging", RULES)
def test_clip_bounds_a_giant(averaging, rng):
    fragment = builders.one_tensor(200, averaging)
    honest = [Sent([rng.integers(-100, 101, 200).astype(np.int32)]) for _ in range(2)]
    giant = Sent([rng.integers(-100, 101, 200).astype(np.int32) * 10_000])
    usual = max(norm(s.values[0]) for s in honest)
    if averaging != "centered-clip":  # which clips whatever the manifest says
        assert norm(_merge(fragment, Outer(clip=0.0), *honest, giant)) > 1000 * usual
    assert norm(_merge(fragment, OUTER, *honest, giant)) <= 3.1 * usual
    # Of two nobody can say who is the odd one out: the shorter is believed.
    assert norm(_merge(fragment, OUTER, honest[0], giant)) <= 3.1 * usual


@pytest.mark.parametrize("averaging", RULES)
def test_clip_counts_records_of_positive_weight_only(averaging, rng):
    fragment = builders.one_tensor(200, averaging)
    honest = Sent([rng.integers(-100, 101, 200).astype(np.int32)])
    giant = Sent([honest.values[0] * 1000])
    stale = Sent(honest.values, staleness=OUTER.staleness_max + 1)
    assert np.array_equal(
        _merge(fragment, OUTER, honest, giant, stale), _merge(fragment, OUTER, honest, giant)
    )
    assert np.array_equal(_merge(fragment, OUTER, giant, stale), giant.values[0])


@pytest.mark.parametrize(("cap", "times"), [(4.0, 4), (0.0, 100)])
def test_a_long_window_is_no_attack(cap, times, rng):
    """A machine 100 times as fast: 10 times the length after a random walk, and not clipped.

    Where weights are capped it is believed as far as its weight is.
    """
    fragment = builders.one_tensor(200, "mean")
    slow = [Sent([rng.integers(-100, 101, 200).astype(np.int32)], steps=1, tokens=10) for _ in range(2)]
    peak = int(100 * sqrt(times))
    fast = Sent([rng.integers(-peak, peak + 1, 200).astype(np.int32)], steps=times, tokens=10 * times)
    unclipped = _merge(fragment, Outer(clip=0.0, weight_cap=cap), *slow, fast)
    assert np.array_equal(_merge(fragment, Outer(weight_cap=cap), *slow, fast), unclipped)


@pytest.mark.parametrize("averaging", RULES)
def test_a_claim_of_steps_does_not_buy_length(averaging, rng):
    """2**24 steps would excuse a thousand times the usual length; bounded, they excuse twice of it."""
    fragment = builders.one_tensor(200, averaging)
    honest = [Sent([rng.integers(-100, 101, 200).astype(np.int32)]) for _ in range(7)]
    liar = Sent([rng.integers(-100, 101, 200).astype(np.int32) * 10_000], tokens=2**40, steps=2**24)
    usual = max(norm(s.values[0]) for s in honest)
    assert norm(_merge(fragment, CAPPED, *honest, liar)) < 3 * sqrt(4) * usual * 4 / 11 * 1.5
    if averaging != "centered-clip":  # which moves its centre there, and by the next radius back
        assert norm(_merge(fragment, Outer(weight_cap=0.0), *honest, liar)) > 100 * usual, "it is believed"


def test_clipping_is_by_tensor(rng):
    fragment = max(LAYOUT.fragments, key=lambda f: len(f.slots))
    sent = [Sent(builders.random_tensors(rng, fragment, 1000)) for _ in range(3)]
    before = _merge(fragment, OUTER, *sent)
    sent[0].values[0] = sent[0].values[0] * 1000
    after = _merge(fragment, OUTER, *sent)
    first = fragment.slots[0].span
    assert not np.array_equal(after[first], before[first])
    assert np.array_equal(after[first.stop :], before[first.stop :])


# --- payloads ---------------------------------------------------------------------------------------


def test_norms_prove_that_a_payload_decodes(rng):
    fragment = LAYOUT.fragments[0]
    tensors = builders.random_tensors(rng, fragment, 1000)
    data = encode_payload("exact", fragment, tensors)
    assert measure(Payload("exact", fragment, data)).norms == tuple(norm(t) for t in tensors)
    bad = encode_payload("int8", fragment, tensors)
    with pytest.raises(PayloadError):
        measure(Payload("int8", fragment, b"\xff" + bad[1:]))


def test_bits_are_those_of_version_1():
    """A change here splits every swarm: it needs a new version."""
    digest = sha256()
    for fragment in LAYOUT.fragments:
        at = np.arange(fragment.numel, dtype=np.int64)
        for count in (1, 2, 3, 5):
            sent = []
            for number in range(count):
                values = ((at * 2654435761 * (number + 3)) % (1 << (12 + number))).astype(np.int32)
                values -= 1 << (11 + number)
                tensors = [values[slot.span] for slot in fragment.slots]
                sent.append(Sent(tensors, tokens=100 + 37 * number, steps=3 + number, staleness=number % 3))
            for outer in (OUTER, CAPPED):
                digest.update(_merge(fragment, outer, *sent).astype("<i4").tobytes())
    assert digest.hexdigest()[:16] == "f3c7735e3cbfc671"


# --- tensors that not all members train -------------------------------------------------------------


def _with_heads(averaging: str) -> Fragment:
    """A body that all train, and a head of 4096 elements."""
    specs = [TensorSpec("body", (4096,), averaging), TensorSpec("head", (4096,), averaging)]
    return plan(specs, 1).fragments[0]


def _training(rng: np.random.Generator, *trains_head: bool) -> list[Sent]:
    """Deltas that point one way in the body and, where it is trained, in the head, of about 64,000 each."""
    common = rng.normal(0, 1000, (2, 4096))
    sent = []
    for trains in trains_head:
        body, head = np.rint(common + rng.normal(0, 100, (2, 4096))).astype(np.int32)
        sent.append(Sent([body, head if trains else np.zeros_like(head)]))
    return sent


@pytest.mark.parametrize("outer", [OUTER, CAPPED, Outer(clip=0.0), Outer(clip=1.5)], ids=repr)
@given(seed=SEEDS, count=st.integers(2, 8), idle=st.floats(0.0, 1.0))
def test_members_who_left_a_tensor_alone_do_not_say_what_is_usual_of_it(outer, seed, count, idle):
    specs = [TensorSpec(name, (size,), "mean") for name, size in (("a", 60), ("b", 7), ("c", 200))]
    fragment = plan(specs, 1).fragments[0]
    sent, rng = _several(seed, fragment, count), np.random.default_rng(seed)
    for s in sent:
        s.values[:] = [v * np.int32(rng.random() > idle) for v in s.values]
    largest = max(int(np.abs(v).max()) for s in sent for v in s.values)
    error = _merge(fragment, outer, *sent) - _reference(fragment, outer, sent)
    assert np.abs(error).max() <= 0.51 + count * largest * 0.5 / 16383


@pytest.mark.parametrize("averaging", RULES)
@pytest.mark.parametrize("clip", [0.0, 1.5, 3.0])
@pytest.mark.parametrize(("few", "count"), [(1, 2), (1, 3), (2, 4), (2, 5), (1, 8), (3, 8), (4, 8)])
def test_what_few_train_is_averaged_over_those_few(averaging, clip, few, count, rng):
    """An expert, a task's head, a layer frozen elsewhere: who leaves it alone has no vote on it."""
    fragment = _with_heads(averaging)
    sent = _training(rng, *(number < few for number in range(count)))
    merge = RoundMerge([_of(n, s) for n, s in enumerate(sent)], fragment, Outer(clip=clip))
    head = np.mean([s.values[1] for s in sent[:few]], axis=0)
    assert norm(merge.tensor(1)) == pytest.approx(np.linalg.norm(head), rel=0.1)
    assert merge.tensor(1) @ head > 0.99 * norm(merge.tensor(1)) * np.linalg.norm(head)
    for treated in merge.treatment().values():
        assert treated.clipped == pytest.approx(1.0)


@pytest.mark.parametrize("averaging", RULES)
@pytest.mark.parametrize("few", [0, 1, 2])
def test_few_liars_are_bounded_where_they_are_alone(averaging, few, rng):
    """In a tensor that nobody else trains they would say what is usual: by then whole deltas do."""
    fragment = _with_heads(averaging)
    sent = _training(rng, *[False] * 5, *[True] * (few + 1))
    honest = norm(sent[-1].values[1])
    for s in sent[5:]:
        s.values[1] = s.values[1] * 10_000
    for others in (sent[:5], sent[:1]) if not few else (sent[:5],):
        bound = 3 * sqrt(2) * 1.1 * honest
        assert norm(_merge(fragment, OUTER, *others, *sent[5:])[4096:]) <= bound


def test_what_one_member_trains_more_of_is_not_cut_to_what_others_train(rng):
    """Two train a small head, and one the large body as well."""
    specs = [TensorSpec("body", (40_000,), "mean"), TensorSpec("head", (400,), "mean")]
    fragment = plan(specs, 1).fragments[0]
    sent = []
    for number in range(3):
        body, head = np.split(np.rint(rng.normal(0, 1000, 40_400)).astype(np.int32), [40_000])
        sent.append(Sent([body * np.int32(number == 0), head]))
    merged = _merge(fragment, OUTER, *sent)[:40_000]
    assert norm(merged) == pytest.approx(norm(sent[0].values[0]), rel=0.01)
