"""Sockets: TLS 1.3 between nodes, looking names up, listening on a port, and this machine's addresses.

There are no certificate authorities. A daemon makes a self-signed certificate when it first starts. Nobody
trusts what the certificate says. Instead, both nodes sign its fingerprint with their Ed25519 keys in the
hello (`protocol.access.handshake`), so a man in the middle with a certificate of his own breaks the
signatures. The fingerprint is also in the node's signed member record, and later connections are pinned to
it.
"""

import asyncio
import datetime
import errno
import logging
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

from aiohappyeyeballs import AddrInfoType
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.http_exceptions import HttpProcessingError
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from gossamer.node.files import cannot_write, write_atomically
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.identity import Identity

WRITE_BUFFER_BYTES = 64 * 1024
"""Bytes that may wait in a connection's write buffer, over TLS too, where asyncio would let half a chunk
wait. A small buffer shows how fast a chunk goes out."""

_BEGIN = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_VALID = datetime.timedelta(days=36500)
"""Nobody looks at the dates: the access list decides who may take part."""


def _self_signed() -> bytes:
    """A new key and its certificate, PEM."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gossamer")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_BEGIN + _VALID)
        .sign(key, None)
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A node's own certificate: the context it serves with, and the SHA-256 fingerprint others pin."""

    context: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def of(cls, path: Path) -> Self:
        """The certificate in a file, or a new one if there is none or it is damaged. Raises StorageError."""
        try:
            try:
                return cls._load(path)
            except (FileNotFoundError, ssl.SSLError, ValueError):
                write_atomically(path, _self_signed(), durable=True)
                return cls._load(path)
        except OSError as error:
            raise cannot_write(path, error, f"cannot use {path}: {error.strerror or error}") from None

    @classmethod
    def _load(cls, path: Path) -> Self:
        path.chmod(0o600)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(path)
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        return cls(context, sha256(certificate.public_bytes(serialization.Encoding.DER)).digest())


@dataclass(frozen=True, slots=True)
class LocalNode:
    """This node, as it proves itself to others."""

    identity: Identity
    swarm_id: bytes
    certificate: Certificate | None
    """None without TLS: then everything stays on loopback."""

    @property
    def fingerprint(self) -> bytes:
        """That of the certificate; empty without TLS."""
        return self.certificate.fingerprint if self.certificate else b""

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"


def client_context() -> ssl.SSLContext:
    """A context that accepts any certificate: the hello proves whose it is, not its text."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint_of(certificate_der: bytes | None) -> bytes:
    """SHA-256 of a certificate; empty bytes for a connection without TLS."""
    return sha256(certificate_der).digest() if certificate_der else b""


def cut(transport: asyncio.WriteTransport) -> None:
    """End a connection at once. If it is closed already, Python 3.11.2 (Debian 12) raises an AttributeError;
    the connection then ends by itself."""
    with suppress(AttributeError):
        transport.abort()


# --- What aiohttp's servers log, of the network and of the admin server: errors of ours alone.

log = logging.getLogger("gossamer.server")


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error that aiohttp logs is ours: often a stranger merely does not speak HTTP, and that is
    not worth a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    theirs = HttpProcessingError | ConnectionError | web.RequestPayloadError
    # aiohttp refuses an unknown Expect header before any code of ours is asked, and cannot quote all of them.
    if not isinstance(error, theirs | UnicodeEncodeError):
        return True
    log.debug("a request that cannot be answered: %s", type(error).__name__)
    return False


http_log = logging.getLogger("gossamer.http")
http_log.addFilter(_is_ours)


FILES_MIN = 1024
"""Open files to ask for: CONNECTIONS_MAX, and 256 for the node itself."""

FILES_LEAST = 64
"""With fewer no node can run: its own files and sockets are some 20."""


def ask_for_open_files() -> None:
    """Raise the limit on open files, which is 256 on some systems, as far as allowed and needed.

    Raises ConfigError if the node could not run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MIN if hard < 0 else min(FILES_MIN, hard)  # infinity is negative
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FILES_LEAST:
        raise ConfigError(f"only {hard} files may be open: raise that limit (ulimit -n {FILES_MIN})")


class Resolver(AbstractResolver):
    """The system's own lookups, each in a thread of its own.

    If the name servers are out of reach, a lookup takes half a minute and more, and nothing ends it sooner.
    asyncio's few threads also write to disk and merge, and a process waits for them when it ends: a lookup
    must hold up neither. aiohttp looks a name up only once at a time, however many dial it.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Addresses of a name. Raises OSError."""
        answer: Future[list[ResolveResult]] = Future()
        answer.set_running_or_notify_cancel()  # nothing ends a lookup; its caller just stops waiting

        def look_up() -> None:
            try:
                answer.set_result(_addresses(host, port, family))
            except UnicodeError:
                answer.set_exception(OSError(errno.EINVAL, f"{host!r} is not a host name"))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=look_up, name="look-up", daemon=True).start()
        return await asyncio.wrap_future(answer)

    async def close(self) -> None:
        """Nothing is kept open."""


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    """Raises OSError, or UnicodeError for what cannot be a name."""
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host,
            host=socket.getnameinfo(address, numeric)[0],  # with its scope
            port=port,
            family=kind,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family
        )
    ]


async def listen(
    protocol: Callable[[], asyncio.Protocol], host: str, port: int, backlog: int
) -> asyncio.Server:
    """Have a protocol made for every connection that comes in. Raises OSError.

    Listening at ``::`` also accepts IPv4 connections, which asyncio would leave out, and only those if the
    machine has no IPv6.
    """
    loop = asyncio.get_running_loop()
    if host == "::":
        try:
            both = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return await loop.create_server(protocol, sock=both, backlog=backlog)
        except (OSError, ValueError) as error:  # ValueError: there is no dual stack
            if isinstance(error, OSError) and error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
        host = "0.0.0.0"
    return await loop.create_server(protocol, host, port, reuse_address=True, backlog=backlog)


def why_not(error: OSError) -> str:
    """Why we cannot listen, in the system's words: asyncio replaces those by its own."""
    number = error.errno or 0
    return (os.strerror(number) if number > 0 else str(error.strerror)).lower()  # negative: name not found


def families_of(server: asyncio.Server) -> frozenset[socket.AddressFamily]:
    """The kinds of address by which a server can be reached."""
    families = {listener.family for listener in server.sockets}
    if any(
        listener.family == socket.AF_INET6
        and not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        and listener.getsockname()[0] == "::"
        for listener in server.sockets
    ):
        families.add(socket.AF_INET)
    return frozenset(map(socket.AddressFamily, families))


def family_of(host: str) -> socket.AddressFamily:
    """The kind of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_gone(host: str) -> bool:
    """Whether a numeric address is no longer this machine's, perhaps since it is on another network now."""
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL  # other errors, such as too many open files, tell nothing
    return False


def sockets_at(host: str) -> Callable[[AddrInfoType], socket.socket]:
    """A factory of sockets to dial with, bound to our address `host` if what is dialled is of the same kind:
    no route leads from it to the other kind. The factory raises OSError, also once `host` is gone."""
    ours, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]

    def make(dialled: AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = dialled
        made = socket.socket(family, kind, protocol)
        try:
            if family == ours:
                made.bind(where)
        except OSError:
            made.close()
            raise
        return made

    return make
