"""Conversation to token ids and content spans."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec
import xxhash

from leyline_engine.contract import ChatMessage, normalize_messages, template_takes_parts

from ..core.rendered import MessageSpan, Rendered
from .marks import content_spans
from .template import ChatTemplate
from .tokens import PieceTokenizer

_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    RecursionError,
)
"""What a template raises when it trips over a conversation."""


class RenderError(ValueError):
    """The chat template refuses the conversation."""


class ChatRenderer:
    """An engine's chat template and tokenizer, run in the proxy.

    Args:
        chat_template: Jinja source.
        special_tokens: ``bos_token``, ``eos_token``… as the template sees them.
        tokenizer_json: the ``tokenizer.json`` document.
    """

    def __init__(
        self, chat_template: str, special_tokens: Mapping[str, str], tokenizer_json: str
    ) -> None:
        self._template = ChatTemplate(chat_template, special_tokens)
        self._takes_parts = template_takes_parts(chat_template)
        self._tokenizer = PieceTokenizer(tokenizer_json)

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; the template sees the messages normalised, as in the engine.

        Raises:
            RenderError: the template refuses the conversation.
        """
        normal = normalize_messages(messages, parts=self._takes_parts)
        return self._text(normal, tools, add_generation_prompt, template_kwargs)

    def encode(self, text: str) -> array[int]:
        """Token ids of a text, special tokens recognised, none added."""
        return self._tokenizer.encode(text).ids

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Token ids and the span of each message's content.

        A token belongs to the content in which it starts.

        Raises:
            RenderError: the template refuses the conversation.
        """

        def render(conversation: Sequence[ChatMessage]) -> str:
            return self._text(conversation, tools, add_generation_prompt, template_kwargs)

        normal = normalize_messages(messages, parts=self._takes_parts)
        text = render(normal)
        encoded = self._tokenizer.encode(text)
        spans = (
            MessageSpan(span.message, encoded.token_at(span.start), encoded.token_at(span.end))
            for span in content_spans(normal, text, render)
        )
        context = msgspec.json.encode([tools, template_kwargs or {}], order="deterministic")
        return Rendered(
            encoded.ids,
            tuple(span for span in spans if span.end > span.start),
            xxhash.xxh3_64_hexdigest(context),
        )

    def _text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        try:
            return self._template.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=template_kwargs,
            )
        except _FAILURES as error:
            raise RenderError(f"the chat template failed: {type(error).__name__}") from error
