"""Conversation to token ids and content spans."""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec
import xxhash

from leyline_engine.contract import ChatMessage, normalize_messages, template_takes_parts

from ..core.rendered import MessageSpan, Rendered
from .fragments import MAX_REMEMBERED_BYTES, Entry, FragmentMemory, key_of
from .incremental import IncrementalTemplate, Prompt
from .marks import CharSpan, content_spans
from .template import ChatTemplate, chat_environment
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


_NEVER_VARIABLES = ("messages", "self")
"""Names that jinja refuses beside the messages."""


class RenderError(ValueError):
    """The chat template refuses the conversation."""


class ChatRenderer:
    """An engine's chat template and tokenizer, run in the proxy. Safe to use from several threads.

    What a message became is remembered, so a turn costs what is new in it, and little more for
    each message that isn't. The result is that of rendering and tokenising all of it.

    Args:
        chat_template: Jinja source.
        special_tokens: ``bos_token``, ``eos_token``… as the template sees them.
        tokenizer_json: the ``tokenizer.json`` document.
        max_remembered_bytes: bound of the memory for messages, roughly.
    """

    def __init__(
        self,
        chat_template: str,
        special_tokens: Mapping[str, str],
        tokenizer_json: str,
        *,
        max_remembered_bytes: int = MAX_REMEMBERED_BYTES,
    ) -> None:
        self._template = ChatTemplate(chat_template, special_tokens)
        self._takes_parts = template_takes_parts(chat_template)
        self._tokenizer = PieceTokenizer(tokenizer_json)
        self._memory = FragmentMemory(max_remembered_bytes)
        self._incremental = IncrementalTemplate(chat_environment(), chat_template, self._memory)

    @property
    def remembered_bytes(self) -> int:
        """Memory taken by remembered messages, roughly."""
        return self._memory.remembered_bytes

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
        return self._text(normal, self._variables(tools, add_generation_prompt, template_kwargs))

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
        prompt = self.lay_out(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        context = msgspec.json.encode([tools, template_kwargs or {}], order="deterministic")
        return self.tokenise(prompt, xxhash.xxh3_64_hexdigest(context))

    def lay_out(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The first half of :meth:`render`: the text, and where in it the contents stand.

        Raises:
            RenderError: the template refuses the conversation.
        """
        variables = self._variables(tools, add_generation_prompt, template_kwargs)
        return self._from_memory(messages, variables) or self._anew(messages, variables)

    def tokenise(self, prompt: Prompt, context: str = "") -> Rendered:
        """The second half of :meth:`render`.

        Args:
            context: see :attr:`Rendered.context`.
        """
        encoded = self._tokenizer.join(prompt.texts)
        places = iter(
            encoded.tokens_at([at for span in prompt.spans for at in (span.start, span.end)])
        )
        spans = [
            MessageSpan(span.message, start, end)
            for span, start, end in zip(prompt.spans, places, places, strict=True)
            if end > start
        ]
        return Rendered(encoded.ids, tuple(spans), context)

    def _anew(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> Prompt:
        normal = normalize_messages(messages, parts=self._takes_parts)
        text = self._text(normal, variables)
        return Prompt((text,), self._spans(normal, text, variables))

    def _from_memory(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]
    ) -> Prompt | None:
        """The same from what is remembered; None where it has to be done anew."""
        if not self._incremental.remembers or not variables.keys().isdisjoint(_NEVER_VARIABLES):
            return None
        entries = self._entries(messages)
        if entries is None:
            return None
        try:
            texts, spans = self._incremental.render(entries, variables)
        except Exception:  # done anew, whatever it was: that gives the result, or the error
            return None
        if spans is None:
            spans = self._spans([entry.normal for entry in entries], "".join(texts), variables)
        return Prompt(texts, spans)

    def _entries(self, messages: Sequence[ChatMessage]) -> list[Entry] | None:
        """What is remembered of the messages, each with an object of its own; None where one
        isn't plain data."""
        keys = [key for key in map(key_of, messages) if key is not None]
        if len(keys) < len(messages):
            return None
        entries: list[Entry] = []
        seen: set[bytes] = set()
        for key, known in zip(keys, self._memory.find(keys), strict=True):
            entry = known or self._memory.add(self._entry(key))
            entries.append(entry.twin() if key in seen else entry)
            seen.add(key)
        return entries

    def _entry(self, key: bytes) -> Entry:
        message = marshal.loads(key)  # noqa: S302 - our own bytes; a copy that nobody can change
        return Entry(key, normalize_messages([message], parts=self._takes_parts)[0])

    def _spans(
        self, normal: Sequence[ChatMessage], text: str, variables: Mapping[str, Any]
    ) -> list[CharSpan]:
        return content_spans(normal, text, lambda marked: self._text(marked, variables))

    def _variables(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        try:
            return self._template.variables(tools, add_generation_prompt, template_kwargs)
        except TypeError as error:
            raise _failure(error) from error

    def _text(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(messages, variables)
        except _FAILURES as error:
            raise _failure(error) from error


def _failure(error: Exception) -> RenderError:
    return RenderError(f"the chat template failed: {type(error).__name__}")
