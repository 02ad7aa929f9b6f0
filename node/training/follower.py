"""The peers of all ranks but the first: they do what the first has decided.

A follower has no outer loop and no daemon. Each of its methods exchanges as many words as the first rank's
does, and takes part in what these say.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import SupportsFloat, SupportsInt

from torch import Tensor, nn

from gossamer.node.ipc.control import Report
from gossamer.node.peer import Peer
from gossamer.node.training.beside import Beside
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.ranks import DONE, Ranks, Word
from gossamer.node.training.standing import Standing
from gossamer.node.training.steps import mean_loss, token_count
from gossamer.protocol.manifest import Manifest


@dataclass(slots=True)
class _Hearsay:
    """A link to nowhere: what is known of the swarm comes with the words."""

    node_id: bytes
    own_last: int = 0
    clock: int = 0
    swarm_tokens: int = 0
    links: int = 0
    stop_asked: Event = field(default_factory=Event)

    def close(self) -> None:
        pass


class Follower(Peer):
    """A `Peer` on another rank than the first."""

    def __init__(
        self,
        model: nn.Module,
        manifest: Manifest,
        team: Ranks,
        *,
        node_id: bytes,
        stop_round: int,
        beside: Beside,
    ) -> None:
        Standing.__init__(self, model, _Hearsay(node_id), team, stop_round=stop_round, beside=beside)
        team.bind(manifest.plan())

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        while not self._follow().done:
            pass
        return not self._word.stop

    def step(self, tokens: SupportsInt, loss: SupportsFloat | Tensor) -> int | None:
        self._check_here()
        count, _ = token_count(tokens), mean_loss(loss)
        self._steps_run += 1
        before, own_last = self.version, self._word.own_last
        word = self._follow(count)
        self.progress = Progress(word.steps + 1, word.own_tokens + word.tokens)
        self._after_step(before)
        return word.own_last if word.own_last > own_last else None

    def flush(self, timeout_s: float) -> None:
        self._follow()

    def drop_progress(self) -> None:
        self._follow()

    def settle(self) -> bool:
        return bool(self._follow().touched)

    def finish(self, *, quiet_s: float = 2.0, timeout_s: float = 30.0) -> bool:
        self._check_here()
        self.flush(0.0)
        self.drop_progress()
        while True:
            self.settle()
            if done := self._follow().done:
                return done == DONE

    def report(self, report: Report) -> None:
        pass

    def close(self) -> None:
        Standing.close(self)

    def _follow(self, tokens: int = 0) -> Word:
        """Exchange one word, and take part in what it says."""
        word = self._word = self._team.agree(Word(tokens=tokens, stop=int(self._is_told_to_stop())))
        with self._team.full(word.touched):
            pass
        self.version, self.last_loss = word.version, word.loss
        self.progress = Progress(word.steps, word.own_tokens)
        return word
