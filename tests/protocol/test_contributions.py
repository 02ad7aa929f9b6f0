"""ContributionStats: figures of what merging did to members, and verdicts that begin once and end once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.blocks import pack_blocks
from gossamer.protocol.manifest import Outer
from gossamer.protocol.merge.contributions import (
    CLIPPED_MIN,
    ROUNDS_KEPT,
    ROUNDS_MIN,
    Change,
    ContributionStats,
    Figures,
    RoundFigures,
    agreement,
    figures,
    greedy_in,
)
from gossamer.protocol.merge.merge import SAMPLE_MAX, Contribution, RoundMerge, measure
from gossamer.protocol.payloads import Payload, encode_payload
from tests.protocol import builders

GOOD = Figures(agreement=0.4)
OPPOSED = Figures(agreement=-0.4)
CLIPPED = Figures(clipped=9.8, pace=30.0, agreement=0.1)


def member(number: int) -> bytes:
    return builders.identity(number).node_id


def contribution(number: int, values: np.ndarray, **changes: object) -> Contribution:
    fragment = builders.one_tensor(values.size, "rda")
    payload = Payload("exact", fragment, encode_payload("exact", fragment, [values.astype(np.int32)]))
    norms, sample = measure(payload)
    settings = {"tokens": 1000, "steps": 10, "staleness": 0, **changes}
    return Contribution(member(number), norms=norms, tensor=payload.section, sample=sample, **settings)


def judge(outer: Outer, *contributions: Contribution) -> RoundFigures:
    fragment = builders.one_tensor(contributions[0].tensor(0).numel, "rda")
    return figures(RoundMerge(contributions, fragment, outer))


def play(stats: ContributionStats, *of_member: Figures, start: int = 1) -> list[Change]:
    changes = []
    for round_, given_ in enumerate(of_member, start):
        changes += stats.note(round_, RoundFigures({member(0): given_}, None))
    return changes


# --- figures of a round


def test_a_round_of_honest_members_and_every_kind_of_other(rng):
    common = rng.normal(0, 1e5, 20_000)
    honest = [contribution(n, common + rng.normal(0, 1e5, 20_000)) for n in range(6)]
    found = judge(
        Outer(weight_cap=4.0, clip=3.0),
        *honest,
        contribution(6, -10 * common),
        contribution(7, common, tokens=1_000_000),
        contribution(8, common, staleness=99),
    )
    for number in range(6):
        of_member = found.members[member(number)]
        assert (of_member.void, of_member.stale, of_member.capped, of_member.clipped) == (False, False, 1, 1)
        assert of_member.pace == pytest.approx(1, abs=0.1)
        assert of_member.agreement is not None and 0.4 < of_member.agreement < 0.9
    reversed_ = found.members[member(6)]
    assert reversed_.clipped == pytest.approx(10 / (3 * 2**0.5), rel=0.05)
    assert reversed_.agreement is not None and reversed_.agreement < -0.8
    assert found.members[member(7)].capped == pytest.approx(250_000)
    assert found.members[member(8)] == Figures(stale=True)


def test_what_does_not_decode_is_void(rng):
    values = rng.normal(0, 1e5, 50)
    merge = RoundMerge([contribution(0, values)], builders.one_tensor(50, "rda"), Outer())
    found = figures(merge, void=[member(1)])
    assert found.members == {member(0): Figures(), member(1): Figures(void=True)}
    assert found.agreement is None


def test_members_whose_deltas_are_zero_stand_in_nobodys_way():
    """Without any movement none is faster than others, nor is any of it clipped."""
    found = judge(Outer(), *(contribution(number, np.zeros(100)) for number in range(3)))
    assert [(f.clipped, f.pace, f.agreement) for f in found.members.values()] == 3 * [(1.0, 1.0, None)]


def test_the_agreement_shown_is_that_of_the_newest_round_that_had_two_deltas():
    stats = ContributionStats()
    for round_, found, shown in ((4, 0.5, 0.5), (3, 0.9, 0.5), (5, None, 0.5), (4, 0.6, 0.6), (6, 0.1, 0.1)):
        stats.note(round_, RoundFigures({}, found))
        assert stats.agreement == shown


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_agreement_is_the_mean_cosine_of_pairs(seed, count):
    rng = np.random.default_rng(seed)
    samples = {
        member(n): rng.normal(0.3, 1, 200).astype(np.float32) * 10.0 ** rng.integers(9) for n in range(count)
    }
    units = np.array([s / np.linalg.norm(s) for s in samples.values()], dtype=np.float64)
    gram = units @ units.T
    each, overall = agreement(samples)
    assert overall == pytest.approx((gram.sum() - count) / (count * (count - 1)), abs=1e-5)
    assert set(each) == (set(samples) if count > 2 else set())
    for number in range(count if count > 2 else 0):
        others = np.delete(units, number, axis=0).sum(axis=0)
        expected = units[number] @ others / np.linalg.norm(others)
        assert each[member(number)] == pytest.approx(expected, abs=1e-4)


def test_one_giant_does_not_set_the_standard(rng):
    """Honest members stay in agreement whatever one of them shouts."""
    common = rng.normal(0, 1, 5000)
    samples = {member(n): (common + rng.normal(0, 1, 5000)).astype(np.float32) for n in range(4)}
    samples[member(4)] = (-1e9 * common).astype(np.float32)
    each, _ = agreement(samples)
    assert all(each[member(n)] > 0.2 for n in range(4)) and each[member(4)] < -0.5


def test_nothing_to_compare():
    zero, some = np.zeros(5, dtype=np.float32), np.ones(5, dtype=np.float32)
    assert agreement({}) == ({}, None)
    assert agreement({member(0): some, member(1): zero}) == ({}, None)
    each, overall = agreement({member(0): some, member(1): -some, member(2): some, member(3): zero})
    assert member(3) not in each and each[member(0)] == 0.0 and each[member(1)] == pytest.approx(-1.0)
    assert overall == pytest.approx(-1 / 3)


@pytest.mark.parametrize("shapes", [(10,), (SAMPLE_MAX,), (SAMPLE_MAX + 1,), (50_000, 3, 100_000)])
def test_a_sample_is_spread_over_all_tensors(shapes):
    fragment = builders.several_tensors(shapes)
    values = np.arange(fragment.numel, dtype=np.int32)
    tensors = [values[slot.span] for slot in fragment.slots]
    _, sample = measure(Payload("exact", fragment, encode_payload("exact", fragment, tensors)))
    stride = int(sample[1] - sample[0])
    assert len(sample) <= SAMPLE_MAX and stride % 2 == 1
    assert np.array_equal(sample, values[::stride])


# --- verdicts


def test_an_honest_member_has_none():
    stats = ContributionStats()
    assert play(stats, *[GOOD] * 30) == []
    summary = stats.of(member(0))
    assert (summary.judged, summary.clipped, summary.opposed, summary.verdict) == (ROUNDS_KEPT, 0, 0, None)
    assert (summary.cap_factor, summary.clip_factor) == (1.0, 1.0), "nothing was cut"
    assert summary.agreement == pytest.approx(0.4)


def test_a_verdict_begins_once_and_ends_once():
    stats = ContributionStats()
    assert play(stats, *[CLIPPED] * (ROUNDS_MIN - 1)) == [], "too early to say"
    [begun] = play(stats, *[CLIPPED] * 12, start=ROUNDS_MIN)
    assert begun.verdict == "clipped in 8 of the last 8 rounds, by 9.8x on average"
    assert stats.of(member(0)).clip_factor == pytest.approx(9.8)
    [ended] = play(stats, *[GOOD] * 40, start=20)
    assert ended == Change(member(0), None)
    assert stats.of(member(0)).verdict is None


def test_a_share_about_the_border_does_not_flap():
    stats = ContributionStats()
    changes = play(stats, *[OPPOSED, GOOD] * 20)
    changes += play(stats, *[OPPOSED, GOOD, GOOD] * 20, start=41)
    assert [change.verdict for change in changes] == ["opposed to the others in 4 of the last 8 rounds"]


def test_charges_are_named_together_and_a_new_one_is_announced():
    stats = ContributionStats()
    play(stats, *[CLIPPED] * ROUNDS_MIN)
    both = Figures(clipped=4.0, pace=12.0, agreement=-0.5)
    changes = play(stats, *[both] * ROUNDS_KEPT, start=ROUNDS_MIN + 1)
    assert len(changes) == 1
    assert changes[0].verdict is not None
    assert "clipped in" in changes[0].verdict and "; opposed to the others in" in changes[0].verdict


def test_two_void_rounds_are_enough_and_one_is_not():
    stats = ContributionStats()
    first = stats.note(1, RoundFigures({member(0): GOOD}, None), [member(0)])
    assert first == [] and stats.of(member(0)).void == 1
    [begun] = stats.note(2, RoundFigures({}, None), [member(0)])
    assert begun.verdict == "void (equivocated, or cannot be decoded) in 2 of the last 2 rounds"
    changes = play(stats, *[GOOD] * (ROUNDS_KEPT + 1), start=3)
    assert changes == [Change(member(0), None)]


def test_whoever_was_found_void_stays_so_while_one_such_round_is_remembered():
    stats = ContributionStats()
    void = Figures(void=True)
    play(stats, void, *[GOOD] * (ROUNDS_KEPT - 2), void)
    assert play(stats, *[GOOD] * (ROUNDS_KEPT - 1), start=ROUNDS_KEPT + 1) == [], "the newer is still there"
    assert stats.of(member(0)).void == 1 and stats.of(member(0)).verdict is not None
    assert play(stats, GOOD, start=2 * ROUNDS_KEPT) == [Change(member(0), None)]


def test_being_late_and_being_heavy_are_said_as_what_they_are():
    stats = ContributionStats()
    [late] = play(stats, *[Figures(stale=True)] * ROUNDS_MIN)
    assert late.verdict == "too late to count in 8 of the last 8 rounds"
    stats = ContributionStats()
    assert play(stats, *[Figures(capped=20.0)] * 20) == [], "a faster machine"
    [heavy] = play(stats, *[Figures(capped=250_000.0)] * 10, start=21)
    assert heavy.verdict is not None and "by 250,000x" in heavy.verdict and "or overstating" in heavy.verdict


def test_a_summary_counts_the_rounds_in_which_a_weight_was_cut_and_by_how_much_it_was_there():
    stats = ContributionStats()
    play(stats, GOOD, Figures(capped=3.0), GOOD, Figures(capped=5.0))
    summary = stats.of(member(0))
    assert (summary.judged, summary.capped, summary.cap_factor) == (4, 2, 4.0)


def test_a_round_merged_again_replaces_its_figures():
    """Partial rounds look odd: of three deltas of eight, an honest one may be clipped."""
    stats = ContributionStats()
    for round_ in range(1, 30):
        assert stats.note(round_, RoundFigures({member(0): CLIPPED}, 0.9)) == []
        assert stats.note(round_, RoundFigures({member(0): GOOD}, 0.3)) == []
    assert stats.of(member(0)).clipped == 0
    assert stats.agreement == 0.3
    stats.note(5, RoundFigures({member(0): CLIPPED}, -1.0))
    assert stats.agreement == 0.3, "of the newest round"
    assert stats.of(member(0)).judged == ROUNDS_KEPT and stats.of(member(0)).clipped == 0, "too old"


def test_a_little_clipping_is_no_offence():
    stats = ContributionStats()
    assert play(stats, *[Figures(clipped=CLIPPED_MIN - 0.1, pace=10.0, agreement=0.01)] * 30) == []


def test_a_long_window_is_no_offence(rng):
    """32 times the steps and 20 times the length: clipped, but short for its steps."""
    common = rng.normal(0, 1e4, 5000)
    slow = [contribution(n, common + rng.normal(0, 1e4, 5000)) for n in range(3)]
    fast = contribution(3, 30 * common, steps=320, tokens=32_000)
    found = judge(Outer(clip=1.0), *slow, fast).members[member(3)]
    assert found.clipped > 3 and found.pace < 1
    stats = ContributionStats()
    assert play(stats, *[found] * 30) == [] and stats.of(member(0)).clipped == 0


def test_members_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MEMBERS_MAX", 3)
    stats = ContributionStats()
    for round_ in range(1, 50):
        stats.note(round_, RoundFigures({bytes([round_]) * 32: OPPOSED, member(0): GOOD}, None))
    assert len(stats._members) <= 3
    assert stats.of(member(0)).judged == ROUNDS_KEPT, "those that come and go make room"


def test_who_trains_a_head_of_its_own_is_neither_clipped_nor_opposed():
    """A body for all, and three heads of which each member trains one."""
    rng = np.random.default_rng(0)  # of one in sixty, chance alone makes a verdict
    fragment = builders.several_tensors([3000, 1000, 1000, 1000])
    common, stats = rng.normal(0, 1e5, 3000), ContributionStats()
    for round_ in range(1, ROUNDS_KEPT):
        found = []
        for number in range(3):
            tensors = [common + rng.normal(0, 1e5, 3000), *np.zeros((3, 1000))]
            tensors[1 + number] = rng.normal(0, 3e5, 1000)
            payload = encode_payload("exact", fragment, [t.astype(np.int32) for t in tensors])
            norms, sample = measure(Payload("exact", fragment, payload))
            section = Payload("exact", fragment, payload).section
            found.append(Contribution(member(number), 1000, 10, 0, norms, section, sample))
        judged = figures(RoundMerge(found, fragment, Outer(clip=1.5)))
        assert all(of_member.clipped == 1.0 for of_member in judged.members.values())
        assert stats.note(round_, judged) == []
    assert stats.of(member(0)).opposed == 0


def test_who_claims_more_of_the_data_than_its_tokens_make_is_named():
    ours = builders.manifest(data={"samples": 9000, "blocks": 900})
    deltas = [
        builders.signed(
            builders.identity(number),
            builders.body_of(b"1", "int8", 8, 2, blocks=pack_blocks(range(blocks))[0], tokens=tokens),
            ours,
        )
        for number, (blocks, tokens) in enumerate([(10, 1000), (40, 4000), (9, 1000), (800, 1000)])
    ]
    assert greedy_in(deltas) == {builders.identity(3).node_id}
    assert greedy_in(deltas[2:]) == set(), "of two, nobody can tell"
    stats = ContributionStats()
    for round_ in range(1, 9):
        stats.note(round_, RoundFigures({member(0): Figures(greedy=True)}, None))
    assert "than it can have trained on" in (stats.of(member(0)).verdict or "")
