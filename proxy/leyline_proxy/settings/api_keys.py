"""API keys as they are kept: digests with a tenant and, maybe, an expiry.

A key that Leyline makes has 256 random bits. Nobody guesses those, so one SHA-256 is enough to
keep it from whoever reads the file; the slow hashes that passwords need would only slow requests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

HASHED = "sha256:"
PREFIX = "lk-"
"""What a key of Leyline's making begins with, so that a leaked one is recognised."""

_ID_LENGTH = 12
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_EXPIRES = "expires="
_TENANT = re.compile(r"[^\s:#]{1,64}")


class KeyLineError(ValueError):
    """A key that isn't written as it should be. Never quotes it."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key of a tenant."""

    tenant: str
    digest: bytes
    """SHA-256 of the key."""
    expires: float | None = None
    """When it stops to be valid, in seconds since 1970; None for never."""

    @property
    def id(self) -> str:
        """Tells keys apart in lists and logs; it opens nothing."""
        return self.digest.hex()[:_ID_LENGTH]

    def valid(self, now: float) -> bool:
        """Whether it opens anything at ``now``."""
        return self.expires is None or now < self.expires


def key_digest(key: str) -> bytes:
    """SHA-256 of an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def digest_of(written: str) -> bytes:
    """The digest of a key that is written plainly, or as ``sha256:HEX``.

    Raises:
        KeyLineError: ``sha256:`` before something else than 64 hexadecimal digits.
    """
    if not written.startswith(HASHED):
        return key_digest(written)
    digits = written[len(HASHED) :]
    if not _DIGEST.fullmatch(digits):
        raise KeyLineError("sha256: must be followed by 64 hexadecimal digits")
    return bytes.fromhex(digits)


def check_tenant(name: str) -> str:
    """``name``, if a tenant can be called so.

    Raises:
        KeyLineError: it is empty, too long, or has a colon, a # or a blank in it.
    """
    if not _TENANT.fullmatch(name):
        raise KeyLineError(
            "a tenant's name has 1 to 64 characters, none of them a colon, # or blank"
        )
    return name


def parse_key(line: str) -> ApiKey:
    """The key of ``tenant:KEY`` or ``tenant:sha256:HEX``, with ``expires=TIME`` behind it or not.

    Raises:
        KeyLineError: for anything else; doesn't quote it.
    """
    pair, *options = line.split() or [""]
    tenant, _, written = pair.partition(":")
    if not tenant or not written:
        raise KeyLineError("an API key must be written as tenant:key")
    expires: float | None = None
    for option in options:
        if expires is not None or not option.startswith(_EXPIRES):
            raise KeyLineError("behind a key there is room for one expires=TIME, and nothing else")
        expires = parse_expiry(option[len(_EXPIRES) :])
    return ApiKey(check_tenant(tenant), digest_of(written), expires)


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """The keys of a file: one a line, ``#`` before comments.

    Raises:
        KeyLineError: names the first wrong line, without quoting it.
    """
    found: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            found.append(parse_key(stripped))
        except KeyLineError as error:
            raise KeyLineError(f"line {number}: {error}") from error
    return tuple(found)


def parse_expiry(text: str) -> float:
    """Seconds since 1970 of an ISO date or time; UTC where it names no zone.

    Raises:
        KeyLineError: it is none.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise KeyLineError(
            "expires must be an ISO date or time, such as 2027-01-31 or 2027-01-31T12:00:00Z"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def expiry_text(expires: float) -> str:
    """The ISO time that :func:`parse_expiry` reads, in UTC."""
    return datetime.fromtimestamp(expires, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def key_line(key: ApiKey) -> str:
    """The line of a key file that stands for ``key``."""
    ending = "" if key.expires is None else f" {_EXPIRES}{expiry_text(key.expires)}"
    return f"{key.tenant}:{HASHED}{key.digest.hex()}{ending}"


def tenants_of(keys: Iterable[ApiKey]) -> frozenset[str]:
    """Who has any of ``keys``."""
    return frozenset(key.tenant for key in keys)
