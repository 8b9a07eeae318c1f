"""Requests that a compaction makes: the one for the summary, and the compacted one; also those of
policies that ask for a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from ..model.compaction import DEFAULT_THRESHOLD, MAX_INSTRUCTIONS, CompactionWish
from ..model.fields import OPTIONS_FIELD
from ..model.messages import Message
from .declared import DeclaredEdit

Threshold = Annotated[int, msgspec.Meta(ge=1)]
Instructions = Annotated[str, msgspec.Meta(max_length=MAX_INSTRUCTIONS)]

_PROMPT = (
    "model",
    "lora_path",
    "tools",
    "chat_template_kwargs",
    "reasoning",
    "reasoning_effort",
    "thinking",
    "task",
    "prompt_cache_key",
    "user",
    "metadata",
    "context_management",
)
"""Members of a request that its summary's prompt and session depend on, besides the messages."""

_OF_THIS_TURN = ("compact", "context")
"""Options about a conversation that a compacted request no longer has."""


class CompactOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The option ``leyline.compact``."""

    threshold_tokens: Threshold | None = None
    """Prompt tokens above which the request is compacted; None for the default."""
    instructions: Instructions | None = None
    """What the summary should also have."""
    pause: bool = False
    """True to end the answer after the compaction."""

    def wish(self) -> CompactionWish:
        """Return the wish."""
        least = self.threshold_tokens or DEFAULT_THRESHOLD
        return CompactionWish(least, self.instructions, self.pause)


def question_body(
    body: Mapping[str, Any], messages: Sequence[Message], *, max_tokens: int
) -> dict[str, Any]:
    """Return the body that asks something about a request's conversation.

    Its prompt begins like the request's own, so the engine has most of it, and writes the answer
    with the whole conversation in view.

    Args:
        body: the chat request's.
        messages: the conversation, and what is asked.
    """
    asked = {name: body[name] for name in _PROMPT if body.get(name) is not None}
    if isinstance(body.get("tool_choice"), str) and body["tool_choice"] != "required":
        # Engines leave the tools out of the prompt for "none".
        asked["tool_choice"] = body["tool_choice"]
    options = _without(body.get(OPTIONS_FIELD), ("compact",))
    return {
        **asked,
        **({OPTIONS_FIELD: options} if options else {}),
        "messages": [*messages],
        "max_tokens": max_tokens,
        "temperature": 0,
    }


def compacted_body(
    body: Mapping[str, Any],
    edits: Sequence[DeclaredEdit],
    kept: Sequence[int],
    messages: Sequence[Message],
) -> dict[str, Any]:
    """Return the body of a chat request with its compacted messages.

    The edits of messages that stay are declared again. Those of the others were made when the
    summary was written.

    Args:
        edits: all that the request declares.
        kept: indices of the messages that stay, in order.
        messages: those that stay, and what stands in place of the others.
    """
    options = _without(body.get(OPTIONS_FIELD), (*_OF_THIS_TURN, "edits"))
    places = {index: place for place, index in enumerate(kept)}
    staying = [
        msgspec.structs.replace(edit, message=places[edit.message])
        for edit in edits
        if edit.message in places
    ]
    if staying:
        options["edits"] = msgspec.to_builtins(staying)
    rest = {name: value for name, value in body.items() if name != OPTIONS_FIELD}
    return {**rest, **({OPTIONS_FIELD: options} if options else {}), "messages": [*messages]}


def merged_wish(
    option: CompactOption | None, requested: CompactionWish | None
) -> CompactionWish | None:
    """Return the wish of ``leyline.compact``, or else that of ``context_management``."""
    return option.wish() if option is not None else requested


def forced(wish: CompactionWish | None) -> CompactionWish:
    """Return a wish that is granted whatever the prompt's size, and ends the answer."""
    return replace(wish or CompactionWish(), threshold=None, pause=True)


def _without(options: object, names: Sequence[str]) -> dict[str, Any]:
    given = options if isinstance(options, dict) else {}
    return {name: value for name, value in given.items() if name not in names}
