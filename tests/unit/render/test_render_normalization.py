"""Real agents' requests under published templates: engine and proxy give the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from template_kit import recorded, renderer_of, tokenizer_of

from leyline_engine.contract import normalize_messages, template_takes_parts
from leyline_proxy.model.messages import text_of
from leyline_proxy.upstream.proof import PROBES
from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE
from leyline_replay.text.chat import PromptEncoder, TemplateFailedError

Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]

CONVERSATIONS: list[Conversation] = [
    (probe.messages, tools)
    for probe in PROBES
    for tools in [probe.members.get("tools")]
    # Templates may ask for a description, and fail where there is none.
    if all("description" in tool["function"] for tool in tools or ())
]
TAKING_PARTS = {"GLM-4.6", "Kimi-K2-Instruct", "tiny"}
ONE_CALL_AT_A_TIME = {"meta-llama-Llama-3.1-8B-Instruct"}
NO_CALLS = {"Kimi-K2-Instruct"}
"""Writes tool calls by appending to a list, which the template sandbox forbids everywhere."""
SESSIONS = 2


def is_refused(name: str, messages: list[dict[str, Any]]) -> bool:
    """Return True if no form of such a conversation can be rendered with the template."""
    most = max(len(message.get("tool_calls") or ()) for message in messages)
    return (name in ONE_CALL_AT_A_TIME and most > 1) or (name in NO_CALLS and most > 0)


def test_which_templates_take_parts(sources: dict[str, str]) -> None:
    """Those that loop over a content, and no other."""
    assert {name for name in sources if template_takes_parts(sources[name])} == TAKING_PARTS


@pytest.mark.parametrize("length", [8, pytest.param(16, marks=pytest.mark.nightly)])
def test_real_requests_render_alike_under_every_template(
    length: int, sources: dict[str, str], traces_dir: Path
) -> None:
    """Null contents, arguments as text and parts neither fail nor leak Python's notation."""
    conversations = recorded(traces_dir, SESSIONS, length)
    for name, source in sources.items():
        tokenizer = tokenizer_of(source)
        engine, proxy = PromptEncoder(tokenizer), renderer_of(tokenizer, source)
        rendered = 0
        for messages, tools in conversations:
            try:
                expected = engine.chat(messages, tools, {})
            except TemplateFailedError:
                with pytest.raises(ValueError, match="template"):
                    proxy.render(messages, tools)
                assert is_refused(name, messages), name
                continue
            ours = proxy.render(messages, tools)
            assert ours.tokens == expected, name
            rendered += 1
            text = proxy.text(messages, tools)
            assert "{'type': 'text'" not in text, name
            end = 0
            for span in ours.spans:
                assert end <= span.start < span.end
                end = span.end
                found = tokenizer.decode(ours.tokens[span.start : end].tolist()).strip()
                content = text_of(messages[span.message]).strip()
                assert found in (content, json.dumps(content, ensure_ascii=False)[1:-1]), name
        assert rendered >= 4, name


def test_the_three_spellings_of_a_conversation_are_one_prompt(sources: dict[str, str]) -> None:
    """Null or empty content, arguments as text or object, a text or its part: equal tokens."""
    for name, source in sources.items():
        proxy = renderer_of(tokenizer_of(source), source)
        for messages, tools in CONVERSATIONS:
            plain = normalize_messages(messages, parts=False)
            if not is_refused(name, messages):
                spelled, spelled_plainly = (proxy.render(m, tools) for m in (messages, plain))
                assert spelled.tokens == spelled_plainly.tokens, name
                assert spelled.spans == spelled_plainly.spans, name


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"])
def test_arguments_are_encoded_once(sources: dict[str, str], name: str) -> None:
    """Templates that write arguments as JSON get an object, not its text."""
    messages, tools = CONVERSATIONS[2]
    text = renderer_of(tokenizer_of(sources[name]), sources[name]).text(messages, tools)
    assert '{"path": "a.py", "lines": 3}' in text
    assert '\\"path\\"' not in text


def test_the_tiny_models_prompts_only_grow() -> None:
    """A turn more never changes what was rendered before, whatever form its messages have."""
    renderer = renderer_of(tokenizer_of(CHAT_TEMPLATE), CHAT_TEMPLATE)
    for messages, tools in CONVERSATIONS:
        texts = [
            renderer.text(messages[:count], tools, add_generation_prompt=False)
            for count in range(1, len(messages) + 1)
        ]
        assert all(texts[-1].startswith(text) for text in texts)


def test_a_template_that_recurses_too_deep_refuses_in_both() -> None:
    """Deeply nested arguments may do that; it is the request's failure, never the server's."""
    source = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages) }}"
    messages, tokenizer = CONVERSATIONS[0][0], tokenizer_of(source)
    with pytest.raises(TemplateFailedError):
        PromptEncoder(tokenizer).chat(messages, None, {})
    with pytest.raises(ValueError, match="template"):
        renderer_of(tokenizer, source).render(messages, None)
