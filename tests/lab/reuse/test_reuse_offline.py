"""The offline measurement of reuse: what is cached when, and what is counted."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from leyline_lab.reuse import offline
from leyline_lab.reuse.verbatim_runs import Mask
from leyline_lab.traces.recordings import RecordedSession, TraceRequest


class Anywhere:
    """An arm that finds every token which any sequence had."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def remember(self, tokens: array[int], known: int) -> None:
        """Learn all tokens but the known ones."""
        self.seen.update(tokens[known:])

    def served(self, tokens: array[int], known: int) -> Mask:
        """Find tokens, in the prefix as well."""
        return np.array([token in self.seen for token in tokens], dtype=np.bool_)


def sent(prompt: list[int], answer: list[int]) -> Any:
    """A request with its answer."""
    return offline.Sent(array("q", prompt), array("q", prompt + answer))


def test_tokens_are_counted_beyond_the_prefix() -> None:
    """A prefix includes the answer before; an arm counts only for the tokens after it."""
    session = [
        sent([1, 2, 3], [4]),
        sent([1, 2, 3, 4, 5, 6], [7]),
        sent([1, 2, 6, 3, 9], []),
    ]
    (alone, together) = offline.measured("x", [session, session], lambda: {"any": Anywhere()})
    assert (alone.history, alone.counts.requests, alone.counts.prompt) == ("session", 6, 28)
    assert (alone.counts.prefix, alone.counts.found) == (2 * (0 + 4 + 2), {"any": 2 * 2})
    assert (together.counts.prefix, together.counts.found) == (6 + 14, {"any": 2})
    assert alone.counts.share("any") == 4 / 16
    assert "| 42.9 % | 16 | 25.0 % |" in offline.markdown([alone])


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Which files?"}, {"type": "image_url"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "ls", "arguments": '{"path": "."}'}}],
    },
    {"role": "tool", "content": "a.py b.py"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Thanks."},
]


def recorded(*requests: list[dict[str, Any]]) -> RecordedSession:
    """A session of the requests."""
    tools = ({"type": "function", "function": {"name": "ls"}},)
    return RecordedSession("s", tuple(TraceRequest(tuple(one), tools) for one in requests))


def test_a_request_begins_with_the_one_before_and_its_answer() -> None:
    """The prompts of a history that grows extend what is cached; those of an edited one don't."""
    renderer = offline.Renderer()
    first, second, third = offline.rendered(
        recorded(MESSAGES[:2], MESSAGES[:4], MESSAGES[:6]), renderer
    )
    assert len(first.cached) > len(first.prompt)
    assert second.prompt[: len(first.cached)] == first.cached
    assert third.prompt[: len(second.cached)] == second.cached
    assert third.cached == third.prompt  # nobody knows its answer
    kept = [*MESSAGES[:3], {"role": "tool", "content": "cut"}, *MESSAGES[4:]]
    before, after = offline.rendered(recorded(MESSAGES[:4], kept), renderer)
    assert before.cached == before.prompt
    assert after.prompt[: len(before.prompt)] != before.prompt
    assert len(renderer.specials) == 5
