"""Compaction blocks: summaries that clients carry, and that stand in place of what came before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...model.compaction import Compacted, CompactionReport, is_foreign
from ..fields import FieldError

COMPACTION = "compaction"

Opens = Callable[[str], Compacted | None]
"""Opens an ``encrypted_content``; returns None if it can't."""

_Place = tuple[int, int]
"""A message's number, and a block's in it."""


def compaction_block(compacted: Compacted, carried: str) -> dict[str, Any]:
    """Return a compaction block.

    Args:
        carried: the kept messages, closed.
    """
    return {"type": COMPACTION, "content": compacted.summary, "encrypted_content": carried}


def last_compaction(messages: Sequence[Any]) -> _Place | None:
    """Return the place of the last compaction block with a summary; None for none.

    Raises:
        FieldError: a block is wrong.
    """
    for number in range(len(messages) - 1, -1, -1):
        message = messages[number]
        content = message.get("content") if isinstance(message, dict) else None
        blocks = content if isinstance(content, list) else []
        for index in range(len(blocks) - 1, -1, -1):
            if _is_compaction(blocks[index]) and _summary(blocks[index], number, index) is not None:
                return number, index
    return None


def opened(messages: Sequence[Any], place: _Place, opens: Opens) -> tuple[Compacted, str]:
    """Return the compaction at a place, and its field.

    A summary that the client has changed counts as it is; what it doesn't show can't be changed.

    Raises:
        FieldError: its ``encrypted_content`` can't be opened.
    """
    number, index = place
    field = f"messages[{number}].content[{index}]"
    block = messages[number]["content"][index]
    carried, summary = block.get("encrypted_content"), block["content"]
    if carried is None or (isinstance(carried, str) and is_foreign(carried)):
        return Compacted(summary), field  # all that can be read of another provider's
    found = opens(carried) if isinstance(carried, str) else None
    if found is None:
        raise FieldError(
            f"{field}.encrypted_content",
            f"{field}.encrypted_content isn't from a compaction of this proxy for this tenant and "
            "model, or it was changed.",
            code="compaction_signature_invalid",
        )
    return replace(found, summary=summary), field


def uncovered(
    message: Mapping[str, Any], number: int, place: _Place | None
) -> Mapping[str, Any] | None:
    """Return a message with empty compactions in place of the blocks that the compaction at
    ``place`` covers, so that the others keep their numbers; None if nothing is left of it. System
    messages stay.
    """
    if place is not None and number < place[0] and message.get("role") != "system":
        return None
    content = message.get("content")
    if not isinstance(content, list):
        return message
    covered = place[1] + 1 if place is not None and number == place[0] else 0
    rest = [*({"type": COMPACTION},) * covered, *content[covered:]]
    if rest and all(map(_is_compaction, rest)):
        return None
    return {**message, "content": rest} if covered else message


def with_iterations(
    usage: Mapping[str, Any], report: CompactionReport | None, *, counted: bool = True
) -> dict[str, Any]:
    """Return a message's usage with that of a compaction, which its totals don't include.

    Args:
        usage: that of the answer itself.
        counted: False if the answer is the compaction alone.
    """
    if report is None or report.usage is None:
        return {**usage}
    prompt, cached = report.usage["prompt_tokens"], report.usage["cached_tokens"]
    compaction = {
        "type": COMPACTION,
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": report.usage["completion_tokens"],
    }
    message = [{**_counts(usage), "type": "message"}] if counted else []
    return {**usage, "iterations": [compaction, *message]}


def _counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if isinstance(value, int)}


def _is_compaction(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == COMPACTION


def _summary(block: Mapping[str, Any], number: int, index: int) -> str | None:
    """Return a block's summary; None for a compaction that failed, which is left out."""
    summary = block.get("content")
    if summary is None or (isinstance(summary, str) and summary):
        return summary
    field = f"messages[{number}].content[{index}].content"
    raise FieldError(field, f"{field} must be the text of a summary, or null.")
