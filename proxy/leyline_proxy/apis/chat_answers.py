"""Read answers of the chat API, for the mappings to other APIs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

OWN_MEMBERS = ("context_management", "leyline")
"""Members that the proxy adds to a chat answer, and to answers in other APIs."""

NAMELESS = "The engine's answer has a tool call without a name."
MIXED = "The engine adds to the arguments of a tool call that has ended."
INVALID_JSON = "INVALID_JSON"
"""Member that holds a call's arguments if they are no JSON object, as Anthropic advises."""

CUT_OFF = "The engine ended its stream before its answer was complete."
"""An :class:`AnswerError`'s message for an answer without an end."""


class AnswerError(ValueError):
    """An answer of the engine that is no chat completion."""


class StreamedAnswer:
    """Facts from the chunks of a streamed chat completion so far."""

    def __init__(self) -> None:
        self.usage: Mapping[str, Any] | None = None
        self.extra: dict[str, Any] = {}
        """The proxy's own members."""
        self._finish: Mapping[str, Any] | None = None
        self._begun = False

    def read(self, chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Read a chunk, and return its addition to the answer, if any."""
        usage = chunk.get("usage")
        if isinstance(usage, Mapping) and usage:
            self.usage = usage
        self.extra |= {name: chunk[name] for name in OWN_MEMBERS if name in chunk}
        choice = first_choice(chunk)
        if choice is None:
            return None
        if choice.get("finish_reason"):
            self._finish = choice
        delta = choice.get("delta")
        if not isinstance(delta, Mapping) and not self._begun:
            # Gateways whose engine doesn't stream send its whole answer.
            delta = choice.get("message")
        self._begun = self._begun or bool(delta)
        return delta if isinstance(delta, Mapping) else None

    @property
    def finish(self) -> Mapping[str, Any]:
        """Return the choice with the finish reason.

        Raises:
            AnswerError: the engine never reported a finish reason.
        """
        if self._finish is None:
            raise AnswerError(CUT_OFF)
        return self._finish


def first_choice(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the choice with index 0, the only one in other APIs."""
    choices = document.get("choices")
    found = choices if isinstance(choices, list) else ()
    return next(
        (each for each in found if isinstance(each, dict) and each.get("index") in (None, 0)), None
    )


def content_of(said: Mapping[str, Any]) -> str:
    """Return the text of a message or a delta, whose content may be a list of parts."""
    return "".join(_texts(said.get("content"), ("text", "output_text")))


def reasoning_of(said: Mapping[str, Any]) -> str:
    """Return the model's reasoning in a message or a delta, under any of its names."""
    for name in ("reasoning_content", "reasoning", "reasoning_details"):
        if text := "".join(_texts(said.get(name), _REASONING)):
            return text
    content = said.get("content")
    return "".join(_texts(content, ("thinking", "reasoning"))) if isinstance(content, list) else ""


_REASONING = ("text", "thinking", "reasoning", "reasoning.text", "reasoning_text")


def _texts(value: object, kinds: Sequence[str]) -> Iterator[str]:
    """Yield the texts of a value: a text, or parts of certain types, which may be nested once."""
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else ():
        if isinstance(part, str) and "text" in kinds:
            yield part
        elif isinstance(part, Mapping) and part.get("type", "text") in kinds:
            inner = part.get("text") or part.get("thinking")
            yield from (inner,) if isinstance(inner, str) else _texts_inside(inner)


def _texts_inside(parts: object) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text


def text_or_none(value: object) -> str | None:
    """Return a text, or None for anything else."""
    return value if isinstance(value, str) else None


def arguments_text(value: object) -> str:
    """Return a call's arguments as text: engines write JSON, an object, or null."""
    if isinstance(value, str) or value is None:
        return value or ""
    # Not orjson: numbers may have any size.
    return msgspec.json.encode(value).decode()


def whole_arguments(text: str) -> str:
    """Return the arguments of a whole call; of one that has none, an empty object."""
    return "{}" if text in ("", "null") else text


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call of a whole answer."""

    id: str | None
    """None if the engine gave it none of its own."""
    name: str
    arguments: str


def call_parts(said: Mapping[str, Any]) -> list[Any]:
    """Return the tool calls of a message, or the parts of some in a delta; also one that is alone,
    and one in OpenAI's first form."""
    calls = said.get("tool_calls")
    if isinstance(calls, Mapping):
        return [calls]
    if isinstance(calls, list) and calls:
        return calls
    function = said.get("function_call")
    return [{"function": function}] if isinstance(function, Mapping) and function else []


def calls_of(said: Mapping[str, Any]) -> list[Called]:
    """Return the calls of a whole answer.

    Raises:
        AnswerError: one names no function.
    """
    found: list[Called] = []
    for call in call_parts(said):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not name:
            raise AnswerError(NAMELESS)
        identifier = str(call.get("id") or "") or None
        taken = any(each.id == identifier for each in found)
        arguments = arguments_text(function.get("arguments"))
        found.append(Called(None if taken else identifier, str(name), arguments))
    return found


def prompt_tokens(usage: Mapping[str, Any], account: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the number of prompt tokens, and of cached ones among them.

    Args:
        usage: the engine's; not all engines report cached tokens.
        account: the answer's member ``leyline``, which reports them if the engine gave a receipt.
    """
    tokens = (account or {}).get("tokens") or {}
    prompt = count(usage.get("prompt_tokens")) or count(tokens.get("prompt"))
    cached = detail(usage.get("prompt_tokens_details"), "cached_tokens")
    if cached is None:
        cached = sum(count(tokens.get(name)) for name in ("prefix", "spliced", "reused"))
    return prompt, min(cached, prompt)


def detail(details: object, name: str) -> int | None:
    """Return one of usage's details; None if not reported."""
    value = details.get(name) if isinstance(details, Mapping) else None
    return None if value is None else count(value)


def count(value: object) -> int:
    """Return a number of tokens; 0 for other values."""
    return value if isinstance(value, int) and value > 0 else 0
