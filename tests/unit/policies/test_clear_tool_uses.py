"""clear_tool_uses, case by case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_talks import SYSTEM, USER, asks, call, contents, result, sent, steps, talk

from leyline_policies import Message
from leyline_policies.builtin.clear_tool_uses import ClearToolUses
from leyline_policies.context import Context, run

FIXTURE = Path(__file__).parents[2] / "fixtures" / "policies" / "anthropic_clear_tool_uses.json"
GONE = "[cleared]"


def _policy(**settings: Any) -> ClearToolUses:
    return ClearToolUses(**{"trigger_tokens": 0, **settings})


def _documented() -> list[Any]:
    cases = json.loads(FIXTURE.read_text(encoding="utf-8"))["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", _documented())
def test_anthropics_documentation(case: dict[str, Any]) -> None:
    """Each rule that Anthropic documents for clear_tool_uses_20250919 holds."""
    sizes: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []
    for number, (tool, tokens) in enumerate(case["tool_uses"]):
        sizes[f"result {number}"] = tokens
        pairs.append((tool, f"result {number}"))
    context = Context(count=lambda message: sizes.get(str(message["content"]), 0))
    before = talk(*pairs)
    edit = case["edit"]
    trigger = edit.get("trigger", {"type": "input_tokens", "value": 100_000})
    policy = ClearToolUses(
        trigger_tokens=trigger["value"] if trigger["type"] == "input_tokens" else None,
        trigger_tool_uses=trigger["value"] if trigger["type"] == "tool_uses" else None,
        keep=edit.get("keep", {"value": 3})["value"],
        clear_at_least=edit.get("clear_at_least", {"value": 0})["value"],
        exclude_tools=tuple(edit.get("exclude_tools", ())),
        clear_tool_inputs=edit.get("clear_tool_inputs", False),
    )
    after = sent(policy, before, context)
    cleared = [number for number, text in enumerate(contents(after)) if text == GONE]
    emptied = [
        number
        for number, message in enumerate(m for m in after if m["role"] == "assistant")
        if message["tool_calls"][0]["function"]["arguments"] == "{}"
    ]
    assert cleared == case["cleared_results"]
    assert emptied == case["cleared_inputs"]
    applied = {"cleared_tool_uses": len(cleared), "cleared_input_tokens": 0}
    applied["cleared_input_tokens"] = context.total(before) - context.total(after)
    assert applied == case["applied"]


def test_pairs_and_other_messages_stay() -> None:
    """Only the contents of old results change; calls, ids and the other messages stay."""
    before = talk(*[("bash", f"text {n}") for n in range(5)])
    after = sent(_policy(), before)
    assert contents(after) == [GONE, GONE, "text 2", "text 3", "text 4"]
    for old, new in zip(before, after, strict=True):
        assert {**old, "content": None} == {**new, "content": None}


def test_below_the_trigger_the_list_itself_comes_back() -> None:
    """A conversation at the trigger, not over it, is handed on as the same list."""
    messages = talk(*[("bash", "x")] * 5)
    context = Context(count=lambda message: 1)
    assert run(ClearToolUses(trigger_tokens=12), messages, 0, context) is messages
    assert run(ClearToolUses(trigger_tokens=11), messages, 0, context) is not messages


def test_either_trigger_is_enough() -> None:
    """With both triggers, one that holds suffices."""
    messages = talk(*[("bash", "x")] * 5)
    assert contents(sent(_policy(trigger_tokens=10**6, trigger_tool_uses=4), messages))[0] == GONE
    assert contents(sent(_policy(trigger_tokens=10**6, trigger_tool_uses=5), messages))[0] == "x"


def test_edited_messages_are_the_same_objects_each_turn() -> None:
    """A message cleared on one turn is the very same object on the next."""
    context = Context()
    messages = talk(*[("bash", "x" * 50)] * 6)
    first = run(_policy(), messages[:-2], 0, context)
    context.memo.next_turn()
    second = run(_policy(), messages, 1, context)
    assert first[3] is second[3]
    assert second[3] is not messages[3]


def test_parallel_calls_lose_their_own_inputs_only() -> None:
    """Of several calls in a message, those whose results are cleared lose their arguments."""
    both = asks(call("a"), call("b", "read"), call("c"))
    messages = [SYSTEM, USER, both, result("b", "B"), result("a", "A"), result("c", "C")]
    after = sent(_policy(keep=1, clear_tool_inputs=True, exclude_tools=("read",)), messages)
    assert contents(after) == ["B", GONE, "C"]
    arguments = [each["function"]["arguments"] for each in after[2]["tool_calls"]]
    assert arguments == ["{}", '{"command": "ls"}', '{"command": "ls"}']


def test_older_and_custom_calls_lose_their_inputs() -> None:
    """A function_call and a custom tool's call are emptied in their own shape."""
    custom = {"id": "x", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    messages: list[Message] = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "[1]"}},
        {"role": "function", "name": "f", "content": "old"},
        asks(custom),
        result("x", "done"),
    ]
    after = sent(_policy(keep=0, clear_tool_inputs=True), messages)
    assert after[1]["function_call"] == {"name": "f", "arguments": "{}"}
    assert after[3]["tool_calls"][0]["custom"] == {"name": "patch", "input": ""}
    assert contents(after) == [GONE, GONE]


def test_reused_ids_are_told_apart() -> None:
    """If ids begin again each turn, the tool is that of the call before the result."""
    messages = [USER, *steps(("read", "one")), *steps(("bash", "two")), *steps(("bash", "three"))]
    after = sent(_policy(keep=0, exclude_tools=("read",)), messages)
    assert contents(after) == ["one", GONE, GONE]


def test_parts_and_images_are_cleared_whole() -> None:
    """A part list becomes the placeholder, images included."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    messages = talk(("shot", [{"type": "text", "text": "seen"}, image]), ("bash", "x"))
    assert contents(sent(_policy(keep=1, placeholder="gone"), messages)) == ["gone", "x"]


def test_nothing_is_cleared_twice() -> None:
    """A result that holds the placeholder already is left as it is."""
    messages = talk(("bash", GONE), ("bash", "x"), ("bash", "y"), ("bash", "z"))
    assert sent(_policy(), messages) == messages


def test_stop_when_enough_clears_the_oldest_only() -> None:
    """With stop_when_enough the oldest results go until so many tokens are gone."""
    messages = talk(*[("bash", "x" * 4000)] * 6)
    policy = _policy(keep=1, clear_at_least=1500, stop_when_enough=True)
    assert [text == GONE for text in contents(sent(policy, messages))] == [True] * 2 + [False] * 4
    short = _policy(keep=5, clear_at_least=9000, stop_when_enough=True)
    assert contents(sent(short, messages))[0] == GONE
    assert sent(_policy(keep=5, clear_at_least=9000), messages) == messages


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep": -1}, "keep=-1"),
        ({"trigger_tokens": -5}, "trigger_tokens=-5"),
        ({"trigger_tokens": None}, "trigger_tokens and trigger_tool_uses"),
        ({"stop_when_enough": True}, "clear_at_least"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """A setting that can't work is refused, by name."""
    with pytest.raises(ValueError, match=said):
        ClearToolUses(**settings)
