"""Event streams as bytes: nothing is lost, re-ordered or re-encoded."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.http.sse import (
    ChunkFacts,
    EventSplitter,
    append_to_event,
    chunk_facts,
    event_data,
    tells_nothing,
)

EVENT = st.sampled_from(
    [
        b'data: {"a": 1}\n\n',
        b": keep-alive\n\n",
        b"data: x\r\n\r\n",
        b"event: e\ndata: y\n\n",
        b"data: \xe4\xbd\xa0\r\r",
        b"\n\n",
    ]
)


@given(st.lists(EVENT), st.binary(max_size=5), st.integers(1, 7))
def test_events_joined_are_the_stream(events: list[bytes], tail: bytes, size: int) -> None:
    """A stream's events and rest join to the same bytes, however the network cuts it."""
    stream = b"".join(events) + tail
    splitter = EventSplitter()
    found: list[bytes] = []
    for start in range(0, len(stream), size):
        found += splitter.feed(stream[start : start + size])
    assert b"".join(found) + splitter.rest() == stream
    assert splitter.rest() == b""


@given(st.lists(st.sampled_from([b"data: a\n\n", b"data: bb\r\n\r\n", b": c\n\n"])))
def test_each_event_is_found(events: list[bytes]) -> None:
    """Whole events come out one by one, also byte by byte."""
    splitter = EventSplitter()
    found: list[bytes] = []
    for byte in b"".join(events):
        found += splitter.feed(bytes([byte]))
    assert found == events


def test_data_lines_are_joined_and_comments_are_none() -> None:
    """The data of an event follows the standard."""
    assert event_data(b"data: a\ndata:b\n\n") == b"a\nb"
    assert event_data(b": ping\n\n") == b""


def test_facts_of_chunks() -> None:
    """Role openings bear no token; content, tool calls and finish reasons do."""

    def facts(choice: dict[str, object], **members: object) -> ChunkFacts:
        return chunk_facts(
            b"data: " + json.dumps({"choices": [choice], **members}).encode() + b"\n\n"
        )

    assert not facts({"delta": {"role": "assistant", "content": ""}}).bears_token
    assert facts({"delta": {"content": "a"}}).bears_token
    assert facts({"delta": {"tool_calls": [{"index": 0}]}}).bears_token
    assert facts({"delta": {}, "finish_reason": "stop"}).finishes
    assert facts({"delta": {}}, usage={"prompt_tokens": 3}).usage == {"prompt_tokens": 3}
    assert chunk_facts(b'data: {"error": {"code": 400}}\n\n').error == {"code": 400}
    assert chunk_facts(b'data: {"error": "plain"}\n\n').error == {}
    for other in (b"data: [DONE]\n\n", b": ping\n\n", b"data: no json\n\n", b"data: [1]\n\n"):
        assert chunk_facts(other) == chunk_facts(b"")


def test_a_member_is_appended_by_byte_surgery() -> None:
    """All other bytes of the event stay, whatever their spacing and terminator."""
    event = b'id: 7\r\ndata: {"b" : 1.00, "a":"\\u00e9" }\r\n\r\n'
    changed = append_to_event(event, {"leyline": {"x": 1}})
    assert changed == b'id: 7\r\ndata: {"b" : 1.00, "a":"\\u00e9","leyline":{"x":1} }\r\n\r\n'
    assert append_to_event(b"data: [DONE]\n\n", {"leyline": 1}) == b"data: [DONE]\n\n"


MEMBER = st.one_of(
    st.tuples(
        st.sampled_from(("error", "usage", "x")), st.sampled_from(("null", "{}", "1", " null"))
    ),
    st.just(("choices", '[{"finish_reason":null,"delta":{"content":"finish_reason\\": 1"}}]')),
    st.just(("choices", '[{"delta":{},"finish_reason" : "stop"}]')),
    st.just(("choices", '[{"f\\u0069nish_reason":"stop"}]')),
    st.just(("us\\u0061ge", '{"a":1}')),
)
LINE_ENDS = st.sampled_from(("\n", "\r\n", "\r"))


@st.composite
def chunks_of_events(draw: st.DrawFn) -> bytes:
    """Events of a stream, some of which say something."""
    events = []
    for members in draw(st.lists(st.lists(MEMBER, max_size=3), min_size=1, max_size=4)):
        end = draw(LINE_ENDS)
        space = draw(st.sampled_from(("", " ", f"{end}data: ")))
        text = ",".join(f'"{name}":{space}{value}' for name, value in members)
        data = draw(st.sampled_from((f"{{{text}}}", f"{{{text}}}", "[DONE]")))
        events.append(f"data: {data}{end}{end}")
    return "".join(events).encode()


@given(chunks_of_events())
def test_what_tells_nothing_has_no_facts(chunk: bytes) -> None:
    """No finish reason, usage, error or end of a stream passes unread."""
    if not tells_nothing(chunk):
        return
    splitter = EventSplitter()
    for event in splitter.feed(chunk):
        facts = chunk_facts(event)
        assert (facts.finishes, facts.usage, facts.error) == (False, None, None)
        assert event_data(event) != b"[DONE]"
    assert splitter.empty


def test_plain_tokens_tell_nothing() -> None:
    """Chunks of the usual forms aren't decoded; what isn't whole is."""
    plain = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}],"usage":null}\n\n'
    spaced = plain.replace(b":null", b": null")
    assert tells_nothing(plain) and tells_nothing(plain + spaced + b": keep-alive\n\n")
    assert not tells_nothing(plain + b"data: {")
    assert not tells_nothing(plain.replace(b'"usage":null', b'"usage":{"prompt_tokens":1}'))
    assert not tells_nothing(plain.replace(b'_reason":null', b'_reason":"stop"'))
    assert not tells_nothing(plain + b"data: [DONE]\n\n")
