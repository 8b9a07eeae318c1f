"""From messages or text to tokens, with the model's own chat template and tokenizer."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from leyline_engine.contract import normalize_messages, template_takes_parts

_MEMO_ENTRIES = 16
_MEMO_CHARACTERS = 4_000_000
"""Maximum length of texts that are kept, which bounds the memo's size."""


class TemplateFailedError(ValueError):
    """The chat template can't render these messages; the caller's fault."""


class PromptEncoder:
    """Renders and tokenises prompts. Safe to use from several threads.

    The last few tokenisations are kept, keyed by text: asking for the tokens of a prompt and
    then sending it costs one tokenisation. A request that forgets drops them all.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._takes_parts = isinstance(template, str) and template_takes_parts(template)
        self._lock = threading.Lock()
        self._memo: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()

    @property
    def has_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> array[int]:
        """Return the tokens of a conversation up to the start of the assistant's next message.

        Raises: as :meth:`chat_text`.
        """
        return self._encode(self.chat_text(messages, tools, template_kwargs), special=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Return the text whose tokens :meth:`chat` returns.

        The template sees the messages normalised by :mod:`leyline_engine.contract.chat`.

        Raises:
            TemplateFailedError: there is no template, or it refuses the messages.
        """
        if not self.has_template:
            raise TemplateFailedError("this model has no chat template; use /v1/completions")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    normalize_messages(messages, parts=self._takes_parts),
                    tools=list(tools) if tools else None,
                    **{"add_generation_prompt": True, **template_kwargs, "tokenize": False},
                )
            )
        except TemplateError as error:
            raise TemplateFailedError(f"the chat template refused: {error.message}") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise TemplateFailedError(
                f"the chat template can't render these messages ({type(error).__name__})"
            ) from error

    def text(self, prompt: str) -> array[int]:
        """Return the tokens of a plain prompt, with the model's leading special tokens."""
        return self._encode(prompt, special=True)

    def forget(self) -> None:
        """Drop the kept tokenisations, because one of their texts is to be forgotten."""
        with self._lock:
            self._memo.clear()

    def _encode(self, text: str, *, special: bool) -> array[int]:
        key = (text, special)
        with self._lock:
            if (known := self._memo.get(key)) is not None:
                self._memo.move_to_end(key)
                return known
        encoding = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=special)
        tokens = array("q", encoding.ids)
        if len(text) > _MEMO_CHARACTERS:
            return tokens
        with self._lock:
            self._memo[key] = tokens
            while len(self._memo) > _MEMO_ENTRIES:
                self._memo.popitem(last=False)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text of generated tokens, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself, special tokens included."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def renderer_document(self) -> dict[str, Any]:
        """Return the facts that another process needs to render exactly as this one does."""
        template = self._tokenizer.chat_template
        return {
            "chat_template": template if isinstance(template, str) else "",
            "special_tokens": {
                name: str(value)
                for name, value in self._tokenizer.special_tokens_map.items()
                if isinstance(value, str)
            },
            "tokenizer_json": self._tokenizer.backend_tokenizer.to_str(),
        }
