"""Calls of the recall tool in answers, as engines spell them."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_proxy.apis.recall_calls import RecallScreen, asked_in, without_calls
from leyline_proxy.model.asides import RECALL_TOOL

Delta = dict[str, Any]


def piece(
    index: int | None, name: str | None = None, arguments: str = "", called: str = ""
) -> Delta:
    """One call's part of a delta."""
    function: Delta = {"arguments": arguments}
    if name is not None:
        function["name"] = name
    part: Delta = {"function": function}
    if index is not None:
        part["index"] = index
    if called:
        part |= {"id": called, "type": "function"}
    return part


def fed(*deltas: list[Delta]) -> tuple[RecallScreen, list[Delta]]:
    """A screen after deltas of calls, and the parts of calls that the client got."""
    screen, shown = RecallScreen(), []
    for calls in deltas:
        delta = screen.feed({"tool_calls": calls})
        shown += (delta or {}).get("tool_calls", [])
    return screen, shown


def own_calls(shown: list[Delta]) -> dict[int, tuple[str, str]]:
    """Names and arguments of the calls that a client puts together."""
    found: dict[int, tuple[str, str]] = {}
    for each in shown:
        name, arguments = found.get(each["index"], ("", ""))
        function = each["function"]
        found[each["index"]] = (
            name + (function.get("name") or ""),
            arguments + function.get("arguments", ""),
        )
    return found


INTERLEAVED = [
    [
        piece(0, "shell", called="a"),
        piece(1, RECALL_TOOL, called="b"),
        piece(2, "note", called="c"),
    ],
    [piece(1, None, '{"addr'), piece(0, None, '{"x'), piece(2, None, "{}")],
    [piece(0, None, '":1}'), piece(1, None, 'ess":1}')],
]
LATE = [
    [piece(0, None, "", called="b")],
    [piece(0, RECALL_TOOL)],
    [piece(0, None, '{"address":1}')],
]
IN_PIECES = [
    [piece(0, RECALL_TOOL[:7], called="b")],
    [piece(0, RECALL_TOOL[7:])],
    [piece(0, None, '{"address":1}')],
]


def test_interleaved_calls() -> None:
    """Parts of several calls in one delta, in any order, come to the right calls."""
    screen, shown = fed(*INTERLEAVED)
    assert own_calls(shown) == {0: ("shell", '{"x":1}'), 1: ("note", "{}")}
    assert screen.asked is not None and screen.asked.own == ("a", "c")
    (call,) = screen.asked.calls
    assert (call.id, call.arguments, call.place) == ("b", '{"address":1}', 1)


@pytest.mark.parametrize("deltas", [LATE, IN_PIECES])
def test_a_name_that_comes_late(deltas: list[list[Delta]]) -> None:
    """A call whose name isn't known yet waits, so that the client sees nothing of a recall."""
    screen, shown = fed(*deltas)
    assert shown == []
    assert screen.asked is not None
    assert [call.arguments for call in screen.asked.calls] == ['{"address":1}']


@pytest.mark.parametrize("names", [("shell",), ("leyline_recall_notes",), ("leyline_", "sync")])
def test_another_tools_name_that_comes_late(names: tuple[str, ...]) -> None:
    """The client's call comes whole once its name is known."""
    deltas = [[piece(0, None, "", called="a")], *([piece(0, name)] for name in names)]
    screen, shown = fed(*deltas, [piece(0, None, '{"x":1}')])
    assert own_calls(shown) == {0: ("".join(names), '{"x":1}')}
    assert shown[0]["id"] == "a" and screen.asked is None


def test_a_tool_whose_name_begins_like_the_recall_tools() -> None:
    """It is the client's, with the first of its arguments or at the answer's end."""
    screen, shown = fed([piece(0, "leyline", called="a")], [piece(0, None, "{}")])
    assert own_calls(shown) == {0: ("leyline", "{}")}
    screen = RecallScreen()
    assert screen.feed({"tool_calls": [piece(0, "leyline", called="a")]}) is None
    end = screen.feed({}, last=True)
    assert end is not None and own_calls(end["tool_calls"]) == {0: ("leyline", "")}
    assert screen.asked is None


def test_calls_without_numbers() -> None:
    """Of a server that leaves out the index, a part with an id or a name begins a call."""
    screen, shown = fed(
        [piece(None, RECALL_TOOL, '{"addr', called="b")], [piece(None, None, 'ess":1}')]
    )
    assert shown == []
    assert screen.asked is not None
    assert [call.arguments for call in screen.asked.calls] == ['{"address":1}']


def test_an_answer_that_was_cut_says_so() -> None:
    """Without its calls, an answer that ran out of tokens still says that it did."""
    call = {"id": "b", "type": "function", "function": {"name": RECALL_TOOL, "arguments": "{"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
    assert asked_in(answer) is not None
    (choice,) = without_calls(answer)["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
