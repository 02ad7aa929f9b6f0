"""`briefing`: by which clock the trainer publishes, and whether the swarm has come to rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gossamer.node.daemon.daemon import Briefing
from gossamer.node.ipc import messages as control
from gossamer.protocol.replica import BEFORE_ALL_ROUNDS
from tests.protocol.builders import identity


class Setup:
    """What is said between a core and a trainer that are only the test's."""

    def __init__(self) -> None:
        self.sent: list[control.ControlMessage] = []
        self.core: Any = SimpleNamespace(
            identity=identity(0), own_last=3, clock_to_publish_by=7, is_contradicted=False
        )
        port: Any = SimpleNamespace(attached=True, send=self.sent.append)
        self.merging: Any = SimpleNamespace(diverged="", tokens=100, unmerged=0)
        publisher: Any = SimpleNamespace(handed_in=4, acknowledged=3)
        self.briefing = Briefing(self.core, port, self.merging, publisher, links=(), dispatch=list)


def test_nothing_is_published_for_a_model_that_diverged() -> None:
    setup = Setup()
    core, merging, briefing, sent = setup.core, setup.merging, setup.briefing, setup.sent
    for diverged, clock in (("", 7), ("fragment 1", BEFORE_ALL_ROUNDS), ("", 7)):
        merging.diverged = diverged
        assert briefing.welcome().clock == clock
        briefing.tell_clock()
        assert sent[-1] == control.Clock(clock, 100, 0, 0)
    count = len(sent)
    briefing.tell_clock()
    assert len(sent) == count, "said once"
    core.is_contradicted = True
    briefing.tell_clock()
    assert sent[-1] == control.Clock(7, 100, 0, 1), "what is refused is not merged"
    said = briefing.welcome()
    assert (said.own_last, said.handed_in, said.acknowledged) == (4, 4, 3), "one is being stored"


def test_a_new_trainer_is_told_what_the_one_before_was() -> None:
    """Else it would know neither the swarm's tokens nor what is unmerged, until one of them changes."""
    setup = Setup()
    for _ in range(2):
        setup.briefing.welcome()
        setup.briefing.tell_clock()
    assert setup.sent == [control.Clock(7, 100, 0, 0)] * 2
