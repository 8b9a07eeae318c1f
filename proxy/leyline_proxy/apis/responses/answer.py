"""Map a chat completion to a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...overflow import CODE
from ..chat_answers import (
    AnswerError,
    Called,
    calls_of,
    content_of,
    count,
    detail,
    first_choice,
    prompt_tokens,
    reasoning_of,
    text_or_none,
    whole_arguments,
)
from .calls import whole_call
from .ids import output_id, response_id
from .reasoning import reasoning_item
from .tools import ToolBook

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_RATE_LIMIT = 429
_SERVER_FAULT = 500


_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "instructions": (str,),
        "max_output_tokens": (int,),
        "max_tool_calls": (int,),
        "metadata": (dict,),
        "parallel_tool_calls": (bool,),
        "previous_response_id": (str,),
        "prompt_cache_key": (str,),
        "safety_identifier": (str,),
        "temperature": (int, float),
        "tool_choice": (str, dict),
        "tools": (list,),
        "top_logprobs": (int,),
        "top_p": (int, float),
        "truncation": (str,),
        "user": (str,),
    }
)
"""Types of members that a response repeats."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Facts of a response before the engine has answered.

    ``shown`` holds the request's members that the document repeats.
    """

    key: str
    """32 hexadecimal digits; names the response and its items."""
    created_at: int
    model: str
    shown: Mapping[str, Any]
    tools: ToolBook
    carries_reasoning: bool
    before: tuple[Mapping[str, Any], ...] = ()
    """Items in front of the model's: a compaction."""
    alone: bool = False
    """True if these are the whole answer; without any, the answer is empty."""

    def item_id(self, kind: str, index: int) -> str:
        """Return the id of an item."""
        return output_id(kind, self.key, index)

    def call_id(self, index: int) -> str:
        """Return an id for a call without one from the engine."""
        return f"call_{self.key}_{index}"

    def document(
        self,
        status: str,
        output: Sequence[Mapping[str, Any]] = (),
        *,
        model: object = None,
        reason: str | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the response, except its ``usage``.

        Args:
            model: the engine's name for it.
            reason: reason for an incomplete response.
        """
        return {
            "id": response_id(self.key),
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": str(model or self.model),
            "output": list(output),
            **self.shown,
        }


def shown_request(body: Mapping[str, Any], *, store: bool) -> dict[str, Any]:
    """Return the request's members that a response's document repeats, with the API's defaults."""
    reasoning = body.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, dict) else {}
    text = body.get("text")
    defaults: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    # The engine refuses members of a wrong type; clients couldn't read them here.
    repeated = {
        name: value if isinstance(value := body.get(name), _TYPES[name]) else default
        for name, default in defaults.items()
    }
    return {
        **repeated,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "service_tier": "default",
        "store": store,
        "text": {"format": {"type": "text"}, **(text if isinstance(text, dict) else {})},
    }


def map_answer(answer: Mapping[str, Any], opening: Opening) -> dict[str, Any]:
    """Return the response of a whole chat completion, except its ``usage``.

    Raises:
        AnswerError: it is no chat completion.
    """
    choice = first_choice(answer)
    said = choice.get("message") if choice is not None else None
    if choice is None or not isinstance(said, Mapping):
        raise AnswerError("The engine's answer is no chat completion.")
    status, reason = ending(choice)
    output = _output(said, calls_of(said), opening, status)
    if output:
        output[-1]["status"] = status
    output = [{**item} for item in opening.before] + output
    return opening.document(status, output, model=answer.get("model"), reason=reason)


def ending(choice: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the status and, if it is incomplete, the reason."""
    reason = _INCOMPLETE.get(str(choice.get("finish_reason")))
    return ("incomplete" if reason else "completed"), reason


def failed_error(status: int, message: str, code: str | None) -> dict[str, Any]:
    """Return the member ``error`` of a failed response.

    Args:
        status: the HTTP status of the error.
        code: the error's code. The API has few; clients compact on that of a prompt too long.
    """
    if code == CODE:
        return {"code": CODE, "message": message}
    code = "server_error" if status >= _SERVER_FAULT else "invalid_prompt"
    return {"code": "rate_limit_exceeded" if status == _RATE_LIMIT else code, "message": message}


def message_item(item_id: str, content: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
    """Return a message of the assistant."""
    head = {"type": "message", "id": item_id, "role": "assistant", "status": status}
    return {**head, "content": list(content)}


def text_part(text: str) -> dict[str, Any]:
    """Return a text part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def map_usage(usage: Mapping[str, Any] | None, account: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``usage`` as the Responses API counts it.

    Args:
        usage: the engine's; not all engines report cached tokens.
        account: the answer's member ``leyline``, which reports them if the engine gave a receipt.
    """
    usage = usage or {}
    prompt, cached = prompt_tokens(usage, account)
    thought = detail(usage.get("completion_tokens_details"), "reasoning_tokens")
    if thought is None:
        thought = count(usage.get("reasoning_tokens"))
    return _counted(prompt, cached, count(usage.get("completion_tokens")), thought)


def usage_of(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return ``usage`` for a compaction's counts of tokens."""
    return _counted(counts["prompt_tokens"], counts["cached_tokens"], counts["completion_tokens"])


def _counted(prompt: int, cached: int, output: int, thought: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": min(thought, output)},
        "total_tokens": prompt + output,
    }


def _output(
    said: Mapping[str, Any], calls: Sequence[Called], opening: Opening, status: str
) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    start = len(opening.before)
    if opening.alone:
        return items
    if reasoning := reasoning_of(said):
        identifier = opening.item_id("reasoning", start)
        carried = opening.carries_reasoning
        items.append(reasoning_item(identifier, reasoning, carried=carried, status="completed"))
    parts: list[dict[str, Any]] = []
    if text := content_of(said):
        parts.append(text_part(text))
    if refusal := text_or_none(said.get("refusal")):
        parts.append({"type": "refusal", "refusal": refusal})
    if parts or not (calls or items):
        identifier = opening.item_id("message", start + len(items))
        items.append(message_item(identifier, parts or [text_part("")], "completed"))
    first = start + len(items)
    cut = len(calls) - 1 if status == "incomplete" else None
    return items + [_call(call, opening, first + i, cut=i == cut) for i, call in enumerate(calls)]


def _call(call: Called, opening: Opening, index: int, *, cut: bool) -> dict[str, Any]:
    tool = opening.tools.called(call.name)
    return whole_call(
        tool,
        opening.item_id(tool.item_type, index),
        call.id or opening.call_id(index),
        call.arguments if cut else whole_arguments(call.arguments),
        "completed",
    )
