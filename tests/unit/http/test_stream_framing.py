"""Streams of every route, whatever the pieces that the engine's bytes arrive in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fake_engine import CAPABILITY, DONE, MODEL, Answer, FakeEngine, chunk, proxy_before

CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "ls", "arguments": '{"path": "ü"}'},
}
EVENTS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "Think …"}),
    chunk({"content": "Hé"}),
    chunk({"content": 'l"lo\n\n'}),
    chunk({"tool_calls": [CALL]}),
    chunk({}, "tool_calls"),
    b'data: {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 4}}\n\n',
    DONE,
]
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 50},
    "/v1/responses": {"input": "Hi.", "store": False},
}
NAMES = re.compile(
    rb'"(?:id|item_id|session|turn|message_id|created|created_at|completed_at|micros\w*)":'
    rb'\s*(?:"[^"]*"|[\d.]+)'
)
"""The members that differ from one request to the next."""


def answered(route: str, parts: Sequence[bytes]) -> bytes:
    """Return what a client of ``route`` gets of an engine that sends these pieces."""

    async def ask() -> bytes:
        engine = FakeEngine(capability=CAPABILITY)
        engine.answers = [Answer(parts, content_type="text/event-stream")]
        async with proxy_before(engine, log_level="error") as client:
            body = {"model": MODEL, "stream": True, **ROUTES[route]}
            got = await client.post(route, json=body)
        assert got.status_code == 200, got.text
        return NAMES.sub(b"", got.content)

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """Each route's output for events that come one by one."""
    return {route: answered(route, EVENTS) for route in ROUTES}


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=examples(25))
@given(cuts=st.lists(st.integers(0, sum(map(len, EVENTS))), max_size=40))
def test_the_pieces_that_events_arrive_in_make_no_difference(
    route: str, cuts: list[int], whole: dict[str, bytes]
) -> None:
    """A client sees the same events wherever the engine's bytes are cut, within a character too."""
    stream = b"".join(EVENTS)
    ends = [*sorted(set(cuts)), len(stream)]
    parts = [stream[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert answered(route, parts) == whole[route]


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
@settings(max_examples=examples(25))
@given(
    ends=st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]), min_size=8, max_size=8),
    comments=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_line_ends_and_comments_of_the_engine_make_no_difference(
    route: str, ends: list[bytes], comments: list[bool], whole: dict[str, bytes]
) -> None:
    """Translated events are the same for all line ends of the engine; its comments keep the
    connection alive and say nothing."""
    parts = []
    for event, end, comment in zip(EVENTS, ends, comments, strict=True):
        parts.append(event.removesuffix(b"\n\n") + end)
        parts += [b": wait" + end] * comment
    got = answered(route, parts)
    pings = re.compile(rb'event: ping\ndata: \{"type":"ping"\}\n\n|: wait(\r\n\r\n|\n\n|\r\r)')
    assert pings.sub(b"", got) == pings.sub(b"", whole[route])


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_says_what_the_engine_said(route: str, whole: dict[str, bytes]) -> None:
    """Text, thoughts and calls are all there, so that equality above isn't that of nothing."""
    text = whole[route]
    assert text.count(b"ls") >= 1
    assert "Hé".encode() in text or b"H\\u00e9" in text
    assert b"Think" in text and b"leyline" in text


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_without_an_end_is_an_error_however_cleanly_its_stream_ends(route: str) -> None:
    """A router closes the stream of an engine that was killed as if it were over."""
    got = answered(route, EVENTS[:5])
    assert b"ended its stream before its answer was complete" in got
    assert DONE not in got and b"message_stop" not in got and b"response.completed" not in got


def test_an_answer_that_ends_in_the_streams_last_bytes_is_whole() -> None:
    """Neither ``[DONE]`` nor the last blank line is needed."""
    got = answered("/v1/chat/completions", [*EVENTS[:5], EVENTS[5].rstrip()])
    assert b'"finish_reason": "tool_calls"' in got and b'"error"' not in got
