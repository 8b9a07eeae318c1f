"""Built-in policies beside the capabilities of pydantic-ai-harness, on recorded sessions.

The library edits its own kind of messages just before each request, and what it cut is carried on
to the next one; so each session is replayed request by request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ToolCallPart
from pydantic_ai_harness.compaction import (
    ClearToolResults,
    DeduplicateFileReads,
    SlidingWindowCompaction,
    WarnNearLimits,
)
from pydantic_sessions import chars, compacted, converted, quarters, recorded, requests_in, restored

from leyline_policies import Context, Message, load_pipeline
from leyline_policies.context import apply

FILES = (
    "sessions_mini_swe_deepseek.jsonl.gz",
    "sessions_openhands_codeact.jsonl.gz",
    "sessions_swe_agent.jsonl.gz",
    "sessions_tau_bench.jsonl.gz",
)
EVERY = 7  # of the requests of a session, one in so many is compared


@dataclass(frozen=True, slots=True)
class _Beside:
    """A capability of the library, and whether what it did to a request is carried on."""

    capability: Any
    carried: bool = True

    def requests(self, messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
        """The lengths of some of the requests, and the capability's result for them."""
        whole = converted(messages)
        merged = len(messages) - len(whole)
        held: list[ModelMessage] = []
        done = 0
        for turn, end in enumerate(requests_in(messages)):
            compared = turn % EVERY == 0 or end >= len(messages) - 1
            if compared or self.carried:
                sent = compacted(self.capability, [*held, *whole[done : end - merged]])
                if self.carried:
                    held, done = sent, end - merged
                if compared:
                    yield end, restored(sent)


def _compare(
    sessions: Sequence[list[Message]],
    beside: _Beside,
    spec: str,
    count: Callable[[Sequence[Message]], dict[int, int]] = chars,
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
    count: Callable[[Sequence[Message]], dict[int, int]] = chars,
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
        recorded(traces_dir, file),
        _Beside(SlidingWindowCompaction(max_messages=20, keep_messages=9)),
        "sliding_window:max_messages=20,keep_messages=9",
        "sliding_window:max_messages=20,keep_messages=13",
    )


@pytest.mark.parametrize("file", FILES)
def test_sliding_window_by_tokens(traces_dir: Path, file: str) -> None:
    """The same messages are left on every request when their length is limited."""
    sessions = recorded(traces_dir, file)
    most = max(sum(chars(messages).values()) for messages in sessions) // 2
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
        recorded(traces_dir, file),
        _Beside(DeduplicateFileReads(file_key=file_key)),
        spec,
        f"{spec},placeholder=other",
    )


@pytest.mark.parametrize("file", FILES)
def test_clear_tool_uses(traces_dir: Path, file: str) -> None:
    """``ClearToolResults`` clears the same results of the same request as ``clear_tool_uses``."""
    spec = "clear_tool_uses:trigger_tokens=4000,placeholder='[tool result cleared]'"
    _check(
        recorded(traces_dir, file),
        _Beside(ClearToolResults(max_tokens=4000, keep_pairs=3, tokenizer=len), carried=False),
        f"{spec},keep=3",
        f"{spec},keep=2",
    )


@pytest.mark.parametrize("file", FILES)
def test_warn_near_limits(traces_dir: Path, file: str) -> None:
    """The same warning is at the end of the same requests."""
    spec = "warn_near_limits:max_tokens=3000,place=end"
    _check(
        recorded(traces_dir, file),
        _Beside(WarnNearLimits(max_context_tokens=3000), carried=False),
        spec,
        "warn_near_limits:max_tokens=3010,place=end",
        count=quarters,
    )
