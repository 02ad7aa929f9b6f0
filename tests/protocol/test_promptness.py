"""What is usual of transfers, and who has kept us waiting."""

from __future__ import annotations

from gossamer.protocol import limits
from gossamer.protocol.fetching.piece_picker import Promptness
from tests.protocol.fetching import Net, blob_of, key_of


def test_the_rest_of_those_who_keep_us_waiting_grows_and_is_forgotten():
    prompt = Promptness()
    rests = []
    for now in (0.0, 1.0, 8.0, 24.0, 80.0, 88.0, 208.0):
        prompt.kept_waiting(1, now)
        rests.append(next(at for at in range(int(now), 1000) if not prompt.tardy(float(at), 2)))
        assert prompt.tardy(now, 2) == {1}
    assert rests == [8, 8, 24, 56, 144, 144, 216], "8, 16, 32 and 64 s, and 8 s anew"
    for now in range(300, 3000):
        prompt.kept_waiting(1, float(now))
    assert prompt._rests[1].wait == limits.TARDY_REST_MAX_S
    prompt.link_down(1)
    assert prompt.tardy(now, 2) == set()


def test_where_most_links_keep_us_waiting_none_is_asked_last():
    """It is our own line that is slow then."""
    prompt = Promptness()
    for link in (1, 2):
        prompt.kept_waiting(link, 0.0)
    assert prompt.tardy(1.0, links=4) == {1, 2}
    assert prompt.tardy(1.0, links=3) == set()


def test_what_somebody_else_brings_in_the_end_counts_as_long_as_it_was_waited_for():
    """Else nothing would be learned of a line that has become slow, and all would be asked for twice."""
    net = Net(links={1: True, 2: True})
    for second in (False, True):
        before = net.fetcher._promptness._share
        net.want(second, second)
        for link in (1, 2):
            net.fetcher.hint(link, key_of(second))
        net.plan()
        while second and not net.late:
            net.now = net.fetcher.deadline()
            net.plan()
        net.arrive(blob_of(second))
        net.plan()
        assert (net.fetcher._promptness._share > before) == second


def test_who_was_waited_for_in_vain_until_the_end_is_asked_last():
    """Nobody else was there who could have been asked meanwhile."""
    net = Net(links={1: True})
    net.want(0, 0)
    net.fetcher.hint(1, key_of(0))
    net.plan()
    while net.flights:
        net.now = net.fetcher.deadline()
        net.plan()
    net.links[2] = True
    net.fetcher.link_up(2, True)
    for key in (1, 2):
        net.want(key, key)
        for link in (1, 2):
            net.fetcher.hint(link, key_of(key))
    net.plan()
    assert [net.flights[blob_of(key)] for key in (1, 2)] == [2, 2]
