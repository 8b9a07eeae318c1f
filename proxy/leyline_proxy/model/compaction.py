"""Compaction: a summary in place of a conversation, and what is kept beside it. Pure.

::

    instructions │ user, assistant, tool, … ─▶ instructions │ user's newest messages │ summary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from leyline_policies.builtin.summarize import HEADING, TASK

from .history import FRAME
from .messages import Message, text_of

DEFAULT_THRESHOLD = 150_000
"""Prompt tokens above which a request that names no number is compacted, as in Anthropic's API."""

MAX_INSTRUCTIONS = 16 * 1024
"""Largest number of characters of a request's own instructions for the summary."""

MAX_SUMMARY = 256 * 1024
"""Largest number of characters of a summary; the rest of a longer one is left out."""

SEALED = "leyline-compaction-"
"""Prefix of what this proxy encrypts for clients to carry; other providers' is none of its own."""

_MAX_KEPT = 32 * 1024
"""Largest size of the kept messages, as JSON."""


def is_foreign(carried: str) -> bool:
    """Return True for an ``encrypted_content`` of another provider."""
    return bool(carried) and not carried.startswith(SEALED)


@dataclass(frozen=True, slots=True)
class CompactionWish:
    """A request's wish to be compacted."""

    threshold: int | None = DEFAULT_THRESHOLD
    """Prompt tokens above which it is compacted; None to compact it in any case."""
    instructions: str | None = None
    pause: bool = False
    """True to end the answer after the compaction."""

    def question(self) -> Message:
        """Return the message that asks the model for the summary."""
        own = (self.instructions or "").strip()
        return {"role": "user", "content": f"{TASK}\n\n{own}" if own else TASK}


@dataclass(frozen=True, slots=True)
class Compacted:
    """The replacement of a conversation."""

    summary: str
    """The model's words, unchanged."""
    kept: tuple[Message, ...] = ()
    """Messages of the user in front of it."""
    session: str | None = None
    """Id of the session whose turn wrote it."""

    def messages(self) -> list[Message]:
        """Return the messages in place of those that were compacted."""
        return [*self.kept, {"role": "user", "content": HEADING + self.summary}]


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """The result of a request's wish, for its answer."""

    reason: str | None
    """None if it was compacted, else the reason that it wasn't."""
    prompt_tokens: int | None = None
    """Size of the prompt; None if nobody asked for it."""
    compacted: Compacted | None = None
    turn: str | None = None
    """Name of the turn that wrote the summary."""
    usage: Mapping[str, int] | None = None
    """Its ``prompt_tokens``, ``cached_tokens`` and ``completion_tokens``."""
    applied: Sequence[Mapping[str, Any]] = ()
    """Effects of the request's other edits on the conversation that was compacted."""
    truncated: bool = False
    """True if the summary reached the limit of its length."""
    paused: bool = False
    text: bool = False
    """True to show the messages that stand in place of the conversation."""

    def document(self) -> dict[str, Any]:
        """Return the member ``compaction`` of the account."""
        told: dict[str, Any] = {
            "compacted": self.reason is None,
            "reason": self.reason,
            "prompt_tokens": self.prompt_tokens,
        }
        if self.compacted is None:
            return told
        told |= {
            "turn": self.turn,
            "usage": self.usage,
            "truncated": self.truncated,
            "paused": self.paused,
            "kept_messages": len(self.compacted.kept),
        }
        return told | ({"messages": self.compacted.messages()} if self.text else {})


def instructions_in(messages: Sequence[Message]) -> list[int]:
    """Return the places of the system's and developer's messages, which a compaction leaves."""
    return [at for at, message in enumerate(messages) if message.get("role") in FRAME]


def is_worth_it(messages: Sequence[Message]) -> bool:
    """Return True if a summary would replace more than a single message or the last summary."""
    rest = [message for message in messages if message.get("role") not in FRAME]
    fresh = [message for message in rest if not _is_summary(message)]
    return any(message.get("role") != "user" for message in fresh) or len(fresh) > 1


def kept_of(messages: Iterable[Message], *, prompt_tokens: int) -> tuple[Message, ...]:
    """Return the user's newest messages that stay beside the summary, oldest first.

    They take about a quarter of the prompt at most. Earlier summaries are in the new one.

    Args:
        messages: those that the summary covers, as they were sent to the model.
    """
    left, kept = min(_MAX_KEPT, prompt_tokens), list[Message]()
    for message in reversed([*messages]):
        if message.get("role") != "user" or _is_summary(message):
            continue
        left -= len(msgspec.json.encode(message))
        if left < 0:
            break
        kept.append({"role": "user", "content": message.get("content")})
    return (*reversed(kept),)


def _is_summary(message: Message) -> bool:
    return message.get("role") == "user" and text_of(message).startswith(HEADING)
