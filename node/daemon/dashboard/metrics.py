"""Prometheus metrics: the daemon's state, read at the moment of the scrape.

Names follow https://prometheus.io/docs/practices/naming/: base units, ``_total`` for what only grows.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gossamer.node import __version__
from gossamer.node.daemon.monitoring.status import NodeView, describe, loss_of
from gossamer.node.daemon.monitoring.watching import Watching
from gossamer.protocol.membership.members import Health

STATES = ("joining", "starting", "training", "serving", "finished", "leaving")

Status = dict[str, Any]
Reading = Callable[[Status], float | None]


def _of(key: str) -> Reading:
    return lambda status: status[key]


def _of_trainer(key: str) -> Reading:
    """Read a field of the trainer's report; None if the node does not train, or its trainer has not
    reported."""
    return lambda status: status.get("trainer", {}).get(key)


def _so_far(key: str) -> Reading:
    """Read a trainer's total over all its runs, which it does not know before it has joined."""

    def reading(status: Status) -> float | None:
        trainer = status.get("trainer", {})
        return None if trainer.get("state") == "joining" else trainer.get(key)

    return reading


_GAUGES: tuple[tuple[str, str, Reading], ...] = (
    ("gossamer_uptime_seconds", "Time since the daemon started.", _of("uptime_s")),
    ("gossamer_round", "Last round that this node published a delta for.", _of("round")),
    ("gossamer_swarm_round", "Round clock of the swarm.", _of("clock")),
    ("gossamer_sealed_round", "Round of this node's newest snapshot.", _of("sealed_round")),
    ("gossamer_closed_round", "Rounds up to this one cannot change any more.", _of("closed_round")),
    ("gossamer_records", "Delta records held.", _of("records")),
    ("gossamer_void_records", "Rounds of members that are void.", lambda status: len(status["void"])),
    ("gossamer_rounds_behind", "Rounds that have changed and wait to be merged.", _of("rounds_behind")),
    ("gossamer_payloads_missing", "Payloads that are known of but not fetched yet.", _of("payloads_missing")),
    (
        "gossamer_agreement_ratio",
        "Mean cosine of pairs of deltas in the newest round with two deltas, -1 to 1.",
        _of("agreement"),
    ),
    (
        "gossamer_members_accused",
        "Members whose deltas are usually bad.",
        lambda status: sum(member["conduct"]["verdict"] is not None for member in status["members"]),
    ),
    (
        "gossamer_invited_until_timestamp_seconds",
        "When this node's invitation ends, in Unix time.",
        _of("invited_until"),
    ),
    ("gossamer_validation_loss", "Held-out loss at the last evaluation.", _of_trainer("val_loss")),
    (
        "gossamer_wait_ratio",
        "Fraction of training time not spent on inner steps.",
        _of_trainer("wait_fraction"),
    ),
    ("gossamer_tokens_per_second", "Speed of this node's trainer.", _of_trainer("tokens_per_s")),
)

_COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    ("gossamer_merges_total", "Merges that changed the model.", _of("version")),
    ("gossamer_misbehaviours_total", "Messages that broke the protocol.", _of("misbehaviours_seen")),
)

_TRAINER_COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    (
        "gossamer_inner_steps_total",
        "Inner steps of this node's trainer, since the first scrape.",
        _so_far("inner_steps"),
    ),
    (
        "gossamer_tokens_total",
        "Tokens that this node has trained on, since the first scrape.",
        _so_far("tokens"),
    ),
)
"""The trainer reports totals over all its runs; these metrics count from the first scrape on, see
`_Total`."""


class _Total:
    """Makes a counter, which must not fall, from a total that may: a scraper takes a fall for a restart from
    0.

    A total falls when a trainer goes back to its checkpoint, or when records turn out to be void. What is
    done after a fall counts from there: a counter that waited for the old total to be reached again would
    suggest that nobody trains.
    """

    def __init__(self, begin: float | None) -> None:
        """`begin`: the total as this process started; None if the total when first seen counts for nothing.

        A trainer's next process may begin below what the last one reported, and a scraper that saw the
        counter fall, though not to 0, would count all of it again.
        """
        self._last = begin
        self._counted = 0.0

    def counted(self, total: float) -> float:
        """The counter's value, now that this is the total."""
        self._counted += 0.0 if self._last is None else max(0.0, total - self._last)
        self._last = total
        return self._counted


class DaemonCollector(Collector):
    """Every metric of one daemon."""

    def __init__(self, view: NodeView, watching: Watching) -> None:
        self._view = view
        self._watching = watching
        self._totals: dict[str, _Total] = {}

    def collect(self) -> Iterator[Metric]:
        """Called at every scrape, on the event loop's thread."""
        status = describe(self._view)
        yield self._info(status)
        for name, help_text, reading in _GAUGES:
            yield _filled(GaugeMetricFamily(name, help_text), reading(status))
        for name, help_text, reading in _COUNTERS:
            yield self._counter(name, help_text, reading(status))
        for name, help_text, reading in _TRAINER_COUNTERS:
            yield self._counter(name, help_text, reading(status), begin=None)
        merging = self._view.merging
        # After a restart the sum is built up again, and is of no use until then.
        tokens = merging.tokens if merging.ready else None
        yield self._counter("gossamer_swarm_tokens_total", "Tokens that the swarm has trained on.", tokens)
        loss = GaugeMetricFamily("gossamer_training_loss", "Training loss of this node's latest step.")
        yield _filled(loss, loss_of(self._view.report))  # a status has 0 for no loss, as members' rows do
        yield from self._of_watching()
        yield _labelled(
            "gossamer_state",
            "1 for the node's current state.",
            "state",
            {state: int(state == status["state"]) for state in STATES},
        )
        healths = Counter(member["health"] for member in status["members"])
        yield _labelled(
            "gossamer_members",
            "Other members, by their health as this node sees it.",
            "health",
            {health.value: healths[health.value] for health in Health},
        )
        directions = Counter("outbound" if link["outbound"] else "inbound" for link in status["links"])
        yield _labelled(
            "gossamer_links",
            "Links, by which side dialled.",
            "direction",
            {direction: directions[direction] for direction in ("inbound", "outbound")},
        )
        yield _link_bytes(status)

    def _counter(self, name: str, help_text: str, total: float | None, begin: float | None = 0.0) -> Metric:
        so_far = self._totals.setdefault(name, _Total(begin))
        counted = None if total is None else so_far.counted(total)
        return _filled(CounterMetricFamily(name, help_text), counted)

    def _info(self, status: Status) -> Metric:
        info = InfoMetricFamily("gossamer_node", "Which node of which swarm this is.")
        labels = {
            "swarm": status["swarm"],
            "swarm_id": status["swarm_id"],
            "node_id": status["node_id"],
            "name": status["name"],
            "version": __version__,
        }
        info.add_metric([], labels)
        return info

    def _of_watching(self) -> Iterator[Metric]:
        watching, vitals = self._watching, self._watching.vitals
        lag = "Longest time in the last minute that the daemon's event loop was busy."
        yield GaugeMetricFamily("gossamer_event_loop_lag_seconds", lag, vitals.lag_s)
        healthy = "1 if the node is healthy, see /healthz."
        yield GaugeMetricFamily("gossamer_healthy", healthy, int(watching.health()[0]))
        space = "Free space on the disk of the node's folder or of its chunks, whichever has less."
        free = GaugeMetricFamily("gossamer_disk_free_bytes", space)
        yield _filled(free, watching.disk_free)
        seconds = self._view.merging.seconds
        yield CounterMetricFamily("gossamer_merge_seconds_total", "Wall time spent merging.", seconds)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, value: float | None) -> Metric:
    """A family with one sample, or with none if there is no value."""
    if value is not None:
        family.add_metric([], value)
    return family


def _labelled(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for of_label, value in values.items():
        family.add_metric([of_label], value)
    return family


def _link_bytes(status: Status) -> Metric:
    help_text = "Bytes of all links: messages, and the chunks of payloads and snapshots."
    family = CounterMetricFamily("gossamer_link_bytes_total", help_text, labels=["direction", "kind"])
    for direction in ("sent", "received"):
        payload = status[f"payload_bytes_{direction}"]
        family.add_metric([direction, "payload"], payload)
        family.add_metric([direction, "control"], status[f"bytes_{direction}"] - payload)
    return family


def registry_of(view: NodeView, watching: Watching) -> CollectorRegistry:
    """A registry of a daemon's metrics, and of its process's CPU, memory and open files."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(view, watching))
    ProcessCollector(registry=registry)
    return registry
