"""Recorded sessions as messages of pydantic-ai, and back."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestContext, ModelRequestParameters
from pydantic_ai.models.test import TestModel
from pydantic_ai.tools import RunContext
from pydantic_ai.usage import RunUsage

from leyline_policies import Message, text_of

MODEL = TestModel()


def recorded(folder: Path, file: str) -> list[list[Message]]:
    """The sessions of a file."""
    with gzip.open(folder / file, "rt", encoding="utf-8") as lines:
        return [plain(json.loads(line)["messages"]) for line in lines]


def plain(messages: Sequence[Message]) -> list[Message]:
    """A recorded session as the library can carry it.

    Texts are in one piece, and an id is used once: the library takes calls with the same id for
    one, and clears or keeps the results of all of them.
    """
    ids: dict[str, str] = {}
    session: list[Message] = []
    for place, message in enumerate(messages):
        kept: Message = {"role": message["role"], "content": text_of(message)}
        if message.get("tool_calls"):
            ids |= {call["id"]: f"{call['id']}-{place}" for call in message["tool_calls"]}
            kept["tool_calls"] = [
                {"id": ids[call["id"]], "type": "function", "function": dict(call["function"])}
                for call in message["tool_calls"]
            ]
        if message["role"] == "tool":
            kept["tool_call_id"] = ids[message["tool_call_id"]]
        session.append(kept)
    return session


def converted(messages: Sequence[Message]) -> list[ModelMessage]:
    """One message of the library for each of ours, but that instructions are part of the task."""
    names: dict[str, str] = {}
    found: list[ModelMessage] = []
    instructions: list[SystemPromptPart] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system":
            instructions.append(SystemPromptPart(text))
        elif role == "user":
            found.append(ModelRequest(parts=[*instructions, UserPromptPart(text)]))
            instructions = []
        elif role == "tool":
            identity = message["tool_call_id"]
            part = ToolReturnPart(names[identity], text, tool_call_id=identity)
            found.append(ModelRequest(parts=[part]))
        else:
            calls = []
            for call in message.get("tool_calls", ()):
                names[call["id"]] = name = call["function"]["name"]
                calls.append(ToolCallPart(name, call["function"]["arguments"], call["id"]))
            found.append(ModelResponse(parts=[*([TextPart(text)] if text else []), *calls]))
    return found


def restored(messages: Sequence[ModelMessage]) -> list[Message]:
    """Our messages for those of the library."""
    found: list[Message] = []
    for message in messages:
        if isinstance(message, ModelResponse):
            texts = [part.content for part in message.parts if isinstance(part, TextPart)]
            answer: Message = {"role": "assistant", "content": "".join(texts)}
            calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
            if calls:
                answer["tool_calls"] = [
                    {
                        "id": call.tool_call_id,
                        "type": "function",
                        "function": {"name": call.tool_name, "arguments": call.args},
                    }
                    for call in calls
                ]
            found.append(answer)
            continue
        for part in message.parts:
            if isinstance(part, ToolReturnPart):
                identity = {"tool_call_id": part.tool_call_id}
                found.append({"role": "tool", "content": part.content, **identity})
            elif isinstance(part, SystemPromptPart | UserPromptPart):
                role = "user" if isinstance(part, UserPromptPart) else "system"
                found.append({"role": role, "content": text_in(part)})
    return found


def text_in(part: SystemPromptPart | UserPromptPart) -> str:
    """The text of a prompt, which the library may have marked."""
    if isinstance(part.content, str):
        return part.content
    return "".join(str(getattr(item, "content", item)) for item in part.content)


def requests_in(messages: Sequence[Message]) -> Iterator[int]:
    """The number of messages that each request of the session held."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index > 1:
            yield index
    if messages[-1]["role"] != "assistant":
        yield len(messages)


def compacted(capability: Any, messages: Sequence[ModelMessage]) -> list[ModelMessage]:
    """The capability's result for one request."""
    context = RunContext(
        deps=None, model=MODEL, usage=RunUsage(), messages=[*messages], pending_messages=[]
    )
    request = ModelRequestContext(
        model=MODEL,
        messages=[*messages],
        model_settings=None,
        model_request_parameters=ModelRequestParameters(),
    )
    done = asyncio.run(capability.before_model_request(context, request))
    # A queued prompt is for this request alone: most models get it as the user's, at the end.
    queued = [
        UserPromptPart(str(part.content))
        for pending in context.pending_messages or ()
        for message in pending.messages
        for part in message.parts
        if isinstance(part, SystemPromptPart)
    ]
    return [*done.messages, *([ModelRequest(parts=queued)] if queued else [])]


def chars(messages: Sequence[Message]) -> dict[int, int]:
    """The length of each message, by its identity, as the library measures it."""
    return {
        id(message): len(message["content"])
        + sum(
            len(call["function"]["name"]) + len(call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        )
        for message in messages
    }


def quarters(messages: Sequence[Message]) -> dict[int, int]:
    """Tokens of each message such that every beginning has a quarter of its characters."""
    sums = [0, *accumulate(chars(messages).values())]
    return {id(m): sums[i + 1] // 4 - sums[i] // 4 for i, m in enumerate(messages)}
