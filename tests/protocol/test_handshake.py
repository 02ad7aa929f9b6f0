"""The hello and signed questions: keys are proven for this channel, this swarm and this once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.access.handshake import (
    ASK_BYTES_MAX,
    HELLO_BYTES_MAX,
    PROTOCOL_VERSION,
    ClientHandshake,
    ServerHandshake,
    ask,
    check_proof,
    check_question,
    prove,
    refusal,
)
from gossamer.protocol.errors import MalformedError, PeerError, RefusedError, SignatureError
from gossamer.protocol.limits import ASK_FRESH_S, CREDENTIAL_BYTES_MAX
from gossamer.protocol.wire import pack, unpack
from tests.protocol import builders
from tests.protocol.builders import identity

CLIENT, SERVER, THIRD = (builders.identity(n) for n in range(3))
SWARM = b"s" * 32
SESSION = b"t" * 32


def _server(
    swarm: bytes = SWARM, binding: bytes = b"", nonce: bytes = b"n" * 32, who=SERVER
) -> ServerHandshake:
    return ServerHandshake(who, swarm, binding, nonce, SESSION, vet=builders.turns_nobody_away)


def _client(
    swarm: bytes = SWARM,
    binding: bytes = b"",
    nonce: bytes = b"c" * 32,
    expected: bytes | None = None,
    who=CLIENT,
) -> ClientHandshake:
    return ClientHandshake(who, swarm, binding, nonce, expected, vet=builders.turns_nobody_away)


def _shake(client: ClientHandshake, server: ServerHandshake) -> tuple[bytes, bytes, bytes]:
    peer_of_server, welcome = server.answer(client.hello(server.challenge()))
    return peer_of_server, *client.finish(welcome)


@pytest.mark.parametrize("binding", [b"", b"f" * 32])
@pytest.mark.parametrize("expected", [None, SERVER.node_id])
def test_both_learn_who_the_other_is(binding, expected):
    seen, met, session = _shake(_client(binding=binding, expected=expected), _server(binding=binding))
    assert (seen, met, session) == (CLIENT.node_id, SERVER.node_id, SESSION)


def test_another_node_than_the_one_we_dialled():
    with pytest.raises(SignatureError, match="not the one we dialled"):
        _client(expected=THIRD.node_id).hello(_server().challenge())


def test_another_swarm_is_refused_with_a_reason():
    with pytest.raises(RefusedError, match="belongs to swarm") as caught:
        _shake(_client(swarm=b"o" * 32), _server())
    client = _client()
    client.hello(_server().challenge())
    with pytest.raises(RefusedError, match="belongs to swarm"):
        client.finish(refusal(str(caught.value)))


def test_another_version_is_refused():
    server = _server()
    later = pack([PROTOCOL_VERSION + 1, SERVER.public_key, bytes(32)])
    with pytest.raises(RefusedError, match=f"version {PROTOCOL_VERSION + 1}"):
        _client().hello(later)
    with pytest.raises(RefusedError, match=f"version {PROTOCOL_VERSION + 1}"):
        server.answer(pack([PROTOCOL_VERSION + 1]))


@pytest.mark.parametrize(
    "server",
    [_server(binding=b"other channel"), _server(nonce=b"x" * 32), _server(who=THIRD)],
    ids=["binding", "nonce", "server key"],
)
def test_a_hello_holds_on_its_own_channel_only(server):
    """Recorded and played again, or passed on to somebody else."""
    hello = _client(binding=b"this channel").hello(_server(binding=b"this channel").challenge())
    with pytest.raises(SignatureError):
        server.answer(hello)


def test_a_welcome_cannot_be_replayed_or_reflected():
    server = _server()
    client, later = _client(), _client(nonce=b"d" * 32)
    _, welcome = server.answer(client.hello(server.challenge()))
    later.hello(server.challenge())
    with pytest.raises(SignatureError):
        later.finish(welcome)
    own = _client(who=SERVER)  # talking to itself, and given its own signature back
    hello = own.hello(server.challenge())
    with pytest.raises(PeerError):
        own.finish(hello)
    signature = unpack(hello, HELLO_BYTES_MAX)[4]
    with pytest.raises(SignatureError):
        own.finish(pack([True, signature, SESSION, b""]))


def test_the_session_is_signed_too():
    client, server = _client(), _server()
    _, welcome = server.answer(client.hello(server.challenge()))
    accepted, signature, _, credential = unpack(welcome, HELLO_BYTES_MAX)
    with pytest.raises(SignatureError):
        client.finish(pack([accepted, signature, b"u" * 32, credential]))


def test_each_side_judges_the_other_and_its_credential():
    seen: list[tuple[bytes, bytes]] = []

    def vet(node_id: bytes, credential: bytes) -> None:
        seen.append((node_id, credential))

    client = ClientHandshake(CLIENT, SWARM, b"", b"c" * 32, None, credential=b"client's", vet=vet)
    server = ServerHandshake(SERVER, SWARM, b"", b"n" * 32, SESSION, credential=b"server's", vet=vet)
    _shake(client, server)
    assert seen == [(CLIENT.node_id, b"client's"), (SERVER.node_id, b"server's")]
    assert (client.peer_credential, server.peer_credential) == (b"server's", b"client's")


def test_nobody_is_vetted_before_its_signature_holds():
    def vet(node_id: bytes, credential: bytes) -> None:
        raise AssertionError("asked about somebody who has proven nothing")

    server = ServerHandshake(SERVER, SWARM, b"", b"n" * 32, SESSION, vet=vet)
    hello = unpack(_client().hello(server.challenge()), HELLO_BYTES_MAX)
    hello[4] = bytes(64)
    with pytest.raises(SignatureError):
        server.answer(pack(hello))


def test_small_order_keys_are_refused():
    key = (1).to_bytes(32, "little")
    forged = (1).to_bytes(32, "little") + bytes(32)
    with pytest.raises(SignatureError):
        _server().answer(pack([PROTOCOL_VERSION, SWARM, key, bytes(32), forged, b""]))
    client = _client()
    client.hello(pack([PROTOCOL_VERSION, key, bytes(32)]))
    with pytest.raises(SignatureError):
        client.finish(pack([True, forged, SESSION, b""]))


def test_messages_end_where_they_should():
    """What comes after that no signature holds."""
    server, client = _server(), _client()
    challenge = unpack(server.challenge(), HELLO_BYTES_MAX)
    with pytest.raises(MalformedError):
        client.hello(pack([*challenge, 1]))
    hello = unpack(client.hello(server.challenge()), HELLO_BYTES_MAX)
    with pytest.raises(MalformedError):
        server.answer(pack([*hello, 1]))
    _, welcome = server.answer(pack(hello))
    with pytest.raises(MalformedError):
        client.finish(pack([*unpack(welcome, HELLO_BYTES_MAX), 1]))


@given(st.data())
def test_mutated_messages_never_lead_to_a_link(data):
    def broken(message: bytes) -> bytes:
        wrong = bytearray(message)
        bit = data.draw(st.integers(0, 8 * len(wrong) - 1))
        wrong[bit // 8] ^= 1 << bit % 8
        return bytes(wrong)

    server = _server(binding=b"f" * 32)
    hello = _client(binding=b"f" * 32).hello(server.challenge())
    with pytest.raises(PeerError):
        server.answer(broken(hello))
    client = _client(binding=b"f" * 32)
    with pytest.raises(PeerError):
        server.answer(client.hello(broken(server.challenge())))


def test_messages_out_of_order_or_too_long_are_refused_and_a_refusal_says_why():
    with pytest.raises(RefusedError, match="come back later"):
        _client().hello(refusal("come back later"))
    with pytest.raises(MalformedError):
        _client().finish(pack([True, bytes(64), SESSION, b""]))  # before any challenge
    for take in (_server().answer, _client().hello):
        with pytest.raises(MalformedError):
            take(bytes(HELLO_BYTES_MAX + 1))


@pytest.mark.parametrize("reason", ["bad\nreason", "x" * 300, "\x1b[2J"])
def test_a_reason_unfit_for_a_log_is_refused(reason):
    client = _client()
    client.hello(_server().challenge())
    with pytest.raises(MalformedError):
        client.finish(refusal(reason))


# --- questions outside any link: for one channel, one time and one thing ---

ASKER, NODE = identity(1), identity(2)
CHANNEL, NONCE = b"c" * 32, b"n" * 32
NOW = 1_700_000_000.5
PATH = "/gossamer/1/status?digest=1"


def question(**changes) -> bytes:
    said = {"swarm_id": SWARM, "binding": CHANNEL, "unix_s": NOW, "path": PATH, "credential": b"grant"}
    return ask(ASKER, **{**said, **changes})


@pytest.mark.parametrize("credential", [b"", b"grant", bytes(CREDENTIAL_BYTES_MAX)])
def test_who_asks_and_what_it_shows(credential):
    data = question(credential=credential)
    assert len(data) <= ASK_BYTES_MAX
    found = check_question(data, SWARM, CHANNEL, NOW, PATH)
    assert (found.node_id, found.credential) == (ASKER.node_id, credential)


@pytest.mark.parametrize(
    "changes",
    [{"swarm_id": b"t" * 32}, {"binding": b"d" * 32}, {"binding": b""}, {"path": "/gossamer/1/manifest"}],
)
def test_it_holds_for_nothing_else(changes):
    with pytest.raises(SignatureError, match=f"to swarm {SWARM.hex()[:12]}, but another one was asked for"):
        check_question(question(**changes), SWARM, CHANNEL, NOW, PATH)


@pytest.mark.parametrize("off", [-1, 1])
def test_it_holds_for_some_minutes(off):
    check_question(question(), SWARM, CHANNEL, NOW + off * (ASK_FRESH_S - 1), PATH)
    with pytest.raises(RefusedError, match="clocks differ by 10 min; set"):
        check_question(question(), SWARM, CHANNEL, NOW + off * 600, PATH)


def test_a_proof_is_of_one_channel_and_one_nonce():
    proof = prove(NODE, CHANNEL, NONCE)
    assert check_proof(proof, CHANNEL, NONCE) == NODE.node_id
    for binding, nonce in ((b"d" * 32, NONCE), (CHANNEL, b"m" * 32), (b"", NONCE)):
        with pytest.raises(SignatureError):
            check_proof(proof, binding, nonce)


def test_a_question_is_no_proof_and_a_proof_no_question():
    with pytest.raises(PeerError):
        check_proof(question(), CHANNEL, NONCE)
    with pytest.raises(PeerError):
        check_question(prove(NODE, CHANNEL, NONCE), SWARM, CHANNEL, NOW, PATH)


@given(st.data())
def test_any_flipped_bit_is_found_but_in_the_credential(data):
    """The credential is signed by its owner, and judged by itself."""
    for message, check in (
        (question(credential=b""), lambda wrong: check_question(wrong, SWARM, CHANNEL, NOW, PATH)),
        (prove(NODE, CHANNEL, NONCE), lambda wrong: check_proof(wrong, CHANNEL, NONCE)),
    ):
        wrong = bytearray(message)
        bit = data.draw(st.integers(0, 8 * len(wrong) - 1))
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PeerError):
            check(bytes(wrong))


def test_messages_are_bounded():
    with pytest.raises(MalformedError):
        check_question(bytes(ASK_BYTES_MAX + 1), SWARM, CHANNEL, NOW, PATH)
    with pytest.raises(MalformedError):
        check_question(question(credential=bytes(CREDENTIAL_BYTES_MAX + 1)), SWARM, CHANNEL, NOW, PATH)
