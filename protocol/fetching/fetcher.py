"""Pulling payloads: which chunk to fetch from which link, and when to try another.

Bodies always travel over connections opened in the direction in which a link was dialled, since that
direction is known to work: we `Get` a chunk from a peer that we dialled, and send a `Want` to a peer that
dialled us, which puts the chunk to us.

`requests` holds what is wanted, from whom it may be had, and what is under way; `piece_picker` decides which
chunk is next, and who is asked for it. A peer that is asked and silent must not keep us from a chunk that
others have. So when everything missing of a payload is under way, and one of its chunks for far longer than
is usual, the request is *late*, and somebody else is asked too (a hedged request, BitTorrent's end game). The
first to bring it ends both.

Silence looks like slowness. What tells them apart is how long other transfers take here, each as a share of
the patience with it, so that neither its size nor the queue before it matters. And only a few chunks are late
at a time, one if nothing has come from anybody since it was asked for: our own line may be what is slow. Nor
is a chunk late that nobody else may be asked for (the simulator's `parts`, seed 28 of 8 nodes and 6 minutes).
"""

from collections.abc import Callable
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.backoff import Backoff
from gossamer.protocol.effects import Effect, Get, Send
from gossamer.protocol.fetching.piece_picker import PiecePicker
from gossamer.protocol.fetching.requests import Pick, Request, Requests, Wants
from gossamer.protocol.fetching.window import FetchWindow
from gossamer.protocol.messages import Want
from gossamer.protocol.sampling import RandomSource

_WEIGHT = 1 / 8
"""Weight of the last transfer in the moving average of the share of the patience that a chunk takes."""


class Fetcher:
    """Schedules chunk transfers over the links. Chunks are verified and stored by the adapter."""

    def __init__(self, fits: Callable[[bytes, int], bool | None], rng: RandomSource) -> None:
        """`fits(blob, size)` tells whether a stored chunk has that size; None if it is not stored."""
        self.wants = Wants(fits)
        self.requests = Requests()
        self._links: dict[int, bool] = {}
        """Links that are up, and whether we dialled each."""
        self._window = FetchWindow(self.requests)
        self._picker = PiecePicker(self.wants, self.requests, rng)
        self._tardy: dict[int, Backoff] = {}
        """Links that kept us waiting, and until when they rest: longer each time."""
        self._usual_share = limits.FETCH_SHARE_AT_FIRST
        self._brought_at = -inf
        """When a chunk last came, from any link."""
        self._retry_at = inf
        """When a link that is still believed to hold what it declined may be asked again."""
        self._due = inf
        self._now = 0.0
        self._changed = False

    # -- links and hints

    def link_up(self, link: int, outbound: bool) -> None:
        self._links[link] = outbound
        self.requests.link_up(link)
        self._picker.link_up(self._now)
        self._changed = True

    def link_down(self, link: int) -> None:
        self._links.pop(link, None)
        self.wants.link_down(link)
        self.requests.link_down(link)
        self._picker.link_down(link)
        self._tardy.pop(link, None)
        self._changed = True

    def hint(self, link: int, key: bytes) -> None:
        """Note that the peer of a link holds all chunks of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and link not in want.holders | want.doubted:
            self.wants.held_by(link, key)
            for blob in want.missing:
                self.requests.end_rest(link, blob, self._now)
            self._changed = self._changed or any(map(self._is_sought, want.missing))

    def hint_part(self, link: int, key: bytes, blob: bytes) -> None:
        """Note that the peer of a link holds one chunk of `key`."""
        want = self.wants.get(key)
        if want is None or link not in self._links or blob not in want.missing or link in want.doubted:
            return
        if link not in want.parts.get(blob, ()):
            self.wants.held_by(link, key, blob)
            want.heard_at = self._now
            self.requests.end_rest(link, blob, self._now)
        self._changed = self._changed or self._is_sought(blob)

    def _is_sought(self, blob: bytes) -> bool:
        """Whether another holder of a missing chunk is of use now."""
        request = self.requests.current.get(blob)
        return request is None or request.link in self._picker.tardy

    # -- chunks

    def fetch_between(self, bulk: bytes, is_needless: Callable[[bytes], bool]) -> None:
        """Fetch something large between all else: see `PiecePicker.fetch_between`."""
        self._picker.fetch_between(bulk, is_needless)
        self._changed = True

    def want(self, key: bytes, chunks: tuple[tuple[bytes, int], ...], now: float) -> bool:
        """Ask for chunks (hash, size) under a key. Returns whether none is missing.

        A list of chunks that nobody can have is ignored, see `Wants.add`.
        """
        is_lacking = self.wants.add(key, chunks, now)
        self._changed = self._changed or bool(is_lacking)
        return is_lacking is False

    @property
    def came(self) -> int:
        """Bytes of all chunks that have come."""
        return self.requests.came

    def is_stalled(self, key: bytes, now: float) -> bool:
        """Whether chunks of a key are missing, none has come for as long as the slowest may take, and none
        that was asked for in that time is still waited for: on a slow line one may be behind many others."""
        want = self.wants.get(key)
        if want is None:
            return False
        over = max(want.since, want.got_at) + limits.FETCH_TIMEOUT_S
        return over <= now and not any(
            request.blob in want.missing and request.began < over and now < request.deadline
            for request in self.requests
        )

    def expected_size(self, blob: bytes) -> int | None:
        """The largest size of a chunk that is on its way. None for any other: no peer may put that to us."""
        return self.wants.size_of(blob) or None if self.requests.of(blob) else None

    def arrived(self, blob: bytes, now: float) -> list[bytes]:
        """Note that a chunk is stored; returns the keys that it completes."""
        over = self.requests.arrived(blob)
        self._changed = True
        brought_by = None
        if over:
            # The oldest, whichever brought it: otherwise a line that has become slow would never be found
            # out.
            first = over[0]
            share = min(1.0, max(0.0, now - first.began) / (first.deadline - first.began))
            self._usual_share += _WEIGHT * (share - self._usual_share)
            self._brought_at = now
            self._window.brought(first, share)
            if len(over) == 1 and first.is_guess:  # of two, it is unknown which one brought it
                brought_by = first.link
        return self.wants.arrived(blob, brought_by, now)

    def failed(self, link: int, blob: bytes, now: float) -> None:
        """Note that a link did not bring a chunk: other links are tried first."""
        for request in self.requests.of(blob):
            if request.link == link:
                least = limits.FETCH_RETRY_S if request.is_guess else limits.FETCH_SOON_S
                self._in_vain(request, now, least)

    def _in_vain(self, request: Request, now: float, least: float) -> None:
        """End a request that brought nothing: its link rests from the chunk for `least` s or more."""
        self.requests.end(request)
        self._rest(request, now, least)
        if request.is_guess:
            self._picker.guess_failed(request.link, now)

    def _rest(self, request: Request, now: float, least: float) -> None:
        want = self.wants.get(request.key)
        is_orphan = want is None or want.is_orphan(now)
        most = limits.ORPHAN_RETRY_MAX_S if is_orphan else limits.FETCH_RETRY_MAX_S
        rest = self.requests.rest(request.link, request.blob, now, least, most)
        if rest.wait >= limits.FETCH_RETRY_S and not request.is_guess:
            self.wants.doubt(request.link, request.key)
        elif rest.wait < limits.FETCH_RETRY_S:
            self._retry_at = min(self._retry_at, rest.until)
        self._picker.ask_others(request.key, now)
        self._changed = True

    # -- scheduling

    def deadline(self) -> float:
        """When `plan` is due next, as of the last call."""
        return self._due

    def plan(self, now: float) -> list[Effect]:
        """Start as many transfers as the bounds allow, oldest wants first."""
        self._now = self._picker.now = now
        if not self._changed and now < self._due:
            return []
        self._changed = False
        self._retry_at = inf if now >= self._retry_at else self._retry_at
        longer, self.wants.longer = self.wants.longer, []
        for blob in longer:
            for link in self._links:
                self.requests.end_rest(link, blob, now)
        self._give_up(now)
        self.requests.sweep(now)
        self._picker.tardy = self._find_tardy(now)
        self._find_late(now)
        effects = self._ask_holders(now) + self._search(now)
        self._due = self._next_due(now)
        return effects

    def _give_up(self, now: float) -> None:
        """End requests that have taken too long. A busy peer says so soon, so silence does not mean busy."""
        for request in [request for request in self.requests.late.values() if now >= request.deadline]:
            self._in_vain(request, now, limits.FETCH_RETRY_S)
        over = [request for request in self.requests.current.values() if now >= request.deadline]
        if over:
            self._window.given_up(over, now)
        for request in over:
            self._in_vain(request, now, limits.FETCH_RETRY_S)
            self._kept_waiting(request.link, now)

    def _kept_waiting(self, link: int, now: float) -> None:
        rest = self._tardy.get(link)
        if rest is None or rest.until <= now:
            self._tardy[link] = Backoff.after(rest, now, limits.TARDY_REST_S, limits.TARDY_REST_MAX_S)

    def _find_tardy(self, now: float) -> set[int]:
        """Links that kept us waiting lately; none if they are more than half: then our own line is slow."""
        tardy = {link for link, rest in self._tardy.items() if rest.until > now}
        return tardy if 2 * len(tardy) <= len(self._links) else set()

    # -- the end game

    def _find_late(self, now: float) -> None:
        """See which requests should not be waited for alone.

        A chunk that is under way twice already is asked of a third. Of others a few may be if another
        transfer has outrun this one, else one, to find out whether any does.
        """
        twice = self.requests.twice
        for request in list(self.requests.current.values()):
            if self._is_too_slow(request, now) and self._may_be_late(request):
                if request.blob in self.requests.late:
                    self._in_vain(self.requests.late[request.blob], now, limits.FETCH_RETRY_S)
                elif twice < (limits.FETCHES_TWICE_MAX if request.began < self._brought_at else 1):
                    twice += 1
                else:
                    continue
                self.requests.is_late(request)
                self._kept_waiting(request.link, now)
                self._picker.tardy.add(request.link)
                self._picker.ask_others(request.key, now)

    def _overdue_at(self, request: Request) -> float:
        """When a request will have taken far longer than is usual."""
        usual = self._usual_share * (request.deadline - request.began)
        return request.began + max(limits.FETCH_OVERDUE_S, limits.FETCH_OVERDUE_TIMES * usual)

    def _is_too_slow(self, request: Request, now: float) -> bool:
        """Whether a request is overdue, or its link was merely the first to say that it holds the chunk, but
        has kept us waiting before."""
        if self._overdue_at(request) <= now:
            return True
        tardy, want = self._picker.tardy, self.wants.get(request.key)
        if request.link not in tardy or want is None:
            return False
        return not want.holders_of(request.blob) <= tardy

    def _may_be_late(self, request: Request) -> bool:
        """Whether nothing else of its key is left to ask for, and somebody else may be asked."""
        late, current = self.requests.late, self.requests.current
        want = self.wants.get(request.key)
        if want is not None and any(blob not in current and blob not in late for blob in want.missing):
            return False
        return self._picker.may_ask_other(request)

    # -- asking

    def _ask_holders(self, now: float) -> list[Effect]:
        """Ask for what somebody is known to hold."""
        if not self._is_any_waiting or self._is_full():
            return []
        return [self._ask(pick, now) for pick in self._picker.held(self._is_full)]

    def _search(self, now: float) -> list[Effect]:
        """Ask anybody for what nobody is known to hold."""
        effects: list[Effect] = []
        picks = self._picker.searches()
        while not self._are_searches_full() and (pick := next(picks, None)) is not None:
            effects.append(self._ask(pick, now, is_search=True))
        return effects

    def _is_full(self) -> bool:
        under_way = len(self.requests.sizes(of_searches=False))
        return under_way >= limits.FETCHES_MAX or self._window.is_full(of_searches=False)

    def _are_searches_full(self) -> bool:
        under_way = len(self.requests.sizes(of_searches=True))
        return under_way >= limits.SEARCHES_MAX or self._window.is_full(of_searches=True)

    def _ask(self, pick: Pick, now: float, *, is_search: bool = False) -> Effect:
        link, key, blob = pick
        want = self.wants.get(key)
        assert want is not None
        size, is_guess = self.wants.size_of(blob), link not in want.holders_of(blob)
        request = self.requests.begin(pick, size, now, is_guess=is_guess, is_search=is_search)
        if not self._links[link]:
            return Send(link, Want(blob))
        return Get(link, blob, size, request.deadline - now)

    @property
    def _is_any_waiting(self) -> bool:
        """Whether a missing chunk is not under way. Quick to find out, since few are under way."""
        return any(blob not in self.requests.current for blob in self.wants.blobs)

    def _next_due(self, now: float) -> float:
        """When a request is late or over, or somebody may be asked for what waits."""
        overdue = min(map(self._overdue_at, self.requests.current.values()), default=inf)
        due = min(
            min((request.deadline for request in self.requests), default=inf),
            overdue if overdue > now else now + limits.FETCH_RETRY_S,
        )
        if not self._is_any_waiting:
            return due
        if self.wants.any_has_holder and not self._is_full():
            due = min(due, self._retry_at, now + limits.FETCH_RETRY_S)
        if not self._are_searches_full():
            due = min(due, max(self._picker.next_search(), self._picker.next_guess()))
        return max(due, now + limits.FETCH_TURN_MIN_S)
