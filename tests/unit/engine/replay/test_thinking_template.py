"""The chat template of the model that thinks, beside those that it follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from leyline_engine.contract import normalize_messages
from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE, THINKING_CHAT_TEMPLATE
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

CALL = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Any tokenizer: templates are given to it."""
    return AutoTokenizer.from_pretrained(trained_model_dir(DEFAULT_MODEL_NAME))


def shown(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The conversation's text."""
    normal = normalize_messages(messages, parts=False)
    text = tokenizer.apply_chat_template(normal, chat_template=template, tokenize=False)
    return str(text)


def drawn(rng: Random) -> Chat:
    """A conversation with a thought, or none, in front of each answer and call."""
    chat: Chat = []
    for turn in range(rng.randint(1, 4)):
        chat.append({"role": "user", "content": f"question {turn}"})
        for step in range(rng.randint(0, 2)):
            chat.append({"role": "assistant", "content": "", "tool_calls": [CALL]})
            chat.append({"role": "tool", "tool_call_id": "c", "content": f"output {turn}.{step}"})
        chat.append({"role": "assistant", "content": f"answer {turn}"})
    for index, message in enumerate(chat):
        if message["role"] == "assistant" and rng.random() < 0.8:
            message["reasoning_content"] = f"thought-{index}."
    return chat


@pytest.mark.parametrize("seed", range(30))
def test_thoughts_are_shown_where_qwen3_shows_them(
    seed: int, tokenizer: Any, templates_dir: Path
) -> None:
    """The same thoughts of a conversation are in the text, and each in the same form."""
    chat = drawn(Random(seed))
    reference = (templates_dir / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    ours, theirs = (
        shown(tokenizer, template, chat) for template in (THINKING_CHAT_TEMPLATE, reference)
    )
    thoughts = [each["reasoning_content"] for each in chat if "reasoning_content" in each]
    for thought in thoughts:
        block = f"<|im_start|>assistant\n<think>\n{thought}\n</think>\n\n"
        assert (block in ours) == (thought in ours) == (thought in theirs) == (block in theirs)


def test_a_message_of_the_user_strips_the_thoughts_before_it(tokenizer: Any) -> None:
    """Thoughts between the calls of the last turn are shown until it comes."""
    thinking = {"role": "assistant", "reasoning_content": "Hm."}
    chat: Chat = [
        {"role": "user", "content": "How?"},
        {**thinking, "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "output"},
        {**thinking, "content": "Fine."},
    ]
    before = shown(tokenizer, THINKING_CHAT_TEMPLATE, chat)
    after = shown(tokenizer, THINKING_CHAT_TEMPLATE, [*chat, {"role": "user", "content": "And?"}])
    assert before.count("<think>\nHm.\n</think>\n\n") == 2
    assert "<think>" not in after


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning", "content"])
def test_a_thought_may_come_in_three_ways(member: str, tokenizer: Any) -> None:
    """Clients send it as either member, or leave it in the content as the engine gave it."""
    said = {"role": "assistant", "content": "Fine."}
    text = "<think>\nHm.\n</think>\n\nFine." if member == "content" else "Hm."
    chat: Chat = [{"role": "user", "content": "How?"}, {**said, member: text}]
    asked = {"role": "user", "content": "Why?"}
    with_thought = shown(tokenizer, THINKING_CHAT_TEMPLATE, chat)
    assert with_thought.endswith("assistant\n<think>\nHm.\n</think>\n\nFine.<|im_end|>\n")
    plain = shown(tokenizer, CHAT_TEMPLATE, [chat[0], said, asked])
    assert shown(tokenizer, THINKING_CHAT_TEMPLATE, [*chat, asked]) == plain


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_only_the_assistant_thinks(role: str, tokenizer: Any) -> None:
    """The same tags in another's text are text."""
    content = "a<think>\nb\n</think>\n\nc"
    chat: Chat = [{"role": role, "content": content}, {"role": "user", "content": "d"}]
    assert content in shown(tokenizer, THINKING_CHAT_TEMPLATE, chat)


@pytest.mark.parametrize("seed", range(5))
def test_conversations_without_thoughts_are_shown_as_before(seed: int, tokenizer: Any) -> None:
    """Both templates give the same text where nobody thinks."""
    chat = [
        {key: value for key, value in each.items() if key != "reasoning_content"}
        for each in drawn(Random(seed))
    ]
    both = {shown(tokenizer, each, chat) for each in (CHAT_TEMPLATE, THINKING_CHAT_TEMPLATE)}
    assert len(both) == 1
