"""Prometheus metrics: the fields of the node's status that have one, read at the moment of the scrape."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from gossamer.node.daemon.monitoring.status import Kind, Metric, NodeStatus, metrics_of


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

    def __init__(self, read: Callable[[], NodeStatus]) -> None:
        self._read = read
        self._totals: dict[tuple[str, ...], _Total] = {}

    def collect(self) -> Iterator[Family]:
        """Called at every scrape, on the event loop's thread."""
        status = self._read()
        info = InfoMetricFamily("gossamer_node", "Which node of which swarm this is.")
        names = ("swarm", "swarm_id", "node_id", "name")
        info.add_metric([], {name: getattr(status, name) for name in names} | {"version": status.release})
        yield info
        families: dict[str, Family] = {}
        for metric, value in metrics_of(status):
            family = families.setdefault(metric.name, _family(metric))
            self._add(family, metric, value)
        yield from families.values()

    def _add(self, family: Family, metric: Metric, value: object) -> None:
        """Add a field's samples; none if it has no value."""
        if metric.label:
            counts = Counter(metric.of(value))
            for of_label in metric.values:
                family.add_metric([of_label], counts[of_label])  # type: ignore[attr-defined]
            return
        number = metric.of(value)
        if number is None:
            return
        if metric.kind is not Kind.GAUGE:
            begin = None if metric.kind is Kind.TOTAL else 0.0
            key = (metric.name, *metric.labels.values())
            number = self._totals.setdefault(key, _Total(begin)).counted(number)
        family.add_metric(list(metric.labels.values()), number)  # type: ignore[attr-defined]


def _family(metric: Metric) -> Family:
    made = GaugeMetricFamily if metric.kind is Kind.GAUGE else CounterMetricFamily
    return made(metric.name, metric.help, labels=[metric.label] if metric.label else list(metric.labels))


def registry_of(read: Callable[[], NodeStatus]) -> CollectorRegistry:
    """A registry of a daemon's metrics, and of its process's CPU, memory and open files."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(read))
    ProcessCollector(registry=registry)
    return registry
