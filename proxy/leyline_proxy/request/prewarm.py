"""Requests with a limit of 0 tokens: their prompt is prefilled, and nothing is generated.

SGLang takes ``max_tokens: 0`` but reads ``max_completion_tokens: 0`` as no limit; vLLM and others
refuse both. All engines take 1, and the prefill computes that token anyway. So one is asked for,
and dropped (:mod:`..apis.prewarm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .wire import add_members, remove_members

LIMITS = ("max_completion_tokens", "max_tokens")
"""Members that limit an answer, the one that counts first."""

_LEAST = ("min_tokens", "min_new_tokens")
"""Members that would demand more than one token."""


def prewarms(body: Mapping[str, Any]) -> bool:
    """Return True if a chat or completion request wants its prompt prefilled and nothing else.

    A bare completion that echoes its prompt wants its log probabilities.
    """
    limit = next((body[name] for name in LIMITS if body.get(name) is not None), None)
    return type(limit) in (int, float) and limit == 0 and not body.get("echo")


def for_one_token(raw: bytes, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request with a limit of 1 in place of 0.

    Args:
        body: ``raw``, decoded.
    """
    names = [name for name in LIMITS if body.get(name) is not None]
    least = [name for name in _LEAST if name in body]
    kept = remove_members(raw, (*LIMITS, *least))
    return add_members(kept, dict.fromkeys(names, b"1"))
