"""`deploy`: the chart renders to what Kubernetes takes, and its scripts start nodes as they are meant to.

The chart is rendered by Helm's own code, and every document checked against Kubernetes' schemas. Both come as
Python packages. The operator's own kinds have no schema there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer.node.options import flags

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm" / "gossamer"
VALUES = sorted(CHART.glob("ci/*.yaml"))
FLAGS = {flag.name.upper().replace("-", "_") for flag in flags().values()}
OPERATOR = {"ServiceMonitor", "PrometheusRule"}
VERSIONS = ("1.27", "1.37")
"""The oldest that the chart is for, and the newest that has schemas."""


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="demo", namespace="prod")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of(path: Path) -> list[dict[str, Any]]:
    return rendered(yaml.safe_load(path.read_text("utf-8")))


def named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every StatefulSet's pod, and the container in it."""
    for each in documents:
        if each["kind"] == "StatefulSet":
            pod = each["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            yield pod, container


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_every_document_is_what_kubernetes_takes(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = of(path)
    assert len({(each["kind"], each["metadata"]["name"]) for each in documents}) == len(documents)
    for document in documents:
        for version in VERSIONS if document["kind"] not in OPERATOR else ():
            kubernetes_validate.validate(document, version, strict=True)
    kinds = {each["kind"] for each in documents}
    assert kinds >= {"StatefulSet", "Service"} and (path.stem == "outside") == bool(kinds & OPERATOR)


def test_a_name_that_kubernetes_does_not_know_is_found() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    document = named(of(CHART / "ci" / "minimal.yaml"), "StatefulSet", "demo-gossamer-trainer")
    document["spec"]["template"]["spec"]["toleration"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_what_a_pod_refers_to_is_there(path: Path) -> None:
    documents = of(path)
    values = yaml.safe_load(path.read_text("utf-8"))
    made = {each["metadata"]["name"] for each in documents if each["kind"] in ("ConfigMap", "Secret")}
    theirs = set(re.findall(r"my-\w+|texts", json.dumps(values)))
    for pod, container in pods(documents):
        volumes = {volume["name"]: volume for volume in pod["volumes"]} | {"data": {}}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        sources = [volume.get("secret", {}).get("secretName") for volume in volumes.values()]
        sources += [volume.get("configMap", {}).get("name") for volume in volumes.values()]
        env = {each["name"]: each for each in container["env"]}
        sources.append(env["GOSSAMER_ADMIN_TOKEN"]["valueFrom"]["secretKeyRef"]["name"])
        assert {source for source in sources if source} <= made | theirs
        settings = {f"GOSSAMER_{command}_{name}" for command in ("NODE", "BOOTSTRAP") for name in FLAGS}
        assert {name for name in env if name.startswith(("GOSSAMER_NODE", "GOSSAMER_BOOT"))} <= settings


def test_a_node_is_never_restarted_because_it_is_alone_and_no_key_runs_twice() -> None:
    for path in VALUES:
        for document in of(path):
            assert document["kind"] not in ("Deployment", "DaemonSet", "Pod")
        for _, container in pods(of(path)):
            assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
            probe = container["startupProbe"]  # a trainer may wait for the first bootstrap peer
            assert probe["periodSeconds"] * probe["failureThreshold"] > 30 * 86_400
            assert container["securityContext"]["readOnlyRootFilesystem"]


def test_a_trainer_that_is_told_to_stop_is_done_before_it_is_killed() -> None:
    document = named(of(CHART / "ci" / "spot.yaml"), "StatefulSet", "demo-gossamer-trainer")
    pod = document["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert env["GOSSAMER_NODE_STOP_WITHIN"] == "25" and pod["terminationGracePeriodSeconds"] == 30


def test_a_pod_without_a_volume_has_a_key_of_its_own() -> None:
    documents = of(CHART / "ci" / "outside.yaml")
    keys = named(documents, "Secret", "demo-gossamer-keys")["data"]
    names = [f"demo-gossamer-trainer-{number}" for number in range(3)]
    names += [f"demo-gossamer-bootstrap-{number}" for number in range(2)]
    assert sorted(keys) == sorted(names) and len(set(keys.values())) == 5
    with_volumes = of(CHART / "ci" / "minimal.yaml")
    assert not [each for each in with_volumes if each["metadata"]["name"].endswith("-keys")]
    assert all("GOSSAMER_KEY_FILE" not in json.dumps(container) for _, container in pods(with_volumes))


def test_replicas_are_left_to_an_autoscaler_or_may_be_none() -> None:
    replicas = [
        named(of(CHART / "ci" / f"{name}.yaml"), "StatefulSet", "demo-gossamer-trainer")["spec"].get(
            "replicas"
        )
        for name in ("minimal", "spot", "outside")
    ]
    assert replicas == [3, None, 0]


@pytest.mark.parametrize("values", [{}, {"manifest": "x", "bootstrap": {"replicas": 0}}])
def test_what_is_missing_is_said(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match=r"set-file manifest=my\.toml|give bootstrap\.replicas, or join"):
        rendered(values)


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("values", "number", "joins", "outside"),
    [
        ("minimal", 0, "", []),
        ("minimal", 1, "demo-gossamer-bootstrap-0.", []),
        ("outside", 0, "gossamer://", ["a.example:30700"]),
        ("outside", 1, "gossamer://", ["b.example:30700"]),
        ("outside", 2, "gossamer://", []),
    ],
)
def test_only_the_first_bootstrap_peer_begins_the_swarm(
    tmp_path: Path, values: str, number: int, joins: str, outside: list[str]
) -> None:
    pod = f"demo-gossamer-bootstrap-{number}"
    script(
        tmp_path,
        "gossamer",
        'echo "$@"; echo "$GOSSAMER_BOOTSTRAP_JOIN"; echo "$GOSSAMER_BOOTSTRAP_ADVERTISE"',
    )
    document = named(of(CHART / f"ci/{values}.yaml"), "StatefulSet", "demo-gossamer-bootstrap")
    (container,) = document["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["tini", "--", "/bin/sh", "-c"]
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    env |= {"POD_NAME": pod, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    started = ["/bin/sh", "-c", *container["args"]]
    done = subprocess.run(started, env=env, capture_output=True, text=True, check=True)
    said, joined, advertised = done.stdout.splitlines()
    assert said == "bootstrap /etc/gossamer/swarm/my.toml"
    assert joined.startswith(joins) and bool(joined) == bool(joins)
    assert advertised.split() == [f"{pod}.demo-gossamer-bootstrap.prod.svc:7700", *outside]


def test_a_slurm_job_hands_on_the_signal_waits_and_leaves_its_key_only(tmp_path: Path) -> None:
    """Slurm signals the shell; what the node then takes to end must not be cut short."""
    script(tmp_path, "srun", 'shift; exec "$@"')
    script(
        tmp_path,
        "gossamer",
        "trap 'echo told; sleep 0.3; echo ended; exit 7' TERM\n"
        'mkdir "$4"; echo "$@"; echo "$GOSSAMER_KEY_FILE"; while :; do sleep 0.05; done',
    )
    (tmp_path / "local").mkdir()
    job = subprocess.Popen(
        ["bash", str(DEPLOY / "slurm" / "gossamer.sbatch")],
        env={
            **{
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "HOME": str(tmp_path),
                "TMPDIR": str(tmp_path / "local"),
            },
            **{"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"},
            "SLURM_CPUS_PER_TASK": "2",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    with job:
        assert job.stdout.readline().startswith("node --wait --dir ")
        key = Path(job.stdout.readline().strip())
        job.send_signal(signal.SIGTERM)
        assert job.stdout.read().split() == ["told", "ended"]
    assert job.returncode == 7
    assert key.name == "11-3" and len(key.read_bytes()) == 32 and key.stat().st_mode & 0o077 == 0
    assert list((tmp_path / "local").iterdir()) == []
