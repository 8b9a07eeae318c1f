"""Map a request of the Responses API to a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..fields import FieldError
from .compaction import CONTEXT, Opens, ends_with_trigger, options_of, unfolded
from .items import TOOLS_ITEM, Placed, conversation, kind_of
from .tools import ToolBook, choose_tools, read_tools

Items = Sequence[Mapping[str, Any]]

PREVIOUS = "previous_response_id"

_MAPPED = frozenset(
    {
        "input",
        "instructions",
        "max_output_tokens",
        "messages",
        "reasoning",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        PREVIOUS,
    }
)

_WITHOUT_EFFECT = frozenset(
    {
        "access_programs",
        "client_metadata",
        "image",
        "include",
        "max_tool_calls",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "top_logprobs",
        "truncation",
    }
)
"""Members handled elsewhere, or for OpenAI only: accounts, and caching, which is automatic."""

_SERVER_SIDE = {
    "background": "background runs aren't offered here; leave it out and stream instead.",
    "conversation": "conversations aren't kept here; use previous_response_id instead.",
    "moderation": "moderation needs OpenAI's own servers; leave it out.",
    "prompt": "prompt templates aren't kept here; send instructions and input instead.",
}
_EFFORT = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_CARRY = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class ChatMapping:
    """A chat request, and the facts needed to map its answer back."""

    body: dict[str, Any]
    origins: tuple[str, ...]
    """Source field of each chat message."""
    tools: ToolBook
    carries_reasoning: bool
    """True if reasoning items must hold ``encrypted_content``."""
    truncates: bool
    """True if old items may be dropped to make the rest fit."""
    foreign: frozenset[str] = frozenset()
    """Types of items and parts that only another provider can read."""
    compacts: bool = False
    """True if the last item asks for a compaction."""


def input_items(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the request's own items, including references.

    Raises:
        FieldError: ``input`` is neither a string nor a list of items.
    """
    given = body.get("input")
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "role": "user", "content": content}]
    if given is None and body.get(PREVIOUS) is not None:
        return []
    if not isinstance(given, list):
        other = " messages are those of POST /v1/chat/completions." if "messages" in body else ""
        raise FieldError("input", f"input must be a string or a list of items.{other}")
    if not given and body.get(PREVIOUS) is None:
        raise FieldError("input", "input must hold at least one item.")
    return given


def references(items: Items) -> list[str]:
    """Return the ids of stored items that a request refers to, in order.

    Raises:
        FieldError: an item or an id is invalid; the error names it.
    """
    found = (_reference(item, f"input[{index}]") for index, item in enumerate(items))
    return [identifier for identifier in found if identifier is not None]


def resolved(items: Items, known: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the items with references replaced by the stored items.

    Raises:
        FieldError: a referenced item isn't known.
    """
    found: list[Mapping[str, Any]] = []
    for index, item in enumerate(items):
        identifier = _reference(item, f"input[{index}]")
        if identifier is not None and identifier not in known:
            field = f"input[{index}].id"
            message = f"{field} names no item that is stored here; it may have expired."
            raise FieldError(field, message, code="item_not_found", missing=True)
        found.append(item if identifier is None else known[identifier])
    return found


def map_request(
    body: Mapping[str, Any],
    items: Items,
    previous: Items = (),
    *,
    runs: bool = True,
    opens: Opens = lambda _: None,
) -> ChatMapping:
    """Map a request. Members that aren't this API's are kept, as on the chat route.

    Args:
        items: the request's own, without references.
        previous: the items of earlier responses, oldest first.
        runs: False if tokens are only counted.
        opens: opens compaction items.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    for name, message in _SERVER_SIDE.items():
        if body.get(name):
            raise FieldError(name, message, code="unsupported_parameter")
    placed = _placed(body, items, previous)
    compacts = ends_with_trigger(placed)
    placed = unfolded(placed[:-1] if compacts else placed, opens)
    foreign: set[str] = set()
    messages = conversation(body.get("instructions"), placed, foreign)
    book = read_tools([("tools", body.get("tools")), *_more_tools(placed)])
    chosen, book = choose_tools(body.get("tool_choice"), book)
    chat = {
        name: value
        for name, value in body.items()
        if name not in _MAPPED
        and name not in _WITHOUT_EFFECT
        and name not in _SERVER_SIDE
        and value is not None
        and not (name == CONTEXT and isinstance(value, list))
    }
    chat["messages"] = [dict(one.value) for one in messages]
    if book.definitions:
        chat["tools"] = list(book.definitions)
    else:
        chat.pop("parallel_tool_calls", None)
    chat |= chosen
    if runs:
        chat |= _limit(body.get("max_output_tokens"))
    if body.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    chat |= _reasoning(body.get("reasoning"), body.get("chat_template_kwargs"))
    chat |= _text(body.get("text"))
    chat |= options_of(body)
    return ChatMapping(
        body=chat,
        origins=tuple(one.origin for one in messages),
        tools=book,
        carries_reasoning=_carries(body.get("include")),
        truncates=_truncates(body.get("truncation")),
        foreign=frozenset(foreign),
        compacts=compacts,
    )


def _placed(body: Mapping[str, Any], items: Items, previous: Items) -> list[Placed]:
    """Return all items with their fields."""
    own = [Placed(item, f"input[{index}]") for index, item in enumerate(items)]
    if isinstance(body.get("input"), str):
        own = [Placed(item, "input") for item in items]
    return [*(Placed(item, PREVIOUS) for item in previous), *own]


def stores(body: Mapping[str, Any]) -> bool:
    """Return True if the response must be stored.

    Raises:
        FieldError: ``store`` is no boolean.
    """
    store = body.get("store")
    if store is not None and not isinstance(store, bool):
        raise FieldError("store", "store must be true or false.")
    return store is not False


def previous_id(body: Mapping[str, Any]) -> str | None:
    """Return the id of the response that a request continues.

    Raises:
        FieldError: it is no string.
    """
    previous = body.get(PREVIOUS)
    if previous is not None and not isinstance(previous, str):
        raise FieldError(PREVIOUS, f"{PREVIOUS} must be the id of a response.")
    return previous


def _more_tools(items: Sequence[Placed]) -> list[tuple[str, object]]:
    return [
        (f"{item.origin}.tools", item.value.get("tools"))
        for item in items
        if kind_of(item) == TOOLS_ITEM
    ]


def _limit(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return {"max_tokens": value}
    field = "max_output_tokens"
    raise FieldError(field, f"{field} must be a number of tokens; 0 prefills the prompt only.")


def _reasoning(config: object, given: object) -> dict[str, Any]:
    """Return the members for the reasoning effort. "None" turns thinking off, under both names that
    chat templates use."""
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise FieldError("reasoning", "reasoning must be an object.")
    effort = config.get("effort")
    if effort is None:
        return {}
    if effort == "none":
        own = given if isinstance(given, dict) else {}
        return {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, **own}}
    if not isinstance(effort, str) or effort not in _EFFORT:
        known = ", ".join(("none", *_EFFORT))
        raise FieldError("reasoning.effort", f"reasoning.effort must be one of {known}.")
    return {"reasoning_effort": _EFFORT[effort]}


def _text(config: object) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise FieldError("text", "text must be an object.")
    match config.get("format"):
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"response_format": {"type": "json_object"}}
        case {"type": "json_schema", "schema": dict(schema), **other}:
            name = other.get("name")
            described: dict[str, Any] = {"name": name if isinstance(name, str) else "response"}
            described |= {key: other[key] for key in ("description", "strict") if other.get(key)}
            shaped = {"type": "json_schema", "json_schema": {**described, "schema": schema}}
            return {"response_format": shaped}
    field = "text.format"
    raise FieldError(field, f"{field} must have type text, json_object, or json_schema and schema.")


def _carries(include: object) -> bool:
    if include is None:
        return False
    if not isinstance(include, list):
        raise FieldError("include", "include must be a list of names.")
    return _CARRY in include


def _truncates(value: object) -> bool:
    if value not in (None, "auto", "disabled"):
        raise FieldError("truncation", "truncation must be auto or disabled.")
    return value == "auto"


def _reference(item: Mapping[str, Any], place: str) -> str | None:
    """Return the id of a reference; None for any other item."""
    if kind_of(Placed(item, place)) != "item_reference":
        return None
    identifier = item.get("id")
    if isinstance(identifier, str):
        return identifier
    raise FieldError(f"{place}.id", f"{place}.id must be the id of a stored item.")
