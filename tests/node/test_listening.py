"""`gossamer.node.network.listening`: a port for either kind of address."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gossamer.node.network.listening import is_gone, listen


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


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with await listen(Told, "127.0.0.1", 0, 8) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(OSError, match=r"[Aa]ddress"):
            await listen(Told, "127.0.0.1", port, 8)


def test_an_address_that_this_machine_has_not_is_gone() -> None:
    assert not is_gone("127.0.0.1")
    assert is_gone("192.0.2.1")  # for documentation: nobody's
    assert is_gone("2001:db8::1") or not socket.has_ipv6
