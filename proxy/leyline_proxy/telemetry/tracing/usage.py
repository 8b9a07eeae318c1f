"""Tokens of an answer, as attributes of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from .current import Attribute, current_trace

MAX_INT = 2**63 - 1
"""Largest attribute value; a larger one is lost, with a traceback in the log."""


def of_usage(usage: Mapping[str, Any] | None) -> dict[str, Attribute]:
    """Return the engine's token counts."""
    if usage is None:
        return {}
    found: dict[str, Attribute] = {}
    for name, attribute in (
        ("prompt_tokens", "gen_ai.usage.input_tokens"),
        ("completion_tokens", "gen_ai.usage.output_tokens"),
    ):
        value = usage.get(name)
        if isinstance(value, int) and 0 <= value <= MAX_INT:
            found[attribute] = value
    return found


def receipt_span(usage: Mapping[str, Any] | None) -> AbstractContextManager[None]:
    """Note the engine's complete answer, and return a span of the wait for its receipt."""
    trace = current_trace()
    if trace.recording:
        trace.answered(of_usage(usage))
    return trace.stage("receipt")
