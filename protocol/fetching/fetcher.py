"""Pulling payloads: which chunk to fetch from which link, and when to try another.

Bodies always travel over connections opened in the direction in which a link was dialled, since that
direction is known to work: we `Get` a chunk from a peer that we dialled, and send a `Want` to a peer that
dialled us, which puts the chunk to us. `requests` holds what is wanted, from whom it may be had, and what is
under way.

What somebody is known to hold comes oldest first. Within a payload, the chunk with the fewest known holders
comes first (rarest first), so that neighbours have different chunks to give to each other; it is asked of the
least busy holder.

What nobody has brought a second after it was wanted is asked for on a *guess*, too: once a second, each link
that is not busy is asked for one chunk that it has not said to hold. A joiner needs this: it is told of
everything by the first peer that it meets, and the others have it too. So do payloads whose author died.

A peer that is asked and silent must not keep us from a chunk that others have. So a request that lasts for
far longer than is usual is *late*, and somebody else is asked too (a hedged request, BitTorrent's end game).
The first to bring it ends both. Silence looks like slowness. What tells them apart is how long other
transfers take here, each as a share of the patience with it, so that neither its size nor the queue before it
matters. And only a few chunks are late at a time, one if nothing has come from anybody since it was asked
for: our own line may be what is slow. Nor is a chunk late that nobody else may be asked for (the simulator's
`parts`, seed 28 of 8 nodes and 6 minutes). A slow link is asked last for `SLOW_S`.

Each of these rules has a mutant or a test that fails without it: hedging (the mutant `wait for the silent`),
`SLOW_S` (`test_fetcher`: a silent holder delays few of many; of many who list a chunk each is waited for
once), one late chunk (`test_requests`: hardly anything is asked for twice), doubts (`test_fetcher`: who was
silent is not believed again), guesses (`test_fetcher`: a busy holder is helped out, what its holders lose is
looked for), few parts of a link (`benchmarks spread`), the window (`test_requests`), the order beside a
snapshot (`test_fetcher`: a snapshot gets on though deltas fill the line).

Holders keep a snapshot for as long as somebody downloads it, but drop payloads when their rounds close: on a
slow line that may be long before the last of the snapshot has come. So what is published meanwhile comes
first, and the snapshot between it. Some of the snapshot is always fetched, or its holders would drop it too.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.effects import Get, Outbox
from gossamer.protocol.fetching.requests import Request, Requests, WantedKey, Wants
from gossamer.protocol.messages import Want
from gossamer.protocol.sampling import RandomSource, sample, shuffle

_WEIGHT = 1 / 8
"""Weight of the last transfer in the moving average of the share of the patience that a chunk takes."""

GUESSED_AT_MAX = 64
"""Keys that are looked at in one go to guess who has them, and chunks of each: `CHUNKS_TRIED`."""

CHUNKS_TRIED = 8


class Fetcher:
    """Schedules chunk transfers over the links. Chunks are verified and stored by the adapter."""

    def __init__(self, fits: Callable[[bytes, int], bool | None], rng: RandomSource, outbox: Outbox) -> None:
        """`fits(blob, size)` tells whether a stored chunk has that size; None if it is not stored."""
        self.wants = Wants(fits)
        self.requests = Requests()
        self._rng = rng
        self._outbox = outbox
        self._links: dict[int, bool] = {}
        """Links that are up, and whether we dialled each."""
        self._bulk: bytes | None = None
        self._is_needless: Callable[[bytes], bool] = lambda key: False
        self._asked_since = 0
        """Bytes of everything else that was asked for since the last chunk of the bulk."""
        self._usual_share = limits.FETCH_SHARE_AT_FIRST
        self._brought_at = -inf
        """When a chunk last came, from any link."""
        self._retry_at = inf
        """When a link that is still believed to hold what it declined may be asked again."""
        self._slow_until: dict[int, float] = {}
        """Links that kept us waiting, and until when they are asked only for what no other link holds."""
        self._guess_at = 0.0
        self._due = inf
        self._changed = False

    # -- links and hints

    def link_up(self, link: int, outbound: bool) -> None:
        self._links[link] = outbound
        self.requests.load[link] = 0
        self._changed = True

    def link_down(self, link: int) -> None:
        self._links.pop(link, None)
        self._slow_until.pop(link, None)
        self.wants.link_down(link)
        self.requests.link_down(link)
        self._changed = True

    def hint(self, link: int, key: bytes) -> None:
        """Note that the peer of a link holds all chunks of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and link not in want.holders | want.doubted:
            want.holders.add(link)
            self.wants.held_by(link, key, want.missing)
            self._changed = True

    def hint_part(self, link: int, key: bytes, blob: bytes) -> None:
        """Note that the peer of a link holds one chunk of `key`."""
        want = self.wants.get(key)
        if want is None or link not in self._links or blob not in want.missing or link in want.doubted:
            return
        if link not in want.parts.setdefault(blob, set()):
            want.parts[blob].add(link)
            self.wants.held_by(link, key, [blob])
            self._changed = self._changed or blob not in self.requests.current

    # -- chunks

    def fetch_between(self, bulk: bytes, is_needless: Callable[[bytes], bool]) -> None:
        """While anything is missing under the key `bulk`, fetch it between all else, one chunk at a time, and
        more of it where nothing else is left to ask for. `is_needless` tells whether a key is not needed once
        the bulk is here: such keys come last of all."""
        self._bulk, self._is_needless = bulk, is_needless
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
        is_late = blob in self.requests.late
        # The oldest, whichever brought it: else a line that has become slow would never be found out.
        first, share = self.requests.arrived(blob, now)
        self._changed = True
        brought_by = None
        if first is not None and first.size:
            self._usual_share += _WEIGHT * (share - self._usual_share)
            self._brought_at = now
            if first.is_guess and not is_late:  # of two, it is unknown which one brought it
                brought_by = first.link
        return self.wants.arrived(blob, brought_by, now)

    def brought(self, link: int, key: bytes, blob: bytes, now: float) -> bool:
        """A link has brought a chunk that it was not asked for. Returns whether it is of use: then it counts
        as asked for until it is stored."""
        is_missing = blob in self.wants.missing(key) and blob not in self.requests.current
        if is_missing and self.requests.load[link] < limits.FETCHES_PER_LINK_MAX:
            # Of no size: how long it takes to be stored shows nothing of the line.
            self.requests.begin(link, key, blob, 0, now, is_guess=False)
            return True
        return False

    def failed(self, link: int, blob: bytes, now: float) -> None:
        """Note that a link did not bring a chunk: other links are tried first."""
        for request in self.requests.of(blob):
            if request.link == link:
                self._in_vain(request, now, limits.FETCH_RETRY_S if request.is_guess else limits.FETCH_SOON_S)

    def _in_vain(self, request: Request, now: float, least: float) -> None:
        """End a request that brought nothing: its link rests from the chunk for `least` s or more."""
        self.requests.end(request)
        wait = self.wants.rest(request.link, request.blob, now, least)
        if wait < limits.FETCH_RETRY_S:
            self._retry_at = min(self._retry_at, now + wait)
        elif not request.is_guess:
            self.wants.doubt(request.link, request.key)
        self._changed = True

    # -- scheduling

    def deadline(self) -> float:
        """When `plan` is due next, as of the last call."""
        return self._due

    def plan(self, now: float) -> None:
        """Start as many transfers as the bounds allow, oldest wants first."""
        if not self._changed and now < self._due:
            return
        self._changed = False
        self._retry_at = inf if now >= self._retry_at else self._retry_at
        self._give_up(now)
        self._find_late(now)
        self._ask_holders(now)
        if now >= self._guess_at:
            self._guess_at = now + limits.FETCH_RETRY_S
            self._guess(now)
        self._due = self._next_due(now)

    def _give_up(self, now: float) -> None:
        """End requests that have taken too long. A busy peer says so soon, so silence does not mean busy."""
        over = [request for request in self.requests if now >= request.deadline]
        if over:
            self.requests.given_up(over)
        for request in over:
            self._in_vain(request, now, limits.FETCH_RETRY_S)

    def _find_late(self, now: float) -> None:
        """See which requests should not be waited for alone: on a link with one that is overdue, any.

        A few chunks may be late if another transfer has outrun this one, else one, to find out whether any
        does. One that is under way twice already is asked of a third.
        """
        late = self.requests.late
        overdue = {request.link for request in self.requests if self._overdue_at(request) <= now}
        self._slow_until.update(dict.fromkeys(overdue, now + limits.SLOW_S))
        for request in [request for request in self.requests.current.values() if request.link in overdue]:
            blob, others = request.blob, self._links.keys() - {request.link}
            most = limits.FETCHES_TWICE_MAX if request.began < self._brought_at else 1
            if blob not in late and sum(map(self.requests.current.__contains__, late)) >= most:
                continue
            if any(not self.wants.rests(link, blob, now) for link in others):
                if blob in late:
                    self._in_vain(late[blob], now, limits.FETCH_RETRY_S)
                self.requests.is_late(request)

    def _overdue_at(self, request: Request) -> float:
        """When a request will have taken far longer than is usual; some time before its deadline, however
        slow the line was a while ago (the simulator's seed 2114 of 8 nodes and 8 minutes)."""
        usual = limits.FETCH_OVERDUE_TIMES * self._usual_share * (request.deadline - request.began)
        latest = request.deadline - limits.FETCH_PATIENCE_S / 2
        return min(request.began + max(limits.FETCH_OVERDUE_S, usual), latest)

    def _next_due(self, now: float) -> float:
        """When a request is late or over, or somebody may be asked for what waits."""
        overdue = min(map(self._overdue_at, self.requests.current.values()), default=inf)
        due = min(
            min((request.deadline for request in self.requests), default=inf),
            overdue if overdue > now else now + limits.FETCH_RETRY_S,
        )
        if any(blob not in self.requests.current for blob in self.wants.blobs):  # quick: few are under way
            due = min(due, self._retry_at, self._guess_at)
        return max(due, now + limits.FETCH_TURN_MIN_S)

    # -- asking

    def _ask(self, link: int, key: bytes, blob: bytes, now: float, *, is_guess: bool) -> None:
        request = self.requests.begin(link, key, blob, self.wants.size_of(blob), now, is_guess=is_guess)
        if self._links[link]:
            self._outbox.append(Get(link, blob, request.size, request.deadline - now))
        else:
            self._outbox.send(link, Want(blob))

    def _may_be_asked(self, link: int, blob: bytes, now: float) -> bool:
        late = self.requests.late.get(blob)
        return not self.wants.rests(link, blob, now) and (late is None or late.link != link)

    def _free(self, most: int) -> set[int]:
        return {link for link, load in self.requests.load.items() if load < most}

    def _ask_holders(self, now: float) -> None:
        """Ask for what somebody is known to hold, until as much is under way as is allowed: slow links last.

        There may be thousands of wants, and every message leads here. So at most `WANTS_LOOKED_AT_MAX` of
        them are looked at, the others the next time.
        """
        if self.requests.is_full(of_guesses=False):
            return
        some = list(islice(self.wants.with_holder.items(), limits.WANTS_LOOKED_AT_MAX))
        free, idle = self._free(limits.FETCHES_PER_LINK_MAX), self._free(limits.PARTS_PER_LINK_MAX)
        slow, late = {link for link, until in self._slow_until.items() if until > now}, self.requests.late
        for key, want, most in self._in_order(some):
            begun = 0
            for blob in self._rarest_first(want):
                if begun >= most or not (want.parts or want.holders & free):
                    break
                holders = want.holders_of(blob) - slow or (set() if blob in late else want.holders_of(blob))
                links = [link for link in holders if link in (free if link in want.holders else idle)]
                able = [link for link in links if self._may_be_asked(link, blob, now)]
                if not able:
                    continue
                self._ask(self._least_busy(able), key, blob, now, is_guess=False)
                self._asked_since = 0 if key == self._bulk else self._asked_since + want.missing[blob]
                if self.requests.is_full(of_guesses=False):
                    return
                free, idle = self._free(limits.FETCHES_PER_LINK_MAX), self._free(limits.PARTS_PER_LINK_MAX)
                begun += 1
        if len(some) < len(self.wants.with_holder):
            self.wants.put_last(key for key, _ in some)

    def _in_order(self, some: Sequence[tuple[bytes, WantedKey]]) -> list[tuple[bytes, WantedKey, float]]:
        """The wants in the order in which to fetch them, each with the most chunks to begin."""
        bulk = self.wants.with_holder.get(self._bulk) if self._bulk is not None else None
        if self._bulk is None or bulk is None:
            return [(key, want, inf) for key, want in some]
        others = [(key, want, inf) for key, want in some if key != self._bulk]
        last = [item for item in others if self._is_needless(item[0])]
        first = [item for item in others if not self._is_needless(item[0])] if last else others
        is_under_way = not bulk.missing.keys().isdisjoint(self.requests.current)
        if not is_under_way and self._asked_since >= max(bulk.missing.values()):
            first.insert(0, (self._bulk, bulk, 1))
        return [*first, (self._bulk, bulk, inf), *last]

    def _rarest_first(self, want: WantedKey) -> Iterable[bytes]:
        """The chunks that are not under way, rarest first; equally rare ones in random order.

        If nobody holds only parts, the chunks keep their order: a snapshot has thousands, and none is better.
        """
        current = self.requests.current
        waiting = (blob for blob in (want.missing if want.holders else want.parts) if blob not in current)
        if not want.parts:
            return waiting
        shuffled = list(waiting)
        shuffle(shuffled, self._rng)
        return sorted(shuffled, key=lambda blob: len(want.parts.get(blob, ())))

    def _least_busy(self, links: list[int]) -> int:
        return min(sample(links, len(links), self._rng), key=self.requests.load.__getitem__)

    def _guess(self, now: float) -> None:
        """Ask each link that is not busy for one chunk that it has not said to hold: first of keys that
        nobody is known to hold, then of those whose holders have no more to give just now."""
        free = self._free(limits.FETCHES_PER_LINK_MAX)
        without, held = self.wants.without_holder, self.wants.with_holder
        for key in [*islice(without, GUESSED_AT_MAX), *islice(held, GUESSED_AT_MAX)]:
            if not free:
                break
            if key in without:
                if self.requests.is_full(of_guesses=True):
                    continue
                self.wants.put_last([key])  # the others have their turns, too
            want = self.wants.get(key)
            if want is None or now < want.since + limits.FETCH_RETRY_S:
                continue
            waiting = (blob for blob in want.missing if blob not in self.requests.current)
            for blob in islice(waiting, CHUNKS_TRIED):
                links = free - want.holders_of(blob)
                able = [link for link in links if self._may_be_asked(link, blob, now)]
                if able and not self.requests.is_full(of_guesses=key in without or None):
                    link = self._least_busy(able)
                    self._ask(link, key, blob, now, is_guess=True)
                    free.discard(link)
