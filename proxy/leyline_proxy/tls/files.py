"""Files of certificates and keys in PEM. All functions block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from ..settings.named_files import FileVersion, NamedFileError, file_version, read_within

_MAX_BYTES = 4 * 1024 * 1024

Signature = tuple[FileVersion, ...]


class TlsFilesError(NamedFileError):
    """Files that can't serve for TLS; the message names the setting and the fix."""


@dataclass(frozen=True, slots=True)
class Validity:
    """The lifetime of a certificate, in seconds since 1970."""

    begins: float
    ends: float

    def fault(self, now: float) -> str | None:
        """Return the reason that peers refuse the certificate at a time; None if they don't."""
        if self.begins <= now <= self.ends:
            return None
        reason = "has expired" if now > self.ends else "isn't valid yet"
        return f"{reason}: peers refuse it"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one side, with the settings that name them."""

    certificate: Path | None
    """Chain of our own certificate, the leaf first."""
    key: Path | None
    authorities: Path | None
    """Certificates of the authorities that sign those of our peers."""
    settings: tuple[str, str, str]
    """Names of the three settings, for messages."""

    @property
    def named(self) -> Mapping[str, Path]:
        """The files by setting."""
        pairs = zip(self.settings, (self.certificate, self.key, self.authorities), strict=True)
        return {setting: path for setting, path in pairs if path is not None}

    def signature(self) -> Signature:
        """Return the files' versions. A link that is turned to another file changes it."""
        return tuple(map(file_version, self.named.values()))

    def validity(self) -> Validity | None:
        """Return the lifetime of our own certificate; None if there is none.

        Raises:
            TlsFilesError: it can't be read.
        """
        if self.certificate is None:
            return None
        setting = self.settings[0]
        try:
            leaf = x509.load_pem_x509_certificates(read(self.certificate, setting))[0]
        except (ValueError, IndexError) as error:
            raise TlsFilesError(
                f"{setting} {self.certificate} holds no certificate in PEM, or only a part of one."
            ) from error
        return Validity(leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp())


def read(path: Path, setting: str) -> bytes:
    """Return the content of a file.

    Raises:
        TlsFilesError: it can't be read, or is too large.
    """
    try:
        return read_within(path, setting, _MAX_BYTES)
    except NamedFileError as error:
        raise TlsFilesError(str(error)) from error
