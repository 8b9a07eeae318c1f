"""Requests of the Responses API before a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
from support.fake_engine import DONE, MODEL, Answer, chunk
from support.messages_route import SSE

RESPONSES = "/v1/responses"
LS = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "b.py"}
USER = {"role": "user", "content": "List."}


def body(given: Any = "Hello.", **members: Any) -> dict[str, Any]:
    """A request."""
    return {"model": MODEL, "input": given, **members}


async def ask(client: httpx.AsyncClient, given: Any = "Hello.", **members: Any) -> dict[str, Any]:
    """A response."""
    answer = await client.post(RESPONSES, json=body(given, **members))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def scripted(**members: Any) -> Answer:
    """A stream with reasoning, text and a call; usage comes after the finish chunk."""
    call = {"index": 0, "id": "c1", "function": {"name": "ls", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "I look."},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ': "é"}'}}]},
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    parts = [*map(chunk, deltas), chunk({}, "tool_calls"), last, DONE]
    return Answer(parts, content_type=SSE, **members)
