"""TLS 1.3 between nodes, without certificate authorities.

A daemon makes a self-signed certificate when it first starts. Nobody trusts what the certificate says.
Instead, both nodes sign its fingerprint with their Ed25519 keys in the hello
(`protocol.access.handshake`), so a man in the middle with a certificate of his own breaks the signatures.
The fingerprint is also in the node's signed member record, and later connections are pinned to it.
"""

import asyncio
import datetime
import ssl
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from gossamer.node.files import cannot_write, write_atomically
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
            if not path.exists():
                write_atomically(path, _self_signed(), durable=True)
            path.chmod(0o600)
            try:
                return cls._load(path)
            except (ssl.SSLError, ValueError):
                write_atomically(path, _self_signed(), durable=True)
                return cls._load(path)
        except OSError as error:
            raise cannot_write(path, error, f"cannot use {path}: {error.strerror or error}") from None

    @classmethod
    def fresh(cls) -> Self:
        """A new certificate that is not kept."""
        with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:  # ssl reads keys from files only
            return cls.of(Path(folder) / "tls.pem")

    @classmethod
    def _load(cls, path: Path) -> Self:
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
