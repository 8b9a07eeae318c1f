"""Built-in policies beside the capabilities of pydantic-ai-harness, on recorded sessions.

The library edits its own kind of messages just before each request, and what it cut is carried on
to the next one; so each session is replayed request by request.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
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
from pydantic_ai_harness.compaction import (
    ClearToolResults,
    DeduplicateFileReads,
    SlidingWindowCompaction,
    WarnNearLimits,
)

from leyline_policies import Context, Message, load_pipeline, text_of
from leyline_policies.context import apply

FILES = (
    "sessions_mini_swe_deepseek.jsonl.gz",
    "sessions_openhands_codeact.jsonl.gz",
    "sessions_swe_agent.jsonl.gz",
    "sessions_tau_bench.jsonl.gz",
)
MODEL = TestModel()
EVERY = 7  # of the requests of a session, one in so many is compared


def _sessions(folder: Path, file: str) -> list[list[Message]]:
    with gzip.open(folder / file, "rt", encoding="utf-8") as lines:
        return [_plain(json.loads(line)["messages"]) for line in lines]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """A recorded session as the library can carry it.

    Texts are in one piece, and an id is used once: the library takes calls with the same id for
    one, and clears or keeps the results of all of them.
    """
    ids: dict[str, str] = {}
    session: list[Message] = []
    for place, message in enumerate(messages):
        plain: Message = {"role": message["role"], "content": text_of(message)}
        if message.get("tool_calls"):
            ids |= {call["id"]: f"{call['id']}-{place}" for call in message["tool_calls"]}
            plain["tool_calls"] = [
                {"id": ids[call["id"]], "type": "function", "function": dict(call["function"])}
                for call in message["tool_calls"]
            ]
        if message["role"] == "tool":
            plain["tool_call_id"] = ids[message["tool_call_id"]]
        session.append(plain)
    return session


def _converted(messages: Sequence[Message]) -> list[ModelMessage]:
    """One message of the library for each of ours, but that instructions are part of the task."""
    names: dict[str, str] = {}
    converted: list[ModelMessage] = []
    instructions: list[SystemPromptPart] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system":
            instructions.append(SystemPromptPart(text))
        elif role == "user":
            converted.append(ModelRequest(parts=[*instructions, UserPromptPart(text)]))
            instructions = []
        elif role == "tool":
            identity = message["tool_call_id"]
            part = ToolReturnPart(names[identity], text, tool_call_id=identity)
            converted.append(ModelRequest(parts=[part]))
        else:
            calls = []
            for call in message.get("tool_calls", ()):
                names[call["id"]] = name = call["function"]["name"]
                calls.append(ToolCallPart(name, call["function"]["arguments"], call["id"]))
            converted.append(ModelResponse(parts=[*([TextPart(text)] if text else []), *calls]))
    return converted


def _restored(messages: Sequence[ModelMessage]) -> list[Message]:
    restored: list[Message] = []
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
            restored.append(answer)
            continue
        for part in message.parts:
            if isinstance(part, ToolReturnPart):
                identity = {"tool_call_id": part.tool_call_id}
                restored.append({"role": "tool", "content": part.content, **identity})
            elif isinstance(part, SystemPromptPart | UserPromptPart):
                role = "user" if isinstance(part, UserPromptPart) else "system"
                restored.append({"role": role, "content": part.content})
    return restored


def _requests(messages: Sequence[Message]) -> Iterator[int]:
    """The number of messages that each request of the session held."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index > 1:
            yield index
    if messages[-1]["role"] != "assistant":
        yield len(messages)


def _original(capability: Any, messages: Sequence[ModelMessage]) -> list[ModelMessage]:
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


@dataclass(frozen=True, slots=True)
class _Beside:
    """A capability of the library, and whether what it did to a request is carried on."""

    capability: Any
    carried: bool = True

    def requests(self, messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
        """The lengths of some of the requests, and the capability's result for them."""
        whole = _converted(messages)
        merged = len(messages) - len(whole)
        held: list[ModelMessage] = []
        done = 0
        for turn, end in enumerate(_requests(messages)):
            compared = turn % EVERY == 0 or end >= len(messages) - 1
            if compared or self.carried:
                sent = _original(self.capability, [*held, *whole[done : end - merged]])
                if self.carried:
                    held, done = sent, end - merged
                if compared:
                    yield end, _restored(sent)


def _chars(messages: Sequence[Message]) -> dict[int, int]:
    """The length of each message, by its identity, as the library measures it."""
    return {
        id(message): len(message["content"])
        + sum(
            len(call["function"]["name"]) + len(call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        )
        for message in messages
    }


def _quarters(messages: Sequence[Message]) -> dict[int, int]:
    """Tokens of each message such that every beginning has a quarter of its characters."""
    sums = [0, *accumulate(_chars(messages).values())]
    return {id(m): sums[i + 1] // 4 - sums[i] // 4 for i, m in enumerate(messages)}


def _compare(
    sessions: Sequence[list[Message]],
    beside: _Beside,
    spec: str,
    count: Callable[[Sequence[Message]], dict[int, int]] = _chars,
) -> tuple[int, int, int]:
    """Requests compared, how many the original edited, and on how many the two differ."""
    (policy,) = load_pipeline(spec)
    compared = edited = different = 0
    for messages in sessions:
        sizes = count(messages)
        for turn, (end, expected) in enumerate(beside.requests(messages)):
            given = messages[:end]
            context = Context(count=lambda message, sizes=sizes: sizes[id(message)])
            ours = apply(policy, given, turn, context)
            compared += 1
            edited += expected != given
            different += ours not in (expected, _with_last_task(expected, ours))
    return compared, edited, different


def _with_last_task(expected: list[Message], ours: list[Message]) -> list[Message]:
    """The library's result, with the one message more that a rule of ours keeps.

    The user's last message is never dropped; where the library dropped it, it is put after the
    instructions and the first task.
    """
    return [*expected[:2], *(m for m in ours[2:3] if m["role"] == "user"), *expected[2:]]


def _check(
    sessions: Sequence[list[Message]],
    beside: _Beside,
    spec: str,
    control: str,
    count: Callable[[Sequence[Message]], dict[int, int]] = _chars,
) -> None:
    """Equal on every request, edited on some, and another setting makes a difference."""
    compared, edited, different = _compare(sessions, beside, spec, count)
    assert compared > len(sessions)
    assert edited > 0
    assert different == 0
    assert _compare(sessions, beside, control, count)[2] > 0


@pytest.mark.parametrize("file", FILES)
def test_sliding_window_by_messages(traces_dir: Path, file: str) -> None:
    """The same messages are left on every request when their number is limited."""
    _check(
        _sessions(traces_dir, file),
        _Beside(SlidingWindowCompaction(max_messages=20, keep_messages=9)),
        "sliding_window:max_messages=20,keep_messages=9",
        "sliding_window:max_messages=20,keep_messages=13",
    )


@pytest.mark.parametrize("file", FILES)
def test_sliding_window_by_tokens(traces_dir: Path, file: str) -> None:
    """The same messages are left on every request when their length is limited."""
    sessions = _sessions(traces_dir, file)
    most = max(sum(_chars(messages).values()) for messages in sessions) // 2
    _check(
        sessions,
        _Beside(SlidingWindowCompaction(max_tokens=most, keep_tokens=most // 3, tokenizer=len)),
        f"sliding_window:max_tokens={most},keep_tokens={most // 3}",
        f"sliding_window:max_tokens={most},keep_tokens={most // 2}",
    )


@pytest.mark.parametrize(
    ("file", "tools", "key", "others"),
    [
        ("sessions_openhands_codeact.jsonl.gz", "str_replace_editor", "path", "view_range"),
        ("sessions_tau_bench.jsonl.gz", "get_reservation_details", "reservation_id", "none"),
    ],
)
def test_deduplicate_reads(traces_dir: Path, file: str, tools: str, key: str, others: str) -> None:
    """The same readings are replaced, in the same words."""

    def file_key(call: ToolCallPart) -> str | None:
        asked = call.args_as_dict()
        read = call.tool_name == tools and asked.get("command") in (None, "view")
        return asked.get(key) if read else None

    spec = f"deduplicate_reads:tools=[{tools}],path_keys=[{key}],ignore_keys=[{others}]"
    _check(
        _sessions(traces_dir, file),
        _Beside(DeduplicateFileReads(file_key=file_key)),
        spec,
        f"{spec},placeholder=other",
    )


@pytest.mark.parametrize("file", FILES)
def test_clear_tool_uses(traces_dir: Path, file: str) -> None:
    """``ClearToolResults`` clears the same results of the same request as ``clear_tool_uses``."""
    spec = "clear_tool_uses:trigger_tokens=4000,placeholder='[tool result cleared]'"
    _check(
        _sessions(traces_dir, file),
        _Beside(ClearToolResults(max_tokens=4000, keep_pairs=3, tokenizer=len), carried=False),
        f"{spec},keep=3",
        f"{spec},keep=2",
    )


@pytest.mark.parametrize("file", FILES)
def test_warn_near_limits(traces_dir: Path, file: str) -> None:
    """The same warning is at the end of the same requests."""
    spec = "warn_near_limits:max_tokens=3000,place=end"
    _check(
        _sessions(traces_dir, file),
        _Beside(WarnNearLimits(max_context_tokens=3000), carried=False),
        spec,
        "warn_near_limits:max_tokens=3010,place=end",
        count=_quarters,
    )
