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
    """However the network cuts a stream, its events and rest join to the same bytes."""
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
