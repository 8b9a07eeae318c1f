"""Edits that the caller declares: carried out to the letter, or refused by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Mode
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.errors import BadRequestError
from leyline_proxy.model.messages import Message, check_messages, text_of
from leyline_proxy.request.declared import DeclaredEdit, DeclaredEditError
from leyline_proxy.request.parse import parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import build_directory

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
TALK: list[Message] = [
    {"role": "system", "content": "frame"},
    {"role": "user", "content": "the task"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "SECRET"},
    {"role": "user", "content": "go on"},
]
REDACT = {"message": 3, "replacement": "[gone]", "mode": "forget"}


def request_of(messages: list[Message], edits: list[dict[str, Any]]) -> Any:
    """A chat request, checked."""
    tenant = build_directory(Settings()).authenticate({})
    body = {"model": "m", "messages": messages, "leyline": {"edits": edits}}
    return parse_chat(json.dumps(body).encode(), {}, tenant)


@pytest.mark.parametrize(
    ("edits", "param"),
    [
        ([REDACT, {"message": 1, "chars": [0, 9], "replacement": ""}], "edits[1].chars"),
        ([REDACT, {"message": 5, "drop": True}], "edits[1].message"),
        ([REDACT, {"message": 2, "drop": True}], "edits[1].drop"),
        ([{"message": 3, "drop": True, "mode": "forget"}], "edits[0].drop"),
        ([REDACT, {"message": 4, "drop": True}], "edits[1].drop"),
        (
            [
                {"message": 1, "chars": [0, 4], "replacement": "", "mode": "forget"},
                {"message": 1, "chars": [3, 5], "replacement": "", "mode": "forget"},
            ],
            "edits[1].chars",
        ),
        (
            [
                {"message": 1, "chars": [3, 5], "replacement": ""},
                {"message": 1, "chars": [0, 4], "replacement": ""},
            ],
            "edits[1].chars",
        ),
        ([REDACT, {"message": 3, "replacement": "x", "mode": "forget"}], "edits[1].replacement"),
        (
            [REDACT, {"message": 3, "chars": [0, 1], "replacement": "", "mode": "forget"}],
            "edits[1].chars",
        ),
        ([REDACT, {"message": 3, "drop": True, "mode": "forget"}], "edits[1].drop"),
        ([REDACT, {"message": 3, "mode": "amortize"}], "edits[1].mode"),
        (
            [
                {"message": 1, "chars": [0, 1], "replacement": ""},
                {"message": 1, "chars": [2, 3], "replacement": "", "mode": "forget"},
            ],
            "edits[1].mode",
        ),
    ],
    ids=[
        "beyond the text",
        "no such message",
        "a call without its result",
        "a result without its call",
        "the last user message",
        "overlap",
        "overlap, the later one first",
        "two texts for one message",
        "as a whole and in part",
        "replaced and dropped",
        "two modes",
        "two modes for two parts",
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_its_field(
    edits: list[dict[str, Any]], param: str
) -> None:
    """A declared edit is a demand: one that can't be met is a 400, and none of them is made."""
    with pytest.raises(BadRequestError) as refused:
        request_of(TALK, edits)
    assert refused.value.param == f"leyline.{param}"
    assert f"leyline.{param}" in refused.value.message
    assert "SECRET" not in refused.value.message


def test_the_last_message_of_all_cannot_be_dropped() -> None:
    """A list without a message of the user's may not become empty either."""
    with pytest.raises(BadRequestError) as refused:
        request_of(TALK[:1], [{"message": 0, "drop": True, "mode": "forget"}])
    assert refused.value.param == "leyline.edits[0].drop"


def test_a_message_is_not_dropped_that_is_to_be_forgotten() -> None:
    """Else the drop, which amortizes, would take the message away before it is forgotten."""
    talk = [*TALK[:1], {**TALK[1], "leyline": {"forget": True}}, *TALK[2:]]
    with pytest.raises(BadRequestError) as refused:
        request_of(talk, [{"message": 1, "drop": True}])
    assert refused.value.param == "leyline.edits[0].mode"
    request_of(talk, [{"message": 1, "drop": True, "mode": "forget"}])


def test_a_forget_of_the_users_last_message_is_refused() -> None:
    """It never goes, so the demand can't be met; earlier ones can be forgotten."""
    said = {"leyline": {"forget": True}}
    with pytest.raises(BadRequestError) as refused:
        request_of([*TALK[:4], {**TALK[4], **said}], [])
    assert refused.value.param == "messages[4].leyline.forget"
    request_of([TALK[0], {**TALK[1], **said}, *TALK[2:]], [])


def test_edits_of_pairs_that_go_together_are_made() -> None:
    """A call may go with its result, and one message may have several edits."""
    edits = [
        DeclaredEdit(message=2, drop=True, mode=Mode.FORGET),
        DeclaredEdit(message=3, drop=True, mode=Mode.FORGET),
        DeclaredEdit(message=1, chars=(0, 3), replacement="a"),
        DeclaredEdit(message=1, chars=(4, 8), replacement="job"),
        DeclaredEdit(message=1),
    ]
    prepared = prepare(TALK, [], edits, 0)
    assert [text_of(m) for m in prepared.messages] == ["frame", "a job", "go on"]
    assert prepared.forget_marks.keys() == {2, 3}


def test_another_user_message_may_take_the_place_of_the_last() -> None:
    """A drop beside a rewritten last message is no loss of that one."""
    talk = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    edits = [DeclaredEdit(message=0, drop=True), DeclaredEdit(message=1, replacement="2")]
    assert prepare(talk, [], edits, 0).messages == [{"role": "user", "content": "2"}]


@pytest.mark.parametrize("content", [None, [IMAGE]])
def test_text_can_be_put_where_there_is_none(content: Any) -> None:
    """It can be put into a call without a text, or before an image; it is never lost."""
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": content}]
    edit = DeclaredEdit(message=1, chars=(0, 0), replacement="a note")
    after = prepare(talk, [], [edit], 0).messages[1]
    assert text_of(after) == "a note"
    assert not isinstance(content, list) or IMAGE in after["content"]


def test_insertions_at_one_place_keep_their_order() -> None:
    """They keep the order of their declaration."""
    edits = [DeclaredEdit(message=0, chars=(1, 1), replacement=text) for text in "zyx"]
    assert prepare([{"role": "user", "content": "ab"}], [], edits, 0).messages[0]["content"] == (
        "azyxb"
    )


ANY_TALK = st.lists(st.sampled_from(["user", "system", "assistant", "calls"]), min_size=1).map(
    lambda kinds: [message for n, kind in enumerate(kinds) for message in _said(kind, n)]
)


def _said(kind: str, number: int) -> list[Message]:
    """One message, or a call with its result; each with a text of its own."""
    if kind != "calls":
        return [{"role": kind, "content": f"<{number}>"}]
    call = {**CALL, "id": f"c{number}"}
    return [
        {"role": "assistant", "content": f"<{number}a>", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"<{number}b>"},
    ]


def _edit(index: int) -> st.SearchStrategy[DeclaredEdit]:
    span = st.tuples(st.integers(0, 3), st.integers(0, 6)).map(lambda s: (s[0], s[0] + s[1]))
    mode = st.sampled_from(Mode)
    return st.one_of(
        st.builds(DeclaredEdit, message=st.just(index), mode=mode, drop=st.just(True)),
        st.builds(DeclaredEdit, message=st.just(index), mode=mode, replacement=st.just("new")),
        st.builds(
            DeclaredEdit, message=st.just(index), mode=mode, chars=span, replacement=st.just("new")
        ),
    )


@given(ANY_TALK, st.data())
def test_every_edit_is_made_or_all_are_refused(talk: list[Message], data: st.DataObject) -> None:
    """No text that an edit takes away is sent, no forget goes unnoted, and the list can be sent."""
    places = st.integers(0, len(talk) - 1)
    edits = data.draw(st.lists(places.flatmap(_edit), min_size=1, max_size=4))
    try:
        prepared = prepare(talk, [], edits, 0)
    except DeclaredEditError:
        return
    assert not prepared.faults
    check_messages(prepared.messages)
    sent = {entry.client_index: entry for entry in prepared.sent}
    for edit in edits:
        if edit.mode is Mode.FORGET:
            assert edit.message in prepared.forget_marks
        if edit.drop:
            assert edit.message not in sent
        elif edit.chars is None:
            assert text_of(sent[edit.message].message) == "new"
        else:
            assert "new" in text_of(sent[edit.message].message)
            gone = text_of(talk[edit.message])[slice(*edit.chars)]
            kept = text_of(talk[edit.message])
            assert len(gone) == edit.chars[1] - edit.chars[0]
            assert kept.replace(gone, "", 1) != kept or not gone


VERBS = st.sampled_from(
    [{}, {"forget": True}, {"forget": True, "pin": True}, {"evict": True}, {"pin": True}]
)


@given(ANY_TALK, st.data())
def test_a_declared_forget_is_carried_out_or_refused(
    talk: list[Message], data: st.DataObject
) -> None:
    """It is, whatever else is said of other messages."""
    said = [data.draw(VERBS) for _ in talk]
    told = [
        {**message, "leyline": verb} if verb else message
        for message, verb in zip(talk, said, strict=True)
    ]
    try:
        request = request_of(told, [])
    except BadRequestError as refused:
        assert refused.param is not None and refused.param.endswith(".leyline.forget")
        return
    prepared = prepare(request.messages, [], [], 0)
    assert not prepared.faults or not any(verb.get("forget") for verb in said)
    check_messages(prepared.messages)
    sent = json.dumps(prepared.messages)
    for place, verb in enumerate(said):
        if verb.get("forget"):
            assert place in prepared.forget_marks
            assert text_of(talk[place]) not in sent
