"""Keys for one run: only those who hold them are members.

A set is three files: ``ca.pem`` (the run's own certificate authority), ``worker.pem`` and ``worker.key`` (the
certificate and the private key all workers of the run share). The authority's private key is not kept: nobody
can add to a set later.
"""

import os
import secrets
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from freewheel.errors import ConfigError, at_least

FILES = ("ca.pem", "worker.pem", "worker.key")
LONGEST_DAYS = 3650


def make(folder: Path, days: int = 30) -> datetime:
    """Write a new set into a folder, overwriting nothing; return until when it is valid."""
    at_least("days", days, 1)
    if days > LONGEST_DAYS:
        raise ConfigError(f"days must be at most {LONGEST_DAYS}, not {days}; a set is for one run.")
    there = [folder / name for name in FILES if (folder / name).exists()]
    if there:
        raise ConfigError(f"{there[0]} exists already and stays; give another folder or remove the old set.")
    until, texts = _new_set(days)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(FILES, texts, strict=True):
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "wb") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write keys into {str(folder)!r}: {error.strerror or error}. Give a folder that can be "
            "written to."
        ) from None
    return until


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and the client's context for mutual TLS 1.3 between members of a run.

    Both ends must show a certificate of this set's authority; host names are not checked. In TLS 1.3 a client
    learns that it was refused only when it first reads.
    """
    given, cure = repr(str(folder)), "`freewheel keys DIR` makes a new set."
    ca, certificate, key = (folder / name for name in FILES)
    missing = [path.name for path in (ca, certificate, key) if not path.is_file()]
    if missing:
        raise ConfigError(f"{given} is not a set of keys: {' and '.join(missing)} missing. {cure}")
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(ca)
            context.load_cert_chain(certificate, key, password="")  # never ask the terminal for one
        server.num_tickets = 0  # every connection proves its membership anew
        # Let the two ends meet in memory: shows at once whether key, certificate, authority and dates fit.
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        calling = client.wrap_bio(to_client, to_server)
        called = server.wrap_bio(to_server, to_client, server_side=True)
        for end in (calling, called, calling, called):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"the keys in {given} are not valid: {error.verify_message}. {cure}") from None
    except OSError as error:  # an SSLError is one
        why = getattr(error, "reason", None) or error.strerror or error
        raise ConfigError(f"cannot use the keys in {given}: {why}. {cure}") from None
    return server, client


def _new_set(days: int) -> tuple[datetime, tuple[bytes, bytes, bytes]]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise ConfigError("making keys needs a package more: pip install 'freewheel[tls]'") from None

    now, run = datetime.now(UTC), secrets.token_hex(4)
    until = now + timedelta(days=days)
    authority, worker = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        ca = key is authority
        by, of = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"freewheel {what} {run}")])
            for what in ("authority", subject)
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        usage = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
        return (
            x509.CertificateBuilder(by, of)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))  # clocks of other hosts may be behind
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer, critical=False)
        )

    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    ca = certificate("authority", authority).sign(authority, hashes.SHA256())
    member = certificate("worker", worker).add_extension(both, critical=False)
    pem = serialization.Encoding.PEM
    return until, (
        ca.public_bytes(pem),
        member.sign(authority, hashes.SHA256()).public_bytes(pem),
        worker.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
