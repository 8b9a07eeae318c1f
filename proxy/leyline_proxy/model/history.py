"""Recognition of the conversation that a request belongs to."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

OWN_HEADER = "x-leyline-session"

CONTINUES = frozenset({"assistant", "tool", "function"})
"""Roles that appear only after a conversation has begun."""

FRAME = frozenset({"system", "developer"})
"""Roles of opening messages that many conversations share."""

HARNESS_HEADERS = (
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-dynamo-session-id",
    "x-amp-thread-id",
    "x-cagent-session-id",
    "x-session-id",
    "thread-id",  # Codex: sub-agents share the session of the agent that sent them
    "session_id",
    "session-id",
    "conversation_id",
    "x-session-affinity",
    "x-litellm-session-id",
    "helicone-session-id",
)
"""Headers by which agents name their conversation; a harness's own come before general ones."""

AGENT_HEADERS = {"x-claude-code-session-id": "x-claude-code-agent-id"}
"""Headers that name one of several agents under the conversation's name: Claude Code's sub-agents
send one, and its main agent doesn't."""


def session_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the name that the request gives its conversation, and the place of that name.

    Args:
        headers: with lower-case names.
        body: the decoded request.

    Returns:
        The name or None, and its header or body field (``history`` for None).
    """
    for header in (OWN_HEADER, *HARNESS_HEADERS):
        if name := headers.get(header, "").strip():
            agent = headers.get(AGENT_HEADERS.get(header, ""), "").strip()
            return (f"{name}:agent:{agent}" if agent else name), header
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


def history_key(secret: str) -> bytes:
    """Return the key of :func:`history_chain`; proxies that share a secret share their chains."""
    return blake2b(secret.encode(), digest_size=32, person=b"history chain").digest()


def history_chain(
    fingerprints: Sequence[int], key: bytes = b"", known: Sequence[int] = ()
) -> list[int]:
    """Return a chain whose item ``i`` identifies messages ``0..i``: equal iff lists agree so far.

    Args:
        key: at most 64 bytes; without it, texts can't be guessed from a chain.
        known: the chain's beginning, if known.
    """
    state = blake2b(key=key, digest_size=8)
    chain = [*known]
    state.update(struct.pack(f"<{len(chain)}Q", *fingerprints[: len(chain)]))
    for value in fingerprints[len(chain) :]:
        state.update(value.to_bytes(8, "little"))
        chain.append(int.from_bytes(state.copy().digest(), "little"))
    return chain


@dataclass(frozen=True, slots=True)
class HistoryMatch:
    """A stored conversation that shares its beginning with a request's messages."""

    session: str
    length: int
    """Messages in common."""
    whole: bool
    """True if this is the whole stored conversation: the request continues it."""


def shortest_partial(roles: Sequence[str]) -> int:
    """Return the number of equal messages needed to recognise an *edited* history.

    The count includes the task and its first answer: conversations that only open alike are
    different ones.
    """
    user = next((index for index, role in enumerate(roles) if role == "user"), len(roles))
    answers = (index for index in range(user, len(roles)) if roles[index] == "assistant")
    return next(answers, len(roles)) + 1


def goes_on(
    stored: Sequence[int], fingerprints: Sequence[int], roles: Sequence[str], length: int
) -> bool:
    """Return True if an answer or a result of the stored list recurs after the edit of a history.

    Two conversations of one kind open alike, but they don't continue alike.

    Args:
        stored: fingerprints of the stored conversation's messages.
        fingerprints, roles: of the request's messages.
        length: messages that both begin with.
    """
    rest = set(stored[length:])
    return any(
        value in rest and role in ("assistant", "tool", "function")
        for value, role in zip(fingerprints[length:], roles[length:], strict=True)
    )


def carries_on(
    stored: Sequence[Sequence[int]], fingerprints: Sequence[int], roles: Sequence[str]
) -> bool:
    """Return True if a message list belongs to the conversation of the stored lists.

    Serves names that a harness gives to all requests of one task: the agent, its sub-agents, a
    request for a title. These share the name but no message that the agent wrote.

    Args:
        stored: fingerprints of the conversation's message lists.
        fingerprints, roles: of the request's messages.
    """
    given = tuple(fingerprints)
    if any(given[: len(each)] == tuple(each) for each in stored):
        return True
    if not any(role in CONTINUES for role in roles):
        return False  # opens another conversation
    known = {value for each in stored for value in each}
    return any(
        value in known and role not in FRAME for value, role in zip(given, roles, strict=True)
    )


def likeness(
    stored: Sequence[Sequence[int]], fingerprints: Sequence[int], roles: Sequence[str]
) -> int:
    """Return the number of a list's messages that occur in the stored conversation; 0 if
    :func:`carries_on` denies that it belongs there."""
    if not carries_on(stored, fingerprints, roles):
        return 0
    known = {value for each in stored for value in each}
    return sum(value in known for value in fingerprints)


def choose_sessions(
    matches: Sequence[HistoryMatch], roles: Sequence[str]
) -> tuple[HistoryMatch, ...]:
    """Return the conversations that a list may continue, likeliest first; none if uncertain.

    A conversation that the list continues is preferred to one that shares only one more answer:
    models answer similar questions alike. It is preferred to all others if the list is one turn
    ahead, as from an agent that appends: the other is then a run of the same task. Of several
    edited ones none is taken.

    Args:
        matches: the longest match of each conversation; partial ones have at least
            :func:`shortest_partial` messages and count only if :func:`goes_on` confirms them.
        roles: of the request's messages.
    """
    wholes = [match for match in matches if match.whole]
    parts = [match for match in matches if not match.whole]
    whole = max(wholes, key=lambda match: match.length, default=None)
    longest = max((match.length for match in parts), default=0)
    rivals = tuple(match for match in parts if match.length == longest)
    if whole is None:
        return rivals if len(rivals) == 1 else ()
    appended = roles[whole.length :].count("assistant") <= 1
    beyond = roles[whole.length : longest]
    if appended or len(rivals) != 1 or all(role == "assistant" for role in beyond):
        return (whole,)
    return (*rivals, whole)
