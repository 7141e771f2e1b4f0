"""Keys of a run: who holds them is a member, nobody else is."""

from __future__ import annotations

import contextlib
import ssl
import stat
import sys
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from freewheel.errors import ConfigError
from freewheel.runtime.launch import keys


@pytest.fixture
def folder(tmp_path):
    keys.make(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def stranger(tmp_path):
    keys.make(tmp_path / "strange")
    return tmp_path / "strange"


def talk(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """Shake hands in memory and send one message; what does not fit raises at the end that refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(to_client, to_server)
    called = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (calling, called, calling, called):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    calling.write(b"hello")
    return called.read()


def client_of(trusted, shown=None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(trusted / "ca.pem")
    if shown is not None:
        context.load_cert_chain(shown / "worker.pem", shown / "worker.key")
    return context


def test_members_of_a_run_talk(folder):
    server, client = keys.contexts(folder)
    assert talk(server, client) == b"hello"
    for context in (server, client):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1


def test_another_run_s_member_is_refused_by_both_ends(folder, stranger):
    server, client = keys.contexts(folder)
    their_server, their_client = keys.contexts(stranger)
    with pytest.raises(ssl.SSLCertVerificationError):
        talk(server, their_client)
    with pytest.raises(ssl.SSLCertVerificationError):
        talk(their_server, client)


def test_who_trusts_us_but_shows_a_stranger_s_certificate_or_none_is_refused(folder, stranger):
    server, _ = keys.contexts(folder)
    assert talk(server, client_of(folder, shown=folder)) == b"hello"
    with pytest.raises(ssl.SSLError, match=r"(?i)verify failed"):
        talk(server, client_of(folder, shown=stranger))
    with pytest.raises(ssl.SSLError, match=r"(?i)did not return a certificate"):
        talk(server, client_of(folder))


def test_older_tls_is_refused(folder):
    server, _ = keys.contexts(folder)
    old = client_of(folder, shown=folder)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        talk(server, old)


def test_the_certificates_say_what_they_are_for(folder):
    ca, worker = (
        x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.pem", "worker.pem")
    )
    for one in (ca, worker):
        assert isinstance(one.public_key(), ec.EllipticCurvePublicKey)
        assert one.public_key().curve.name == "secp256r1"
        assert one.not_valid_before_utc <= datetime.now(UTC) - timedelta(minutes=4)
        assert one.not_valid_after_utc > datetime.now(UTC) + timedelta(days=29)
    authority = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert authority.critical
    assert authority.value.ca
    assert not worker.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = worker.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not usage.key_cert_sign
    assert set(worker.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    worker.verify_directly_issued_by(ca)
    # The strictest reading of the standard is content, too.
    server, client = keys.contexts(folder)
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    assert talk(server, client) == b"hello"


def test_the_files_are_private_and_the_authority_s_key_is_not_among_them(folder):
    assert {path.name for path in folder.iterdir()} == set(keys.FILES)
    assert stat.S_IMODE((folder / "worker.key").stat().st_mode) == 0o600
    private = [path.name for path in folder.iterdir() if "PRIVATE KEY" in path.read_text()]
    assert private == ["worker.key"]


@pytest.mark.parametrize("there", keys.FILES)
def test_nothing_is_overwritten_and_no_half_set_is_left(tmp_path, there):
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match=f"{there} exists already"):
        keys.make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_places_and_days_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write keys into"):
        keys.make(tmp_path / "file")
    with pytest.raises(ConfigError, match="days must be at least 1"):
        keys.make(tmp_path / "new", days=0)
    with pytest.raises(ConfigError, match="days must be at most"):
        keys.make(tmp_path / "new", days=10**6)
    assert not (tmp_path / "new").exists()


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"freewheel\[tls\]"):
        keys.make(tmp_path)


@pytest.mark.parametrize("name", keys.FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} missing.*freewheel keys"):
        keys.contexts(folder)


@pytest.mark.parametrize("name", keys.FILES)
def test_a_file_of_another_set_or_without_sense_is_refused(folder, stranger, name):
    (folder / name).write_bytes((stranger / name).read_bytes())
    with pytest.raises(ConfigError, match=r"keys in .*freewheel keys"):
        keys.contexts(folder)
    (folder / name).write_text("nonsense")
    with pytest.raises(ConfigError, match="cannot use the keys"):
        keys.contexts(folder)


def test_an_expired_set_is_refused(tmp_path, monkeypatch):
    class LastYear(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(days=365)

    monkeypatch.setattr(keys, "datetime", LastYear)
    keys.make(tmp_path, days=30)
    with pytest.raises(ConfigError, match="expired"):
        keys.contexts(tmp_path)
