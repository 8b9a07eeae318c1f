"""A caller's claim that tokens stay resident. Every value is checked on construction. Pure."""

from __future__ import annotations

import math
import re
from enum import StrEnum

import msgspec

MAX_NAME = 128
"""Maximum length of an id, a tenant, a session or a source, in characters."""
MAX_REASON = 256
MAX_TTL_S = 7 * 24 * 3600
MAX_PRIORITY = 100
MAX_REVISION = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""
MAX_POSITION = 2**31 - 1

_NAME = re.compile(r"[!-~]+")


class ClaimError(ValueError):
    """A claim with an impossible value; ``field`` has to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ClaimKind(StrEnum):
    """The cost of a claim to others."""

    SOFT = "soft"
    """Evicted after KV of lower priority."""
    HARD = "hard"
    """Locked; a request that can't fit beside it is refused."""


class Predicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens ``[start, end)`` of ``source`` must be resident, at least ``share`` of them.

    Raises:
        ClaimError: a field is out of bounds.
    """

    source: str
    """A retained turn, by its name in the engine."""
    start: int
    end: int
    share: float = 1.0
    """Share of the span's pages, rounded up; 1 is the whole span."""

    def __post_init__(self) -> None:
        _check_name("predicate.source", self.source)
        _check_range("predicate.start", self.start, 0, MAX_POSITION - 1)
        _check_range("predicate.end", self.end, 1, MAX_POSITION)
        if self.end <= self.start:
            raise ClaimError("predicate.end", f"{self.end} is not behind the start, {self.start}")
        if not 0 < self.share <= 1:  # NaN fails as well
            raise ClaimError("predicate.share", f"{self.share} is not above 0 and at most 1")

    def page_span(self, page_size: int, kept: int | None = None) -> tuple[int, int]:
        """Return the pages that hold the span, half open.

        Args:
            kept: leading tokens of the source of which a cache has whole pages only; None if it
                has a partial page, too.
        """
        first, end = self.start // page_size, -(-self.end // page_size)
        if kept is not None:
            end = min(end, kept // page_size)
        return first, max(first, end)

    def required_pages(self, page_size: int, kept: int | None = None) -> int:
        """Return the number of those pages that must be resident; 0 if there are none."""
        first, end = self.page_span(page_size, kept)
        if first == end:
            return 0
        # 0.07 * 100 is a hair above 7; a share must not ask for a page too many.
        return max(1, math.ceil(round(self.share * (end - first), 6)))


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim as its owner submits it.

    Raises:
        ClaimError: a field is out of bounds. When decoded, ``msgspec.ValidationError`` with the
            same text.
    """

    id: str
    """Name of the owner's choice; tenants don't see each other's."""
    tenant: str
    session: str
    kind: ClaimKind
    predicate: Predicate
    priority: int = 0
    """Priority of a soft claim, and of a hard one that is demoted; unclaimed KV has 0."""
    ttl_s: int | None = None
    """Seconds from acceptance to expiry; None if only a release ends it."""
    write_no_admit: bool = False
    """True if KV that its session's requests compute isn't kept for reuse while it lives."""
    revision: int = 1
    reason: str = ""

    def __post_init__(self) -> None:
        for field in ("id", "tenant", "session"):
            _check_name(field, getattr(self, field))
        _check_range("priority", self.priority, 0, MAX_PRIORITY)
        if self.ttl_s is not None:
            _check_range("ttl_s", self.ttl_s, 1, MAX_TTL_S)
        _check_range("revision", self.revision, 1, MAX_REVISION)
        if len(self.reason) > MAX_REASON:
            raise ClaimError("reason", f"{len(self.reason)} characters are over {MAX_REASON}")

    @property
    def hard(self) -> bool:
        return self.kind is ClaimKind.HARD


def _check_name(field: str, value: str) -> None:
    if len(value) > MAX_NAME or not _NAME.fullmatch(value):
        rule = f"must be 1 to {MAX_NAME} visible ASCII characters"
        what = f"has {len(value)}" if not 1 <= len(value) <= MAX_NAME else "has others"
        raise ClaimError(field, f"{rule}, and {what}")


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ClaimError(field, f"{value} is not within {low} and {high}")
