"""Claims of callers, mapped to tokens of retained turns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.character_turns import numbered, render, retained

from leyline_engine.contract import Claim, ClaimKind, ClaimState, ClaimStatus, Mode, Predicate
from leyline_proxy.claims.documents import (
    ClaimBodyError,
    RevisionBody,
    SpanBody,
    claim_document,
    claim_of,
    event_document,
    message_spans,
    predicate_of,
    read_claim,
    read_revision,
    revised,
)
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Change, DroppedMessage, Prepared, SentMessage
from leyline_proxy.model.session import RetainedTurn


def turn_of(messages: list[Message], dropped: set[int] | None = None) -> RetainedTurn:
    """A turn that sends these messages but for the dropped ones."""
    gone = dropped or set()
    change = Change("policy:rule", Mode.AMORTIZE)
    return retained(
        Prepared(
            tuple(messages),
            tuple(SentMessage(m, i) for i, m in enumerate(messages) if i not in gone),
            tuple(DroppedMessage(i, change) for i in sorted(gone)),
        ),
        output="ok",
    )


def text_of(turn: RetainedTurn, predicate: Predicate) -> str:
    """The text of the predicate's tokens; a token is a character."""
    return "".join(map(chr, turn.tokens[predicate.start : predicate.end]))


@given(messages=numbered(), data=st.data())
def test_a_range_of_messages_holds_them_and_no_other_text(
    messages: list[Message], data: st.DataObject
) -> None:
    """Each message's content is wholly in the span exactly where its index is in the range."""
    first = data.draw(st.integers(0, len(messages) - 1))
    last = data.draw(st.integers(first + 1, len(messages)))
    turn = turn_of(messages)
    predicate = predicate_of(SpanBody(messages=(first, last)), [turn])
    text = text_of(turn, predicate)
    for index, message in enumerate(messages):
        assert (message["content"] in text) == (first <= index < last)
        assert (f"m{index:02d} begins" in text) == (first <= index < last)


@given(messages=numbered(), data=st.data())
def test_what_isnt_sent_has_no_tokens(messages: list[Message], data: st.DataObject) -> None:
    """Spans are those of the sent messages; a range of dropped ones only is an error."""
    dropped = data.draw(st.sets(st.integers(0, len(messages) - 1), max_size=len(messages) - 1))
    turn = turn_of(messages, dropped)
    spans = message_spans(turn)
    assert set(spans) == set(range(len(messages))) - dropped
    for left, right in pairwise(sorted(spans)):
        assert spans[left][0] < spans[right][0] and spans[left][1] < spans[right][1]
    for index in dropped:
        with pytest.raises(ClaimBodyError) as error:
            predicate_of(SpanBody(messages=(index, index + 1)), [turn])
        assert error.value.param == "predicate.messages"


@given(
    first=st.integers(-2, 6),
    last=st.integers(-2, 6),
    start=st.integers(-2, 400),
    end=st.integers(-2, 400),
)
def test_a_predicate_never_leaves_its_turn(first: int, last: int, start: int, end: int) -> None:
    """Any span is inside the turn, or an error that names its field."""
    turn = turn_of([{"role": "user", "content": f"text {n}"} for n in range(4)])
    for span in (SpanBody(messages=(first, last)), SpanBody(start=start, end=end)):
        try:
            predicate = predicate_of(span, [turn])
        except ClaimBodyError as error:
            assert error.param.startswith("predicate.")
        else:
            assert 0 <= predicate.start < predicate.end < len(turn.tokens)


def test_a_prompt_without_an_answer_has_no_kv_of_its_last_token() -> None:
    """An answer has none either: the token generated last was never read."""
    messages: list[Message] = [{"role": "user", "content": "a"}]
    turn = retained(Prepared(tuple(messages), (SentMessage(messages[0], 0),)))
    assert message_spans(turn)[0][1] == len(turn.tokens) - 1
    assert predicate_of(SpanBody(), [turn]).end == len(turn.tokens) - 1


def test_tool_calls_belong_to_their_message() -> None:
    """A message without content is claimed by what the template writes of it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    turn = turn_of(
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
        ]
    )
    text = text_of(turn, predicate_of(SpanBody(messages=(1, 2)), [turn]))
    assert '"id": "call_1"' in text
    assert "Look." not in text and "a.py" not in text


def test_a_message_that_is_sent_twice_is_claimed_from_first_to_last() -> None:
    """A span is one run of tokens, so all between the two is in it."""
    messages = [{"role": "user", "content": text} for text in ("one", "two")]
    sent = (
        SentMessage(messages[0], 0),
        SentMessage(messages[1], 1),
        SentMessage(messages[0], 0, moved_from=0),
    )
    turn = retained(Prepared(tuple(messages), sent))
    text = text_of(turn, predicate_of(SpanBody(messages=(0, 1)), [turn]))
    assert text.count("one") == 2


def test_the_newest_turn_is_meant_where_none_is_named() -> None:
    """Older ones are meant by name; generated tokens belong to a turn, too."""
    old, new = (
        retained(Prepared((m,), (SentMessage(m, 0),)), name=name, output="ok")
        for m, name in (
            ({"role": "user", "content": "a"}, "t0"),
            ({"role": "user", "content": "bb"}, "t1"),
        )
    )
    newest = predicate_of(SpanBody(), [old, new])
    assert newest == Predicate("t1", 0, len(render([{"role": "user", "content": "bb"}]).tokens) + 1)
    assert predicate_of(SpanBody(source="t0", share=0.5), [old, new]).source == "t0"
    for span, turns in ((SpanBody(source="t2"), [old, new]), (SpanBody(), [])):
        with pytest.raises(ClaimBodyError) as error:
            predicate_of(span, turns)
        assert error.value.param == "predicate.source"


def test_a_tenant_that_no_claim_can_name_is_the_tenants_fault() -> None:
    """The error names the tenant, not a field of the caller's."""
    turn = turn_of([{"role": "user", "content": "a"}])
    body = read_claim({"session": "s", "predicate": {}})
    with pytest.raises(ClaimBodyError) as error:
        claim_of(body, [turn], name="c", tenant="équipe", session="s")
    assert error.value.param == "tenant"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session": "s"}, "predicate"),
        ({"session": "s", "predicate": {}, "ttl": 3}, "ttl"),
        ({"session": "s", "predicate": {"span": 1}}, "predicate.span"),
        ({"session": "s", "predicate": {"messages": [1]}}, "predicate.messages"),
        ({"session": "s", "predicate": {"messages": [0, "x"]}}, "predicate.messages[1]"),
        ({"session": "s", "predicate": {"start": True}}, "predicate.start"),
        ({"session": 3, "predicate": {}}, "session"),
        ({"session": "s", "predicate": {}, "id": ""}, "id"),
        ({"session": "s", "predicate": {}, "id": "x" * 129}, "id"),
    ],
)
def test_a_body_that_cant_be_read_is_named(body: dict[str, Any], param: str) -> None:
    """The error's param is the path of the field, whichever way it is wrong."""
    with pytest.raises(ClaimBodyError) as error:
        read_claim(body)
    assert error.value.param == param


def test_a_revision_keeps_what_it_doesnt_say() -> None:
    """A null ttl_s is said: it lifts the deadline."""
    predicate = Predicate("t0", 0, 4)
    claim = Claim(
        id="c",
        tenant="a",
        session="s",
        kind=ClaimKind.HARD,
        predicate=predicate,
        ttl_s=60,
        priority=3,
    )
    body = read_revision({"revision": 2, "ttl_s": None, "reason": "later"})
    later = revised(claim, body, Predicate("t1", 0, 2))
    assert (later.revision, later.ttl_s, later.reason) == (2, None, "later")
    assert (later.kind, later.priority, later.predicate.source) == (ClaimKind.HARD, 3, "t1")
    with pytest.raises(ClaimBodyError) as error:
        revised(claim, RevisionBody(revision=3, priority=101), predicate)
    assert error.value.param == "priority"


def test_documents_tell_no_tenant_and_no_foreign_turn() -> None:
    """Pages are counted: they are called by the turns that brought them, whosever those are."""
    claim = Claim(
        id="c", tenant="tenant-a", session="s", kind=ClaimKind.SOFT, predicate=Predicate("t0", 0, 4)
    )
    document = claim_document(
        ClaimStatus(claim=claim, state=ClaimState.MATERIALIZED, remaining_ms=1500, age_ms=250)
    )
    assert (document["expires_in_s"], document["age_s"]) == (1.5, 0.25)
    event = event_document(
        {
            "event": "found",
            "seq": 3,
            "tenant": "tenant-a",
            "claim": "c",
            "runs": [["t9", 0, 4], ["t8", 4, 6]],
        }
    )
    assert event == {"event": "found", "seq": 3, "claim": "c", "pages": 6}
    assert "tenant-a" not in str(document)
