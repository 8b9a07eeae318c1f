"""Halves of surrogate pairs in the JSON of a client.

A text that was cut inside an emoji has one, as an escape (``\\ud83d``). It is JSON, but no text: no
tokenizer and no UTF-8 takes it. U+FFFD takes its place, as in SDKs and tokenizers, before anything
reads the body, so that an engine gets the same bytes that were planned.
"""

from __future__ import annotations

import re
from collections.abc import Generator

PIECE = 1 << 16
"""Bytes that are repaired at a time: some milliseconds, whatever they are."""
_LONGEST = 12
"""Bytes of two escapes, as of a pair."""

_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW_END = rb"[c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD]%b)|(?<!%b\\u[dD])%b)"
    % (_LOW_END, _HIGH, _LOW_END)
)
"""Half a pair, where each backslash begins an escape."""
_OPEN = re.compile(rb"(?:%b)?(?:\\(?:u[0-9a-fA-F]{0,4})?)?\Z" % _HIGH)
"""The end of a piece that the next bytes may complete."""

_BACKSLASH = rb"\\"
"""The escape of a backslash."""
_MASK = b"\0\0"
"""Bytes of the same length that no JSON has."""


def repair_surrogates(raw: bytes, piece: int = PIECE) -> Generator[None, None, bytes]:
    """Return JSON with ``\\ufffd`` in place of each half of a surrogate pair; all other bytes stay,
    and keep their places. Yields between pieces of the work, so that its caller can let others run.

    Args:
        piece: bytes that are repaired at a time, more than 12.
    """
    if b"\0" in raw:
        return raw  # no JSON in UTF-8
    parts: list[bytes] = []
    start = 0
    while start < len(raw):
        if start:
            yield
        end = _end_of_piece(raw, start, piece)
        parts.append(_repaired(raw[start:end]))
        start = end
    return b"".join(parts)


def _end_of_piece(raw: bytes, start: int, size: int) -> int:
    """Return the end of the piece that begins at ``start``; no escape or pair lies across it."""
    end = start + size
    if end >= len(raw):
        return len(raw)
    piece = raw[start:end].replace(_BACKSLASH, _MASK)
    cut = _OPEN.search(piece, len(piece) - _LONGEST)
    return start + cut.start() if cut is not None else end


def _repaired(piece: bytes) -> bytes:
    if b"\\ud" not in piece and b"\\uD" not in piece:
        return piece
    # Without escaped backslashes, each one that is left begins an escape.
    masked = piece.replace(_BACKSLASH, _MASK)
    return _LONE.sub(rb"\\ufffd", masked).replace(_MASK, _BACKSLASH)
