"""Two nodes for strangers to talk to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from gossamer.node.daemon.network.rpc import fetch_status
from gossamer.node.home import Home, manifest_of
from gossamer.protocol.manifest import Manifest
from tests.net.processes import BootstrapPeer, gossamer


class Live:
    """Two nodes without trainers, linked to each other."""

    def __init__(self, base: Path) -> None:
        self.manifest_path = base / "m.toml"
        done = gossamer("init", self.manifest_path, "--fragments", 2)
        assert done.returncode == 0, done.stderr
        self.first = BootstrapPeer(self.manifest_path, base / "first")
        self.address = self.first.wait_listening()
        self.second = BootstrapPeer(self.manifest_path, base / "second", "--join", self.address)
        self.other_address = self.second.wait_listening()

    @property
    def manifest(self) -> Manifest:
        return manifest_of(Home(self.first.folder))

    def daemon(self) -> psutil.Process:
        """The first node's daemon process."""
        children = psutil.Process(self.first.process.pid).children()
        return next(child for child in children if "gossamer.node.daemon.daemon" in child.cmdline())

    async def status(self) -> dict[str, Any]:
        return await fetch_status(self.address)
