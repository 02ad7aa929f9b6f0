"""Which deltas are outliers: far longer, or of far more tokens, than was usual lately.

The only consequence is that an outlier's round waits for others' deltas (`core/held_back.py`), beside which
it can be clipped and capped. So a node judges by what it has merged itself, and nodes may differ.
"""

from collections.abc import Sequence
from math import inf, sqrt

from gossamer.protocol.merging.merge import Contribution
from gossamer.protocol.merging.token_count import TokenCount
from gossamer.protocol.payloads.layout import Fragment
from gossamer.protocol.records import Delta
from gossamer.protocol.rules.clipping import usual_rates

OUTLIER_TIMES = 8.0
"""A delta this many times as long as usual, or of this many times the usual tokens, is an outlier. Honest
deltas grow by less from round to round; one that grows by more only has to wait."""

USUAL_ROUNDS = 8
"""The usual length is the longest of this many rounds: the delta of a tensor with a single element is 8 times
as long as the one before it in a twelfth of all rounds, because that one was near zero."""


class UsualRates:
    """The lengths of the deltas of each fragment's last rounds, per square root of their inner steps."""

    def __init__(self, own_id: bytes) -> None:
        self._own_id = own_id
        self._rates: dict[int, dict[int, list[float]]] = {}
        """By fragment and by round merged: the usual rate of each tensor (see `clipping`)."""

    def note(self, round_: int, fragment: Fragment, contributions: Sequence[Contribution]) -> None:
        """A round has been merged from these deltas. A single delta counts as usual only if it is our own."""
        if not contributions or (len(contributions) == 1 and contributions[0].author != self._own_id):
            return
        root_steps = [sqrt(c.steps) for c in contributions]
        norms = [c.norms for c in contributions]
        rates = self._rates.setdefault(fragment.index, {})
        if len(contributions) == 1:
            rates[round_] = [norm / root_steps[0] for norm in norms[0]]
        else:
            rates[round_] = usual_rates(norms, [slot.numel for slot in fragment.slots], root_steps)
        if len(rates) > USUAL_ROUNDS:
            del rates[min(rates)]

    def are_known(self, fragment: Fragment) -> bool:
        """Whether any round of a fragment has shown its usual rates."""
        return fragment.index in self._rates

    def are_all_exceeded(self, fragment: Fragment, contributions: Sequence[Contribution]) -> bool:
        """Whether each of these deltas has a tensor that is far longer than usual. See `are_known` first."""
        rates = self._rates[fragment.index]
        usual = [
            max((rate for rate in known if 0.0 < rate < inf), default=inf)
            for known in zip(*rates.values(), strict=True)
        ]
        return all(
            any(n > OUTLIER_TIMES * rate * sqrt(c.steps) for n, rate in zip(c.norms, usual, strict=True))
            for c in contributions
        )


def of_ordinary_tokens(deltas: tuple[Delta, ...], count: TokenCount) -> tuple[Delta, ...]:
    """The deltas that do not state far more tokens than the deltas of others did lately."""
    most = OUTLIER_TIMES * count.usual(but={delta.author for delta in deltas})
    return tuple(delta for delta in deltas if delta.body.tokens <= most)
