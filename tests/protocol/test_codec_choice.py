"""Which codec a node publishes in, over lines that carry so many bytes a second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from gossamer.protocol.effects import Notice, Outbox
from gossamer.protocol.gossip.codec_choice import PATIENCE, PATIENCE_MAX, RECENT, STEPS, CodecChoice
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import TensorSpec, length_in
from tests.protocol import builders

LADDER = ("int4", "topk8", "topk16", "topk")
FRAGMENTS = 4
STEP_S = 0.1
LATENCY_S = 0.01
LINKS = range(5)

Line = Callable[[float], float]
"""Bytes a second at a time."""


def manifest_of(*codecs: str, every_steps: int = 0) -> Manifest:
    tensors = tuple(TensorSpec(f"w{n}", (1000, 1000), "mean") for n in range(FRAGMENTS))
    outer = {"codecs": [{"name": name} for name in codecs]}
    return builders.manifest(tensors, FRAGMENTS, outer=outer, pace={"every_steps": every_steps})


class Node:
    """A node that publishes at every window's `FRAGMENTS`th part, over a line that takes one delta after the
    other; the simulated peers hold a delta at the same time."""

    def __init__(self, manifest: Manifest, line: Line, window: int = STEPS) -> None:
        self.manifest, self.line, self.window = manifest, line, window
        self.outbox = Outbox()
        self.choice = CodecChoice(manifest, self.outbox)
        self.now = self.free_at = 0.0
        self.sent: list[str] = []
        self._arriving: deque[tuple[float, bytes]] = deque()

    def publish(self, deltas: int) -> Counter[str]:
        """Returns how often each codec was used."""
        for _ in range(deltas):
            self._publish()
        return Counter(self.sent[-deltas:])

    def _publish(self) -> None:
        self.now += self.window / FRAGMENTS * STEP_S
        while self._arriving and self._arriving[0][0] <= self.now:
            at, record_id = self._arriving.popleft()
            for link in LINKS:
                self.choice.held([record_id], link, at)
        codec, round_ = self.choice.name, len(self.sent) + 1
        size = length_in(round_, codec, self.manifest.plan())
        took = round(1000 * self.window * STEP_S)
        delta = builders.unsigned(0, round_)
        changed = {"codec": codec, "payload_bytes": size, "steps": self.window, "took": took}
        delta = replace(delta, body=replace(delta.body, **changed))
        self.choice.published(delta, LINKS, self.now)
        self.sent.append(codec)
        self.free_at = max(self.now, self.free_at) + size / self.line(self.now)
        self._arriving.append((self.free_at + LATENCY_S, delta.record_id))

    @property
    def changes(self) -> int:
        return sum(isinstance(effect, Notice) for effect in self.outbox)


INT4_BYTES = 4 * 1000 * 1000 / 2
"""Of a window's payloads."""

CARRIES_INT4 = INT4_BYTES / (0.5 * STEPS * STEP_S)
"""A line that takes half of a short window for them."""


@pytest.mark.parametrize("window", [5, 10, 80])
@pytest.mark.parametrize(
    ("part", "codec"),
    [(100.0, "int4"), (2.0, "int4"), (0.7, "topk8"), (0.2, "topk16"), (0.1, "topk"), (0.001, "topk")],
)
def test_a_line_settles_on_the_finest_codec_that_it_carries(part: float, codec: str, window: int) -> None:
    node = Node(manifest_of(*LADDER), lambda _: part * CARRIES_INT4, window)
    node.publish(400)
    assert node.publish(200)[codec] >= 190, "but for trials"
    assert node.changes <= 4


def test_the_first_change_comes_at_once_and_is_put_in_words() -> None:
    node = Node(manifest_of(*LADDER), lambda _: 0.01 * CARRIES_INT4)
    assert node.choice.why == ""
    assert node.publish(2 * RECENT + 2)["int4"] <= RECENT + 2
    assert "times as long as they may" in node.choice.why
    assert node.outbox[-1] == Notice(f"publishing in {node.choice.name} from now on: {node.choice.why}")


def test_a_line_that_gets_faster_is_found_to_be_by_trials() -> None:
    node = Node(manifest_of(*LADDER), lambda now: (0.05 if now < 300.0 else 10.0) * CARRIES_INT4)
    node.publish(1200)
    assert node.choice.name == "topk"
    node.publish(2 * PATIENCE_MAX + 3 * PATIENCE)
    assert node.publish(50) == {"int4": 50}


@pytest.mark.parametrize("period_s", [3.0, 20.0, 60.0])
def test_a_line_that_comes_and_goes_changes_the_codec_ever_less_often(period_s: float) -> None:
    def line(now: float) -> float:
        return (0.02 if now // period_s % 2 else 20.0) * CARRIES_INT4

    node = Node(manifest_of(*LADDER), line)
    node.publish(500)
    before = node.changes
    node.publish(2000)
    assert node.changes - before <= 2 * len(LADDER) * 2000 / PATIENCE_MAX


def test_a_fixed_pace_gives_deltas_the_time_of_its_windows() -> None:
    node = Node(manifest_of(*LADDER, every_steps=80), lambda _: 0.2 * CARRIES_INT4, window=80)
    assert node.publish(100) == {"int4": 100}


def test_an_earlier_runs_last_delta_says_where_to_begin() -> None:
    node = Node(manifest_of(*LADDER), lambda _: 0.01 * CARRIES_INT4)
    rng = builders.np.random.default_rng(0)
    own = [
        builders.random_delta(rng, builders.identity(0), round_, of=node.manifest, codec=codec)[0]
        for round_, codec in ((5, "topk16"), (1, "int4"))
    ]
    node.choice.restore(own)
    assert node.choice.name == "topk16"


def test_a_single_codec_is_never_left_and_peers_that_go_are_not_waited_for() -> None:
    assert Node(manifest_of("int4"), lambda _: 1.0).publish(50) == {"int4": 50}
    node = Node(manifest_of(*LADDER), lambda _: 1.0)
    for _ in range(50):
        node.publish(1)
        for link in LINKS:
            node.choice.link_down(link, node.now)
    assert node.changes == 0
