"""The role of every rank but the first: to do what the first has decided.

A follower has no outer loop and no daemon. Each of its methods exchanges as many words as the leader's method
does, and takes part in what they say.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from torch import Tensor, nn

from gossamer.node.ipc.messages import Report
from gossamer.node.trainer.beside import Beside
from gossamer.node.trainer.driver import RankRole
from gossamer.node.trainer.metrics import Progress
from gossamer.node.trainer.parameters import Binding
from gossamer.node.trainer.ranks import Team, Word
from gossamer.protocol.manifest import Manifest


@dataclass(slots=True)
class _Hearsay:
    """Stands in for a link to the daemon: a follower hears of the swarm only by the words."""

    node_id: bytes
    own_last: int = 0
    clock: int = 0
    swarm_tokens: int = 0
    links: int = 0
    stop_asked: Event = field(default_factory=Event)
    is_outdated: bool = False

    def close(self) -> None:
        pass


class Follower(RankRole):
    """The role of a rank other than the first; `team` knows the fragments."""

    def __init__(
        self,
        model: nn.Module,
        manifest: Manifest,
        team: Team,
        *,
        node_id: bytes,
        stop_round: int,
        beside: Beside,
    ) -> None:
        super().__init__(_Hearsay(node_id), team, stop_round=stop_round, beside=beside)
        self._binding = Binding(model, manifest)

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        while not self._follow().done:
            pass
        return not self._word.stop

    def step(self, tokens: int, loss: float | Tensor) -> int | None:
        own_last = self._word.own_last
        word = self._follow(tokens)
        self.progress = Progress(word.steps + 1, word.own_tokens + word.tokens)
        return word.own_last if word.own_last > own_last else None

    def await_daemon(self, timeout_s: float) -> None:
        """The leading rank waits, and all others for that one."""

    def flush(self, timeout_s: float) -> None:
        self.stop_requested = False
        while self._follow(leaving=1).leaving < self.team.size:
            pass
        self._follow()

    def save_if_whole(self) -> None:
        pass

    def drop_progress(self) -> None:
        self._binding.check(seldom=False)
        self._follow()

    def settle(self) -> bool:
        return bool(self._follow().touched)

    def agree_done(self, done: int) -> int:
        return self._follow().done

    def report(self, report: Report) -> None:
        pass

    def _follow(self, tokens: int = 0, *, leaving: int = 0) -> Word:
        """Exchange one word, and take part in what it says."""
        said = Word(tokens=tokens, stop=int(self._is_told_to_stop()), leaving=leaving)
        word = self.team.agree(said)
        if word.touched:
            self._binding.check()  # what this rank has replaced would go on without the swarm's values
        with self.team.full(word.touched):
            pass
        self._word = word  # only now: `full` raises if the first rank could not do what the word says
        self.version, self.taken, self.last_loss = word.version, word.taken, word.loss
        self.progress = Progress(word.steps, word.own_tokens)
        return word
