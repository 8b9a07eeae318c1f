"""Stored API keys: digests with a tenant and an optional expiry.

A key made by Leyline has 256 random bits. It can't be guessed, so one SHA-256 is enough to hide it
from readers of the file; the slow hashes that passwords need would only slow requests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from ..model.name_rule import NameRule

HASHED = "sha256:"
PREFIX = "lk-"
"""Prefix of the keys that Leyline makes, by which a leaked one is recognised."""

_ID_LENGTH = 12
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_EXPIRES = "expires="
_TENANT = NameRule(
    r"[^\s:#\[\]{}\"']",
    "characters that are no colon, #, blank, bracket, brace or quotation mark",
    64,
)
_JSON = ("[", "{", '"')


class KeyLineError(ValueError):
    """A key in the wrong form. Never quotes it."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key of a tenant."""

    tenant: str
    digest: bytes
    """SHA-256 of the key."""
    expires: float | None = None
    """Time at which it expires, in seconds since 1970; None for never."""

    @property
    def id(self) -> str:
        """Identifies the key in lists and logs, without giving access."""
        return self.digest.hex()[:_ID_LENGTH]

    def valid(self, now: float) -> bool:
        """Return True if the key is valid at ``now``."""
        return self.expires is None or now < self.expires


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def digest_of(written: str) -> bytes:
    """Return the digest of a key written in plain text or as ``sha256:HEX``.

    Raises:
        KeyLineError: ``sha256:`` without exactly 64 hexadecimal digits after it.
    """
    if not written.startswith(HASHED):
        return key_digest(written)
    digits = written[len(HASHED) :]
    if not _DIGEST.fullmatch(digits):
        raise KeyLineError("sha256: must be followed by 64 hexadecimal digits")
    return bytes.fromhex(digits)


def check_tenant(name: str) -> str:
    """Return ``name`` if it is a valid tenant name.

    Raises:
        KeyLineError: it is empty, too long, or contains a colon, a #, a blank, a bracket, a brace
            or a quotation mark.
    """
    if (broken := _TENANT.broken(name)) is not None:
        raise KeyLineError(f"a tenant's name {broken}")
    return name


def parse_key(line: str) -> ApiKey:
    """Return the key of ``tenant:KEY`` or ``tenant:sha256:HEX``, optionally with ``expires=TIME``.

    Raises:
        KeyLineError: any other form; doesn't quote it.
    """
    if line.lstrip().startswith(_JSON):
        raise KeyLineError(
            "API keys must be written as tenant:key, without quotation marks and not as JSON; "
            "several in a variable are separated by commas"
        )
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
    """Return the keys of a file: one per line, ``#`` before comments.

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
    """Return the seconds since 1970 of an ISO date or time, in UTC unless it names a zone.

    Raises:
        KeyLineError: it isn't one.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise KeyLineError(
            "expires must be an ISO date or time, such as 2027-01-31 or 2027-01-31T12:00:00Z"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def expiry_text(expires: float) -> str:
    """Return the ISO time that :func:`parse_expiry` reads, in UTC."""
    return datetime.fromtimestamp(expires, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def key_line(key: ApiKey) -> str:
    """Return the line of a key file for ``key``."""
    ending = "" if key.expires is None else f" {_EXPIRES}{expiry_text(key.expires)}"
    return f"{key.tenant}:{HASHED}{key.digest.hex()}{ending}"


def tenants_of(keys: Iterable[ApiKey]) -> frozenset[str]:
    """Return the tenants of ``keys``."""
    return frozenset(key.tenant for key in keys)
