"""What people and peers write is an address, or refused before anyone dials it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.node.address import (
    Contact,
    format_address,
    is_loopback,
    is_of_one_interface,
    network_group,
    origin_of,
    parse_address,
    parse_contact,
    parse_node_id,
    port_of,
)
from gossamer.protocol.errors import (
    ConfigError,
)
from tests.protocol.builders import identity

ALICE = identity(1)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7700", "127.0.0.1", 7700),
        (" example.com:1 ", "example.com", 1),
        ("my-host_2.local.:65535", "my-host_2.local.", 65535),
        ("[::1]:80", "::1", 80),
        ("[2001:db8::7]:7700", "2001:db8::7", 7700),
        ("[2001:DB8:0::7]:7700", "2001:db8::7", 7700),
        ("[::0]:7700", "::", 7700),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":80",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:+1",
        "host:1e3",
        "host:８０",
        "host:" + "9" * 5000,
        "::1:80",
        "[::1:80",
        "[zz]:80",
        "[]:80",
        "a b:80",
        "a\n:80",
        "http://host:80",
        "user@host:80",
        "host/path:80",
        "host?x:80",
        "ho%73t:80",
        "..:80",
        "a..b:80",
        "a" * 64 + ":80",
        "a." * 127 + "a:80",
        "\u2100:80",
        "[fe80::1%eth0]:80",
        "[::1%\x1b[31m]:80",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT") as error:
        parse_address(text)
    assert "\n" not in str(error.value)


def test_port_zero_only_where_it_may_be() -> None:
    assert parse_address("0.0.0.0:0", port_min=0) == ("0.0.0.0", 0)
    with pytest.raises(ConfigError):
        parse_address("0.0.0.0:0")


@given(st.text(max_size=40))
def test_anything_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text + ":80")
    except ConfigError:
        return
    assert host.encode("idna") is not None
    assert port == 80


def test_what_a_link_local_address_means_depends_on_the_interface() -> None:
    assert all(map(is_of_one_interface, ["fe80::1", "fe80::1%eth0", "febf::1"]))
    assert not any(
        map(is_of_one_interface, ["fd00::2", "::1", "2001:db8::1", "169.254.0.1", "10.0.0.1", "a.b"])
    )


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com"]))


def test_where_an_address_has_its_budget() -> None:
    assert origin_of("203.0.113.5") == "203.0.113.5"
    assert origin_of("::ffff:203.0.113.5") == "203.0.113.5"
    assert origin_of("2001:db8:1:2:3::4") == origin_of("2001:db8:1:2::5") == "2001:db8:1:2::/64"
    assert origin_of("fe80::1%eth0") == "fe80::/64"
    assert [origin_of(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "no address")] == [None] * 4


def test_network_groups_are_of_the_internet_only() -> None:
    assert network_group("8.8.8.8") == network_group("8.8.8.200") == "8.8.8.0/24"
    assert network_group("::ffff:8.8.8.8") == "8.8.8.0/24"
    assert network_group("2606:4700:10:1::1") == network_group("2606:4700:10:2::1") == "2606:4700:10::/48"
    for host in ("127.0.0.1", "10.1.2.3", "192.168.1.5", "169.254.1.1", "100.64.1.1", "::1", "fe80::1%eth0"):
        assert network_group(host) is None


@pytest.mark.parametrize(
    ("kept", "port"),
    [("127.0.0.1:7700", 7700), ("[::1]:80", 80), ("nonsense", 0), ("a:70000", 0), (None, 0), (7, 0), ([], 0)],
)
def test_the_port_of_an_address_that_a_file_keeps(kept: object, port: int) -> None:
    assert port_of(kept) == port


@pytest.mark.parametrize("text", ["", "zz", "ab" * 31, "ab" * 33, "a" * 63, "gossamer://" + "ab" * 32])
def test_what_is_no_node_id(text: str) -> None:
    with pytest.raises(ConfigError, match="64 hex digits"):
        parse_node_id(text)
    assert parse_node_id("\N{NO-BREAK SPACE}" + "AB" * 32 + "\n") == b"\xab" * 32


def test_contacts() -> None:
    plain, pinned = parse_contact(" host:1 "), parse_contact(f"gossamer://{ALICE.node_id.hex()}@host:1")
    assert plain == Contact("host:1") and str(plain) == "host:1"
    assert parse_contact(f"\tgossamer://{ALICE.node_id.hex()}@ host:1\n") == pinned, "as a file may have it"
    assert pinned == Contact("host:1", ALICE.node_id)
    assert parse_contact(str(pinned)) == pinned
    assert parse_contact("gossamer://host:1") == plain
    assert parse_contact(f"{ALICE.node_id.hex()}@[::1]:1") == Contact("[::1]:1", ALICE.node_id)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "HOST:PORT"),
        ("gossamer://", "HOST:PORT"),
        (f"gossamer://{'a' * 64}@", "HOST:PORT"),
        (f"gossamer://{'a' * 63}@host:1", "64 hex digits"),
        (f"gossamer://{'g' * 64}@host:1", "64 hex digits"),
        ("gossamer://@host:1", "64 hex digits"),
        (f"http://{'a' * 64}@host:1", "64 hex digits"),
        (f"{'a' * 64}@{'b' * 64}@host:1", "64 hex digits"),
    ],
)
def test_what_is_no_contact(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_contact(text)
