"""Certificates, listening by either kind of address, looking names up, and the limit on open files."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest

from gossamer.node.daemon.network import sockets as open_files
from gossamer.node.daemon.network.sockets import (
    Certificate,
    Resolver,
    cut,
    families_of,
    is_gone,
    listen,
)
from gossamer.protocol.errors import ConfigError, StorageError
from tests.node.trainer_side import until
from tests.node.wires import End, fresh_certificate, listening


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
    async with asyncio.timeout(60), server:
        port = server.sockets[0].getsockname()[1]
        assert await told("127.0.0.1", port) == "::ffff:127.0.0.1"
        assert await told("::1", port) == "::1"
        assert families_of(server) == {socket.AF_INET, socket.AF_INET6}


async def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with asyncio.timeout(60), await listen(Told, "::", 0, 8) as server:
        assert families_of(server) == {socket.AF_INET}
        assert await told("127.0.0.1", server.sockets[0].getsockname()[1]) == "127.0.0.1"


async def test_which_kinds_of_address_a_server_has() -> None:
    async with await listen(Told, "127.0.0.1", 0, 8) as server:
        assert families_of(server) == {socket.AF_INET}
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here, or it is kept apart")
    async with await listen(Told, "::1", 0, 8) as server:
        assert families_of(server) == {socket.AF_INET6}


def test_an_address_that_this_machine_has_not_is_gone() -> None:
    assert not is_gone("127.0.0.1")
    assert is_gone("192.0.2.1")  # for documentation: nobody's
    assert is_gone("2001:db8::1") or not socket.has_ipv6


async def test_names_that_nobody_can_look_up_hold_neither_the_disk_up_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name server that is out of reach holds each lookup up for half a minute."""
    asked, answer = [], threading.Event()

    def wait(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        answer.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    dialler = End(1)
    async with listening(dialler):
        monkeypatch.setattr(socket, "getaddrinfo", wait)
        names = {f"n{number}.example.org" for number in range(40)}
        dials = [dialler.dial(f"{name}:7700") for name in names]
        try:
            await until(lambda: set(asked) == names)
            assert await asyncio.wait_for(asyncio.to_thread(os.getpid), 60) == os.getpid()
        finally:
            answer.set()
        for dial in dials:
            with pytest.raises(aiohttp.ClientConnectorError, match="Temporary failure"):
                await dial
        monkeypatch.undo()
        (found, *_) = await Resolver().resolve("localhost", 7700, socket.AF_INET)
        assert (found["host"], found["port"], found["family"]) == ("127.0.0.1", 7700, socket.AF_INET)


@pytest.mark.parametrize("name", ["a" * 64 + ".example.org", "a..example.org"])
async def test_what_cannot_be_a_name_is_an_error_like_others(name: str) -> None:
    with pytest.raises(OSError, match="is not a host name"):
        await asyncio.wait_for(Resolver().resolve(name), 60)


def test_a_daemon_takes_the_open_files_that_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: asked.append(limits))
    open_files.ask_for_open_files()
    assert asked == [(1024, 4096)]
    monkeypatch.setattr("resource.getrlimit", lambda which: (4096, -1))
    open_files.ask_for_open_files()
    assert asked == [(1024, 4096)], "more is left as it is"
    monkeypatch.setattr("resource.getrlimit", lambda which: (20, 20))
    with pytest.raises(ConfigError, match=r"only 20 files may be open.*ulimit -n 1024"):
        open_files.ask_for_open_files()


def test_a_certificate_is_kept_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    first = Certificate.of(path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(first.fingerprint) == 32
    path.chmod(0o644)
    assert Certificate.of(path).fingerprint == first.fingerprint
    assert path.stat().st_mode & 0o777 == 0o600
    assert fresh_certificate().fingerprint != fresh_certificate().fingerprint


@pytest.mark.parametrize("content", [b"", b"junk", b"half", b"-----BEGIN CERTIFICATE-----\n"])
def test_a_damaged_certificate_is_made_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tls.pem"
    first = Certificate.of(path)
    path.write_bytes(content if content != b"half" else path.read_bytes()[:150])
    second = Certificate.of(path)
    assert second.fingerprint not in (first.fingerprint, b"")
    assert Certificate.of(path).fingerprint == second.fingerprint
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_certificate_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        Certificate.of(tmp_path / "missing" / "tls.pem")


def test_a_connection_that_was_closed_twice_is_left_to_end() -> None:
    """As Python 3.11.2 has it, where other releases let it be cut."""
    transport = Mock(abort=Mock(side_effect=AttributeError("'NoneType' object has no attribute '_abort'")))
    cut(transport)
    assert transport.abort.called
