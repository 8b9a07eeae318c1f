"""warn_near_limits, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from tool_talks import SYSTEM, USER, asks, call, result

from leyline_policies import Context, Message, SpecError, load_pipeline
from leyline_policies.builtin.warn_near_limits import WarnNearLimits
from leyline_policies.context import apply

URGENT = (
    "URGENT: Configured run limits are approaching.\n"
    "- Context window: {} tokens used ({}); {} remaining.\n"
    "Complete the current task efficiently and avoid unnecessary tool calls."
)
CRITICAL = URGENT.replace("URGENT", "CRITICAL").replace("efficiently", "immediately")


def _talk(steps: int) -> list[Message]:
    messages = [SYSTEM, USER]
    for number in range(steps):
        messages += [asks(call(f"c{number}")), result(f"c{number}", "out")]
    return messages


def _context(**facts: Any) -> Context:
    """Every message has ten tokens."""
    return Context(count=lambda message: 10, **facts)


def _said(policy: WarnNearLimits, messages: list[Message], **facts: Any) -> dict[int, str]:
    """The text added to the content, by message."""
    after = apply(policy, messages, 0, _context(**facts))
    assert len(after) == len(messages)
    return {
        place: new["content"].removeprefix(f"{old['content']}\n\n")
        for place, (old, new) in enumerate(zip(messages, after, strict=True))
        if new is not old
    }


def test_nothing_is_said_below_the_threshold() -> None:
    """A conversation that fits is left alone, and so is one whose window is unknown."""
    assert _said(WarnNearLimits(), _talk(2), window=100) == {}
    assert _said(WarnNearLimits(), _talk(50)) == {}


def test_the_warning_stays_where_the_limit_was_reached() -> None:
    """Later turns find it in the same words in the same message, and one more at the limit."""
    urgent = URGENT.format("80/100", "80%", "20")
    critical = CRITICAL.format("100/100", "100%", "0")
    for steps in (3, 4):
        expected = {7: urgent} if steps == 3 else {7: urgent, 9: critical}
        assert _said(WarnNearLimits(), _talk(steps), window=100) == expected
    assert _said(WarnNearLimits(), _talk(9), window=100) == {7: urgent, 9: critical}


def test_one_big_message_reaches_both() -> None:
    """Only the stronger warning is given then."""
    assert _said(WarnNearLimits(max_tokens=10), _talk(0)) == {
        1: CRITICAL.format("20/10", "200%", "0")
    }


def test_the_limit_may_be_set() -> None:
    """Tokens, a part of the window, and the threshold are settings."""
    assert list(_said(WarnNearLimits(max_tokens=100), _talk(3))) == [7]
    assert list(_said(WarnNearLimits(max_fraction=0.5), _talk(3), window=200)) == [7]
    assert list(_said(WarnNearLimits(threshold=0.5), _talk(3), window=100)) == [5]


def test_results_of_one_message_come_whole() -> None:
    """Between parallel results nothing is said: the warning is in the last of them."""
    calls = asks(call("a"), call("b"), call("c"))
    messages = [SYSTEM, USER, calls, *(result(name, "out") for name in "abc")]
    assert list(_said(WarnNearLimits(), messages, window=50)) == [5]


def test_parts_get_a_part() -> None:
    """A content of parts gets one more; an answer begun by the client is not written into."""
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "go"}]}
    begun: Message = {"role": "assistant", "content": "Sure"}
    (told, last) = apply(WarnNearLimits(), [parts, begun], 0, _context(window=12))
    assert [part["type"] for part in told["content"]] == ["text", "text"]
    assert last is begun
    assert parts["content"] == [{"type": "text", "text": "go"}]


def test_at_the_end_it_is_a_message_of_its_own() -> None:
    """It is like the original, with this turn's figures, and the history is unchanged."""
    messages = _talk(4)
    after = apply(WarnNearLimits(place="end"), messages, 0, _context(window=125))
    assert after[:-1] == messages
    assert after[-1] == {"role": "user", "content": URGENT.format("100/125", "80%", "25")}


def test_being_near_the_limit_is_reported() -> None:
    """It is reported on every such turn, and only then."""
    for steps, expected in ((2, []), (3, [0.8]), (4, [1.0])):
        context = _context(window=100)
        apply(WarnNearLimits(), _talk(steps), 0, context)
        assert [note.values["fraction"] for note in context.notes] == expected
        assert all(note.kind == "near_limit" for note in context.notes)


@pytest.mark.parametrize("settings", ["threshold=0", "max_tokens=0", "max_fraction=1.1"])
def test_bad_settings_are_refused(settings: str) -> None:
    """The message names the setting."""
    with pytest.raises(SpecError, match=settings.split("=", maxsplit=1)[0]):
        load_pipeline(f"warn_near_limits:{settings}")
