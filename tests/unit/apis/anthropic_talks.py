"""Conversations in Anthropic's shape, written and generated, and their mapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import strategies as st
from pydantic import TypeAdapter

from leyline_proxy.apis.anthropic.request import map_request
from leyline_proxy.apis.anthropic.stream import MessageEvents

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

Talk = list[dict[str, Any]]
TOOL = {"name": "ls", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "a b", "n": [1, None]}}
CALLED = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": [USE]}]


def mapped(messages: Any, **members: Any) -> dict[str, Any]:
    """The chat request."""
    return map_request({"model": "m", "max_tokens": 9, "messages": messages, **members}).body


def chat(messages: Any, **members: Any) -> list[dict[str, Any]]:
    """Its messages."""
    found: list[dict[str, Any]] = mapped(messages, **members)["messages"]
    return found


def user(*blocks: dict[str, Any]) -> Talk:
    """A conversation of one message."""
    return [{"role": "user", "content": list(blocks)}]


def result(**members: Any) -> dict[str, Any]:
    """The message that answers ``CALLED``."""
    block = {"type": "tool_result", "tool_use_id": "t1", **members}
    return {"role": "user", "content": [block]}


TEXT = st.text(alphabet="ab \n{}é€😀", max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def _block(kind: str, **members: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **members})


_SOURCE = st.sampled_from(
    [
        {"type": "base64", "media_type": "image/png", "data": "aGk="},
        {"type": "url", "url": "https://images.example/1.png"},
    ]
)
_SHOWN = st.one_of(_block("text", text=TEXT), _block("image", source=_SOURCE))


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """A conversation whose tool results answer calls that were made before them."""
    ids: list[str] = []
    messages: Talk = []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            blocks = draw(st.lists(_SHOWN, max_size=2))
            for identifier in draw(st.lists(st.sampled_from(ids), max_size=3)) if ids else ():
                result = {
                    "type": "tool_result",
                    "tool_use_id": identifier,
                    "content": draw(TEXT | st.lists(_SHOWN, max_size=2)),
                    "is_error": draw(st.booleans()),
                }
                blocks.insert(draw(st.integers(0, len(blocks))), result)
            content = draw(TEXT) if not blocks and draw(st.booleans()) else blocks
            messages.append({"role": "user", "content": content})
            continue
        said = draw(
            st.lists(
                st.one_of(
                    _block("text", text=TEXT),
                    _block("thinking", thinking=TEXT, signature=st.just("s")),
                    _block("redacted_thinking", data=st.just("x")),
                ),
                max_size=3,
            )
        )
        for _ in range(draw(st.integers(0, 2))):
            ids.append(f"toolu_{len(ids)}")
            given = draw(st.dictionaries(TEXT, _VALUES, max_size=2))
            said.append({"type": "tool_use", "id": ids[-1], "name": "ls", "input": given})
        messages.append({"role": "assistant", "content": said})
    return messages


def events_of(chunks: Sequence[dict[str, Any]], stops: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All events of a stream."""
    events = MessageEvents(message_id="msg_1", model="m", stop_sequences=stops)
    found = [event for each in chunks for event in events.feed(each)]
    return found + list(events.close())


def read(events: Sequence[dict[str, Any]]) -> Message:
    """Return what the SDK makes of a stream's events; they are in order, and each block is
    closed."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    opened: list[int] = []
    for event in events:
        if event["type"] == "ping":
            continue
        if event["type"] == "content_block_start":
            assert event["index"] == len(opened)
            opened.append(event["index"])
        elif event["type"].startswith("content_block"):
            assert event["index"] == opened[-1], "a delta of a block that isn't open"
        typed = _EVENT.validate_python(event)
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    stopped = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stopped == opened
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    return Message.model_validate(snapshot.model_dump())
