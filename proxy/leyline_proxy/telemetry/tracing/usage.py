"""Tokens of an answer, as attributes of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from .current import Attribute, current_trace, plain_code

_COUNTS = (
    (("prompt_tokens",), "gen_ai.usage.input_tokens"),
    (("completion_tokens",), "gen_ai.usage.output_tokens"),
    (("prompt_tokens_details", "cached_tokens"), "gen_ai.usage.cache_read.input_tokens"),
    (("completion_tokens_details", "reasoning_tokens"), "gen_ai.usage.reasoning.output_tokens"),
)
_NAMES = (("id", "gen_ai.response.id"), ("model", "gen_ai.response.model"))
_LONGEST = 256
"""Characters of a name."""
_MOST = 128
"""Choices that are looked at."""

MAX_INT = 2**63 - 1
"""Largest attribute value; a larger one is lost, with a traceback in the log."""


def of_usage(usage: Mapping[str, Any] | None) -> dict[str, Attribute]:
    """Return the engine's token counts."""
    if usage is None:
        return {}
    found: dict[str, Attribute] = {}
    for place, attribute in _COUNTS:
        value: Any = usage
        for name in place:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT:
            found[attribute] = value
    return found


def note_answer(answer: Mapping[str, Any]) -> None:
    """Describe an engine's answer, or the chunk that ends one, in the current trace.

    The engine's strings are ids and names; finish reasons are shown only if they are plain words.
    """
    trace = current_trace()
    if not trace.recording:
        return
    found: dict[str, Attribute] = {}
    for name, attribute in _NAMES:
        value = answer.get(name)
        if isinstance(value, str) and 0 < len(value) <= _LONGEST:
            found[attribute] = value
    choices = answer.get("choices")
    reasons = [
        plain_code(reason)
        for choice in (choices if isinstance(choices, list) else ())[:_MOST]
        if isinstance(choice, Mapping) and isinstance(reason := choice.get("finish_reason"), str)
    ]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    trace.described_answer(found)


def receipt_span(usage: Mapping[str, Any] | None) -> AbstractContextManager[None]:
    """Note the engine's complete answer, and return a span of the wait for its receipt."""
    trace = current_trace()
    if trace.recording:
        trace.answered(of_usage(usage))
    return trace.stage("receipt")
