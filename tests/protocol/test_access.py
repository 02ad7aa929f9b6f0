"""Access lists become the same over the links, in few messages; whose grant has run out is cut."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.access.acl import NEVER, STRANGER_INTERVAL_S, Access, AccessList
from gossamer.protocol.effects import Hangup, Outbox, Send
from gossamer.protocol.events import LinkUp
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.unix_time import UnixTime
from tests.protocol import builders
from tests.protocol.builders import grant, identity, revocation

INVITED = builders.manifest(admission=builders.admission())
POOL = [grant(identity(n), INVITED, expires=e) for n in range(4) for e in (NEVER, 10)]
POOL += [revocation(identity(n), INVITED, last_round=r) for n in range(3) for r in (1, 2)]
SETS = st.lists(st.sampled_from(POOL), max_size=8)


class End:
    """One node's access list and vetting, with links to all others; link n leads to node n."""

    def __init__(self, number: int, of=INVITED) -> None:
        self.number, outbox = number, Outbox()
        self.acl = AccessList(of.admission, of.swarm_id)
        own = identity(100 + number).node_id
        self.links = Links(own, Roster(own), (), random.Random(number), outbox)
        access = Access(self.acl, self.links, random.Random(number), UnixTime(1000.0), outbox)
        self.access = builders.Drained(access, outbox)

    def link_to(self, other: int) -> list[Send]:
        self.links.up(LinkUp(other, identity(100 + other).node_id, True, None), 0.0)
        return self.access.link_up(other)

    def hear(self, link: int, message: msg.Message) -> list[Send]:
        if isinstance(message, msg.AclSummary):
            return self.access.exchange(link, message)
        result: list[Send] = []
        for data, _ in message.entries:
            record = self.acl.learn(data)
            result += self.access.spread(record, source=link) if record else []
        return result


def converge(ends: list[End], opening: list[tuple[int, Send]]) -> int:
    """Deliver, over the wire format, until nothing is under way; returns how many messages it took."""
    queue, count = deque(opening), 0
    while queue:
        source, send = queue.popleft()
        count += 1
        assert count < 1000, "they talk for ever"
        message = msg.decode(msg.encode(send.message))
        queue += [(send.link, answer) for answer in ends[send.link].hear(source, message)]
    return count


@given(SETS, SETS)
def test_two_access_lists_become_one_in_five_messages(one, other):
    ends = [End(0), End(1)]
    for end, records in zip(ends, (one, other), strict=True):
        for data in records:
            end.acl.learn(data)
    equal = ends[0].acl.digest == ends[1].acl.digest
    ends[0].links.up(LinkUp(1, identity(101).node_id, True, None), 0.0)
    ends[1].links.up(LinkUp(0, identity(100).node_id, True, None), 0.0)
    count = converge(ends, [(0, send) for send in ends[0].access.link_up(1)])
    assert ends[0].acl.ids() == ends[1].acl.ids()
    assert count <= (1 if equal else 5)
    assert converge(ends, [(0, send) for send in ends[0].access.link_up(1)]) == 1


def test_a_full_acl_fits_a_message():
    ids = tuple(bytes(30) + n.to_bytes(2, "big") for n in range(limits.ACL_RECORDS_MAX))
    message = msg.AclSummary(bytes(32), ids, True)
    assert len(msg.encode(message)) < limits.MESSAGE_BYTES_MAX
    assert msg.decode(msg.encode(message)) == message


def test_news_goes_to_every_link_but_the_one_it_came_from():
    end = End(0)
    for other in range(1, 10):
        end.link_to(other)
    record = end.acl.learn(POOL[0])
    assert record is not None
    assert [send.link for send in end.access.spread(record, source=4)] == [1, 2, 3, 5, 6, 7, 8, 9]
    assert len(end.access.spread(record, source=None)) == 9


def test_a_link_that_brings_strangers_is_asked_now_and_then():
    end = End(0)
    for other in (1, 2):
        end.link_to(other)
    assert [send.link for send in end.access.stranger(1, 50.0)] == [1]
    assert end.access.stranger(1, 50.0 + STRANGER_INTERVAL_S / 2) == []
    assert [send.link for send in end.access.stranger(2, 50.1)] == [2]
    assert [send.link for send in end.access.stranger(1, 50.0 + STRANGER_INTERVAL_S)] == [1]
    assert sorted(end.access.met_strangers()) == [1, 2]
    assert end.access.met_strangers() == []
    end.access.stranger(1, 60.0)
    end.access.link_down(1)
    assert end.access.met_strangers() == []


def test_every_few_seconds_one_link_hears_our_digest():
    end = End(0)
    for other in range(1, 6):
        end.link_to(other)
        end.acl.learn(grant(identity(100 + other), INVITED))
    now, sent = 100.0, []
    while now < 200.0:
        sent += end.access.wake(now)
        assert now < end.access._next_exchange <= now + limits.ANTI_ENTROPY_INTERVAL_S
        now = end.access._next_exchange
    assert all(send.message == msg.AclSummary(end.acl.digest) for send in sent)
    assert len({send.link for send in sent}) > 2
    assert 100.0 / limits.ANTI_ENTROPY_INTERVAL_S <= len(sent) <= 25


def test_whose_grant_has_run_out_is_cut():
    """Grants are in Unix seconds: 1000 more than this clock shows."""
    end = End(0)
    for other, expires in ((1, 1110), (2, NEVER)):
        end.link_to(other)
        end.acl.learn(grant(identity(100 + other), INVITED, expires=expires))
    assert [e for e in end.access.wake(109.0) if isinstance(e, Hangup)] == []
    hangups = [e for e in end.access.wake(109.0 + limits.EXPIRY_CHECK_INTERVAL_S) if isinstance(e, Hangup)]
    assert [hangup.link for hangup in hangups] == [1]
    assert "ran out" in hangups[0].reason
    end.acl.learn(grant(identity(101), INVITED, expires=2000))
    assert [e for e in end.access.wake(130.0) if isinstance(e, Hangup)] == [], "renewed in time"


def test_a_machine_that_slept_knows_what_time_it_is():
    """The clock that events carry stands still meanwhile."""
    end = End(0)
    end.link_to(1)
    end.acl.learn(grant(identity(101), INVITED, expires=5000))
    assert [e for e in end.access.wake(109.0) if isinstance(e, Hangup)] == []
    end.access._unix_time.set_offset(10_000.0)
    hangups = [e for e in end.access.wake(109.0 + limits.EXPIRY_CHECK_INTERVAL_S) if isinstance(e, Hangup)]
    assert [hangup.link for hangup in hangups] == [1]
