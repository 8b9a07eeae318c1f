"""A model's chat template and tokenizer without the model: from a folder, or from an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import jinja2
import msgspec
from tokenizers import Tokenizer

from leyline_engine.contract import normalize_messages, template_takes_parts
from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.rendering import Rendered, place_contents
from leyline_proxy.render.template import ChatTemplate
from leyline_proxy.upstream.client import RendererDocument


class ModelRenderer:
    """Renders conversations as the replay engine does, so that every engine gets equal prompts.

    Args:
        name: of the model, for errors.

    Raises:
        SubjectError: the template or the tokenizer can't be used.
    """

    def __init__(self, name: str, document: RendererDocument) -> None:
        if not document.chat_template:
            raise SubjectError(f"{name} has no chat template, so no session can be rendered")
        self._name = name
        self._parts = template_takes_parts(document.chat_template)
        try:
            self._template = ChatTemplate(document.chat_template, document.special_tokens)
            self.tokenizer: Any = Tokenizer.from_str(document.tokenizer_json)
        # The tokenizers library raises bare exceptions.
        except Exception as error:
            raise SubjectError(
                f"{name}: its chat template or tokenizer can't be loaded ({type(error).__name__}); "
                "name a folder with both: --model PATH"
            ) from error
        encoded = msgspec.json.encode(
            [document.chat_template, document.special_tokens, document.tokenizer_json],
            order="deterministic",
        )
        self.digest = sha256(encoded).hexdigest()[:32]
        """Digest of template and tokenizer."""
        special = {self.tokenizer.token_to_id(text) for text in document.special_tokens.values()}
        added = self.tokenizer.get_added_tokens_decoder().items()
        self._special = special | {index for index, token in added if token.special}

    def ordinary(self, vocab_size: int) -> tuple[int, ...]:
        """Return the tokens that random text is made of."""
        known = min(self.tokenizer.get_vocab_size(with_added_tokens=True), vocab_size)
        return tuple(token for token in range(known) if token not in self._special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        opened: bool,
    ) -> Rendered:
        """Render a conversation.

        Raises:
            SubjectError: the template refuses it.
        """
        normal = normalize_messages(messages, parts=self._parts)
        try:
            variables = self._template.variables(list(tools) or None, opened, None)
            text = self._template.render(normal, variables)
        except jinja2.TemplateError as error:
            raise SubjectError(
                f"{self._name}: the chat template refused: {error.message}"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise SubjectError(
                f"{self._name}: the chat template can't render these messages "
                f"({type(error).__name__})"
            ) from error
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return place_contents(text, messages, encoding.ids, encoding.offsets)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special ones."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
