"""Texts of an answer that the caller left out when it sent the answer back. Pure."""

from __future__ import annotations

from ..model.messages import text_of
from ..model.prepared import Prepared
from ..model.session import RetainedTurn
from .stripped import Decode
from .token_diff import Hunk

_REASONING = ("reasoning_content", "reasoning", "thinking")


def left_out(hunk: Hunk, turn: RetainedTurn, prepared: Prepared, decode: Decode) -> int | None:
    """Return the caller's message of a turn's answer if the caller left out a text of it.

    Some clients keep only an answer's calls, and drop the text in front of them. The template can't
    have dropped a text that it wasn't given.

    Args:
        hunk: a difference that no message explains and that strips no thinking.
        prepared: this turn's messages.

    Returns:
        The message's index in the caller's list of this turn, or None if the caller has the text.
    """
    before, place = turn.prepared.client_fingerprints, len(turn.prepared.client)
    removes = hunk.end > hunk.start >= len(turn.rendered.tokens) and hunk.new_end == hunk.new_start
    goes_on = prepared.client_fingerprints[:place] == before and len(prepared.client) > place
    if not removes or not goes_on:
        return None
    message = prepared.client[place]
    text = decode(turn.tokens[hunk.start : hunk.end]).strip()
    if message.get("role") != "assistant" or not text:
        return None
    told = (text_of(message), *(str(message.get(name) or "") for name in _REASONING))
    return None if any(text in each for each in told) else place
