"""The certificates for https:// to sandboxes: an authority of this user's own, for the sandboxes' domain and no other.

Clients reach the server through its CONNECT proxy and find a certificate for `<domain>` and `*.<domain>` there. Who
trusts the authority trusts it for these names alone: its certificate says so (name constraints, RFC 5280 4.2.1.10).
It is kept between starts, its key readable for its user alone; the key of the server's certificate is never on disk.
"""

from __future__ import annotations

import fcntl
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DEFAULT_DOMAIN = "e2b.app"
_DOMAIN = re.compile(r"(?=.{1,200}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_AUTHORITY_LIFE = timedelta(days=3650)
_RENEW_BEFORE = timedelta(days=90)  # a server may run that long with the authority it found
_CERTIFICATE_LIFE = timedelta(days=397)  # the longest that clients accept
_CLOCK_SKEW = timedelta(days=1)
_USUAL_PLACES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


@dataclass(frozen=True)
class Tls:
    """What the server answers https with, and what its clients need."""

    domain: str
    context: ssl.SSLContext = field(repr=False)
    authority_file: Path
    """PEM, the authority's certificate alone: what Node adds to its own (`NODE_EXTRA_CA_CERTS`)."""
    bundle_file: Path
    """PEM, with the authorities that the system trusts: for what replaces those (`SSL_CERT_FILE`)."""

    def covers(self, host: str) -> bool:
        """Whether `host`, in lower case, is the domain or one label below it."""
        label, _, rest = host.partition(".")
        return host == self.domain or (rest == self.domain and bool(label))


def prepare(directory: Path, domain: str = DEFAULT_DOMAIN, environ: Mapping[str, str] = os.environ) -> Tls:
    """Find or make the authority of `domain` below `directory`, and a certificate of it. Raises OSError, ValueError.

    Safe with other processes that do the same at the same time.
    """
    domain = domain.lower()
    if not _DOMAIN.fullmatch(domain):
        raise ValueError(f"{domain!r} is not a domain such as {DEFAULT_DOMAIN}")
    home = directory / domain
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.now(UTC)
    with _locked(home / "lock"):
        authority, key = _load(home, now) or _make(home, domain, now)
        authority_file, bundle_file = home / "ca.pem", home / "bundle.pem"
        _replace(bundle_file, _trusted(environ, bundle_file) + b"\n" + authority_file.read_bytes(), 0o644)
    return Tls(domain, _context(domain, authority, key, now), authority_file, bundle_file)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _load(home: Path, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None:
    """The authority of an earlier start; None when there is none, or it cannot be used any more."""
    try:
        authority = x509.load_pem_x509_certificate((home / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((home / "ca-key.pem").read_bytes(), None)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        return None
    return None if authority.not_valid_after_utc - _RENEW_BEFORE < now else (authority, key)


def _make(home: Path, domain: str, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "me2b"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"me2b local server for {domain}"[:64]),
        ]
    )
    everywhere = [x509.IPAddress(ip_network(net)) for net in ("0.0.0.0/0", "::/0")]
    authority = (
        _builder(name, name, key.public_key(), now, _AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.NameConstraints([x509.DNSName(domain)], everywhere), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _replace(home / "ca-key.pem", _key_pem(key), 0o600)
    _replace(home / "ca.pem", authority.public_bytes(serialization.Encoding.PEM), 0o644)
    return authority, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + life - _CLOCK_SKEW)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _context(
    domain: str, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, now: datetime
) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "me2b")])
    names = x509.SubjectAlternativeName([x509.DNSName(domain), x509.DNSName(f"*.{domain}")])
    certificate = (
        _builder(subject, authority.subject, key.public_key(), now, _CERTIFICATE_LIFE)
        .add_extension(names, critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, certificate.public_bytes(serialization.Encoding.PEM) + _key_pem(key))
    return context


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """`load_cert_chain` takes files only: one in memory, which no other process can open, leaves nothing behind."""
    descriptor = os.memfd_create("me2b-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _trusted(environ: Mapping[str, str], ours: Path) -> bytes:
    """The authorities that programs of this user trust now: SSL_CERT_FILE unless it is ours, else the system's.

    Certifi's where the system has none, and nothing where that is not installed.
    """
    places = (environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().openssl_cafile, *_USUAL_PLACES)
    for place in places:
        # one of ours may be of another domain: then a bundle would grow with every start
        if place and os.path.isfile(place) and ours.parent.parent.resolve() not in Path(place).resolve().parents:
            return Path(place).read_bytes()
    try:
        import certifi
    except ModuleNotFoundError:
        return b""
    return Path(certifi.where()).read_bytes()


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file in one step, with that mode from its first moment on."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)
