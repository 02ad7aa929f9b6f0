"""Keeps the trainer and the core informed of each other: what `TrainerPort` and the stores call back."""

from typing import TYPE_CHECKING

from gossamer.node.ipc import control
from gossamer.protocol import effects as fx
from gossamer.protocol.records import Delta

if TYPE_CHECKING:
    from gossamer.node.daemon import Daemon


class Briefing:
    """What is said between one daemon's core and whichever trainer is attached."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._clock_sent: tuple[int, int, int] | None = None

    def welcome(self) -> control.Welcome:
        """The first words to a new trainer; the clock is told it next."""
        self._clock_sent = None
        daemon = self._daemon
        return control.Welcome(
            daemon.manifest.canonical(),
            daemon.identity.node_id,
            daemon.core.own_last,
            daemon.core.clock,
        )

    def trainer_changed(self) -> None:
        """It reported, took a fragment, came or went."""
        report = self._daemon.port.report
        if report is not None:
            self._daemon.dispatch(
                fx.Progress(
                    report.inner_steps, report.tokens, report.tokens_per_s, report.loss, report.device
                )
            )
        self._daemon.merging.look()
        self.tell_clock()

    def tell_clock(self) -> None:
        """Tell the trainer how far the swarm is, if that has changed."""
        daemon = self._daemon
        told = (daemon.core.clock, daemon.merging.tokens, len(daemon.links))
        if daemon.port.attached and told != self._clock_sent:
            self._clock_sent = told
            daemon.port.send(control.Clock(*told))

    def own_stored(self, delta: Delta) -> None:
        """Our delta is durable: now the core may speak of it, and the trainer go on."""
        self._daemon.dispatch(fx.Stored(delta))
        self._daemon.watching.heard(delta)
        self.acknowledge(control.Published(delta.round))

    def acknowledge(self, message: control.Published) -> None:
        self._daemon.port.send(message)
