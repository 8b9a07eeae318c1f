"""Which conversation a request belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

OWN_HEADER = "x-leyline-session"

HARNESS_HEADERS = (
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-dynamo-session-id",
    "x-amp-thread-id",
    "x-cagent-session-id",
    "x-session-id",
    "session_id",
    "session-id",
    "conversation_id",
    "x-session-affinity",
    "x-litellm-session-id",
    "helicone-session-id",
)
"""Headers by which agents name their conversation; a harness's own name before general ones."""


def session_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str | None, str]:
    """The name that the request gives its conversation, and where it stood.

    Args:
        headers: with lower-case names.
        body: the decoded request.

    Returns:
        The name or None, and the header or body field that it came from (``history`` for None).
    """
    for header in (OWN_HEADER, *HARNESS_HEADERS):
        if name := headers.get(header, "").strip():
            return name, header
    metadata = body.get("metadata")
    in_metadata = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    for where, value in (
        ("prompt_cache_key", body.get("prompt_cache_key")),
        ("metadata.session_id", in_metadata),
        ("user", body.get("user")),
    ):
        if isinstance(value, str) and value.strip():
            return value.strip(), where
    return None, "history"


def history_chain(fingerprints: Sequence[int]) -> list[int]:
    """``chain[i]`` identifies messages ``0..i``: two lists agree on it iff they agree that far."""
    state = xxhash.xxh3_64()
    chain: list[int] = []
    for value in fingerprints:
        state.update(value.to_bytes(8, "little"))
        chain.append(state.intdigest())
    return chain
