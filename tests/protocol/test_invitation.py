"""An invitation survives mail and chat, or is refused in one line."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.access.acl import (
    INVITATION_BYTES_MAX,
    PREFIX,
    Invitation,
    Role,
    parse_grant,
    read_invitation,
)
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX
from gossamer.protocol.records import open_envelope
from gossamer.protocol.wire import pack
from tests.protocol import builders
from tests.protocol.builders import grant, identity, revocation

INVITED = builders.manifest(admission=builders.admission())
ALICE = identity(1)


def invitation(*contacts: str) -> Invitation:
    data = grant(ALICE, INVITED, role=Role.OBSERVE, expires=5)
    return Invitation(INVITED.swarm_id, parse_grant(open_envelope(data, INVITED.swarm_id)), contacts)


def text_of(*fields: object) -> str:
    return PREFIX + urlsafe_b64encode(pack(list(fields))).decode()


@pytest.mark.parametrize("contacts", [(), ("a:1",), ("a:1", f"gossamer://{ALICE.node_id.hex()}@b:2")])
def test_round_trip(contacts):
    made = invitation(*contacts)
    assert read_invitation(made.to_text()) == made
    assert made.to_text().isascii() and " " not in made.to_text()


@given(st.lists(st.integers(0, 300), max_size=6), st.sampled_from(["\n", " ", "\r\n  ", "\t"]))
def test_mail_may_break_it_anywhere(places, gap):
    text = whole = invitation("host:7700").to_text()
    for place in places:
        text = text[:place] + gap + text[place:]
    assert read_invitation(f"{gap}{text}{gap}") == read_invitation(whole)


@given(st.data())
def test_a_piece_of_it_is_said_to_be_damaged(data):
    text = invitation("host:7700").to_text()
    cut = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(ConfigError) as error:
        read_invitation(text[:cut])
    assert str(error.value).isprintable()


@given(st.data())
def test_a_changed_character_never_makes_another_grant(data):
    made = invitation("host:7700")
    text = made.to_text()
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii", exclude_characters=text[place]))
    try:
        found = read_invitation(text[:place] + other + text[place + 1 :])
    except ConfigError:
        return
    assert (found.grant.node_id, found.grant.role) == (made.grant.node_id, made.grant.role)


@pytest.mark.parametrize("text", ["", "hello", PREFIX[:-1], "x" + PREFIX, PREFIX.upper() + "AAAA"])
def test_what_is_no_invitation(text):
    with pytest.raises(ConfigError, match=f"that is not an invitation; one begins with {PREFIX}"):
        read_invitation(text)


@pytest.mark.parametrize(
    "text",
    [
        PREFIX,
        PREFIX + "ä",
        PREFIX + "AAAA",
        text_of(INVITED.swarm_id, grant(ALICE, builders.SMALL), []),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED)),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED), ["two\nlines"]),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED), ["a:1"] * (ADDRESSES_PER_PEER_MAX + 1)),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED), [], 1),
        text_of(INVITED.swarm_id[:31], grant(ALICE, INVITED), []),
    ],
)
def test_what_is_damaged(text):
    with pytest.raises(ConfigError, match="damaged") as error:
        read_invitation(text)
    assert str(error.value).isprintable()


def test_what_grants_nothing_or_is_without_end():
    with pytest.raises(ConfigError, match="grants nothing"):
        read_invitation(text_of(INVITED.swarm_id, revocation(ALICE, INVITED), []))
    with pytest.raises(ConfigError, match="not an invitation"):
        read_invitation(PREFIX + "A" * INVITATION_BYTES_MAX)
