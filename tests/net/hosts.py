"""Separate hosts on one machine: Linux network namespaces on a bridge, without any privilege.

A user namespace holds the bridge; every host is a network namespace under it with one end of a veth pair::

    pytest            user namespace          host 1          host 2
                      br0 -- v1 ------------- e1 (10.77.0.1)
                          -- v2 ----------------------------- e2 (10.77.0.2)

A cable is cut with ``ip link set v1 down`` and shaped with tc, so that real TCP meets a real outage. The file
system is shared, so a puppet outside reaches its daemon over its Unix socket.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NET = "10.77.0"
IN_USER = ["--user", "--net", "--preserve-credentials"]


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot have such hosts; None if it can."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None and not Path(f"/usr/sbin/{tool}").exists():
            return f"there is no {tool}"
    script = (
        "ip link add br0 type bridge && ip link add v1 type veth peer name e1"
        " && tc qdisc add dev v1 root tbf rate 100mbit burst 128kb latency 100ms"
    )
    done = subprocess.run(
        ["unshare", "-Urn", "sh", "-c", script], capture_output=True, text=True, check=False, env=_env()
    )
    return None if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def _bucket(rate: str) -> str:
    return f"tbf rate {rate} burst 128kb latency 100ms"


class _Holder:
    """A process that keeps a namespace open. It waits for the end of its input, and so ends with us."""

    def __init__(self, prefix: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [*prefix, "sh", "-c", "echo ready; cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_env(),
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.pid = self._process.pid

    def close(self) -> None:
        self._process.communicate(timeout=5)


class Hosts:
    """A bridge and the hosts on it. Use as a context manager: processes started on it end with it."""

    def __init__(self) -> None:
        self._bridge = _Holder(["unshare", "-Urn"])
        self._hosts: list[_Holder] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.on_bridge("ip link add br0 type bridge && ip addr add 10.77.0.254/24 dev br0")
        self.on_bridge("ip link set br0 up && ip link set lo up")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(6)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for holder in (*self._hosts, self._bridge):
            holder.close()

    def _enter(self, pid: int) -> list[str]:
        return ["nsenter", "--target", str(pid), *IN_USER]

    def on_bridge(self, command: str) -> None:
        """Run a shell command in the bridge's namespace."""
        self.run(["sh", "-c", command]).check_returncode()

    def run(self, command: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program in the bridge's namespace, from which all connected hosts can be reached."""
        return subprocess.run(
            [*self._enter(self._bridge.pid), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=_env(),
        )

    def add(self) -> int:
        """Add a host; returns its number n, for the address 10.77.0.n and the cable vn."""
        host = _Holder([*self._enter(self._bridge.pid), "unshare", "-n"])
        self._hosts.append(host)
        n = len(self._hosts)
        self.on_bridge(
            f"ip link add v{n} type veth peer name e{n} && ip link set e{n} netns {host.pid}"
            f" && ip link set v{n} master br0 up"
        )
        self._on_host(n, f"ip addr add {NET}.{n}/24 dev e{n} && ip link set e{n} up && ip link set lo up")
        return n

    def _on_host(self, n: int, command: str) -> None:
        self.run_on(n, ["sh", "-c", command]).check_returncode()

    def run_on(self, n: int, command: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program on a host."""
        return subprocess.run(
            [*self.on(n), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=_env(),
        )

    def on(self, n: int) -> list[str]:
        """The words to put before a command in order to run it on a host."""
        return self._enter(self._hosts[n - 1].pid)

    def shape(self, n: int, rate: str) -> None:
        """Limit the rate at which a host sends, from now on."""
        self._on_host(n, f"tc qdisc replace dev e{n} root {_bucket(rate)}")

    def shape_both_ways(self, n: int, rate: str) -> None:
        """Limit the rate at which a host sends, and at which it receives."""
        self.shape(n, rate)
        self.on_bridge(f"tc qdisc replace dev v{n} root {_bucket(rate)}")

    def cut(self, n: int) -> None:
        """Pull a host's cable at the bridge: nothing comes back, not even an error."""
        self.on_bridge(f"ip link set v{n} down")

    def plug_in(self, n: int) -> None:
        self.on_bridge(f"ip link set v{n} up")

    def move(self, n: int, bridge: str) -> None:
        """Plug a host into another bridge, a new one if there is none of that name: hosts on two bridges are
        two halves of a network. All begin on br0."""
        self.on_bridge(f"ip link show {bridge} >/dev/null 2>&1 || ip link add {bridge} up type bridge")
        self.on_bridge(f"ip link set v{n} master {bridge}")

    def sent(self, n: int) -> int:
        """Bytes that a host has sent over its cable so far."""
        lines = Path(f"/proc/{self._hosts[n - 1].pid}/net/dev").read_text().splitlines()
        (found,) = (line.split()[9] for line in lines if line.split()[0] == f"e{n}:")
        return int(found)

    def pids(self, n: int) -> list[int]:
        """The processes on a host, however they came there."""
        space = os.stat(f"/proc/{self._hosts[n - 1].pid}/ns/net").st_ino
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ends meanwhile
                pid = int(path.name)
                if (path / "ns/net").stat().st_ino == space and os.getpgid(pid) != os.getpgrp():
                    found.append(pid)
        return found

    def start(
        self, n: int, module: str, *args: str, log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run ``python -m module args`` on a host, with extra environment variables."""
        return self.launch(n, [sys.executable, "-m", module, *args], log=log, env=env)

    def launch(
        self, n: int, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a program on a host, with extra environment variables."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*self.on(n), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**_env(), **(env or {})},
                start_new_session=True,  # so that Linux gives each host a share of the cores of its own
            )
        self._processes.append(process)
        return process
