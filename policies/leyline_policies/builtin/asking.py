"""The part of a conversation that a policy has a model read beside the requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyline_policies.builtin.transcripts import joined_print
from leyline_policies.context import Context

_PATIENCE_TURNS = 20
"""Turns without an answer after which a newer part is asked about."""
_ASKED = "asked"


def asked_part(
    context: Context, prints: Sequence[str], front: int, least: int
) -> dict[str, Any] | None:
    """Return the part that is being asked about: its ``end``, and the ``key`` of its messages.

    It stays the same while the conversation grows, or no answer would ever fit it.

    Args:
        prints: of the conversation's messages.
        front: place of the part's first message.
        least: place after which the part must end.
    """
    asked: dict[str, Any] | None = context.state.get(_ASKED)
    if (
        asked is not None
        and least < asked["end"] <= len(prints)
        and joined_print(prints[front : asked["end"]]) == asked["key"]
        and context.turn - asked["turn"] < _PATIENCE_TURNS
    ):
        return asked
    context.state.pop(_ASKED, None)
    return None


def ask_about(context: Context, prints: Sequence[str], front: int, end: int) -> dict[str, Any]:
    """Return the part before ``end``, which is asked about from now on."""
    key = joined_print(prints[front:end])
    context.state[_ASKED] = asked = {"end": end, "key": key, "turn": context.turn}
    return asked
