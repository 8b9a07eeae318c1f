"""Answers to requests with a limit of 0 tokens: what was generated is left out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTS = ("completion_tokens", "completion_tokens_details", "reasoning_tokens", "total_tokens")


def emptied(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole answer, or a chunk of one, without what was generated.

    It ends because of its limit, and its usage counts the prompt alone.
    """
    choices, usage = answer.get("choices"), answer.get("usage")
    shown = {**answer}
    if isinstance(choices, list):
        shown["choices"] = [_choice(each) for each in choices if isinstance(each, Mapping)]
    if isinstance(usage, Mapping):
        shown["usage"] = usage_of(usage)
    return shown


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's usage without what was generated."""
    kept = {name: value for name, value in usage.items() if name not in _COUNTS}
    return {**kept, "completion_tokens": 0, "total_tokens": usage.get("prompt_tokens", 0)}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": choice.get("index", 0)}
    if "message" in choice:
        shown["message"] = {"role": "assistant", "content": ""}
    if "text" in choice:
        shown["text"] = ""
    if "delta" in choice:
        delta = choice["delta"]
        opens = isinstance(delta, Mapping) and "role" in delta
        shown["delta"] = {"role": "assistant", "content": ""} if opens else {}
    ended = bool(choice.get("finish_reason"))
    return {**shown, "logprobs": None, "finish_reason": "length" if ended else None}
