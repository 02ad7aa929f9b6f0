"""`gossamer.node.daemon.dashboard.metrics` as Prometheus reads it, and the dashboard that is made of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gossamer.node.daemon.monitoring.status import STATES
from gossamer.node.home import Home
from gossamer.protocol.membership.members import Health
from tests.node.daemons import founded, get, joining, publish, report, running, training
from tests.node.trainer_side import until

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("seconds", "bytes", "ratio", "info", "celsius")


async def scraped(tmp_path: Path) -> tuple[dict[str, Metric], str]:
    """All metric families of a node that trains, by name, and the same in the format OpenMetrics."""
    home = founded(tmp_path / "a")
    async with running(home, name='a "name"\\') as daemon, training(home) as link:
        link.send(report())
        await publish(home, link, 1)
        await until(lambda: daemon.phi.port.report and daemon.phi.loop.seconds and daemon.phi.loop.ready)
        status, headers, text = await get(home, "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=")
        odd = {"Accept": "application/openmetrics-text; version=abc"}
        status, headers, _ = await get(home, "/metrics", headers=odd)
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=")
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        return {family.name: family for family in text_string_to_metric_families(text)}, (
            await get(home, "/metrics", headers=accept)
        )[2]


async def test_what_prometheus_reads(tmp_path: Path) -> None:
    families, open_text = await scraped(tmp_path)
    values = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if not sample.labels
    }
    assert values["gossamer_round"] == values["gossamer_swarm_round"] == 1
    assert values["gossamer_swarm_tokens"] == 100 and values["gossamer_records"] == 1
    assert values["gossamer_inner_steps"] == 10 and values["gossamer_training_loss"] == 2.0
    assert values["gossamer_validation_loss"] == 2.5 and values["gossamer_validation_loss_average"] == 2.25
    assert values["gossamer_wait_ratio"] == 0.01
    assert values["gossamer_merges_total"] == 1 and values["gossamer_merge_seconds_total"] > 0
    assert values["gossamer_healthy"] == 1 and values["process_resident_memory_bytes"] > 1e6
    (node,) = families["gossamer_node_info"].samples
    assert node.labels["name"] == 'a "name"\\' and node.labels["swarm"] == "n"
    states = {sample.labels["state"]: sample.value for sample in families["gossamer_state"].samples}
    assert set(states) == set(STATES) and [s for s, value in states.items() if value] == ["training"]
    healths = {sample.labels["health"] for sample in families["gossamer_members"].samples}
    assert healths == {health.value for health in Health}
    kinds = {(s.labels["direction"], s.labels["kind"]) for s in families["gossamer_link_bytes"].samples}
    assert kinds == {(d, k) for d in ("sent", "received") for k in ("payload", "control")}
    names = {family.name for family in openmetrics(open_text)}
    assert names >= {name.removesuffix("_info") for name in families}


async def test_a_loss_that_is_none_has_no_sample(tmp_path: Path) -> None:
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        for said in (report(loss=math.nan), report(inner_steps=0, loss=0.0), report(loss=0.0)):
            link.send(said)
            await until(
                lambda said=said: daemon.phi.port.report and repr(daemon.phi.port.report) == repr(said)
            )
            (loss,) = (
                family
                for family in text_string_to_metric_families((await get(home, "/metrics"))[2])
                if family.name == "gossamer_training_loss"
            )
            assert [sample.value for sample in loss.samples] == ([0.0] if said == report(loss=0.0) else [])


async def value_of(home: Home, name: str) -> float | None:
    """A metric's value as it is scraped now; None where it has no sample."""
    found = text_string_to_metric_families((await get(home, "/metrics"))[2])
    (family,) = (family for family in found if family.name == name)
    return family.samples[0].value if family.samples else None


async def test_what_a_node_has_trained_on_is_not_known_before_it_has_joined(tmp_path: Path) -> None:
    """Its checkpoint is taken up only then: until then a trainer says 0. It may go back to an older one."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon, training(home) as link:
        for state, steps, shown in (("joining", 0, None), ("training", 400, 400), ("training", 391, 391)):
            said = report(state=state, inner_steps=steps)
            link.send(said)
            await until(lambda said=said: daemon.phi.port.report == said)
            assert await value_of(home, "gossamer_inner_steps") == shown


async def test_what_the_swarm_has_trained_on_is_not_known_before_a_node_has_joined(tmp_path: Path) -> None:
    home = joining(tmp_path / "b", founded(tmp_path / "a"))
    async with running(home, join=("127.0.0.1:1",), observe=True):
        assert await value_of(home, "gossamer_swarm_tokens") is None


async def test_names_and_units_are_as_prometheus_would_have_them(tmp_path: Path) -> None:
    families, _ = await scraped(tmp_path)
    ours = {name: family for name, family in families.items() if name.startswith("gossamer_")}
    assert len(ours) > 20
    for name, family in ours.items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", name), name
        assert family.documentation.endswith(".") and len(family.documentation) > 15, name
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
            assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in sample.labels)
        assert not re.search(r"_(ms|milliseconds|minutes|kb|kib|mb|mib|percent|count|s)$", name), name
        unit = next((unit for unit in UNITS if f"_{unit}" in name), None)
        if unit and "per_second" not in name:
            assert name.endswith(f"_{unit}"), name


async def test_the_dashboard_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    families, _ = await scraped(tmp_path)
    known = {s.name for family in families.values() for s in family.samples} | set(families) | {"up"}
    dashboard = json.loads((ROOT / "deploy/grafana/gossamer.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    alerts = re.findall(r"^ +expr: (.*)$", (ROOT / "deploy/prometheus/alerts.yaml").read_text("utf-8"), re.M)
    assert len(alerts) == 5
    queries += alerts
    assert len(queries) > 25
    for query in queries:
        asked = set(re.findall(r"\b(?:gossamer|process)_[a-z_]+\b", query))
        assert asked or "up{" in query, query
        assert asked <= known, f"{asked - known} in {query}"
        own = "gossamer_round" not in asked or re.search(r' and .*gossamer_state\{.*state="training"', query)
        assert own, f"nodes that do not train have no round of their own: {query}"
    for panel in dashboard["panels"]:
        if panel["type"] == "table":  # of a range Grafana shows one series at a time, a row for each moment
            assert all(target["format"] == "table" and target["instant"] for target in panel["targets"])
        asked = " ".join(target["expr"] for target in panel["targets"])
        assert "CPU" not in panel["title"] or "process_cpu_seconds_total" in asked
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
