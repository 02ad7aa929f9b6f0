"""TLS 1.3 between nodes, without certificate authorities.

Every daemon makes a fresh self-signed certificate when it starts. Nobody trusts it for what it says: the
hello (`protocol.handshake`) signs its fingerprint with both nodes' Ed25519 keys, so a man in the middle with
a certificate of his own breaks the signatures, and later requests of the link are pinned to the fingerprint.
"""

import datetime
import ssl
import tempfile
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

_VALID_DAYS = 3650


def _self_signed() -> tuple[bytes, bytes, bytes]:
    """A new key and certificate: (PEM of both, DER of the certificate, its SHA-256)."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gossamer")])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=_VALID_DAYS * 3))
        .sign(key, None)
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    der = certificate.public_bytes(serialization.Encoding.DER)
    return pem, der, sha256(der).digest()


def server_context() -> tuple[ssl.SSLContext, bytes]:
    """A context with a certificate of its own, and that certificate's SHA-256 fingerprint."""
    pem, _, fingerprint = _self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:  # ssl reads keys from files only; 0700
        path = Path(folder) / "certificate.pem"
        path.write_bytes(pem)
        context.load_cert_chain(path)
    return context, fingerprint


def client_context() -> ssl.SSLContext:
    """A context that accepts any certificate: who it belongs to is proven by the hello, not by its text."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint_of(certificate_der: bytes | None) -> bytes:
    """SHA-256 of a certificate; empty bytes for a connection without TLS."""
    return sha256(certificate_der).digest() if certificate_der else b""
