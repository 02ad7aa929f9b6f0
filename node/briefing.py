"""Keeps the trainer and the core informed of each other."""

from collections.abc import Callable, Sized

from gossamer.node.ipc import control
from gossamer.node.ipc.publisher import Publisher
from gossamer.node.ipc.trainer_port import TrainerPort
from gossamer.node.phi.merging import Merging
from gossamer.protocol import events as ev
from gossamer.protocol.core.replica import BEFORE_ALL_ROUNDS, Replica


class Briefing:
    """The port's `Attendant`: carries what a daemon's core and its attached trainer tell each other."""

    def __init__(
        self,
        core: Replica,
        port: TrainerPort,
        merging: Merging,
        publisher: Publisher,
        links: Sized,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._core = core
        self._port = port
        self._merging = merging
        self._publisher = publisher
        self._links = links
        self._dispatch = dispatch
        self._clock_sent: tuple[int, int, int, int] | None = None

    def welcome(self) -> control.Welcome:
        """The first message to a new trainer; a `Clock` follows it."""
        self._clock_sent = None
        core, publisher = self._core, self._publisher
        return control.Welcome(
            core.identity.node_id,
            max(core.own_last, publisher.handed_in),
            self._clock,
            publisher.handed_in,
            publisher.acknowledged,
        )

    def publish(self, message: control.Publish, payload: memoryview) -> None:
        """Have a delta stored and signed."""
        self._publisher.hand_in(message, payload)

    def trainer_changed(self) -> None:
        """The trainer reported, took a fragment, came or went: tell the core, and let merging go on."""
        report = self._port.report
        if report is not None:
            self._dispatch(
                ev.Progress(
                    report.inner_steps, report.tokens, report.tokens_per_s, report.loss, report.device
                )
            )
        self._merging.look()
        self.tell_clock()

    def tell_clock(self) -> None:
        """Tell the trainer how far the swarm is, if that has changed."""
        if not self._port.attached:  # called after every event, and a joining node has many
            return
        told = (self._clock, self._merging.tokens, len(self._links), self._unmerged)
        if told != self._clock_sent:
            self._clock_sent = told
            self._port.send(control.Clock(*told))

    @property
    def _unmerged(self) -> int:
        """How many rounds are not in Phi yet; at least 1 while most others are at rounds that we refuse."""
        return max(self._merging.unmerged, int(self._core.is_contradicted))

    @property
    def _clock(self) -> int:
        """The clock to publish by. For a diverged model, which nobody can train, there is none."""
        return BEFORE_ALL_ROUNDS if self._merging.diverged else self._core.clock_to_publish_by
