"""A proxy's question about what an engine's ledger has of a session, and the answer.

One question is one ``POST`` to :data:`LEDGER_PATH`, signed like a command about claims. The answer
has names, numbers and positions, no text.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

LEDGER_PATH = "/leyline/ledger"
MAX_ASKED = 1000
"""Maximum number of spans in one question."""
MAX_QUESTION_BYTES = 256 << 10

_Name = Annotated[str, msgspec.Meta(max_length=256)]


class LedgerQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question about spans of a session."""

    scope: _Name
    """The tenant."""
    session: _Name
    spans: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_ASKED)]


class SpanReaders(msgspec.Struct, frozen=True, kw_only=True):
    """Holders and readers of a span in one engine."""

    turns: int
    """Number of retained turns whose prompt shows it."""
    lineages: int
    """Number of lineages, of any session, whose moved KV has read it or may have."""
    first: int | None = None
    """First position, in any of these, that holds or may have read it."""


class LedgerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer."""

    spans: dict[str, SpanReaders]
    """By name. A span that the ledger doesn't know is missing: its readers are unknown."""
    pending: int
    """Slots of forgets of the session that wait for running requests."""


def decode_question(body: bytes) -> LedgerQuestion:
    """Decode a question from its JSON.

    Raises:
        msgspec.DecodeError: not JSON, or not a question; the text names the field.
    """
    return _DECODER.decode(body)


_DECODER = msgspec.json.Decoder(LedgerQuestion)
