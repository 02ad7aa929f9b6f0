"""The clock as one node reads it: neither those who are gone nor those who are behind hold the swarm back."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.access.acl import Role
from gossamer.protocol.history.clock import SwarmClock
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.members import Activity
from gossamer.protocol.unix_time import UnixTime
from tests.protocol import builders

NOW = 1_000.0


def clock_of(
    own: int,
    others: list[tuple[int, bool]],
    *,
    idle: tuple[int, ...] = (),
    floor: int = 0,
    trains: bool = True,
    last: dict[bytes, int] | None = None,
    activity: Activity | None = None,
    observers: tuple[int, ...] = (),
    looking_on: tuple[int, ...] = (),
    of: Manifest = builders.SMALL,
) -> SwarmClock:
    """The clock of a node as `reads` has it. What the others published last may be given, and change; so may
    what they do, which is otherwise that they train, but for the idle. Observers were not invited to,
    and who is looking on says itself that it does not.
    """
    members = [
        SimpleNamespace(
            record=SimpleNamespace(
                node_id=place.to_bytes(2),
                body=SimpleNamespace(trains=place not in looking_on, round=round_ if says else 0),
            ),
            activity=activity or SimpleNamespace(is_idle=lambda now, place=place: place in idle),
        )
        for place, (round_, says) in enumerate(others)
    ]
    if last is None:
        last = {place.to_bytes(2): round_ for place, (round_, _) in enumerate(others)}
    context = SimpleNamespace(
        manifest=of,
        acl=SimpleNamespace(
            role_of=lambda id_: Role.OBSERVE if int.from_bytes(id_) in observers else Role.TRAIN
        ),
        roster=SimpleNamespace(live=lambda: members),
        ledger=SimpleNamespace(
            last_rounds=last, floor=floor, reached=lambda but: max([floor, *last.values()])
        ),
        info=SimpleNamespace(trains=trains),
    )
    author = SimpleNamespace(last_round=own, node_id=b"own")
    return SwarmClock(context, author, UnixTime(builders.CREATED + 10**6))  # type: ignore[arg-type]


def reads(
    own: int,
    others: list[tuple[int, bool]],
    *,
    has_say: bool = False,
    idle: tuple[int, ...] = (),
    floor: int = 0,
    trains: bool = True,
) -> int:
    """What a node reads that published `own` last; of the others, their last rounds and who has a say.

    Who has none has published nothing since it came back, and its row says 0; `idle` are places among them.
    """
    clock = clock_of(own, others, idle=idle, floor=floor, trains=trains)
    clock.progress(1, NOW)
    clock.published_round = own if has_say else 0
    return clock.read(NOW)


@pytest.mark.parametrize(
    ("own", "others", "changes", "clock"),
    [
        (53, [(52, False), (32, True)], {}, 52),
        (52, [(53, False), (32, True)], {}, 52),
        (32, [(53, False), (52, False)], {"has_say": True}, 52),
        (52, [(53, True), (32, True)], {"has_say": True, "idle": (0,)}, 52),
        (80, [(52, False), (53, False)], {"has_say": True}, 80),
        (80, [(52, True), (53, True)], {"has_say": True, "idle": (0, 1)}, 80),
        (53, [(80, True), (52, False)], {}, 80),
        (0, [(52, True), (52, True), (51, True)], {"floor": 48}, 52),
        (52, [(52, True), (51, True), (0, False), (0, False)], {"has_say": True}, 52),
        (53, [(553, True), (53, True)], {}, 53),
        (53, [(10**9, True), (10**9, True), (53, True)], {"has_say": True}, 53),
        (53, [(10**9, True), (10**9, True), (52, False)], {"has_say": True}, 53),
        (0, [(5, True)], {"floor": 48}, 48),
        (0, [(53, False), (52, False), (32, True)], {"trains": False}, 52),
        (5, [], {"trains": False, "has_say": True}, 5),
    ],
    ids=[
        "one that is behind does not take back two of three that start again",
        "whoever of them reads",
        "nor does it read so itself",
        "one that is behind does not hold up who goes on while another idles",
        "who goes on waits for nobody that is away",
        "nor for anybody that hangs",
        "nor is who comes back ahead of it",
        "who joins has no say",
        "and drags nobody",
        "of three one that lies does not race one that has just come back",
        "most of a small swarm cannot race it to where it cannot be yet",
        "nor by what is known of one",
        "the swarm is not where its history is closed already",
        "who only looks on reads the same",
        "it published all the same, before",
    ],
)
def test_what_a_node_reads(own, others, changes, clock):
    assert reads(own, others, **changes) == clock


def test_who_was_invited_to_look_on_has_no_say_whatever_it_says():
    others = [(553, True), (553, True), (53, True)]
    assert clock_of(53, others, observers=(0, 1)).read(NOW) == 53
    assert clock_of(53, others, looking_on=(0, 1)).read(NOW) == 53
    assert clock_of(53, others).read(NOW) == 553


def test_whoever_has_not_published_yet_neither_contradicts_our_clock_nor_bears_it_out():
    for others, is_contradicted in (
        ([(10**9, True), (0, False), (0, False)], True),
        ([(10**9, True), (9, True), (0, False)], False),
    ):
        clock = clock_of(9, others)
        clock.read(NOW)
        assert clock.is_contradicted is is_contradicted


def test_whose_history_begins_anew_keeps_what_the_others_take_however_far_it_was_itself():
    """Most of the others are at 16, and whoever reads another clock than that reads one from 7 on."""
    history = builders.SMALL.history
    far = max(history.retain, history.seal_after + history.snapshot_every)
    others = [(16, True), (16, True), (7, True), (200, True)]
    clock = clock_of(5_000, others, idle=(0, 1, 2, 3))
    assert clock.is_near(5_000, NOW)
    assert clock.begin_at(12, NOW) == 16 + far
    assert clock_of(5_000, []).begin_at(12, NOW) == 12 + far, "nobody else is there"


def test_where_all_is_retained_one_side_of_a_partition_may_be_far_ahead():
    clock = clock_of(16, [(16, True)] * 3, of=builders.manifest(history={"retain": 0}))
    far = 16 + limits.ROUND_SLACK + limits.APART_MAX
    assert clock.is_near(far, NOW) and not clock.is_near(far + 1, NOW)


def test_a_reading_that_was_too_high_for_a_moment_opens_nothing_later():
    """When few of the others were known, those were the ones that had run ahead, say."""
    last = {place.to_bytes(2): 5_000 for place in range(3)}
    clock = clock_of(0, [(0, True)] * 3, last=last, trains=False)
    assert clock.is_near(5_000, NOW)
    last.update(dict.fromkeys(last, 16))
    assert clock.is_near(16 + limits.ROUND_SLACK, NOW) and not clock.is_near(5_000, NOW)


def test_who_idled_while_the_swarm_went_on_has_no_say_until_it_publishes_again():
    for round_, kept in ((51, 50), (52, 0)):
        clock = clock_of(50, [(round_, True)])
        clock.progress(1, NOW)
        clock.published(50, NOW)
        clock.progress(2, NOW + 2 * limits.IDLE_MIN_S)
        assert clock.published_round == kept


def test_what_others_did_before_we_slept_does_not_tell_that_they_train():
    activity = Activity(NOW - 5.0)
    activity.note(1, 9, NOW - 1.0)
    clock = clock_of(9, [(9, True)], activity=activity)
    assert clock.somebody_trains(NOW)
    clock.woke(NOW)
    assert not clock.somebody_trains(NOW)
    activity.note(2, 9, NOW + 1.0)
    assert clock.somebody_trains(NOW + 1.0)


def test_who_was_heard_of_just_now_is_not_known_to_train():
    assert not clock_of(9, [(9, True)], activity=Activity(NOW)).somebody_trains(NOW)


def test_a_swarm_does_not_rest_while_we_have_still_to_hear_of_it():
    clock = clock_of(9, [(9, True)], activity=Activity(NOW))
    clock.woke(NOW)
    assert not clock.rests(NOW) and not clock.rests(NOW + 0.9 * limits.WAKE_PATIENCE_S)
    assert clock.rests(NOW + limits.WAKE_PATIENCE_S)


def test_of_many_members_a_reading_is_kept_for_a_moment_and_of_few_it_is_not():
    for count, kept in ((limits.CLOCK_CACHED_ABOVE_MEMBERS, False), (1_000, True)):
        others = [(9, True)] * count
        last = {place.to_bytes(2): 9 for place in range(count)}
        clock = clock_of(9, others, last=last)
        assert clock.read(NOW) == 9
        last.update(dict.fromkeys(last, 10))
        assert clock.read(NOW) == (9 if kept else 10)
        assert clock.read(NOW + 1.0) == 10
        last.update(dict.fromkeys(last, 11))
        clock.published(11, NOW + 1.0)
        assert clock.read(NOW + 1.0) == 11, "what we do ourselves is seen at once"


@given(st.data())
def test_a_third_of_liars_neither_race_nor_hold_up_those_who_come_back(data):
    """Whichever of the honest have restarted or idle, if one of them has a say, and we are honest."""
    count = data.draw(st.integers(2, 15), label="honest")
    round_ = data.draw(st.integers(10, 10_000), label="round")
    honest = [round_ - data.draw(st.integers(0, 1)) for _ in range(count)]
    lies = data.draw(st.lists(st.sampled_from((1, round_ + 500)), max_size=(count + 1) // 2), label="lies")
    lies = lies[: (count + len(lies)) // 3]
    says = [data.draw(st.booleans()) for _ in range(count - 1)]
    has_say = data.draw(st.booleans())
    others = [*zip(honest[1:], says, strict=True), *((lie, True) for lie in lies)]
    read = reads(honest[0], others, has_say=has_say)
    assert read >= round_ - 1, "held up"
    if sum(says) + has_say > len(lies):
        assert read <= round_, "raced"
