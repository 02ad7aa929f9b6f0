"""Prometheus metrics: the fields of the node's status that have one, read at the moment of the scrape."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from gossamer.node.daemon.monitoring.status import Metric, NodeStatus, metrics_of


class DaemonCollector(Collector):
    """Every metric of one daemon."""

    def __init__(self, read: Callable[[], NodeStatus]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Called at every scrape, on the event loop's thread."""
        status = self._read()
        info = InfoMetricFamily("gossamer_node", "Which node of which swarm this is.")
        names = ("swarm", "swarm_id", "node_id", "name")
        info.add_metric([], {name: getattr(status, name) for name in names} | {"version": status.release})
        yield info
        families: dict[str, Any] = {}
        for metric, value in metrics_of(status):
            # A counter only grows. Totals that may fall are gauges: a trainer goes back to its checkpoint.
            made = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
            labels = [metric.label] if metric.label else list(metric.labels)
            family = families.setdefault(metric.name, made(metric.name, metric.help, labels=labels))
            for of_labels, number in _samples(metric, value):
                family.add_metric(of_labels, number)
        yield from families.values()


def _samples(metric: Metric, value: object) -> Iterator[tuple[list[str], float]]:
    """A field's samples; none if it has no value, or one that is not finite."""
    if metric.label:
        counts = Counter(metric.of(value))
        yield from (([of_label], counts[of_label]) for of_label in metric.values)
    elif (number := metric.of(value)) is not None and isfinite(number):
        yield list(metric.labels.values()), number


def registry_of(read: Callable[[], NodeStatus]) -> CollectorRegistry:
    """A registry of a daemon's metrics, and of its process's CPU, memory and open files."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(read))
    ProcessCollector(registry=registry)
    return registry
