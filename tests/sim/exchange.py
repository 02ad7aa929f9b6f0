"""One HTTP request: a chunk asked for and answered, or put and accepted.

Each request has a connection of its own. It is retried while the hosts cannot reach each other, and given up
after the timeout of the real client.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.protocol.limits import FETCH_TIMEOUT_S
from tests.sim.network import FRAME_BYTES, Network, Party

Answer = bytes | None
HEADER_BYTES = 300


class NoAnswerError(Exception):
    """Raised by the server to keep the connection open and never answer."""


class LateAnswerError(Exception):
    """Raised by the server to answer `seconds` later."""

    def __init__(self, seconds: float, answer: Answer) -> None:
        super().__init__(seconds, answer)
        self.seconds, self.answer = seconds, answer


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request. `serve` runs in the target's process, `done` in the source's, with None if it failed."""

    net: Network
    source: Party
    target: Party
    upload_bytes: int
    serve: Callable[[], Answer]
    done: Callable[[Answer], None]
    source_life: int = 0
    target_life: int = 0
    begun: float = 0.0

    def start(self) -> None:
        self.source_life, self.target_life = self.source.life, self.target.life
        self.begun = self.net.loop.now
        self._ask(0.2)

    def _finish(self, answer: Answer) -> None:
        self.source.deliver(self.source_life, self.done, answer)

    def _travel(self, source: Party, target: Party, size: int) -> float:
        path = self.net.paths[source.index, target.index]
        delay = (path.latency_s + path.jitter_s * self.net.rng.random()) * self.net.weather.slowness
        if self.net.rng.random() < path.loss + self.net.weather.loss:
            delay += 0.2 + self.net.rng.random()
        return delay + (size + HEADER_BYTES + FRAME_BYTES) / path.bytes_per_s

    def _wait(self, again: Callable[..., None], wait: float, *args: Answer) -> None:
        loop = self.net.loop
        if loop.now + wait < self.begun + FETCH_TIMEOUT_S:
            loop.after(wait, again, 2 * wait, *args)
        else:
            loop.at(self.begun + FETCH_TIMEOUT_S, self._finish, None)

    def _ask(self, wait: float) -> None:
        if self.net.is_closed(self.source.index, self.target.index):
            self._wait(self._ask, wait)
            return
        self.net.loop.after(self._travel(self.source, self.target, self.upload_bytes), self._reach)

    def _reach(self) -> None:
        alive = self.target.running and self.target.life == self.target_life
        if alive:
            self.target.deliver(self.target_life, self._serve)
        elif self.target.powered:
            self._finish(None)  # refused, or reset
        else:
            self.net.loop.at(self.begun + FETCH_TIMEOUT_S, self._finish, None)

    def _serve(self) -> None:
        late_s = 0.0
        try:
            answer = self.serve()
        except LateAnswerError as late:
            late_s, answer = late.seconds, late.answer
        except NoAnswerError:
            self.net.loop.at(self.begun + FETCH_TIMEOUT_S, self._finish, None)
            return
        mischief = self.net.weather.mischief
        if answer and mischief is not None and self.net.rng.random() < mischief.damage:
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        travel_s = self._travel(self.target, self.source, len(answer or b""))
        self.net.loop.after(late_s + travel_s, self._return, 0.2, answer)

    def _return(self, wait: float, answer: Answer) -> None:
        if self.net.is_closed(self.source.index, self.target.index):
            self._wait(self._return, wait, answer)
        else:
            self._finish(answer)
