"""Facts in answers of an upstream that speaks Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..native import NOTHING_TOLD, Told

_CACHE = ("cache_read_input_tokens", "cache_creation_input_tokens")


class _Message(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    type: str = ""
    message: _Message | None = None
    usage: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Event)


class NativeMessages:
    """Reads answers to ``/v1/messages``."""

    path = "/v1/messages"

    def passes(self, body: Mapping[str, Any]) -> bool:
        """Return True if a request can go to such an upstream unchanged."""
        return True

    def usage(self, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the usage of a whole answer, as a chat completion counts it."""
        return _usage(answer.get("usage"))

    def told(self, data: bytes) -> Told:
        """Return the facts of an event's data."""
        try:
            event = _decoder.decode(data)
        except msgspec.DecodeError:
            return NOTHING_TOLD
        if event.type == "message_start":
            return Told(usage=_usage(event.message.usage) if event.message is not None else None)
        if event.type == "content_block_delta":
            return Told(bears_token=True)
        if event.type == "message_delta":
            return Told(usage=_usage(event.usage), finishes=True)
        return NOTHING_TOLD


def _usage(usage: object) -> Mapping[str, Any] | None:
    """Return usage as a chat completion counts it: its prompt tokens include cached tokens, unlike
    Anthropic's input tokens."""
    if not isinstance(usage, Mapping):
        return None
    counts = {name: value for name, value in usage.items() if isinstance(value, int)}
    found: dict[str, Any] = {}
    if "input_tokens" in counts:
        found["prompt_tokens"] = counts["input_tokens"] + sum(
            counts.get(name, 0) for name in _CACHE
        )
        found["prompt_tokens_details"] = {"cached_tokens": counts.get(_CACHE[0], 0)}
    if "output_tokens" in counts:
        found["completion_tokens"] = counts["output_tokens"]
    return found
