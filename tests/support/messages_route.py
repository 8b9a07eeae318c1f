"""Requests of the Messages API, and reading its streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from support.fake_engine import MODEL

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SSE = "text/event-stream"
USE = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "a"}}
"""A call of a tool."""


def body(*messages: dict[str, Any], **members: Any) -> dict[str, Any]:
    """A request."""
    talk = list(messages) or [{"role": "user", "content": "Hello."}]
    return {"model": MODEL, "max_tokens": 9, "messages": talk, **members}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is the type of its data."""
    found = []
    assert text.endswith("\n\n")
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def kinds(found: Sequence[dict[str, Any]]) -> list[str]:
    """Their types."""
    return [event["type"] for event in found]
