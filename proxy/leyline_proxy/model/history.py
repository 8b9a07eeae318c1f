"""Which conversation a request belongs to."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

OWN_HEADER = "x-leyline-session"

CONTINUES = frozenset({"assistant", "tool", "function"})
"""Roles of messages that only a conversation under way has."""

FRAME = frozenset({"system", "developer"})
"""Roles of messages that many conversations begin with alike."""

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


def history_key(secret: str) -> bytes:
    """The key of :func:`history_chain`; proxies that share a secret share their chains."""
    return blake2b(secret.encode(), digest_size=32, person=b"history chain").digest()


def history_chain(
    fingerprints: Sequence[int], key: bytes = b"", known: Sequence[int] = ()
) -> list[int]:
    """``chain[i]`` identifies messages ``0..i``: two lists agree on it iff they agree that far.

    Args:
        key: of at most 64 bytes; who lacks it can't try out which text a chain may be of.
        known: the chain's beginning, if that is known.
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
    """Whether that is all the stored conversation has: the request continues it."""


def shortest_partial(roles: Sequence[str]) -> int:
    """How many messages must be the same for an *edited* history to be recognised.

    The task and the first answer to it: conversations that merely open alike are not one.
    """
    user = next((index for index, role in enumerate(roles) if role == "user"), len(roles))
    answers = (index for index in range(user, len(roles)) if roles[index] == "assistant")
    return next(answers, len(roles)) + 1


def goes_on(
    stored: Sequence[int], fingerprints: Sequence[int], roles: Sequence[str], length: int
) -> bool:
    """Whether an edited history is the stored one's: behind the edit, an answer or a result recurs.

    Two conversations of one kind open alike; they don't go on alike.

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
    """Whether a message list is of the conversation that these lists were of.

    For a name that a harness gives to all it does for one task: the agent, those that it sends out,
    a request for a title. They have the name in common and no message that the agent wrote.

    Args:
        stored: fingerprints of the conversation's message lists.
        fingerprints, roles: of the request's messages.
    """
    given = tuple(fingerprints)
    if any(given[: len(each)] == tuple(each) for each in stored):
        return True
    if not any(role in CONTINUES for role in roles):
        return False  # it opens a conversation, and it isn't this one's opening
    known = {value for each in stored for value in each}
    return any(
        value in known and role not in FRAME for value, role in zip(given, roles, strict=True)
    )


def likeness(
    stored: Sequence[Sequence[int]], fingerprints: Sequence[int], roles: Sequence[str]
) -> int:
    """How many messages of a list the conversation had that these lists were of; none where
    :func:`carries_on` says no."""
    if not carries_on(stored, fingerprints, roles):
        return 0
    known = {value for each in stored for value in each}
    return sum(value in known for value in fingerprints)


def choose_sessions(
    matches: Sequence[HistoryMatch], roles: Sequence[str]
) -> tuple[HistoryMatch, ...]:
    """The conversations that a message list may continue, likeliest first; none where that is not
    certain.

    A conversation that the list continues is preferred to one that it shares more with only by
    an answer: models answer like questions alike. It is preferred to any where the list is one turn
    ahead of it, as that of an agent is which appends: the other is a run of the same task. Of
    several edited ones none is taken.

    Args:
        matches: per conversation its longest match; partial ones from :func:`shortest_partial` on,
            which count only where :func:`goes_on` confirms them.
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
