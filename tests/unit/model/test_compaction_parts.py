"""The parts of a compaction, and when it is worth a turn."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_policies.builtin.summarize import HEADING
from leyline_proxy.model.compaction import (
    Compacted,
    CompactionWish,
    instructions_in,
    is_worth_it,
    kept_of,
)

SYSTEM = {"role": "system", "content": "Rules."}
TOLD = {"role": "user", "content": f"{HEADING}So far."}
CALL = {"role": "assistant", "content": None}


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("messages", "worth"),
    [
        ([SYSTEM, user("a")], False),
        ([SYSTEM, TOLD], False),
        ([user("a"), TOLD], False),
        ([user("a"), user("b")], True),
        ([user("a"), CALL], True),
        ([TOLD, CALL], True),
        ([TOLD, user("a"), user("b")], True),
        ([], False),
    ],
)
def test_more_than_a_message_and_a_summary_is_worth_a_turn(messages: Any, worth: bool) -> None:
    """A summary of a summary would shorten nothing."""
    assert is_worth_it(messages) is worth


def test_the_newest_messages_of_the_user_are_kept() -> None:
    """In order, without summaries, as far as a quarter of the prompt goes, and without members that
    were for one turn."""
    first, last = {**user("f" * 60), "name": "x"}, user("l" * 60)
    messages = [SYSTEM, first, TOLD, CALL, last]
    assert kept_of(messages, prompt_tokens=1_000) == (user("f" * 60), last)
    assert kept_of(messages, prompt_tokens=120) == (last,)
    assert kept_of(messages, prompt_tokens=50) == ()
    long = [user("x" * 1_000) for _ in range(100)]
    assert 20 < len(kept_of(long, prompt_tokens=1_000_000)) < 33


def test_the_summary_is_the_last_message_word_by_word() -> None:
    """Its text isn't changed; instructions are those of the conversation, wherever they are."""
    summary = "  Two lines,\nspaces kept. \n"
    *kept, told = Compacted(summary, (user("a"),)).messages()
    assert kept == [user("a")]
    assert told == user(HEADING + summary)
    assert instructions_in([SYSTEM, user("a"), {**SYSTEM, "role": "developer"}]) == [0, 2]


def test_own_instructions_are_added() -> None:
    """They come after the proxy's own words."""
    own = CompactionWish(instructions=" Keep paths. ").question()["content"]
    assert own.endswith("\n\nKeep paths.")
    assert own.startswith(CompactionWish().question()["content"])
    assert CompactionWish(instructions="  ").question() == CompactionWish().question()
