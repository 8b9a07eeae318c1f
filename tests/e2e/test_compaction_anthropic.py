"""Compaction by Anthropic's Messages API: the SDK, unmodified, and a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from compaction_kit import ANSWER, LISTING, SUMMARY, compacting_stack, prompts

from leyline_lab.stand_ins.scripted_model import SCRIPTED, ScriptedModel, build_scripted

TENANTS = {name: {"api_keys": [f"key-of-{name}"]} for name in ("red", "blue")}
RULES = "You are an agent that looks into folders."
COMPACT: dict[str, Any] = {
    "type": "compact_20260112",
    "trigger": {"type": "input_tokens", "value": 500},
}
CLEAR: dict[str, Any] = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 1},
    "keep": {"type": "tool_uses", "value": 1},
}
Stack = tuple[str, ScriptedModel]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A proxy's origin, and the model behind it."""
    files = Path(build_scripted(tmp_path_factory.mktemp("model") / "scripted"))
    with compacting_stack(files, tenants=TENANTS) as (origin, model):
        yield origin, model


@pytest.fixture
def sdk(stack: Stack) -> Iterator[anthropic.Anthropic]:
    """A client of one tenant."""
    with client_of(stack[0]) as client:
        yield client


def client_of(origin: str, tenant: str = "red") -> anthropic.Anthropic:
    """The SDK's client, without retries that would hide a failure."""
    return anthropic.Anthropic(base_url=origin, api_key=f"key-of-{tenant}", max_retries=0)


def talk(task: str, calls: int = 3) -> list[Any]:
    """A conversation with so many tool calls."""
    found: list[Any] = [{"role": "user", "content": task}]
    for number in range(calls):
        use = {"type": "tool_use", "id": f"t{number}", "name": "ls", "input": {}}
        text = f"{number}\n{LISTING}"
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": text}
        found += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return found


def ask(
    sdk: anthropic.Anthropic, messages: list[Any], *edits: Any, stream: bool = False
) -> tuple[Any, dict[str, Any]]:
    """One message, whole or put together by the SDK from its events, and the members of its end
    that only events show."""
    request: dict[str, Any] = {
        "model": SCRIPTED,
        "system": RULES,
        "messages": messages,
        "max_tokens": 60,
        "context_management": {"edits": [*edits]},
        "betas": ["compact-2026-01-12"],
    }
    if not stream:
        message = sdk.beta.messages.create(**request)
        return message, {"usage": message.usage, **(message.model_extra or {})}
    with sdk.beta.messages.stream(**request) as events:
        (end,) = [event for event in events if event.type == "message_delta"]
        message = events.get_final_message()
    return message, {"usage": end.usage, **(end.model_extra or {})}


def said(message: Any) -> dict[str, Any]:
    """The answer as clients send it back."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return {"role": "assistant", "content": blocks}


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_conversation_is_answered_from_its_summary(
    sdk: anthropic.Anthropic, stack: Stack, stream: bool
) -> None:
    """The block comes first, the usage of both requests is told apart, and the block sent back
    stands in place of everything before it."""
    model, before = stack[1], len(stack[1].admitted)
    given = talk(f"Find it, {stream}.")
    message, end = ask(sdk, given, COMPACT, stream=stream)
    block, text = message.content
    assert (block.type, block.content) == ("compaction", SUMMARY)
    assert (text.text, message.stop_reason) == (ANSWER, "end_turn")
    assert message.context_management.applied_edits == []
    compaction, answer = end["usage"].iterations
    assert (compaction.type, answer.type) == ("compaction", "message")
    assert compaction.input_tokens + compaction.cache_read_input_tokens > 500
    assert answer.input_tokens == end["usage"].input_tokens < 500
    assert answer.output_tokens == end["usage"].output_tokens
    account = end["leyline"]
    assert "messages" not in account["compaction"]
    _, compacted = prompts(model)[before:]
    assert compacted.messages[:2] == (("system", RULES), ("user", f"Find it, {stream}."))
    assert compacted.messages[2][1].endswith(SUMMARY)
    later = [said(message), {"role": "user", "content": "Go on."}]
    for history in ([*given, *later], later):
        again, told = ask(sdk, history, COMPACT)
        assert [each.type for each in again.content] == ["text"]
        assert again.usage.iterations is None
        assert prompts(model)[-1].messages == (
            *compacted.messages,
            ("assistant", ANSWER),
            ("user", "Go on."),
        )
        assert told["leyline"]["session"] == account["session"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_returns_the_block_alone(
    sdk: anthropic.Anthropic, stack: Stack, stream: bool
) -> None:
    """Its reason is ``compaction``, its usage that of the summary; the block continues the
    conversation, which no message but it shows."""
    model, before = stack[1], len(stack[1].admitted)
    edit = {**COMPACT, "pause_after_compaction": True, "instructions": "Name the zoo."}
    message, end = ask(sdk, talk(f"Pause, {stream}."), edit, stream=stream)
    (asked,) = prompts(model)[before:]
    assert asked.messages[-1][1].endswith("\n\nName the zoo.")
    assert [block.type for block in message.content] == ["compaction"]
    assert message.stop_reason == "compaction"
    assert [each.type for each in end["usage"].iterations] == ["compaction"]
    assert end["usage"].output_tokens == 0
    again, told = ask(sdk, [said(message)], edit)
    assert again.content[0].text == ANSWER
    assert told["leyline"]["session"] == end["leyline"]["session"]


def test_edits_that_clear_come_before_the_compaction(
    sdk: anthropic.Anthropic, stack: Stack
) -> None:
    """The summary is written under the cleared conversation, and the answer reports what was
    cleared there."""
    before = len(stack[1].admitted)
    big = {**COMPACT, "trigger": {"type": "input_tokens", "value": 1_500}}
    message, _ = ask(sdk, talk("Clear it."), CLEAR, big)
    assert [block.type for block in message.content] == ["text"]
    assert len(stack[1].admitted) == before + 1
    message, _ = ask(sdk, talk("Clear it."), CLEAR, COMPACT)
    assert [block.type for block in message.content] == ["compaction", "text"]
    asked = prompts(stack[1])[-2]
    assert str(asked.messages).count("module_39") == 1
    (applied,) = message.context_management.applied_edits
    assert applied.cleared_tool_uses == 2


def test_a_block_without_a_summary_is_left_out(sdk: anthropic.Anthropic, stack: Stack) -> None:
    """It is a no-op, as in the API; an edited summary counts as the client sends it."""
    failed = {"type": "compaction", "content": None}
    edited = {"type": "compaction", "content": "My own words."}
    history = [
        {"role": "user", "content": "Long ago."},
        {"role": "assistant", "content": [edited, {"type": "text", "text": "Yes."}, failed]},
        {"role": "user", "content": [failed, {"type": "text", "text": "Go on."}]},
    ]
    ask(sdk, history)
    roles = [role for role, _ in prompts(stack[1])[-1].messages]
    texts = [text for _, text in prompts(stack[1])[-1].messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert texts[1].endswith("My own words.")
    assert texts[2:] == ["Yes.", "Go on."]


@pytest.mark.parametrize("how", ["tenant", "model", "tampered"])
def test_a_block_opens_for_its_tenant_and_model_alone(
    sdk: anthropic.Anthropic, stack: Stack, how: str
) -> None:
    """Any other is refused by name, in the API's own shape, and nothing runs."""
    message, _ = ask(sdk, talk("Mine."), {**COMPACT, "pause_after_compaction": True})
    block = message.content[0].model_dump(exclude_none=True)
    if how == "tampered":
        block["encrypted_content"] = block["encrypted_content"][:-8]
    before = len(stack[1].admitted)
    with (
        client_of(stack[0], "blue" if how == "tenant" else "red") as client,
        pytest.raises(anthropic.BadRequestError) as raised,
    ):
        client.beta.messages.create(
            model="other" if how == "model" else SCRIPTED,
            max_tokens=5,
            messages=[{"role": "assistant", "content": [block]}],
        )
    assert "messages[0].content[0].encrypted_content" in str(raised.value)
    assert raised.value.error_code == "compaction_signature_invalid"
    assert len(stack[1].admitted) == before


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([{**COMPACT, "trigger": {"type": "input_tokens", "value": 0}}], "[0].trigger.value"),
        ([{**COMPACT, "trigger": {"type": "input_tokens", "value": -1}}], "[0].trigger.value"),
        ([{**COMPACT, "trigger": {"type": "input_tokens", "value": "9"}}], "[0].trigger.value"),
        ([{**COMPACT, "trigger": {"type": "tool_uses", "value": 9}}], "[0].trigger.type"),
        ([{**COMPACT, "pause": True}], "[0] has no field"),
        ([{**COMPACT, "type": "compact_20260113"}], "did you mean"),
        ([COMPACT, COMPACT], "twice"),
        ([COMPACT, {"type": "clear_thinking_20251015"}], "first"),
    ],
)
def test_mistakes_name_the_edit(sdk: anthropic.Anthropic, edits: list[Any], words: str) -> None:
    """A 400 in Anthropic's shape."""
    with pytest.raises(anthropic.BadRequestError) as raised:
        ask(sdk, talk("Wrong."), *edits)
    assert words in str(raised.value)


def test_an_empty_summary_is_refused(sdk: anthropic.Anthropic) -> None:
    """A compaction has words, or null."""
    block = {"type": "compaction", "content": ""}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.content"):
        ask(sdk, [{"role": "assistant", "content": [block]}])
