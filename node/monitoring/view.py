"""One node as seen by the code that shows it: the status, the admin server, metrics, the chronicle."""

import asyncio
import time
from dataclasses import dataclass, field

from gossamer.node.ipc.control import JOINING, Report
from gossamer.node.ipc.trainer_port import TrainerPort
from gossamer.node.network.open_links import OpenLinks
from gossamer.node.network.policing import Policing
from gossamer.node.network.transport import Transport
from gossamer.node.phi.archive import Archive
from gossamer.node.phi.merging import Merging
from gossamer.node.seldom import Trouble
from gossamer.node.storage.home import Home
from gossamer.protocol.core.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The parts of a daemon that are shown. Holders of a view only read."""

    home: Home
    core: Replica
    port: TrainerPort
    merging: Merging
    archive: Archive
    links: OpenLinks
    transport: Transport
    policing: Policing
    storing: tuple[Trouble, ...]
    """Of all that this node stores."""
    stopping: asyncio.Event
    started: float = field(default_factory=time.monotonic)

    @property
    def node_id(self) -> bytes:
        return self.core.identity.node_id

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def report(self) -> Report | None:
        """The trainer's last report, with no speed once the trainer is gone; None if there was none yet."""
        return self.port.report

    @property
    def sealed_round(self) -> int | None:
        """Round of the newest snapshot here."""
        claims = self.core.sealing.claims
        return claims[0].round if claims else None

    @property
    def state(self) -> str:
        """joining, starting, training, serving, finished or leaving."""
        if self.stopping.is_set():
            return "leaving"
        if not self.merging.ready:
            return "joining"
        if not self.core.info.trains:
            return "serving"
        report = self.report if self.port.attached else None
        # A trainer says that it is joining until it begins to train, be the model here for long.
        return "starting" if report is None or report.state == JOINING else report.state
