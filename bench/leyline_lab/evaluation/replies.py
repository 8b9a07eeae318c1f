"""The replies of a model to a session's requests, and the judge of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from leyline_lab.fidelity.judges import called_tool, says, tagged_calls

from ..engines.stack import CHAT_PATH
from ..errors import StackError
from ..replay.driver import SESSION_HEADER

TIMEOUT_S = 300.0
"""Longest wait for an answer."""

_NOT_SPLICED = frozenset(
    {
        "incompatible_identity",
        "invalid_directive",
        "invalid_edit",
        "transform_failed",
        "unsupported_runtime",
    }
)
"""Reasons of a receipt by which the arms that splice would measure a re-prefill."""


class Reply(StrEnum):
    """The model's reaction to a question for a setting."""

    RIGHT = "right"
    LOOKS_UP = "looks up"
    WRONG = "wrong"


def answer_of(
    client: httpx.Client, session: str, body: Mapping[str, Any], *, splices: bool
) -> dict[str, Any]:
    """Send a chat request and return its answer.

    Args:
        splices: True if the engine must take edits.

    Raises:
        StackError: the request fails, or the engine refuses the edits.
    """
    answer = client.post(CHAT_PATH, json=body, headers={SESSION_HEADER: session})
    if answer.status_code != httpx.codes.OK:
        raise StackError(f"HTTP {answer.status_code}: {answer.text[:200]}")
    document: dict[str, Any] = answer.json()
    account = document["leyline"]
    if splices and account["reason"] in _NOT_SPLICED:
        said = ": ".join(filter(None, (account["reason"], account.get("detail"))))
        raise StackError(f"the engine doesn't splice its edits ({said})")
    return document


def judged(message: Mapping[str, Any], value: str) -> Reply:
    """Return the reaction to a question for a value."""
    text = str(message.get("content") or "")
    if says(text, value):
        return Reply.RIGHT
    # A server without a parser of tool calls leaves them in the text.
    return Reply.LOOKS_UP if message.get("tool_calls") or called_tool(text) else Reply.WRONG


@dataclass(frozen=True, slots=True)
class LookUp:
    """A call of one of the client's tools."""

    id: str
    arguments: Mapping[str, Any]
    message: Mapping[str, Any]
    """The assistant's message, with this call alone."""


def looked_up(message: Mapping[str, Any], tool: str, call_id: str) -> LookUp | None:
    """Return a message's first call of a tool, as the client has it in its history; None if it
    has none that can be read.

    Args:
        call_id: id of a call that the engine left in the text.
    """
    for call in message.get("tool_calls") or ():
        if call["function"]["name"] == tool:
            return _look_up(call["id"], tool, call["function"]["arguments"])
    for written in tagged_calls(str(message.get("content") or "")):
        if written["name"] == tool:
            return _look_up(call_id, tool, json.dumps(written.get("arguments")))
    return None


def _look_up(call_id: str, tool: str, arguments: str) -> LookUp | None:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return LookUp(call_id, parsed, message)
