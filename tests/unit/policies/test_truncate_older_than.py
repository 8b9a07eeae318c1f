"""truncate_older_than, case by case."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message
from leyline_policies.builtin.truncate_older_than import TruncateOlderThan

LONG = "".join(f"line {number}\n" for number in range(200))


def _conversation(*results: tuple[str, Any]) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": LONG}]
    for index, (tool, content) in enumerate(results):
        call = {
            "id": f"c{index}",
            "type": "function",
            "function": {"name": tool, "arguments": "{}"},
        }
        messages.append({"role": "assistant", "content": LONG, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{index}", "content": content})
    return messages


def _results(messages: list[Message]) -> list[Any]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_golden_stub() -> None:
    """An old result becomes its head, a line that counts what was cut, and its tail."""
    text = "a" * 100 + "b" * 100
    policy = TruncateOlderThan(n=0, max_chars=60)
    (stub,) = _results(policy.transform(_conversation(("bash", text)), 3))
    assert stub == "a" * 19 + "\n[162 characters cut]\n" + "b" * 19


def test_newest_results_stay_whole() -> None:
    """Only results older than the newest n are shortened, and nothing but results."""
    before = _conversation(("bash", LONG), ("read", LONG), ("bash", LONG))
    after = TruncateOlderThan(n=2).transform(before, 0)
    assert [len(text) <= 200 for text in _results(after)] == [True, False, False]
    assert [m for m in after if m["role"] != "tool"] == [m for m in before if m["role"] != "tool"]
    assert TruncateOlderThan(n=9).transform(before, 0) == before


def test_tools_limits_what_is_counted_and_cut() -> None:
    """With tools, results of other tools are neither counted nor shortened."""
    before = _conversation(("bash", LONG), ("bash", LONG), ("read", LONG), ("read", LONG))
    after = TruncateOlderThan(n=1, tools=("bash",)).transform(before, 0)
    assert [len(text) <= 200 for text in _results(after)] == [True, False, False, False]


def test_tool_name_of_the_result_counts_without_a_call() -> None:
    """A result whose call is gone is known by its own name, as are old function results."""
    orphan = {"role": "tool", "tool_call_id": "gone", "name": "bash", "content": LONG}
    old = {"role": "function", "name": "bash", "content": LONG}
    after = TruncateOlderThan(n=0, tools=("bash",)).transform([orphan, old], 0)
    assert [len(message["content"]) <= 200 for message in after] == [True, True]
    assert TruncateOlderThan(n=0, tools=("read",)).transform([orphan, old], 0) == [orphan, old]


def test_parts_and_unknown_keys_stay() -> None:
    """A part list stays one: images, cache markers and unknown keys survive, texts are cut."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900}}
    content = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}, image]
    before = _conversation(("bash", content))
    before[-1]["x_unknown"] = {"deep": [1]}
    result = TruncateOlderThan(n=0).transform(before, 0)[-1]
    assert result["content"][1] == image
    assert result["content"][0]["cache_control"] == {"type": "ephemeral"}
    assert len(result["content"][0]["text"]) <= 200
    assert result["x_unknown"] == {"deep": [1]}
    assert content[0]["text"] == LONG


@given(st.text(max_size=400), st.integers(0, 300))
def test_stub_is_shorter_and_final(text: str, max_chars: int) -> None:
    """A stub is shorter than its text, within the limit where it can be, and never cut again."""
    policy = TruncateOlderThan(n=0, max_chars=max_chars)
    (stub,) = _results(policy.transform(_conversation(("bash", text)), 0))
    if stub != text:
        assert len(stub) < len(text)
        assert len(stub) <= max(max_chars, len("\n[400 characters cut]\n"))
        assert text.startswith(stub.partition("\n[")[0])
    else:
        assert len(text) <= max(max_chars, 32)
    assert _results(policy.transform(_conversation(("bash", stub)), 0)) == [stub]
