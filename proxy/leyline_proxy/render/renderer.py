"""Rendering of a conversation to token ids and content spans."""

from __future__ import annotations

import marshal
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from threading import Lock
from typing import Any

import jinja2
import msgspec
import xxhash

from leyline_engine.contract import ChatDialect, ChatMessage

from ..model.rendered import MessageSpan, Rendered
from ..model.text_memory import NO_SESSION, Left, Reader
from .continuing import Beginnings
from .dialect_choice import dialect_of
from .dialects import Dialect, PromptTooLargeError, RenderError
from .marks import CharSpan, content_spans, unique_spans
from .memoised import (
    Conversation,
    FragmentMemory,
    IncrementalTemplate,
    MessageEntry,
    Prompt,
    key_of,
)
from .template import ChatTemplate, chat_environment
from .tokens import BYTES_PER_CHAR, PieceTokenizer

Tools = Sequence[Mapping[str, Any]] | None

_MAX_REMEMBERED = 1024
"""Digests that are remembered; others are computed again."""

_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "-"}],
    [{"role": "system", "content": "-"}, {"role": "user", "content": "-"}],
)
"""Conversations in which a template shows its tools."""


class ToolDigests:
    """The digests of a template. Safe to use from several threads.

    Args:
        source: of the template.
    """

    def __init__(self, template: ChatTemplate, source: str) -> None:
        self._template = template
        self._shows_tools = "tools" in source
        self._known: OrderedDict[int, str] = OrderedDict()
        self._lock = Lock()

    def of(self, tools: Tools, template_kwargs: Mapping[str, Any]) -> str:
        """Return the digest: equal options and an equal text of the tools have an equal one.

        So the order of a tool's members counts only if the template shows it.
        """
        options = in_order(template_kwargs)
        if not tools or not self._shows_tools:
            return digest_of([None, options])
        key = xxhash.xxh3_64_intdigest(msgspec.json.encode([tools, template_kwargs]))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        found = digest_of([self._shown(tools, template_kwargs), options])
        with self._lock:
            self._known[key] = found
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _shown(self, tools: Tools, template_kwargs: Mapping[str, Any]) -> list[str]:
        """Return the texts that have the tools; their JSON if the template doesn't show them."""
        texts = self._texts(tools, template_kwargs)
        if not texts or texts == self._texts(None, template_kwargs):
            return [msgspec.json.encode(tools).decode()]
        return texts

    def _texts(self, tools: Tools, template_kwargs: Mapping[str, Any]) -> list[str]:
        texts = []
        for probe in _PROBES:
            try:
                variables = self._template.variables(tools, True, template_kwargs)
                # Another day is no other tool.
                variables["strftime_now"] = str
                texts.append(self._template.render(probe, variables))
            except Exception:  # noqa: S112 - a template may raise anything; the other probe remains
                continue
        return texts


def in_order(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options whose own order doesn't count, but that of the members of each."""
    return {name: msgspec.json.encode(value).decode() for name, value in options.items()}


def digest_of(context: Any) -> str:
    """Return a digest of a JSON value; the order of members doesn't count."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(context, order="deterministic"))


TEXT_MEMORY_BYTES = 896 << 20
"""Bytes for rendered messages and tokens."""

_FAILURES = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError)
"""Errors of a template that fails on a conversation."""


STEERING = (
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning",
    "reasoning_effort",
    "thinking",
    "task",
    "continue_final_message",
)
"""Members of a chat request that may change its prompt, besides messages and model."""

PROMPT_MEMBERS = (*STEERING, "add_generation_prompt")
"""Members of a chat request that its engine needs to return the prompt's tokens."""

_NEVER_VARIABLES = ("messages", "self")
"""Names that jinja refuses besides the messages."""


class ChatRenderer:
    """An engine's chat template and tokenizer, run in the proxy. Safe to use from several threads.

    The results for messages are remembered, so a turn costs its new part, and little more for each
    old message. The output equals that of rendering and tokenising everything.

    Args:
        chat_template: Jinja source.
        special_tokens: ``bos_token``, ``eos_token``… as the template sees them.
        tokenizer_json: the ``tokenizer.json`` document.
        dialect: the engine's steps before its template; by default the contract's.
        max_remembered_bytes: approximate bound of all remembered texts.
    """

    def __init__(
        self,
        chat_template: str,
        special_tokens: Mapping[str, str],
        tokenizer_json: str,
        *,
        dialect: Dialect | None = None,
        max_remembered_bytes: int = TEXT_MEMORY_BYTES,
    ) -> None:
        # Tokens take the most memory; they are expensive to compute.
        of_messages, of_tokens = max_remembered_bytes // 6, max_remembered_bytes // 3
        self._template = ChatTemplate(chat_template, special_tokens)
        self._digests = ToolDigests(self._template, chat_template)
        self._dialect = dialect or dialect_of(ChatDialect.LEYLINE, chat_template)
        self._tokenizer = PieceTokenizer(
            tokenizer_json,
            max_remembered_chars=of_tokens // BYTES_PER_CHAR,
            max_joined_bytes=of_tokens,
        )
        self._memory = FragmentMemory(of_messages)
        self._incremental = IncrementalTemplate(chat_environment(), chat_template, self._memory)
        self._conversations: Beginnings[ChatMessage, Conversation] = Beginnings(of_messages)
        self._reader = NO_SESSION

    @property
    def remembered_bytes(self) -> int:
        """Approximate bytes of remembered messages."""
        return self._memory.remembered_bytes + self._conversations.remembered_bytes

    def read_by(self, reader: Reader) -> ChatRenderer:
        """Return the same renderer, which remembers what it renders as a session's."""
        bound = copy(self)
        bound._reader = reader
        return bound

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop all texts of a session; see
        :meth:`~leyline_proxy.model.text_memory.TextMemory.forget`."""
        for memory in (self._memory, self._conversations, self._tokenizer):
            memory.forget(tenant, session, demands)

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's texts."""
        memories = (self._memory, self._conversations, self._tokenizer)
        return sum((each.left(tenant, session, demands) for each in memories), Left())

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; the template sees the messages normalised, as in the engine.

        Raises:
            RenderError: the template refuses the conversation.
        """
        normal = self._normal(messages)
        return self._text(normal, self._variables(tools, add_generation_prompt, template_kwargs))

    def encode(self, text: str) -> array[int]:
        """Return the token ids of a text; special tokens are recognised, none is added."""
        return self._tokenizer.encode(text, self._reader).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special ones included."""
        return self._tokenizer.decode(tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        lasting: bool = False,
        max_bytes: int | None = None,
    ) -> Rendered:
        """Return token ids and the span of each message's content.

        A token belongs to the content in which it starts.

        Args:
            lasting: True if the messages never change, so equal identity means equal content.
            max_bytes: of the prompt's text; None for any number.

        Raises:
            PromptTooLargeError: the prompt's text has more.
            RenderError: the template refuses the conversation.
        """
        prompt = self.lay_out(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            lasting=lasting,
        )
        if max_bytes is not None and (size := _size_of(prompt.texts, max_bytes)) > max_bytes:
            raise PromptTooLargeError(size)
        return self.tokenise(prompt, self._digests.of(tools, template_kwargs or {}))

    def render_request(
        self,
        messages: Sequence[ChatMessage],
        body: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        lasting: bool = False,
        max_bytes: int | None = None,
    ) -> Rendered:
        """Return the prompt of the chat request ``body`` with ``messages`` in place of its own.

        Args:
            lasting, max_bytes: see :meth:`render`.

        Raises:
            PromptTooLargeError: see :meth:`render`.
            RenderError: the template refuses it, or the engine may render it in another way.
        """
        asked = self._dialect.asked(body)
        return self.render(
            messages,
            asked.tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=asked.kwargs,
            lasting=lasting,
            max_bytes=max_bytes,
        )

    def locate(
        self, tokens: array[int], messages: Sequence[ChatMessage], body: Mapping[str, Any]
    ) -> Rendered:
        """Locate the contents in the engine's own ``tokens`` of a chat request.

        A content has a span if its text occurs once in the text of the tokens.

        Args:
            body: the request; ``messages`` replace its own.
        """
        context = steering_digest(body)
        text = self._tokenizer.decode(tokens)
        try:
            spans = unique_spans(self._normal(messages), text)
        except RenderError:
            spans = []
        found = self.tokenise(Prompt((text,), spans), context)
        return found if found.tokens == tokens else Rendered(tokens, (), context)

    def lay_out(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        lasting: bool = False,
    ) -> Prompt:
        """Do the first half of :meth:`render`: return the text and the places of its contents.

        Raises:
            RenderError: the template refuses the conversation.
        """
        variables = self._variables(tools, add_generation_prompt, template_kwargs)
        known = self._from_memory(messages, variables, lasting=lasting)
        return known or self._anew(messages, variables)

    def tokenise(self, prompt: Prompt, context: str = "") -> Rendered:
        """Do the second half of :meth:`render`.

        Args:
            context: see :attr:`Rendered.context`.
        """
        encoded = self._tokenizer.join(prompt.texts, self._reader)
        places = iter(
            encoded.tokens_at([at for _, start, end in prompt.spans for at in (start, end)])
        )
        spans = [
            MessageSpan(span.message, start, end)
            for span, start, end in zip(prompt.spans, places, places, strict=True)
            if end > start
        ]
        return Rendered(encoded.ids, tuple(spans), context)

    def _anew(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> Prompt:
        normal = self._normal(messages)
        text = self._text(normal, variables)
        return Prompt((text,), self._spans(normal, text, variables))

    def _from_memory(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, Any], *, lasting: bool
    ) -> Prompt | None:
        """Return the prompt from memory; None if it must be rendered again."""
        if not self._incremental.remembers or not variables.keys().isdisjoint(_NEVER_VARIABLES):
            return None
        entries = self._entries(self._dialect.conversation(messages), lasting=lasting)
        if entries is None:
            return None
        try:
            texts, spans = self._incremental.render(
                entries.entries, variables, entries.places, self._reader
            )
        except Exception:  # rendered again in any case: that gives the result, or the error
            return None
        if spans is None:
            normal = [entry.normal for entry in entries.entries]
            spans = self._spans(normal, "".join(texts), variables)
        return Prompt(texts, spans)

    def _entries(self, messages: Sequence[ChatMessage], *, lasting: bool) -> Conversation | None:
        """Return the remembered entries of the messages, each with its own object; None if one
        isn't plain data."""
        before = self._conversations.find(messages, self._reader) if lasting else None
        if before is not None and len(before.items) == len(messages):
            return before.value
        added = messages[len(before.items) :] if before is not None else messages
        keys = [key for key in map(key_of, added) if key is not None]
        if len(keys) < len(added):
            return None
        found = before.value.copy() if before is not None else Conversation()
        reader = self._reader
        for key, known in zip(keys, self._memory.find(keys, reader), strict=True):
            found.add(key, known or self._memory.add(self._entry(key), reader))
        if messages and lasting:
            self._conversations.put([*messages], found, found.weight, before, reader)
        return found

    def _entry(self, key: bytes) -> MessageEntry:
        message = marshal.loads(key)  # noqa: S302 - our own bytes; an unchangeable copy
        return MessageEntry(key, self._dialect.message(message))

    def _normal(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [self._dialect.message(each) for each in self._dialect.conversation(messages)]

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


def steering_digest(body: Mapping[str, Any]) -> str:
    """Return a digest of a request's members, apart from messages, that may affect its prompt.

    Nothing is known of the template here, which may show members in their order.
    """
    given = {name: body.get(name) for name in STEERING}
    options = given.pop("chat_template_kwargs")
    return digest_of([in_order(given), in_order(options if isinstance(options, dict) else {})])


def _size_of(texts: Sequence[str], enough: int) -> int:
    """Return the bytes of texts; fewer if they are certainly no more than ``enough``."""
    chars = sum(map(len, texts))
    if 4 * chars <= enough:
        return chars
    return sum(
        len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        for text in texts
    )


def _failure(error: Exception) -> RenderError:
    return RenderError(f"the chat template failed: {type(error).__name__}")
