"""`gossamer.node.daemon.network.listening`: a port for either kind of address."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from gossamer.node.daemon.network.listening import families_of, is_gone, listen, own_address, why_not


class Told(asyncio.Protocol):
    """Tells who comes where they are."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(str(transport.get_extra_info("peername")[0]).encode())
        transport.close()


async def told(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_all_addresses_of_ipv6_are_all_of_ipv4_too() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this system keeps IPv4 and IPv6 apart")
    try:
        server = await listen(Told, "::", 0, 8)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    async with asyncio.timeout(5), server:
        port = server.sockets[0].getsockname()[1]
        assert await told("127.0.0.1", port) == "::ffff:127.0.0.1"
        assert await told("::1", port) == "::1"
        assert families_of(server) == {socket.AF_INET, socket.AF_INET6}


async def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with asyncio.timeout(5), await listen(Told, "::", 0, 8) as server:
        assert families_of(server) == {socket.AF_INET}
        assert await told("127.0.0.1", server.sockets[0].getsockname()[1]) == "127.0.0.1"


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
async def test_so_they_are_where_ipv6_is_switched_off(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(socket, "create_server", refused)
    async with asyncio.timeout(5), await listen(Told, "::", 0, 8) as server:
        assert families_of(server) == {socket.AF_INET}


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EMFILE])
async def test_where_there_can_be_no_socket_that_is_said(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """asyncio passes over addresses that it can have none for, all of them if need be."""

    class Refused(socket.socket):
        def __init__(self, *_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Refused)
        with pytest.raises(OSError) as told:
            await listen(Told, "127.0.0.1", 0, 8)
    assert why_not(told.value) == os.strerror(number).lower()


async def test_which_kinds_of_address_a_server_has() -> None:
    async with await listen(Told, "127.0.0.1", 0, 8) as server:
        assert families_of(server) == {socket.AF_INET}
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here, or it is kept apart")
    async with await listen(Told, "::1", 0, 8) as server:
        assert families_of(server) == {socket.AF_INET6}


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with await listen(Told, "127.0.0.1", 0, 8) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(OSError, match=r"[Aa]ddress"):
            await listen(Told, "127.0.0.1", port, 8)


def test_an_address_that_this_machine_has_not_is_gone() -> None:
    assert not is_gone("127.0.0.1")
    assert is_gone("192.0.2.1")  # for documentation: nobody's
    assert is_gone("2001:db8::1") or not socket.has_ipv6


def test_the_address_that_this_machine_goes_out_from_is_its_own() -> None:
    assert own_address(socket.AF_INET, loopback=True) == "127.0.0.1"
    for family in (socket.AF_INET, socket.AF_INET6):
        found = own_address(family, loopback=False)
        assert found is None or not is_gone(found)  # None where no way leads out
