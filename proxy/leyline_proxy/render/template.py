"""A chat template, rendered as in transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own class attribute

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja's environment with transformers' settings for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens in scope."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = chat_environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def variables(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Return the template's variables besides the messages.

        Raises:
            TypeError: ``template_kwargs`` has a name that the caller may not set.
        """
        return dict(
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **(template_kwargs or {})},
        )

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt's text.

        Raises:
            jinja2.TemplateError: the template refuses the conversation.
            TypeError: ``variables`` has a name that the caller may not set.
        """
        return self._template.render(messages=messages, **variables)
