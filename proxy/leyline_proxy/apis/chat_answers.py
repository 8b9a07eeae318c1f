"""Answers of the chat API, as the mappings to other APIs read them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN_MEMBERS = ("context_management", "leyline")
"""Members that the proxy adds to a chat answer, and that answers in other APIs have as well."""


class AnswerError(ValueError):
    """An answer of the engine that is no chat completion."""


class StreamedAnswer:
    """What the chunks of a streamed chat completion have told so far."""

    def __init__(self) -> None:
        self.usage: Mapping[str, Any] | None = None
        self.extra: dict[str, Any] = {}
        """The proxy's own members."""
        self._finish: Mapping[str, Any] | None = None

    def read(self, chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Take a chunk in; what it adds to the answer, if anything."""
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
        """The choice that says why the answer ended.

        Raises:
            AnswerError: the engine never said that it had finished.
        """
        if self._finish is None:
            raise AnswerError("The engine ended its stream before its answer was complete.")
        return self._finish


def first_choice(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The choice with index 0; other APIs know no others."""
    choices = document.get("choices")
    found = choices if isinstance(choices, list) else ()
    return next(
        (each for each in found if isinstance(each, dict) and each.get("index", 0) == 0), None
    )


def reasoning_of(said: Mapping[str, Any]) -> str | None:
    """What a message or a delta has of the model's reasoning, under either name for it."""
    return text_or_none(said.get("reasoning_content")) or text_or_none(said.get("reasoning"))


def text_or_none(value: object) -> str | None:
    """A text, or None for anything else."""
    return value if isinstance(value, str) else None


def called(call: object) -> tuple[Mapping[str, Any], str, object]:
    """A tool call, the name of its function, and the arguments as they were written.

    Raises:
        AnswerError: it names none.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
        raise AnswerError("The engine's answer has a tool call without a name.")
    return call, str(name), function.get("arguments")


def prompt_tokens(usage: Mapping[str, Any], account: Mapping[str, Any] | None) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached.

    Args:
        usage: the engine's; not all of them say what was cached.
        account: the member ``leyline`` of the answer, which does where the engine gave a receipt.
    """
    tokens = (account or {}).get("tokens") or {}
    prompt = count(usage.get("prompt_tokens")) or count(tokens.get("prompt"))
    cached = detail(usage.get("prompt_tokens_details"), "cached_tokens")
    if cached is None:
        cached = count(tokens.get("prefix")) + count(tokens.get("spliced"))
    return prompt, min(cached, prompt)


def detail(details: object, name: str) -> int | None:
    """One of usage's details; None where it isn't told."""
    value = details.get(name) if isinstance(details, Mapping) else None
    return None if value is None else count(value)


def count(value: object) -> int:
    """A number of tokens; 0 for what is none."""
    return value if isinstance(value, int) and value > 0 else 0
