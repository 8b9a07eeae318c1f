"""The directive ``(s, t, R, m)``, its checks, and its lowering to segments.

::

    source   0 ───────── s ══════ t ───────────────── n        directive (s, t, R, m)
                         │  cut   │                  │
    result   0 ───────── s ░░ R ░░ s+|R| ─────────────         δ = |R| − (t − s)
             copy [0, s)   literal   copy [t, n)

Coordinates are token positions; every span is half open.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .vocabulary import Mode

MAX_DIRECTIVES = 1024
"""Maximum number of directives in one turn; more are refused as ``invalid_directive``."""


class DirectiveError(ValueError):
    """A directive list that can't be applied; ``index`` is the offending directive."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(f"directive {index}: {message}")
        self.index = index


class Directive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replace tokens ``[start, end)`` of a source with ``replacement`` under ``mode``."""

    start: int
    end: int
    replacement: tuple[int, ...] = ()
    mode: Mode = Mode.AMORTIZE
    source: int = 0
    """Index into the payload's ``sources``."""

    @property
    def delta(self) -> int:
        """Shift of everything after the span, in tokens."""
        return len(self.replacement) - (self.end - self.start)


class CopySegment(msgspec.Struct, frozen=True, tag_field="kind", tag="copy"):
    """Copy tokens ``[start, end)`` of source ``source`` to ``dest`` of the new prompt."""

    source: int
    start: int
    end: int
    dest: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def dest_end(self) -> int:
        return self.dest + self.end - self.start


class LiteralSegment(msgspec.Struct, frozen=True, tag_field="kind", tag="literal"):
    """``length`` tokens at ``dest`` of the new prompt that no source supplies."""

    dest: int
    length: int

    @property
    def dest_end(self) -> int:
        return self.dest + self.length


Segment = CopySegment | LiteralSegment


def check_directives(directives: Sequence[Directive], source_length: int) -> None:
    """Refuse directives of one source that are out of range, unordered or overlapping.

    Raises:
        DirectiveError: names the first offending directive.
    """
    if len(directives) > MAX_DIRECTIVES:
        raise DirectiveError(MAX_DIRECTIVES, f"more than {MAX_DIRECTIVES} directives in one turn")
    previous_end = 0
    for index, directive in enumerate(directives):
        if directive.start < 0 or directive.end < directive.start:
            raise DirectiveError(index, f"span [{directive.start}, {directive.end}) is malformed")
        if directive.end > source_length:
            raise DirectiveError(
                index, f"span ends at {directive.end}, the source has {source_length} tokens"
            )
        if directive.start < previous_end or (
            index > 0 and directive.start == directives[index - 1].start
        ):
            raise DirectiveError(index, "spans must be sorted and must not overlap")
        previous_end = directive.end


def apply_directives(source: Sequence[int], directives: Sequence[Directive]) -> list[int]:
    """Return the token sequence that the directives make of ``source``.

    Raises:
        DirectiveError: if the directives don't fit the source.
    """
    check_directives(directives, len(source))
    result: list[int] = []
    cursor = 0
    for directive in directives:
        result.extend(source[cursor : directive.start])
        result.extend(directive.replacement)
        cursor = directive.end
    result.extend(source[cursor:])
    return result


def lower_directives(
    directives: Sequence[Directive], source_length: int, prompt_length: int, source: int = 0
) -> tuple[Segment, ...]:
    """Lower one source's directives to segments that cover ``[0, prompt_length)`` in order.

    Tokens after the edited source are a literal. A copy that would run past the prompt's end is
    clipped.

    Raises:
        DirectiveError: if the directives don't fit the source.
    """
    check_directives(directives, source_length)
    segments: list[Segment] = []
    cursor = dest = 0
    for start, end, length in [
        *((d.start, d.end, len(d.replacement)) for d in directives),
        (source_length, source_length, 0),
    ]:
        kept = min(start - cursor, prompt_length - dest)
        if kept > 0:
            segments.append(CopySegment(source, cursor, cursor + kept, dest))
            dest += kept
        written = min(length, prompt_length - dest)
        if written > 0:
            segments.append(LiteralSegment(dest, written))
            dest += written
        cursor = end
    if dest < prompt_length:
        segments.append(LiteralSegment(dest, prompt_length - dest))
    return tuple(segments)
