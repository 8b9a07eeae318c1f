"""Certificates of an authority that a test makes for itself."""

from __future__ import annotations

import ipaddress
import shutil
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

_HOUR = timedelta(hours=1)


def _subject(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a certificate and its key."""

    cert: Path
    key: Path

    def put(self, other: Pair) -> None:
        """Put other files in the place of these, the certificate first."""
        shutil.copyfile(other.cert, self.cert)
        shutil.copyfile(other.key, self.key)

    def context(self, ca: Path) -> ssl.SSLContext:
        """The context of a client that shows the certificate."""
        found = ssl.create_default_context(cafile=ca)
        found.load_cert_chain(self.cert, self.key)
        return found


class Authority:
    """Signs certificates, and keeps its own in a file."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = _subject(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._made = 0
        self.ca = folder / f"{name}.pem"
        now = datetime.now(UTC)
        own = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _HOUR)
            .not_valid_after(now + 24 * _HOUR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca.write_bytes(own.public_bytes(Encoding.PEM))

    def issue(
        self,
        *names: str,
        begins: timedelta = -_HOUR,
        ends: timedelta = 24 * _HOUR,
        passphrase: bytes | None = None,
    ) -> Pair:
        """A certificate with these names, in files of its own.

        Args:
            names: URIs, addresses or DNS names.
            begins: from now, as is ``ends``.
            passphrase: encrypts the key.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject("workload"))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        )
        if names:
            listed = x509.SubjectAlternativeName([_general(name) for name in names])
            builder = builder.add_extension(listed, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        self._made += 1
        pair = Pair(self._folder / f"{self._made}.pem", self._folder / f"{self._made}.key")
        pair.cert.write_bytes(signed.public_bytes(Encoding.PEM))
        sealed = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, sealed))
        return pair
