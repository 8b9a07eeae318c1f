"""Rendering from memory against rendering afresh, with nothing of the former's code in the
latter."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from leyline_engine.contract import normalize_messages, template_takes_parts
from leyline_proxy.model.rendered import MessageSpan
from leyline_proxy.render import ChatRenderer, RenderError
from leyline_proxy.render.marks import content_spans
from leyline_proxy.render.template import ChatTemplate

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True)
class Expected:
    """A prompt, rendered afresh."""

    text: str
    ids: array[int]
    spans: tuple[MessageSpan, ...]


class Reference:
    """The whole template, the whole text through the tokenizer, the whole conversation marked."""

    def __init__(self, source: str, special: Mapping[str, str], tokenizer: Tokenizer) -> None:
        self._template = ChatTemplate(source, special)
        self._tokenizer = tokenizer
        self._parts = template_takes_parts(source)

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Tools, options: Any) -> str:
        """The prompt's text, by the template as it is."""
        return self._template.render(messages, self._template.variables(tools, True, options))

    def render(
        self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]
    ) -> Expected | None:
        """The prompt; None where the template refuses the conversation."""
        normal = normalize_messages(messages, parts=self._parts)
        try:
            text = self.text(normal, tools, options)
            spans = content_spans(normal, text, lambda marked: self.text(marked, tools, options))
        except Exception:  # a template raises what it likes
            return None
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]

        located = (
            MessageSpan(
                span.message, bisect_left(starts, span.start), bisect_left(starts, span.end)
            )
            for span in spans
        )
        return Expected(
            text, array("q", encoding.ids), tuple(span for span in located if span.end > span.start)
        )


class TransformersReference(Reference):
    """The same with the text of transformers' own ``apply_chat_template``."""

    def __init__(self, source: str, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(source, {}, tokenizer.backend_tokenizer)
        self._whole = tokenizer

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Tools, options: Any) -> str:
        """The prompt's text, by transformers."""
        return str(
            self._whole.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=True, tokenize=False, **options
            )
        )


def check(
    renderer: ChatRenderer,
    reference: Reference,
    messages: Sequence[Message],
    tools: Tools = None,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Equal text, tokens and spans, or both refuse; returns whether there was a prompt."""
    options = options or {}
    expected = reference.render(messages, tools, options)
    try:
        prompt = renderer.lay_out(messages, tools, template_kwargs=options)
        rendered = renderer.tokenise(prompt)
    except RenderError:
        assert expected is None, "refused what the template takes"
        return False
    assert expected is not None, "took what the template refuses"
    assert prompt.text == expected.text
    assert rendered.tokens == expected.ids
    assert rendered.spans == expected.spans
    return True
