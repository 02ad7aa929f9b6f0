"""Which chunk to fetch next, and from which link.

What somebody is known to hold comes oldest first. Within a payload, the chunk with the fewest known holders
comes first (rarest first), so that neighbours have different chunks to give to each other; it is asked of the
least busy holder. Of what nobody is known to hold, a few links at a time are asked on a guess: each link in
turn, once a second at most, so that a payload that nobody has delays none that somebody has.

A link that has kept us waiting is *tardy*: it is asked only for what no other link is known to hold.

Holders keep a snapshot for as long as somebody downloads it, but drop payloads when their rounds close: on a
slow line that may be long before the last of the snapshot has come. So what is published meanwhile comes
first, and the snapshot between it. Some of the snapshot is always fetched, or its holders would drop it too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.fetching.requests import Pick, Request, Requests, WantedKey, Wants
from gossamer.protocol.sampling import RandomSource, shuffle

LOOKED_AT_MAX = 64
"""Keys that nobody is known to hold that are looked at in one go, and chunks of each: `CHUNKS_TRIED`."""

CHUNKS_TRIED = 8


class PiecePicker:
    """Picks from what is wanted. Each pick is to be asked for before the next one is drawn."""

    def __init__(self, wants: Wants, requests: Requests, rng: RandomSource) -> None:
        self._wants = wants
        self._requests = requests
        self._rng = rng
        self.now = 0.0
        self.tardy: set[int] = set()
        """Links that have kept us waiting, and are asked last for now."""
        self._bulk: bytes | None = None
        self._is_needless: Callable[[bytes], bool] = lambda key: False
        self._asked_since = 0
        """Bytes of everything else that was asked for since the last chunk of the bulk."""
        self._searches: list[tuple[float, bytes]] = []
        """A heap of the times at which anybody may be asked for keys that nobody is known to hold. An entry
        with another time than the key's `search_at` is ignored."""
        self._guess_at: dict[int, float] = {}
        """From when each link may be asked on a guess again: a link that declines one is spared others for a
        while."""

    def fetch_between(self, bulk: bytes, is_needless: Callable[[bytes], bool]) -> None:
        """While anything is missing under the key `bulk`, fetch it between all else, one chunk at a time, and
        more of it where nothing else is left to ask for. `is_needless` tells whether a key is not needed once
        the bulk is here: such keys come last of all."""
        self._bulk, self._is_needless = bulk, is_needless

    def link_up(self, now: float) -> None:
        """A new link may have what all others have been asked for."""
        for key in self._wants.without_holder():
            self.ask_others(key, now)

    def link_down(self, link: int) -> None:
        self._guess_at.pop(link, None)

    def guess_failed(self, link: int, now: float) -> None:
        self._guess_at[link] = now + limits.FETCH_RETRY_S

    def ask_others(self, key: bytes, now: float) -> None:
        """A chunk of a key was asked for in vain, or takes too long: if nobody is known to hold it, ask
        anybody else at once."""
        want = self._wants.get(key)
        if want is not None and not want.has_holder:
            self._search(key, max(now, want.may_be_guessed_at))

    def may_ask_other(self, request: Request) -> bool:
        """Whether any other link may be asked for the chunk of a request."""
        links = self._requests.load
        return any(link != request.link and not self._rests(link, request.blob) for link in links)

    # -- what somebody is known to hold

    def held(self, is_full: Callable[[], bool]) -> Iterator[Pick]:
        """Chunks to ask their holders for, until as much is under way as is allowed.

        There may be thousands of wants, and every message leads here. So at most `WANTS_LOOKED_AT_MAX` of
        them are looked at, the others the next time.
        """
        some = list(islice(self._wants.with_holder.items(), limits.WANTS_LOOKED_AT_MAX))
        current, load = self._requests.current, self._requests.load
        free = self._free()
        guessable = self._open_to_guesses(free)
        for key, want, most in self._in_order(some):
            if not free:
                break
            begun = 0
            for blob in self._rarest_first(want) if self._may_be_any(want, free, guessable) else ():
                link = self._link_for(want, blob)
                if link is None:
                    continue
                yield link, key, blob
                if blob in current:
                    self._asked_since = 0 if key == self._bulk else self._asked_since + want.missing[blob]
                    if load[link] >= limits.FETCHES_PER_LINK_MAX:
                        free.discard(link)
                        guessable.discard(link)
                    begun += 1
                    if is_full():
                        return
                if begun >= most or not self._may_be_any(want, free, guessable):
                    break
        if len(some) < len(self._wants.with_holder):
            self._wants.put_last(key for key, _ in some)

    def _in_order(self, some: Sequence[tuple[bytes, WantedKey]]) -> list[tuple[bytes, WantedKey, float]]:
        """The wants in the order in which to fetch them, each with the most chunks to begin."""
        bulk = self._wants.with_holder.get(self._bulk) if self._bulk is not None else None
        if self._bulk is None or bulk is None:
            return [(key, want, inf) for key, want in some]
        others = [(key, want, inf) for key, want in some if key != self._bulk]
        last = [item for item in others if self._is_needless(item[0])]
        first = [item for item in others if not self._is_needless(item[0])] if last else others
        is_under_way = not bulk.missing.keys().isdisjoint(self._requests.current)
        if not is_under_way and self._asked_since >= max(bulk.missing.values()):
            first.insert(0, (self._bulk, bulk, 1))
        return [*first, (self._bulk, bulk, inf), *last]

    def _free(self) -> set[int]:
        load = self._requests.load
        return {link for link in load if load[link] < limits.FETCHES_PER_LINK_MAX}

    def _may_be_any(self, want: WantedKey, free: set[int], guessable: set[int]) -> bool:
        """Whether it may be worth the while to look at a want's chunks."""
        if want.parts or not (want.holders - self.tardy or want.holders).isdisjoint(free):
            return True
        return bool(guessable) and want.may_be_guessed_at <= self.now

    def _rarest_first(self, want: WantedKey) -> Iterable[bytes]:
        """The chunks that are not under way, rarest first; equally rare ones in random order.

        If nobody holds only parts, the chunks keep their order: a snapshot has thousands, and none is better.
        """
        current = self._requests.current
        is_all = want.holders or want.may_be_guessed_at <= self.now
        waiting = (blob for blob in (want.missing if is_all else want.parts) if blob not in current)
        if not want.parts:
            return waiting
        shuffled = list(waiting)
        shuffle(shuffled, self._rng)
        return sorted(shuffled, key=lambda blob: len(want.parts.get(blob, ())))

    def _link_for(self, want: WantedKey, blob: bytes) -> int | None:
        """The least busy holder, a random one of several. If none is free, after a moment any link: a joiner
        is told of everything by the first peer that it meets, and the others have it too.

        One that has only parts of a payload is asked for fewer chunks at a time.
        """
        load, whole, part = self._requests.load, limits.FETCHES_PER_LINK_MAX, limits.PARTS_PER_LINK_MAX
        free = [
            link
            for link in self._prompt(want.holders_of(blob), blob)
            if load[link] < (whole if link in want.holders else part) and not self._rests(link, blob)
        ]
        if not free and want.may_be_guessed_at <= self.now:
            others = self._open_to_guesses(self._free()) - want.holders_of(blob)
            free = [link for link in others if not self._rests(link, blob)]
        return self._least_busy(sorted(free)) if free else None

    def _open_to_guesses(self, links: set[int]) -> set[int]:
        """Those of the links that may be asked for what they have not said that they hold."""
        return {
            link for link in links if link not in self.tardy and self._guess_at.get(link, 0.0) <= self.now
        }

    def _rests(self, link: int, blob: bytes) -> bool:
        late = self._requests.late.get(blob)
        return self._requests.rests_until(link, blob) > self.now or (late is not None and late.link == link)

    def _prompt(self, links: set[int], blob: bytes) -> set[int]:
        """The links that have not kept us waiting lately; all of them if all have, unless the chunk is
        late."""
        return links - self.tardy or (set() if blob in self._requests.late else links)

    def _least_busy(self, links: list[int]) -> int:
        offset = self._rng.randrange(len(links))
        return min(links[offset:] + links[:offset], key=self._requests.load.__getitem__)

    # -- what nobody is known to hold

    def searches(self) -> Iterator[Pick]:
        """Chunks to ask any link for, of the keys that have waited longest."""
        self._take_in()
        now, looked_at = self.now, 0
        links = {link for link in self._free() if self._guess_at.get(link, 0.0) <= now}
        while links and looked_at < LOOKED_AT_MAX and self.next_search() <= now:
            _, key = heappop(self._searches)
            looked_at += 1
            want = self._wants.get(key)
            assert want is not None
            found = self._guess(want, links)
            if found is None:
                self._search(key, self._next_try(want))
                continue
            link, blob = found
            self._search(key, now)  # another link may be asked for another chunk meanwhile
            yield link, key, blob
            links &= self._free()

    def next_search(self) -> float:
        """When anybody may be asked for something that nobody is known to hold."""
        while self._searches:
            at, key = self._searches[0]
            want = self._wants.get(key)
            if want is not None and want.search_at == at and not want.has_holder:
                return at
            heappop(self._searches)
        return inf

    def next_guess(self) -> float:
        """When a link may be asked on a guess, if one is free then."""
        return min((self._guess_at.get(link, 0.0) for link in self._free()), default=inf)

    def _take_in(self) -> None:
        """Keys that have no holder (any more) are looked for, unless a peer says in a moment that it has
        one."""
        keys, self._wants.lost_holders = self._wants.lost_holders, []
        for key in keys:
            self.ask_others(key, 0.0)

    def _search(self, key: bytes, at: float) -> None:
        want = self._wants.get(key)
        if want is not None:
            want.search_at = at
            heappush(self._searches, (at, key))

    def _guess(self, want: WantedKey, links: set[int]) -> tuple[int, bytes] | None:
        """Of these links, one that may be asked for one of the first missing chunks: if possible one that was
        not asked for it before."""
        for blob in self._not_under_way(want):
            able = {link for link in links if not self._rests(link, blob)}
            if able:
                asked = {link: self._requests.rests_until(link, blob) for link in able - self.tardy or able}
                longest_ago = min(asked.values())
                return self._least_busy(sorted(n for n, until in asked.items() if until == longest_ago)), blob
        return None

    def _next_try(self, want: WantedKey) -> float:
        """When a link may be asked for a chunk of a key again."""
        rests = [
            self._requests.rests_until(link, blob)
            for blob in self._not_under_way(want)
            for link in self._requests.load
        ]
        return max(min(rests, default=0.0), self.now + limits.FETCH_RETRY_S)

    def _not_under_way(self, want: WantedKey) -> Iterator[bytes]:
        current = self._requests.current
        return islice((blob for blob in want.missing if blob not in current), CHUNKS_TRIED)
