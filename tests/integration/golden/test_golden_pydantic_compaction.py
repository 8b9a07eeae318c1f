"""Policies that hold others, the judge, notices and offloading beside pydantic-ai-harness."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.usage import RunUsage
from pydantic_ai_harness.compaction import (
    ClearToolResults,
    CompactOnRequest,
    DeduplicateFileReads,
    FallbackCompaction,
    RelevanceCompaction,
    SlidingWindowCompaction,
    TieredCompaction,
)
from pydantic_ai_harness.tool_output_limits import Band, LocalFileStore, Spill, ToolOutputLimits
from pydantic_sessions import MODEL, chars, compacted, converted, recorded, requests_in, restored

from leyline_policies import Context, Message, load_pipeline
from leyline_policies.builtin.fallback import Fallback
from leyline_policies.builtin.relevance import judgements_in
from leyline_policies.builtin.sliding_window import SlidingWindow
from leyline_policies.context import apply

FILES = (
    "sessions_mini_swe_deepseek.jsonl.gz",
    "sessions_openhands_codeact.jsonl.gz",
    "sessions_swe_agent.jsonl.gz",
    "sessions_tau_bench.jsonl.gz",
)
SHORT = 40
"""Characters that stay of a shortened result."""
CLEARED = "[tool result cleared]"
CLEAR = f"clear_tool_uses:trigger_tokens=0,keep=3,placeholder='{CLEARED}'"
WINDOW = "sliding_window:max_messages=6,keep_messages=5"
"""Moves with every message, as the library's does that is called without its trigger."""


def _quoted(*specs: str) -> str:
    """Specs as a list in the spec language."""
    return "[" + ";".join(f'"{spec}"' for spec in specs) + "]"


def _ours(spec: str, messages: list[Message], **facts: Any) -> list[Message]:
    sizes = chars(messages)

    def size(message: Message) -> int:
        return sizes.get(id(message), chars([message])[id(message)])

    (policy,) = load_pipeline(spec)
    return apply(policy, messages, 0, Context(count=size, **facts))


def _whole(messages: list[Message]) -> list[Message]:
    """The last request of a session."""
    return messages[: [*requests_in(messages)][-1]]


@pytest.mark.parametrize("file", FILES)
def test_tiers(traces_dir: Path, file: str) -> None:
    """For each target the same tiers are reached, with the same result; each of three suffices
    somewhere, and somewhere even the last doesn't."""
    reached: set[int] = set()
    for messages in map(_whole, recorded(traces_dir, file)):
        whole = converted(messages)
        total = sum(chars(messages).values())
        clear = ClearToolResults[None](max_tokens=1, keep_pairs=3, tokenizer=len)
        window = SlidingWindowCompaction[None](max_messages=1, keep_messages=5)
        tiers = [DeduplicateFileReads[None](file_key=lambda call: None), clear, window]
        for part in (2, 5, 8, 10):
            target = total * part // 10
            original = TieredCompaction(tiers=tiers, target_tokens=target, tokenizer=len)
            expected = restored(compacted(original, whole))
            specs = ["drop_images", CLEAR, WINDOW]
            spec = f"tiered:target_tokens={target},tiers={_quoted(*specs)}"
            ours = _ours(spec, messages)
            assert ours in (expected, _with_last_task(expected, ours)), part
            reached.add(_level(messages, ours))
    assert reached >= {0, 2}


def _with_last_task(expected: list[Message], ours: list[Message]) -> list[Message]:
    """The library's result with the user's last message, which is never dropped here."""
    return [*expected[:2], *(m for m in ours[2:3] if m["role"] == "user"), *expected[2:]]


def _level(messages: Sequence[Message], sent: Sequence[Message]) -> int:
    """0 for no edit, 1 for cleared results, 2 for dropped messages."""
    return 2 if len(sent) < len(messages) else int([*sent] != [*messages])


def test_a_compaction_that_the_model_asks_for(traces_dir: Path) -> None:
    """The request after the call has the strategy's result on all that had been said."""
    tool = CompactOnRequest[None](SlidingWindowCompaction(max_messages=1, keep_messages=5))
    for messages in recorded(traces_dir, FILES[1])[:8]:
        asked = _with_request(messages)
        whole = converted(asked)
        running = asyncio.run(tool.for_run(_context(whole)))
        call = ToolCallPart("compact_context", "{}", "compact")
        kind = running.get_toolset().tools["compact_context"].tool_def  # type: ignore[union-attr]
        accepted = running.after_tool_execute(
            _context(whole), call=call, tool_def=kind, args={}, result="ok"
        )
        assert asyncio.run(accepted) == "ok"
        expected = restored(compacted(running, whole))
        ours = _ours(f"compact_on_request:policies=['{WINDOW}']", asked)
        assert ours in (expected, _with_last_task(expected, ours))
        later = [*asked, {"role": "assistant", "content": "so"}, {"role": "user", "content": "?"}]
        longer = _ours(f"compact_on_request:policies=['{WINDOW}']", later)
        assert longer == [*ours, *later[-2:]]


def _with_request(messages: list[Message]) -> list[Message]:
    """A session's beginning, and a call of the tool."""
    end = [i for i, message in enumerate(messages) if message["role"] == "assistant"][9]
    function = {"name": "compact_context", "arguments": "{}"}
    call = {"id": "compact", "type": "function", "function": function}
    return [
        *messages[:end],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "compact", "content": "ok"},
    ]


def _context(messages: Sequence[ModelMessage]) -> RunContext[None]:
    return RunContext(deps=None, model=MODEL, usage=RunUsage(), messages=[*messages])


def test_a_strategy_that_fails(traces_dir: Path) -> None:
    """The next one's result is sent, and a strategy that works is the only one."""

    class Fails:
        name, mode, trusted = "fails", "amortize", True

        async def compact(self, messages: Any, ctx: Any) -> Any:
            raise ModelAPIError("judge", "down")

        def transform(self, messages: Any, turn_idx: int) -> Any:
            raise ValueError("down")

    messages = _whole(recorded(traces_dir, FILES[1])[0])
    window: Any = SlidingWindowCompaction(max_messages=1, keep_messages=5)
    ours = SlidingWindow(max_messages=6, keep_messages=5)
    for chain, policies in (
        ([Fails(), window], (Fails(), ours)),
        ([window, Fails()], (ours, Fails())),
    ):
        original = FallbackCompaction[None](chain, max_tokens=1)
        expected = restored(compacted(original, converted(messages)))
        sent = apply(Fallback(policies), messages, 0, Context())  # type: ignore[arg-type]
        assert sent in (expected, _with_last_task(expected, sent))
        assert len(sent) < len(messages)


@pytest.mark.parametrize(("trigger", "target"), [(0.9, 0.5), (0.6, 0.25), (0.5, 0.35)])
def test_the_judge_selects_the_same_steps(traces_dir: Path, trigger: float, target: float) -> None:
    """With the same ratings the same steps are kept, shortened and dropped; others differ.

    The two numbers are shares of a session's tokens.
    """
    outcomes: set[str] = set()
    sessions = [each for file in FILES for each in recorded(traces_dir, file)[:4]]
    for number, messages in enumerate(map(_whole, sessions)):
        cut = [_unlike_notes(message) for message in messages]
        total = sum(chars(cut).values())
        most, aim = int(total * trigger), int(total * target)
        ratings = _ratings(number, len(cut))
        original = RelevanceCompaction[None](
            FunctionModel(_judge(ratings)),
            max_tokens=most,
            target_tokens=aim,
            keep_tokens=total // 10,
            truncated_result_chars=SHORT,
            judge_concurrency=1,
            tokenizer=len,
        )
        expected = restored(compacted(original, converted(cut)))
        spec = (
            f"relevance:trigger_tokens={most},target_tokens={aim},keep_tokens={total // 10},"
            f"judge_tokens=10000000,truncated_result_chars={SHORT}"
        )
        sent = _ours(spec, cut, completions=_Written(_answer(ratings)))
        assert sent == expected, number
        other = _ours(spec, cut, completions=_Written(_answer(ratings[::-1])))
        outcomes |= {"dropped"} if len(sent) < len(cut) else set()
        outcomes |= {"shortened"} if "removed by compaction" in str(sent) else set()
        outcomes |= {"by rank"} if other != sent else set()
    assert outcomes == {"dropped", "by rank", "shortened"}


def _unlike_notes(message: Message) -> Message:
    """A message whose text is so long that a note in its place is shorter, or isn't cut at all."""
    text = str(message["content"])
    return {**message, "content": text[:SHORT]} if SHORT < len(text) < 200 else dict(message)


def _ratings(seed: int, steps: int) -> list[tuple[float, float]]:
    dice = Random(seed)
    return [(dice.randrange(101) / 100, dice.randrange(101) / 100) for _ in range(steps)]


def _judge(ratings: list[tuple[float, float]]) -> Callable[[list[ModelMessage], AgentInfo], Any]:
    """A judge that rates the steps in order."""
    numbers = count()

    def judge(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        needed, matters = ratings[next(numbers)]
        arguments = {"needed_verbatim": needed, "still_matters": matters}
        return ModelResponse(parts=[ToolCallPart(info.output_tools[0].name, arguments)])

    return judge


def _answer(ratings: list[tuple[float, float]]) -> str:
    lines = [f"{i}: {n * 100:.0f} {m * 100:.0f}" for i, (n, m) in enumerate(ratings, 1)]
    answer = "\n".join(lines)
    assert len(judgements_in(answer, len(ratings))) == len(ratings)
    return answer


class _Written(dict[str, str]):
    """The same text as the answer to each question."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def get(self, key: str, default: Any = None) -> str:
        """The text."""
        return self._text


def test_notices_say_the_same_numbers(traces_dir: Path) -> None:
    """A notice counts the messages and tokens that the library's receipt counts."""
    numbers = re.compile(r"(\d+) messages?[ ,(]+~(\d+) tokens")
    compared = 0
    for messages in map(_whole, recorded(traces_dir, FILES[0])):
        window = SlidingWindowCompaction[None](
            max_messages=12, keep_messages=6, receipts=True, tokenizer=len
        )
        expected = restored(compacted(window, converted(messages)))
        receipt = [m["content"] for m in expected if m["content"].startswith("[History before")]
        # The library's receipt is one of the messages that it keeps.
        sent = _ours(f"{WINDOW},notices=true", messages)
        told = [m["content"] for m in sent if "[Here, " in str(m["content"])]
        assert len(told) == len(receipt)
        for ours, theirs in zip(told, receipt, strict=True):
            assert numbers.findall(ours)[-1:] == numbers.findall(theirs)
            compared += 1
    assert compared > 5


def test_what_is_too_large_is_stored_and_previewed(traces_dir: Path, tmp_path: Path) -> None:
    """The same results are replaced, the text of the preview is the same, and all can be read."""
    limits = ToolOutputLimits[None](
        bands=[Band(over=2_000, action=Spill(preview_chars=300))], store=LocalFileStore(tmp_path)
    )
    (policy,) = load_pipeline("offload:max_chars=2000,preview_chars=300")
    compared = 0
    for messages in recorded(traces_dir, FILES[1])[:6]:
        sent = apply(policy, messages, 0, Context())
        for before, after in zip(messages, sent, strict=True):
            if before["role"] != "tool":
                assert after is before
                continue
            theirs = _limited(limits, str(before["content"]))
            if theirs is None:
                assert after is before
                continue
            assert theirs.partition("]\n")[2] == _below_stubs(after["content"])
            assert f"({len(before['content']):,} chars)" in theirs
            assert f"({len(before['content']):,} chars)" in after["content"]
            compared += 1
    assert compared > 5


def _limited(limits: ToolOutputLimits[None], text: str) -> str | None:
    """The library's text in place of a result; None if it leaves it."""
    done = asyncio.run(
        limits.after_tool_execute(
            _context([]),
            call=ToolCallPart("bash", "{}", "c"),
            tool_def=ToolDefinition(name="bash"),
            args={},
            result=text,
        )
    )
    return None if isinstance(done, str) else str(done.return_value)


def _below_stubs(text: str) -> str:
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if i and not line.startswith("[evicted: "))
    return "\n".join(lines[first:])
