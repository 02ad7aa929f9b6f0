"""Pods of a StatefulSet, as hosts of their own, with the signals and addresses that Kubernetes gives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.net.hosts import NET, Hosts, why_not
from tests.net.processes import COMMAND, gossamer, wait_for, write_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

BOOTSTRAP = f"{NET}.1:7700"
GRACE_S = 30.0
PATIENCE_S = 240.0
"""A machine with two cores starts six trainers, and may have other work."""

PROBES = """
import socket, ssl, sys, time
tls = ssl.create_default_context()
tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
while True:
    for host in sys.argv[1:]:
        for kind in ("connect", "plain", "tls", "https"):
            try:
                with socket.create_connection((host, 7700), 2) as probe:
                    if kind == "plain":
                        probe.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
                        probe.recv(100)
                    elif kind != "connect":
                        with tls.wrap_socket(probe) as secure:
                            if kind == "https":
                                secure.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
                                secure.recv(100)
            except OSError:
                pass
            time.sleep(0.3)
"""
"""What kubelets and load balancers send to peers' ports, many times as often as they do."""


class Pods:
    """A bootstrap peer and trainers. Each start is on a host of its own, with an empty folder."""

    def __init__(self, hosts: Hosts, base: Path) -> None:
        self.hosts = hosts
        self.base = base
        self.manifest = base / "my.toml"
        done = gossamer("init", self.manifest, "--preset", "tiny", "--every-steps", 4, "--fragments", 2)
        assert done.returncode == 0, done.stderr
        self.data = write_text(base / "text.txt")
        self.keys: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = 0

    def bootstrap(self) -> None:
        command = ["bootstrap", str(self.manifest), "--dir", str(self.base / "bootstrap")]
        self._run("bootstrap", 1, [*command, "--listen", "[::]:7700", "--advertise", BOOTSTRAP], {})

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a trainer somewhere, with its key and an empty folder."""
        n, self.starts = self.hosts.add(), self.starts + 1
        folder = self.base / f"{name}.{self.starts}"
        command = ["node", "--wait", "--join", BOOTSTRAP, "--dir", str(folder), "--name", name]
        command += ["--listen", "[::]:7700", "--data", str(self.data), "--device", "cpu", "--threads", "1"]
        command += ["--evaluate-every", "0", "--stop-within", "25"]
        key = self.keys.setdefault(name, os.urandom(32).hex())
        return self._run(name, n, command, {"GOSSAMER_KEY": key})

    def _run(self, name: str, n: int, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        log = self.base / f"{name}.log"
        process = self.hosts.start(n, "gossamer.bootstrap.cli.main", *command, log=log, env=env)
        self.addresses[name], self.processes[name] = f"{NET}.{n}:7700", process
        return process

    def probe(self, name: str) -> None:
        """Probe the bootstrap peer and a trainer from that trainer's address, as long as the hosts live."""
        n = self.addresses[name].removeprefix(f"{NET}.").partition(":")[0]
        command = [*self.hosts.on(int(n)), sys.executable, "-c", PROBES, f"{NET}.1", f"{NET}.{n}"]
        self.hosts._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    def log(self, name: str) -> str:
        return (self.base / f"{name}.log").read_text()

    def status(self, name: str) -> dict[str, Any]:
        """What a pod says of itself; empty if it does not answer."""
        done = self.hosts.run([*COMMAND, "status", self.addresses[name], "--json"])
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def wait_published(self, round_: int, *names: str) -> None:
        for name in names:
            has = lambda name=name: self.status(name).get("round", 0) >= round_  # noqa: E731
            wait_for(has, PATIENCE_S, f"{name} trains")

    def terminate(self, *names: str) -> None:
        """What a pod gets when it is deleted."""
        begun = time.monotonic()
        for name in names:
            self.processes[name].terminate()
        for name in names:
            assert self.processes[name].wait(GRACE_S) == 0, self.log(name)
        print(f"{len(names)} pods ended in {time.monotonic() - begun:.1f} s")

    def trainer(self, name: str) -> psutil.Process:
        """The process that trains in a pod."""
        processes = psutil.Process(self.processes[name].pid).children()
        return next(one for one in processes if "gossamer.node.trainer.trainer" in one.cmdline())

    def kill(self, name: str) -> None:
        """Kill all processes of a pod at once, as when its machine is taken away."""
        supervisor = psutil.Process(self.processes[name].pid)
        for process in [supervisor, *supervisor.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        self.processes[name].wait(10)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with Hosts() as hosts:
        hosts.add()
        swarm = Pods(hosts, tmp_path)
        yield swarm
    for path in tmp_path.glob("*.log"):
        log = path.read_text()
        for bad in ("Traceback", "misbehaved", "are void", "turned away", *swarm.keys.values()):
            assert bad not in log, log


def test_a_stateful_set_scales_moves_and_loses_pods_and_ends_with_the_same_bits(pods: Pods) -> None:
    trainers = [f"trainer-{number}" for number in range(6)]
    pods.start(trainers[0])
    wait_for(
        lambda: "Trying again every" in pods.log(trainers[0]), PATIENCE_S, "it waits for the bootstrap peer"
    )
    pods.probe(trainers[0])
    pods.bootstrap()
    for name in trainers[1:4]:
        pods.start(name)
    pods.wait_published(3, *trainers[:4])

    # A machine is taken away, and its pod comes back elsewhere, with its key and an empty folder.
    before = pods.status(trainers[3])["round"]
    pods.kill(trainers[3])
    pods.start(trainers[3])
    address = pods.addresses[trainers[3]]
    wait_for(lambda: pods.status(trainers[3]), PATIENCE_S, "it is back")
    begun = time.monotonic()

    def knows(name: str) -> bool:
        rows = {row["name"]: row for row in pods.status(name).get("members", ())}
        return address in rows.get(trainers[3], {}).get("addresses", ())

    for name in ("bootstrap", *trainers[:3]):
        wait_for(lambda name=name: knows(name), PATIENCE_S, f"{name} knows where it is now")
    print(f"its new address is known everywhere after {time.monotonic() - begun:.1f} s")
    pods.wait_published(before + 1, trainers[3])

    # 4 -> 1 -> 6
    pods.terminate(*trainers[1:4])
    reached = pods.status(trainers[0])["round"]
    for name in trainers[1:4]:
        assert "stopping before" not in pods.log(name)
    pods.wait_published(reached + 2, trainers[0])
    for name in trainers[1:]:
        pods.start(name)
    pods.wait_published(reached + 4, *trainers)
    for name in trainers:
        pods.trainer(name).suspend()  # what they have published comes to rest
    everybody = [pods.addresses[name] for name in ("bootstrap", *trainers)]
    verified = pods.hosts.run([*COMMAND, "verify", *everybody, "--wait", "120"], timeout=150)
    assert verified.returncode == 0, verified.stdout + verified.stderr

    # And to 0: the bootstrap peer keeps what the last one has published.
    for name in trainers:
        pods.trainer(name).resume()
    pods.terminate(*trainers)
    assert pods.status("bootstrap")["state"] == "serving"


def test_of_two_pods_with_one_key_one_stops_before_either_publishes(pods: Pods) -> None:
    pods.bootstrap()
    wait_for(lambda: pods.status("bootstrap"), PATIENCE_S, "the bootstrap peer answers")
    both = [pods.start("one"), pods.start("one")]
    (gone,) = wait_for(
        lambda: [one for one in both if one.poll() is not None], PATIENCE_S, "one of them stops"
    )
    assert gone.returncode == 2
    assert pods.log("one").count("another process runs with this node's key") == 1
    member = lambda: next(iter(pods.status("bootstrap")["members"]), {})  # noqa: E731
    assert member().get("round", 0) == 0
    wait_for(lambda: member().get("round", 0) >= 2, PATIENCE_S, "the other one trains")
    assert pods.status("bootstrap")["misbehaviours_seen"] == 0
