"""Compactions in the input of both APIs: what they replace, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_policies.builtin.summarize import HEADING
from leyline_proxy.apis.anthropic.request import map_request as map_messages
from leyline_proxy.apis.fields import FieldError
from leyline_proxy.apis.responses.request import map_request as map_response
from leyline_proxy.model.compaction import SEALED, Compacted

RIGHT, OLD, WRONG = (f"{SEALED}1.{word}" for word in ("right", "old", "wrong"))
KEPT = {"role": "user", "content": "Kept."}
TOLD = ("user", f"{HEADING}All is well.")
RULES = {"role": "developer", "content": "Rules."}
LATER = {"role": "developer", "content": "Later rules."}
ASKED = {"role": "user", "content": "Asked."}
CALL = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "Nothing."}
ITEM = {"type": "compaction", "id": "cmp_1", "encrypted_content": RIGHT}
NEXT = {"role": "user", "content": "Next."}


def opens(carried: str) -> Compacted | None:
    """Open one content alone."""
    return Compacted("All is well.", (KEPT,)) if carried == RIGHT else None


def told(items: list[Any]) -> list[tuple[str, str]]:
    """Roles and texts of the chat messages."""
    body = {"model": "m", "input": items}
    mapping = map_response(body, items, opens=opens)
    return [(each["role"], each["content"]) for each in mapping.body["messages"]]


def said(messages: list[Any]) -> list[tuple[str, str]]:
    """Roles and texts of the chat messages."""
    mapping = map_messages({"model": "m", "max_tokens": 1, "messages": messages}, opens=opens)
    return [(each["role"], each["content"]) for each in mapping.body["messages"]]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], [("user", "Kept.")]),
        ([RULES], [("system", "Rules."), ("user", "Kept.")]),
        ([ASKED, CALL, RESULT], [("user", "Kept.")]),
        (
            [RULES, ASKED, CALL, RESULT, LATER],
            [("system", "Rules.\n\nLater rules."), ("user", "Kept.")],
        ),
        ([ASKED], [("user", "Asked.")]),
        ([ASKED, RULES, ASKED], [("user", "Asked."), ("system", "Rules."), ("user", "Asked.")]),
        ([{**ITEM, "encrypted_content": OLD}, ASKED], [("user", "Kept.")]),
        ([ASKED, {"role": "assistant", "content": "Yes."}], [("user", "Kept.")]),
        ([ASKED, {"type": "reasoning", "summary": []}], [("user", "Kept.")]),
    ],
)
def test_an_item_replaces_what_comes_before_it(before: Any, expected: Any) -> None:
    """Instructions stay, and so does a window of the user's messages alone; an older item doesn't
    matter."""
    assert told([*before, ITEM, NEXT]) == [*expected, TOLD, ("user", "Next.")]


def test_an_answer_after_an_item_is_one_message() -> None:
    """A call in the same answer keeps its result."""
    mapping = map_response(
        {"model": "m", "input": [ITEM, CALL, RESULT]}, [ITEM, CALL, RESULT], opens=opens
    )
    roles = [each["role"] for each in mapping.body["messages"]]
    assert roles == ["user", "user", "assistant", "tool"]
    assert mapping.origins == ("input[0]", "input[0]", "input[1]", "input[2]")


def test_a_result_whose_call_was_compacted_stays() -> None:
    """It is shown without its call, and a compaction that was changed is named."""
    assert told([ASKED, CALL, ITEM, RESULT])[-1] == ("tool", "Nothing.")
    with pytest.raises(FieldError) as raised:
        told([ASKED, {**ITEM, "encrypted_content": WRONG}])
    assert raised.value.param == "input[1].encrypted_content"


def test_a_compaction_of_another_provider_replaces_nothing() -> None:
    """The model reads that it can't be read, or its summary if that is a text."""
    foreign = {**ITEM, "encrypted_content": "gAAAAAB"}
    shown = told([ASKED, foreign, NEXT])
    assert [shown[0], shown[2]] == [("user", "Asked."), ("user", "Next.")]
    assert "another provider" in shown[1][1] and "gAAAAAB" not in shown[1][1]
    assert told([foreign, ITEM, foreign, NEXT])[:2] == [("user", "Kept."), TOLD]
    block = {"type": "compaction", "content": "All is well.", "encrypted_content": "gAAAAAB"}
    assert said([ASKED, {"role": "assistant", "content": [block]}, NEXT])[0] == TOLD


def test_a_block_replaces_what_comes_before_it() -> None:
    """The blocks after it stay, under their own numbers; system messages stay, too."""
    use = {"type": "tool_use", "id": "t", "name": "ls", "input": {}}
    block = {"type": "compaction", "content": "All is well.", "encrypted_content": RIGHT}
    text = {"type": "text", "text": "Yes."}
    history: list[Any] = [
        ASKED,
        {"role": "system", "content": "Rules."},
        {"role": "assistant", "content": [text, use, block, text]},
        {"role": "user", "content": "Next."},
    ]
    assert said(history) == [
        ("system", "Rules."),
        ("user", "Kept."),
        TOLD,
        ("assistant", "Yes."),
        ("user", "Next."),
    ]
    history[2]["content"].append({"type": "text", "text": 7})
    with pytest.raises(FieldError) as raised:
        said(history)
    assert raised.value.param == "messages[2].content[4].text"
    block["encrypted_content"] = WRONG
    with pytest.raises(FieldError) as raised:
        said(history)
    assert raised.value.param == "messages[2].content[2].encrypted_content"
