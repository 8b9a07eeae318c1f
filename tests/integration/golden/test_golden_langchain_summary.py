"""summarize beside LangChain's SummarizationMiddleware, on recorded sessions."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest
from langchain.agents.middleware.summarization import SummarizationMiddleware
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import convert_to_messages, convert_to_openai_messages
from langchain_core.messages.utils import count_tokens_approximately

from leyline_policies import Message
from leyline_policies.builtin.summarize import HEADING, Summarize
from leyline_policies.context import Context, apply

FILES = ("sessions_openhands_codeact.jsonl.gz", "sessions_tau_bench.jsonl.gz")
SUMMARY = "what has happened so far"


def _sessions(path: Path) -> list[list[Message]]:
    """Sessions as LangChain keeps them, without the instructions, which it keeps elsewhere."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        found = [_as_sent(json.loads(line)["messages"]) for line in lines]
    return [[m for m in messages if m["role"] != "system"] for messages in found]


def _as_sent(messages: list[Message]) -> list[Message]:
    chat = convert_to_openai_messages(convert_to_messages(copy.deepcopy(messages)))
    return cast("list[Message]", chat)


def _requests(messages: list[Message]) -> list[list[Message]]:
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    return [*(messages[:end] for end in ends[::5]), messages]


def _original(messages: list[Message], tokens: int, keep: int) -> list[Message] | None:
    """The messages beside the summary; None where there is none."""
    middleware = SummarizationMiddleware(
        model=FakeListChatModel(responses=[SUMMARY]),
        trigger=("tokens", tokens),
        keep=("messages", keep),
        token_counter=count_tokens_approximately,
    )
    state: Any = {"messages": convert_to_messages(copy.deepcopy(messages))}
    update = middleware.before_model(state, cast("Any", None))
    if update is None:
        return None
    _, summary, *kept = update["messages"]
    assert summary.content.startswith(HEADING)
    return cast("list[Message]", convert_to_openai_messages(kept))


def _ours(messages: list[Message], tokens: int, keep: int) -> list[Message] | None:
    def count(message: Message) -> int:
        return count_tokens_approximately(convert_to_messages([copy.deepcopy(message)]))

    policy = Summarize(trigger_tokens=tokens, keep_messages=keep)
    asking = Context(count=count, slot="0")
    if apply(policy, messages, 0, asking) == messages and not asking.wanted:
        return None
    answers = {asking.wanted[0].key: SUMMARY}
    sent = apply(policy, messages, 0, Context(count=count, slot="0", completions=answers))
    assert str(sent[0]["content"]).endswith(HEADING + SUMMARY)
    return sent[1:]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(("tokens", "keep"), [(1_500, 20), (500, 6), (3_000, 2)])
def test_langchain_keeps_the_same(traces_dir: Path, file: str, tokens: int, keep: int) -> None:
    """Both summarize on the same requests, and leave the same messages as they are."""
    summarized = 0
    for session in _sessions(traces_dir / file):
        for messages in _requests(session):
            found = _original(messages, tokens, keep)
            assert _ours(messages, tokens, keep) == found
            summarized += found is not None
    assert summarized


def test_the_settings_matter(traces_dir: Path) -> None:
    """The comparison notices another number of messages to keep, and another trigger."""
    sessions = _sessions(traces_dir / FILES[1])
    requests = [messages for session in sessions for messages in _requests(session)]
    assert any(_ours(each, 500, 6) != _original(each, 500, 8) for each in requests)
    assert any(_ours(each, 500, 6) != _original(each, 1_500, 6) for each in requests)
