"""What the coming and going of a link means to every state machine that keeps something per link."""

from gossamer.protocol.admission.vetting import Vetting
from gossamer.protocol.effects import Effect, Hangup, Send
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.events import LinkUp
from gossamer.protocol.fetching.fetch import Fetcher
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.gossip.dealing import Dealing
from gossamer.protocol.gossip.offers import Offers
from gossamer.protocol.gossip.push import Push
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.presence import Presence
from gossamer.protocol.membership.roster import Health, Roster
from gossamer.protocol.membership.swim import Swim
from gossamer.protocol.messages import Records


class Peering:
    """Takes links up and down in all state machines at once."""

    def __init__(
        self,
        links: Links,
        roster: Roster,
        vetting: Vetting,
        membership: Swim,
        presence: Presence,
        push: Push,
        anti_entropy: AntiEntropy,
        fetcher: Fetcher,
        offers: Offers,
        dealing: Dealing,
    ) -> None:
        self._links = links
        self._roster = roster
        self._vetting = vetting
        self._membership = membership
        self._presence = presence
        self._push = push
        self._anti_entropy = anti_entropy
        self._fetcher = fetcher
        self._offers = offers
        self._dealing = dealing

    def up(self, event: LinkUp, now: float) -> list[Effect]:
        """Take up a link, perhaps in place of another, or turn it away."""
        try:
            self._vetting.vet(event.node_id, event.credential, now)
        except RefusedError as error:  # a revocation came, or its grant ran out, since the handshake began
            return [Hangup(event.link, str(error))]
        stays, result = self._links.up(event, now)
        if not stays:
            return [*self._presence.all_rows(event.link), *result]
        # Before an old link of the same node goes, so that nobody seems to be missing.
        self._membership.link_up(event.link, event.node_id, now)
        for hangup in list(result):
            if isinstance(hangup, Hangup):
                result += self._forget(hangup.link, now)
        self._fetcher.link_up(event.link, event.outbound)
        return result

    def greet(self, link: int, *, outbound: bool) -> list[Effect]:
        """Say over a new link who we are. The end that dialled also begins to compare ledgers and rosters."""
        result = self._vetting.link_up(link)
        result.append(Send(link, Records(((self._presence.data, False),))))
        self._push.link_up(link)
        opening = self._anti_entropy.link_up(link)
        if outbound:
            result += [*opening, Send(link, self._presence.summary(answer=False))]
        return result

    def down(self, number: int, now: float) -> list[Effect]:
        """A link is gone. If we gave it up ourselves, there is nothing left to do."""
        return self._forget(number, now) if self._links.get(number) else []

    def cut(self, node_id: bytes, reason: str, now: float) -> list[Effect]:
        """Hang up on a node."""
        numbers = [link.number for link in self._links.all() if link.node_id == node_id]
        return [effect for number in numbers for effect in self._hang_up(number, reason, now)]

    def cut_all(self, reason: str, now: float) -> list[Effect]:
        """Hang up on everybody; the peers that we need are dialled again."""
        return [effect for link in self._links.all() for effect in self._hang_up(link.number, reason, now)]

    def wake(self, now: float) -> list[Effect]:
        """When membership is due, let it judge, and act on its verdicts."""
        if now < self._membership.deadline():
            return []
        return [*self._membership.wake(now), *self._drop_dead(now)]

    def _drop_dead(self, now: float) -> list[Effect]:
        """Hang up on links whose peers do not answer.

        A link to a member that is down may stay open for a quarter of an hour and lead nowhere. So may a link
        to a member that others vouch for: TCP doubles its timeout while a path is broken, and would sleep for
        as long again once the path works.
        """
        down = {m.row.node_id for m in self._roster.doubted() if m.health is Health.DOWN}
        silent = self._membership.silent_links(now)
        if not down and not silent:
            return []
        dead = [link.number for link in self._links.all() if link.node_id in down or link.number in silent]
        return [effect for number in dead for effect in self._hang_up(number, "does not answer", now)]

    def _hang_up(self, number: int, reason: str, now: float) -> list[Effect]:
        return [Hangup(number, reason), *self._forget(number, now)]

    def _forget(self, number: int, now: float) -> list[Effect]:
        self._links.down(number)
        self._push.link_down(number)
        self._anti_entropy.link_down(number)
        self._vetting.link_down(number)
        self._fetcher.link_down(number)
        self._offers.link_down(number)
        return [*self._dealing.link_down(number), *self._membership.link_down(number, now)]
