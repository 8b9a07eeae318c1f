"""Read answers of the chat API, for the mappings to other APIs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN_MEMBERS = ("context_management", "leyline")
"""Members that the proxy adds to a chat answer, and to answers in other APIs."""

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

    def read(self, chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Read a chunk, and return its addition to the answer, if any."""
        if isinstance(chunk.get("usage"), Mapping):
            self.usage = chunk["usage"]
        self.extra |= {name: chunk[name] for name in OWN_MEMBERS if name in chunk}
        choice = first_choice(chunk)
        if choice is None:
            return None
        if choice.get("finish_reason"):
            self._finish = choice
        delta = choice.get("delta")
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
        (each for each in found if isinstance(each, dict) and each.get("index", 0) == 0), None
    )


def reasoning_of(said: Mapping[str, Any]) -> str | None:
    """Return the model's reasoning in a message or a delta, under either name."""
    return text_or_none(said.get("reasoning_content")) or text_or_none(said.get("reasoning"))


def text_or_none(value: object) -> str | None:
    """Return a text, or None for anything else."""
    return value if isinstance(value, str) else None


def called(call: object) -> tuple[Mapping[str, Any], str, object]:
    """Return a tool call, the name of its function, and the arguments as written.

    Raises:
        AnswerError: the call names no function.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
        raise AnswerError("The engine's answer has a tool call without a name.")
    return call, str(name), function.get("arguments")


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
