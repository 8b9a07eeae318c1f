"""Calls of the recall tool in answers, whole and in pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.apis.recall_calls import (
    RecallScreen,
    ToolCall,
    asked_in,
    with_start,
    without_calls,
)
from leyline_proxy.model.asides import RECALL_TOOL

CALLS = st.lists(
    st.tuples(
        st.sampled_from([RECALL_TOOL, "shell", "note"]),
        st.text(max_size=12) | st.sampled_from(["null", "nullx", "nullnull"]),
    ),
    max_size=5,
)


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    """A whole call."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def answer(text: str | None, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    reason = "tool_calls" if calls else "stop"
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}


def pieces(calls: list[dict[str, Any]], data: st.DataObject) -> list[dict[str, Any]]:
    """The deltas of an answer's calls: arguments in pieces, several calls in turn."""
    deltas = []
    for index, made in enumerate(calls):
        function = made["function"]
        cut = data.draw(st.integers(0, len(function["arguments"])))
        head = {**made, "function": {**function, "arguments": function["arguments"][:cut]}}
        rest = {"index": index, "function": {"arguments": function["arguments"][cut:]}}
        deltas += [{"tool_calls": [{"index": index, **head}]}, {"tool_calls": [rest]}]
    return deltas


def joined(deltas: list[Any]) -> list[dict[str, Any]]:
    """The calls that a client makes of deltas."""
    made: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            known = made.setdefault(part["index"], {"name": "", "arguments": "", "id": ""})
            known["id"] = known["id"] or part.get("id", "")
            known["name"] += part["function"].get("name") or ""
            known["arguments"] += part["function"].get("arguments") or ""
    assert sorted(made) == [*range(len(made))]
    return [made[index] for index in sorted(made)]


@given(CALLS, st.data())
def test_a_stream_and_a_whole_answer_agree(
    drawn: list[tuple[str, str]], data: st.DataObject
) -> None:
    """In pieces or whole, the same calls are read, and the client gets its own, numbered from 0."""
    calls = [call(number, *each) for number, each in enumerate(drawn)]
    screen = RecallScreen()
    shown = [screen.feed({"role": "assistant", "content": "Well. "})]
    shown += [screen.feed(delta) for delta in pieces(calls, data)]
    whole = answer("Well. ", calls)
    assert screen.asked == asked_in(whole)
    got = joined([delta for delta in shown if delta is not None])
    message = without_calls(whole)["choices"][0]["message"]
    kept = [{"id": each["id"], **each["function"]} for each in message.get("tool_calls", ())]
    assert (
        got
        == kept
        == [
            {"id": each["id"], **each["function"]}
            for each in calls
            if each["function"]["name"] != RECALL_TOOL
        ]
    )


def test_calls_have_their_places() -> None:
    """A call knows its place among all calls of its message, and the ids of the client's."""
    calls = [call(0, "shell", "{}"), call(1, RECALL_TOOL, '{"address":"a"}'), call(2, "note", "")]
    asked = asked_in(answer(None, calls))
    assert asked is not None
    assert asked.calls == (ToolCall("call_1", '{"address":"a"}', 1),)
    assert asked.own == ("call_0", "call_2")
    assert asked_in(answer("No calls.", [])) is None


def test_an_answer_of_recalls_alone_is_complete_without_them() -> None:
    """Without its calls, an answer that only recalls ends like any other."""
    choice = without_calls(answer(None, [call(0, RECALL_TOOL, "{}")]))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": ""}


def test_text_of_earlier_turns_comes_first() -> None:
    """The client's answer begins with the text that the model wrote in front of its calls."""
    found = with_start(answer("Done.", []), "Let me look. ")
    assert found["choices"][0]["message"]["content"] == "Let me look. Done."
