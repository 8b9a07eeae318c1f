"""Dialects: which requests are followed, and contents found in an engine's own tokens."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from template_kit import SPECIAL, tokenizer_of

from leyline_engine.contract import ChatDialect
from leyline_proxy.render import ChatRenderer, RenderError, dialect_of
from leyline_proxy.render.dialects import SglangDialect
from leyline_proxy.render.vllm_dialect import VllmDialect
from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE

USER = {"role": "user", "content": "Hi."}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Read the first file, please."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Yes. And the second."},
]


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": 0.0},
        {"reasoning": {"effort": "low"}},
        {"continue_final_message": True},
        {"input_ids": [1]},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": "none"},
        {"tool_choice": "any"},
        {"tools": [{"function": {"name": "f", "parameters": {"type": "varchar"}}}]},
        {"tools": [{"function": {"name": "f", "parameters": {"type": ["null", "null"]}}}]},
        {"tools": ["f"]},
    ],
)
def test_what_changes_the_prompt_in_other_ways_is_left_to_sglang(body: dict[str, Any]) -> None:
    """Nothing is rendered here that SGLang may render otherwise."""
    with pytest.raises(RenderError):
        SglangDialect(False).asked(body)


def test_options_of_the_server_are_defaults() -> None:
    """The request's own win."""
    dialect = SglangDialect(False, {"enable_thinking": False, "style": "a"})
    asked = dialect.asked({"chat_template_kwargs": {"style": "b"}, "reasoning_effort": None})
    assert asked.kwargs == {"enable_thinking": False, "style": "b"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["f", "g"]),
        ("auto", ["f", "g"]),
        ("none", None),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
    ],
)
def test_tool_choice_selects_the_tools_shown(choice: Any, names: list[str] | None) -> None:
    """None of them, one, or all."""
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    asked = SglangDialect(False).asked({"tools": tools, "tool_choice": choice})
    shown = None if asked.tools is None else [tool["function"]["name"] for tool in asked.tools]
    assert shown == names


def test_a_conversation_that_ends_with_the_assistant_ends_with_the_user() -> None:
    """SGLang turns a last answer around, its calls are lost; the list of the caller stays."""
    last = {"role": "Assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    messages = [USER, last]
    assert SglangDialect(False).conversation(messages) == [USER, {"role": "user", "content": ""}]
    assert messages[-1] is last
    assert SglangDialect(False).conversation([last, USER]) == [last, USER]


def test_dialects_are_found_by_name() -> None:
    """An unknown one is an error: guessing is forbidden."""
    assert dialect_of("sglang", "", takes_parts=True) == SglangDialect(True, {})
    assert isinstance(dialect_of("vllm", ""), VllmDialect)
    with pytest.raises(ValueError, match="other"):
        dialect_of("other", "")


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "extreme"},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"documents": [{"title": "t", "text": "x"}]},
        {"chat_template": "{{ 1 }}"},
        {"truncate_prompt_tokens": 0},
        {"chat_template_kwargs": {"tokenize": True}},
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    ],
)
def test_what_changes_the_prompt_in_other_ways_is_left_to_vllm(body: dict[str, Any]) -> None:
    """Nothing is rendered here that vLLM may render otherwise."""
    with pytest.raises(RenderError):
        VllmDialect(False).asked(body)


def test_vllms_options_are_those_that_the_template_names() -> None:
    """Effort sets two; a null or ``auto`` leaves the server's own; tools that may not be called
    are shown unless the server withholds them."""
    template = "{{ style }}{{ enable_thinking }}{{ reasoning_effort }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"chat_template_kwargs": {"style": "auto", "other": 1}, "reasoning_effort": "none"}
    body |= {"tools": tools, "tool_choice": "none"}
    for withheld in (False, True):
        dialect = dialect_of(
            "vllm", template, defaults={"style": "a", "x": 1}, withholds_tools=withheld
        )
        asked = dialect.asked(body)
        assert asked.kwargs == {"style": "a", "enable_thinking": False, "reasoning_effort": "none"}
        assert (asked.tools is None) == withheld


def test_a_developer_becomes_the_system_where_a_template_has_none() -> None:
    """Only at the beginning: vLLM would join several into one."""
    developer = {"role": "developer", "content": "Be brief."}
    dialect = dialect_of("vllm", "")
    assert dialect.conversation([developer, USER]) == [{**developer, "role": "system"}, USER]
    assert dialect_of("vllm", "{{ 'developer' }}").conversation([USER, developer])[1] is developer
    for several in ([USER, developer], [developer, developer], [developer, USER, MESSAGES[0]]):
        with pytest.raises(RenderError):
            dialect.conversation(several)


def renderer() -> ChatRenderer:
    """One that only reads tokens: its template isn't the engine's."""
    tokenizer = tokenizer_of(CHAT_TEMPLATE)
    dialect = dialect_of(ChatDialect.SGLANG, "", takes_parts=False)
    return ChatRenderer("", SPECIAL, tokenizer.backend_tokenizer.to_str(), dialect=dialect)


def engine_tokens() -> array[int]:
    """The prompt of :data:`MESSAGES` as the engine has it."""
    tokenizer = tokenizer_of(CHAT_TEMPLATE)
    own = ChatRenderer(CHAT_TEMPLATE, SPECIAL, tokenizer.backend_tokenizer.to_str())
    return own.render(MESSAGES, None).tokens


def test_contents_are_found_in_the_engines_tokens() -> None:
    """Each span is where its text is; a content whose text occurs twice is not located."""
    tokens = engine_tokens()
    found = renderer().locate(tokens, MESSAGES, {})
    decode = tokenizer_of(CHAT_TEMPLATE).decode
    assert found.tokens == tokens
    assert {span.message for span in found.spans} == {0, 1, 3}
    for message, start, end in found.spans:
        assert decode(tokens[start:end].tolist()).strip() == MESSAGES[message]["content"]


def test_tokens_that_their_text_does_not_give_again_have_no_spans() -> None:
    """Positions in such a text would be guesses; the tokens stay the engine's."""
    tokens = engine_tokens()
    split = array("q", [token for token in tokens for _ in range(2)])
    twisted = tokens[:3] + array("q", reversed(tokens[3:]))
    for odd in (twisted, split[1:]):
        found = renderer().locate(odd, MESSAGES, {})
        again = renderer().encode(tokenizer_of(CHAT_TEMPLATE).decode(odd.tolist()))
        assert found.tokens == odd
        assert again == odd or not found.spans


def test_the_context_tells_options_apart() -> None:
    """Every other option of the prompt is in the digest, for the comparison of turns."""
    tokens, reader = engine_tokens(), renderer()
    low, high = (
        reader.locate(tokens, MESSAGES, {"reasoning_effort": effort}).context
        for effort in ("low", "high")
    )
    assert low != high
