"""Rendering from memory: published templates and recorded sessions, turn by turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from incremental_kit import Message, Tools, TransformersReference, check
from template_kit import recorded, renderer_of, tokenizer_of

from leyline_proxy.render.memoised.fragments import FragmentMemory, MessageEntry, key_of
from leyline_proxy.render.memoised.template import IncrementalTemplate
from leyline_proxy.render.template import ChatTemplate, chat_environment

READ_ALL = {"deepseek-ai-DeepSeek-V3.2", "openai-gpt-oss-120b"}
"""Every iteration of theirs may read the whole conversation; nothing is remembered."""
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"thinking": True})
Step = tuple[list[Message], Tools, dict[str, Any]]


def steps(rng: random.Random, messages: list[Message], tools: Tools, count: int) -> Iterator[Step]:
    """A session's turns, each followed by an edit of it: other texts, tools, options, fewer
    messages, the same one twice."""
    ends = sorted(rng.sample(range(1, len(messages) + 1), min(count, len(messages))))
    for end in ends:
        turn = messages[:end]
        yield turn, tools, {}
        edited = list(turn)
        at = rng.randrange(end)
        kind = rng.choice(("replace", "cut", "drop", "repeat", "tools", "options"))
        text = str(edited[at].get("content") or "")
        if kind == "replace":
            edited[at] = {**edited[at], "content": f"[{rng.random()}]"}
        elif kind == "cut":
            edited[at] = {**edited[at], "content": text[: len(text) // 2] + "[cut]"}
        elif kind == "drop":
            del edited[at]
        elif kind == "repeat":
            edited.insert(at, edited[at])
        yield (
            edited or turn,
            (tools or [])[1:] or None if kind == "tools" else tools,
            rng.choice(OPTIONS[1:]) if kind == "options" else {},
        )


def compare(
    traces: Path, name: str, source: str, *, sessions: int, messages: int, count: int
) -> int:
    """Check every step; returns how many prompts there were."""
    tokenizer = tokenizer_of(source)
    renderer, reference = renderer_of(tokenizer, source), TransformersReference(source, tokenizer)
    rng = random.Random(name)
    return sum(
        check(renderer, reference, *step)
        for recording, tools in recorded(traces, sessions, messages)
        for step in steps(rng, recording, tools, count)
    )


def test_remembered_prompts_are_those_of_transformers(
    sources: dict[str, str], traces_dir: Path
) -> None:
    """Text, tokens and spans are equal after appends, edits, removals, other tools and options."""
    for name, source in sources.items():
        prompts = compare(traces_dir, name, source, sessions=1, messages=10, count=2)
        assert prompts >= 10, name


@pytest.mark.nightly
def test_remembered_prompts_of_whole_sessions(sources: dict[str, str], traces_dir: Path) -> None:
    """The same over many more sessions, to their ends."""
    for name, source in sources.items():
        compare(traces_dir, name, source, sessions=2, messages=40, count=8)


class CountingMemory(FragmentMemory):
    """Counts the messages that are rendered again."""

    anew = 0

    def remember(self, *arguments: Any) -> None:
        self.anew += 1
        super().remember(*arguments)


def test_an_append_renders_what_is_new_and_the_exchange_before(
    sources: dict[str, str], traces_dir: Path
) -> None:
    """At most the last two messages of a conversation are rendered once more, at any length."""
    for name in sources.keys() - READ_ALL:
        template = ChatTemplate(sources[name], {"bos_token": "<bos>"})
        memory = CountingMemory()
        incremental = IncrementalTemplate(chat_environment(), sources[name], memory)
        assert incremental.remembers, name
        appended = 0
        for messages, tools in recorded(traces_dir, 1, 24):
            # As normalised as all templates want it; no calls, which some of them refuse.
            plain = [{"role": m["role"], "content": str(m["content"])} for m in messages]
            plain = [m for m in plain if m["role"] in ("user", "assistant")]
            entries = [MessageEntry(key_of(m) or b"", m) for m in plain]
            entries = [memory.add(entry) for entry in entries]
            if len({id(entry) for entry in entries}) < len(entries) or len(entries) < 4:
                continue
            variables = template.variables(tools, True, {})
            incremental.render(entries[:-1], variables)
            memory.anew = 0
            incremental.render(entries, variables)
            assert memory.anew <= 3, name
            appended += 1
        assert appended >= 2, name


def test_templates_that_read_all_are_run_as_they_are(sources: dict[str, str]) -> None:
    """If each iteration reads the whole list there is nothing to remember."""
    forgetful = {
        name
        for name, source in sources.items()
        if not IncrementalTemplate(chat_environment(), source, FragmentMemory()).remembers
    }
    assert forgetful == READ_ALL
