"""clear_tool_uses beside LangChain's ClearToolUsesEdit, on recorded sessions."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware.context_editing import ClearToolUsesEdit
from langchain_core.messages import BaseMessage, convert_to_messages, convert_to_openai_messages
from langchain_core.messages.utils import count_tokens_approximately

from leyline_policies import Message
from leyline_policies.builtin.clear_tool_uses import ClearToolUses
from leyline_policies.context import Context, apply

FILES = (
    "sessions_mini_swe_deepseek.jsonl.gz",
    "sessions_openhands_codeact.jsonl.gz",
    "sessions_swe_agent.jsonl.gz",
    "sessions_tau2_bench.jsonl.gz",
    "sessions_tau_bench.jsonl.gz",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"trigger": 2_000},
    {"trigger": 0, "keep": 0, "placeholder": "gone"},
    {"trigger": 1_000, "keep": 1, "exclude_tools": ("bash", "get_user_details", "search")},
    {"trigger": 1_000, "keep": 2, "clear_tool_inputs": True},
    {"trigger": 500, "keep": 3, "clear_at_least": 1_500},
    {"trigger": 500, "keep": 0, "clear_at_least": 900, "clear_tool_inputs": True},
)


def _sessions(path: Path) -> list[list[Message]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [_as_sent(json.loads(line)["messages"]) for line in lines]


def _as_sent(messages: list[Message]) -> list[Message]:
    """LangChain's copy of a session, with the arguments as it writes them."""
    return _to_chat(_to_langchain(messages))


def _to_langchain(messages: list[Message]) -> list[BaseMessage]:
    return list(convert_to_messages(copy.deepcopy(messages)))


def _to_chat(messages: Sequence[BaseMessage]) -> list[Message]:
    chat = convert_to_openai_messages(messages)
    assert isinstance(chat, list)
    return chat


def _prefixes(messages: list[Message]) -> list[list[Message]]:
    """Requests of a session: some of its beginnings that end before an answer."""
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    wanted = {ends[len(ends) * part // 5] for part in range(5)} if ends else set()
    return [*(messages[:end] for end in sorted(wanted)), messages]


def _original(messages: list[Message], settings: dict[str, Any]) -> list[Message]:
    edited: list[Any] = _to_langchain(messages)
    ClearToolUsesEdit(**settings).apply(edited, count_tokens=count_tokens_approximately)
    return _to_chat(edited)


def _ours(messages: list[Message], settings: dict[str, Any]) -> list[Message]:
    renamed = {"trigger_tokens" if key == "trigger" else key: settings[key] for key in settings}
    policy = ClearToolUses(**renamed, stop_when_enough="clear_at_least" in settings)
    context = Context(count=lambda message: count_tokens_approximately(_to_langchain([message])))
    return apply(policy, messages, 0, context)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_langchain_clears_the_same(traces_dir: Path, file: str, settings: dict[str, Any]) -> None:
    """At every request of every session, both send the same messages."""
    for session in _sessions(traces_dir / file):
        for messages in _prefixes(session):
            assert _ours(messages, settings) == _original(messages, settings)


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"trigger": 2_000}, {"trigger": 3_000}),
        ({"trigger": 0}, {"keep": 2}),
        ({"trigger": 0}, {"placeholder": "gone"}),
        ({"trigger": 0}, {"clear_tool_inputs": True}),
        ({"trigger": 0}, {"exclude_tools": ("get_user_details",)}),
        ({"trigger": 0, "clear_at_least": 900}, {"clear_at_least": 100}),
    ],
    ids=str,
)
def test_each_setting_matters(
    traces_dir: Path, settings: dict[str, Any], changed: dict[str, Any]
) -> None:
    """The comparison notices when a single setting differs between the two."""
    differing = dict(settings) | changed
    sessions = _sessions(traces_dir / "sessions_tau_bench.jsonl.gz")
    requests = [messages for session in sessions for messages in _prefixes(session)]
    assert any(_ours(each, differing) != _original(each, settings) for each in requests)


def test_sessions_are_really_cleared(traces_dir: Path) -> None:
    """The settings of the comparison clear results on the recorded sessions."""
    for settings in SETTINGS[1:]:
        sessions = [s for file in FILES for s in _sessions(traces_dir / file)]
        assert sum(_ours(each, settings) != each for each in sessions) > 10
