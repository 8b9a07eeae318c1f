"""The payload of ``leyline.reuse@1.0``: content that the engine holds elsewhere.

The engine finds it by its tokens, and the proxy can name places where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

from .directive import CopySegment
from .recompute import Extent, joined
from .source import Position, SourceRef

MAX_GROUPS = 16
"""Maximum number of groups that one request names."""
MAX_NAMED_SOURCES = 16
MAX_NAMED_COPIES = 256
MAX_WITHIN = 64
"""Maximum number of extents to which a request restricts reuse."""
MAX_EXTENTS = 256
"""Maximum number of copied extents that a receipt reports."""

GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ReuseMode(StrEnum):
    """The use that an engine makes of content that it holds elsewhere. Off is no action at all."""

    OBSERVE = "observe"
    """Count what could be reused; the request runs as without."""
    LIVE = "live"
    """Copy it. The copied KV has read another context than the prompt's."""


class ReuseKind(StrEnum):
    """The context that reused KV has read, the best first."""

    CLEAN = "clean"
    """Only text that the prompt begins with as well."""
    SESSION = "session"
    """Other text of the same session."""
    TENANT = "tenant"
    """Text of another session of the same tenant."""
    GROUP = "group"
    """Text of another tenant, in a group that both have declared."""


class ReusePayload(msgspec.Struct, frozen=True, kw_only=True):
    """A request for reuse, beside the ``leyline.edit`` that registers the turn."""

    mode: ReuseMode
    boundary: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    """Leading tokens of each reused run that are computed again."""
    groups: Annotated[tuple[GroupName, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    """Groups of tenants: the turn may take KV of other tenants' turns that name one of them, and
    theirs may take its KV."""
    sources: Annotated[tuple[SourceRef, ...], msgspec.Meta(max_length=MAX_NAMED_SOURCES)] = ()
    """Turns of the tenant scope, of this session or others, that hold content of the prompt."""
    copies: Annotated[tuple[CopySegment, ...], msgspec.Meta(max_length=MAX_NAMED_COPIES)] = ()
    """Places of the content, sorted by destination; they don't overlap. They are hints: what
    differs from the engine's own record is left out, and the rest of the prompt is looked for."""
    margin: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    """The smallest margin at which a prefill with reuse is trusted; with 0, none is measured.

    The margin is the likeliest first token's logit minus that of the second: natural logarithms,
    before any sampling parameter."""
    within: (
        Annotated[tuple[tuple[Position, Position], ...], msgspec.Meta(max_length=MAX_WITHIN)] | None
    ) = None
    """Extents of the prompt in which content may be copied, sorted and disjoint; None for all of
    it. With no extent, nothing is looked for: the request only makes the tenant's turns known to
    the index. An engine takes it if its capability says ``reuse_within``; others ignore it."""
    own: bool = False
    """True to take only KV of turns of the payload's own session; ``groups`` then only offers."""

    def __post_init__(self) -> None:
        """Check ``within``.

        Raises:
            ValueError: names the first extent that is empty, or begins before the last one ends.
        """
        cursor = 0
        for index, (start, end) in enumerate(self.within or ()):
            if end <= start:
                raise ValueError(
                    f"within[{index}]: [{start}, {end}) is empty; its end must be above its start"
                )
            if start < cursor:
                raise ValueError(
                    f"within[{index}]: starts at {start}, before the previous extent ends at "
                    f"{cursor}; extents must be sorted and disjoint"
                )
            cursor = end


class ReuseCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens found elsewhere, by :class:`ReuseKind`; they were copied if the mode is live."""

    mode: ReuseMode
    clean: int = 0
    session: int = 0
    tenant: int = 0
    group: int = 0
    bounded: bool = False
    """True if the search, or ``extents``, ended at a bound, so that there may be more."""
    margin: float | None = None
    """The margin of a prefill with reuse; None if it wasn't measured."""
    gated: bool = False
    """True if reuse was given up because the margin was too small."""
    extents: tuple[tuple[int, int], ...] = ()
    """Half-open token extents of the prompt that were copied, sorted and merged where they meet, if
    the mode is live. They are the first :data:`MAX_EXTENTS`."""

    @property
    def total(self) -> int:
        return self.clean + self.session + self.tenant + self.group


def restriction(spans: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return spans of a prompt as :attr:`ReusePayload.within` takes them.

    Those that meet or overlap become one. Of more than :data:`MAX_WITHIN`, the longest are kept.
    """
    longest = sorted(joined(spans), key=lambda span: span[0] - span[1])[:MAX_WITHIN]
    return tuple(sorted(longest))
