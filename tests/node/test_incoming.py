"""What a step takes over of the daemon's offers."""

from dataclasses import dataclass, field
from typing import cast

from gossamer.node.ipc.shared_memory import SharedMemory
from gossamer.node.trainer.daemon_link import DaemonLink, Offer
from gossamer.node.trainer.fragments import FragmentState
from gossamer.node.trainer.phi_updates import Incoming, Staging


@dataclass
class _State:
    last_published: int = 0


@dataclass
class _Link:
    """A daemon whose offers are made here."""

    offers: list[Offer] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    @property
    def has_offers(self) -> bool:
        return bool(self.offers)

    def take_offer(self) -> Offer | None:
        return self.offers.pop(0) if self.offers else None

    def took(self, offer: Offer) -> None:
        self.taken.append(offer.fragment)

    def offer(self, *fragments: int, own_round: int = 0) -> None:
        nowhere = cast(SharedMemory, None)
        self.offers += [Offer(fragment, 1, own_round, 1, nowhere) for fragment in fragments]


@dataclass
class _Staging:
    """A GPU that a test has copy."""

    under_way: set[int] = field(default_factory=set)
    """Fragments that have not come."""
    being_read: set[int] = field(default_factory=set)
    ahead: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def send_ahead(self, offer: Offer) -> None:
        if offer.fragment not in self.ahead:
            self.ahead.append(offer.fragment)

    def has_come(self, offer: Offer) -> bool:
        return offer.fragment not in self.under_way

    def leave(self, offer: Offer) -> None:
        self.left.append(offer.fragment)

    def is_read(self, offer: Offer) -> bool:
        return offer.fragment not in self.being_read


class _Loop:
    """Takes over what it is given, and says of which fragments that was."""

    def __init__(self, fragments: int = 8) -> None:
        self.link, self.states, self.staging = _Link(), [_State() for _ in range(fragments)], _Staging()
        self.incoming = Incoming(
            cast(DaemonLink, self.link),
            cast(list[FragmentState], self.states),
            cast(Staging, self.staging),
        )

    def step(self, round_: int | None = None) -> list[int]:
        offers = self.incoming.take_for_step(round_)
        for offer in offers:
            self.incoming.took(offer)
        return [offer.fragment for offer in offers]


def test_of_several_half_wait() -> None:
    loop = _Loop()
    loop.link.offer(0, 1, 2, 3, 4)
    assert [loop.step() for _ in range(4)] == [[0, 1, 2], [3], [4], []]


def test_a_step_that_publishes_leaves_others_to_the_next() -> None:
    loop = _Loop()
    loop.link.offer(0, 1)
    assert loop.step(round_=7) == []
    loop.link.offer(2)
    assert loop.step() == [0, 1], "both have waited"
    assert loop.step(round_=8) == [], "this one has not, yet"
    assert loop.step() == [2]


def test_where_every_step_publishes_all_wait_for_one() -> None:
    loop = _Loop()
    taken = []
    for round_ in range(3, 7):
        loop.link.offer(round_ - 3)
        taken.append(loop.step(round_=round_))
    assert taken == [[], [0], [1], [2]]


def test_what_is_published_is_up_to_date_and_what_came_before_is_taken_too() -> None:
    loop = _Loop()
    loop.link.offer(0, 3, 5)
    assert loop.step(round_=3) == [0, 3]
    assert loop.step() == [5]


def test_an_image_from_before_the_own_last_delta_is_given_back() -> None:
    loop = _Loop()
    loop.states[1].last_published = 9
    loop.link.offer(0, 1)
    assert loop.step() == [0]
    assert loop.step() == []
    assert loop.link.taken == [0, 1]


def test_a_step_does_not_wait_for_what_is_under_way_to_a_gpu() -> None:
    loop = _Loop()
    loop.staging.under_way = {0}
    loop.link.offer(0, 1, 2)
    assert loop.step() == [] and loop.staging.ahead == [0]
    assert loop.step() == []
    loop.staging.under_way = set()
    assert loop.step() == [0, 1], "the second goes to where the first was"
    assert loop.step() == [2] and loop.staging.ahead == [0, 2]


def test_what_is_published_is_waited_for_on_its_way_to_a_gpu() -> None:
    loop = _Loop()
    loop.staging.under_way = {3}
    loop.link.offer(3, 4)
    assert loop.step(round_=3) == [3]


def test_memory_is_given_back_once_a_gpu_has_read_it() -> None:
    loop = _Loop()
    loop.staging.being_read = {0}
    loop.link.offer(0, 1)
    assert loop.incoming.take() and loop.step() == [0]
    assert loop.step() == [1] and loop.link.taken == [1]
    loop.staging.being_read = set()
    assert loop.step() == [] and loop.link.taken == [1, 0]
    loop.staging.being_read = {2}
    loop.link.offer(2)
    assert loop.step() == [2] and loop.link.taken == [1, 0]
    loop.staging.being_read = set()
    assert loop.incoming.take() == [] and loop.link.taken == [1, 0, 2], "also where nothing is stepped"


def test_what_is_outdated_is_left_on_its_way_to_a_gpu() -> None:
    loop = _Loop()
    loop.states[0].last_published = 9
    loop.link.offer(0, 1)
    loop.staging.being_read = {0}
    assert loop.step() == []
    assert loop.staging.left == [0] and loop.link.taken == []
    assert loop.step() == [1] and loop.link.taken == [1]
