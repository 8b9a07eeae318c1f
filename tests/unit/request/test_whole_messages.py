"""An edit of a message as a whole: all that the model would read of it goes, its frame stays."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message, check_messages, text_of
from leyline_proxy.request.declared import DeclaredEdit
from leyline_proxy.request.parse import ChatRequest, parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import build_directory

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SECRET = "SECRET-7Q"
SPEAKING: dict[str, Message] = {
    "a call": {
        "role": "assistant",
        "name": SECRET,
        "content": [{"type": "text", "text": SECRET}, {"type": "thinking", "thinking": SECRET}],
        "reasoning_content": SECRET,
        "reasoning": SECRET,
        "reasoning_details": [{"text": SECRET}],
        "thinking_blocks": [{"thinking": SECRET}],
        "refusal": SECRET,
        "audio": {"transcript": SECRET},
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "index": SECRET,
                "function": {"name": "f", "arguments": f'{{"{SECRET}": 1}}', "note": SECRET},
            },
            {"id": "d", "type": "custom", "custom": {"name": "g", "input": SECRET}},
            {"id": "e", "type": "function", "function": {"name": "f", "arguments": {"x": SECRET}}},
        ],
        "function_call": {"name": "h", "arguments": SECRET},
        "unheard_of": {"deep": [SECRET]},
    },
    "a result": {
        "role": "tool",
        "name": "f",
        "tool_call_id": "c",
        "content": [{"type": "text", "text": SECRET}],
        "artifact": SECRET,
        "tags": [SECRET],
    },
    "a user's": {
        "role": "user",
        "name": SECRET,
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": f"https://x/{SECRET}"}},
            {"type": "input_audio", "input_audio": {"data": SECRET, "format": "wav"}},
            {"type": "file", "file": {"file_data": SECRET, "filename": SECRET}},
        ],
    },
    "instructions": {"role": "system", "name": SECRET, "content": "be kind", "extra": SECRET},
}


def request_of(messages: list[Message], edits: list[dict[str, Any]]) -> ChatRequest:
    """A chat request, checked."""
    tenant = build_directory(Settings()).authenticate({})
    body = {"model": "m", "messages": messages, "leyline": {"edits": edits}}
    return parse_chat(json.dumps(body).encode(), {}, tenant)


def _around(kind: str) -> tuple[list[Message], int]:
    """A conversation with one such message, and its place."""
    results = [{"role": "tool", "tool_call_id": each, "content": "ok"} for each in "cde"]
    calls = {**CALL, "id": "c"}
    before: list[Message] = [{"role": "user", "content": "go"}]
    if kind == "a result":
        before.append({"role": "assistant", "content": None, "tool_calls": [calls]})
    after = results if kind == "a call" else []
    return [*before, SPEAKING[kind], *after, {"role": "user", "content": "on"}], len(before)


WAYS = ("replaced", "amortized", "forgotten", "quarantined", "both")
REFUSED = ("instructions", "quarantined")
"""Instructions can't be put into quarantine."""


@pytest.mark.parametrize(
    ("kind", "way"), [each for each in product(SPEAKING, WAYS) if each != REFUSED]
)
def test_a_declared_edit_of_a_message_means_all_that_it_says(kind: str, way: str) -> None:
    """Nothing that a template might read of it is left but ids and names of tools, and the list is
    one that can be sent: results keep their calls, whose arguments are JSON."""
    talk, place = _around(kind)
    assert SECRET in json.dumps(talk)
    edits: list[dict[str, Any]] = []
    if way in ("replaced", "amortized", "both"):
        mode = "amortize" if way == "amortized" else "forget"
        edits = [{"message": place, "replacement": "[gone]", "mode": mode}]
    if way == "forgotten" or (way == "both" and kind != "instructions"):
        talk[place] = {**talk[place], "leyline": {"forget": True}}
    if way == "quarantined":
        talk[place] = {**talk[place], "leyline": {"verdict": "quarantine"}}
    request = request_of(talk, edits)
    prepared = prepare(request.messages, [], request.options.edits, 0)
    assert not prepared.faults
    assert SECRET not in json.dumps(prepared.messages)
    assert (place in prepared.forget_marks) == (way != "amortized")
    check_messages(prepared.messages)
    sent = {entry.client_index: entry.message for entry in prepared.sent}.get(place)
    if sent is None:
        assert way in ("forgotten", "both") and kind not in ("a call", "a result")
        return
    assert text_of(sent).startswith("[")
    if kind == "a call":
        assert [call["id"] for call in sent["tool_calls"]] == ["c", "d", "e"]
        functions = [call["function"] for call in sent["tool_calls"] if "function" in call]
        assert functions == [{"name": "f", "arguments": "{}"}] * 2
    if kind == "a result":
        assert (sent["tool_call_id"], sent["name"]) == ("c", "f")


def test_a_replaced_message_is_still_forgotten_if_it_says_so() -> None:
    """An edit that amortizes takes no demand of the message's own away."""
    talk, place = _around("a result")
    talk[place] = {**talk[place], "leyline": {"forget": True}}
    request = request_of(talk, [{"message": place, "replacement": "[gone]"}])
    prepared = prepare(request.messages, [], request.options.edits, 0)
    assert place in prepared.forget_marks
    assert text_of(prepared.messages[place]) == "[forgotten]"


def test_an_edit_of_characters_leaves_the_rest_of_its_message() -> None:
    """Its caller says which part of the text is meant; calls and pictures stay."""
    talk, place = _around("a call")
    edit = DeclaredEdit(message=place, chars=(0, len(SECRET)), replacement="[gone]")
    after = prepare(talk, [], [edit], 0).messages[place]
    assert text_of(after) == "[gone]"
    assert after["tool_calls"] == SPEAKING["a call"]["tool_calls"]
