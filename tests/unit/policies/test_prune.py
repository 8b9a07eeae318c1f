"""prune, case by case, and against a transcription of opencode's walk over a session."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_talks import SYSTEM, USER, contents, sent, steps

from leyline_policies import Message
from leyline_policies.builtin.prune import Prune
from leyline_policies.context import Context, apply, run

GONE = "[Old tool result content cleared]"
DONE: Message = {"role": "assistant", "content": "done"}


def _count(message: Message) -> int:
    """Tokens as sized by the test: a result's length, and nothing else."""
    return len(message["content"]) if message["role"] == "tool" else 0


def _context() -> Context:
    return Context(count=_count)


def _session(*turns: tuple[int, ...], tool: str = "bash") -> list[Message]:
    """A user message, results of these many tokens and an answer for each turn; then the next."""
    messages = [SYSTEM]
    for number, sizes in enumerate(turns):
        results = [(tool, chr(97 + number) * size) for size in sizes]
        messages += [USER, *steps(*results, start=100 * number), DONE]
    return [*messages, USER]


def _cleared(messages: list[Message], **settings: Any) -> list[bool]:
    policy = Prune(**{"protect_tokens": 40, "minimum_tokens": 20, **settings})
    return [text == GONE for text in contents(sent(policy, messages, _context()))]


def test_results_behind_the_protected_amount_are_cleared() -> None:
    """Counted from the newest, results beyond the protected tokens go if it is enough."""
    assert _cleared(_session((30, 9), (31,), (5,), (5,))) == [True, False, False, False, False]
    assert _cleared(_session((30, 10), (31,), (5,), (5,))) == [True, True, False, False, False]
    assert _cleared(_session((21, 20, 20), (0,), (0,))) == [True, False, False, False, False]
    assert _cleared(_session((20, 20, 20), (0,), (0,))) == [False] * 5


def test_recent_turns_neither_go_nor_count() -> None:
    """The last two turns are left out, whatever they hold; so is a turn still running."""
    assert not any(_cleared(_session((50, 50))))
    assert not any(_cleared(_session((30,), (300, 300))))
    assert _cleared(_session((50, 40), (300,), (300,))) == [True, False, False, False]
    running = [*_session((50, 40), (300,)), *steps(("bash", "x" * 500), start=900)]
    assert _cleared(running) == [False] * 4


def test_defaults_are_opencodes() -> None:
    """By default 40,000 tokens are protected, and more than 20,000 must be worth it."""
    whole = Context(count=lambda message: 20_001 if message["role"] == "tool" else 0)
    messages = _session((1, 1, 1), (), (), ())
    assert contents(apply(Prune(), messages, 0, whole)) == [GONE, GONE, "a"]
    less = Context(count=lambda message: 20_000 if message["role"] == "tool" else 0)
    assert contents(apply(Prune(), messages, 0, less)) == ["a", "a", "a"]


def test_protected_tools_neither_go_nor_count() -> None:
    """Results of a skill stay and don't count, by default; other names can be given."""
    skills = _session((90, 90), (5,), (5,), tool="skill")
    assert not any(_cleared(skills))
    assert any(_cleared(skills, exclude_tools=()))
    assert not any(_cleared(_session((90, 90), (5,), (5,)), exclude_tools=("bash",)))


def test_prompt_changes_rarely_and_then_much() -> None:
    """The cleared part changes only when more than the minimum has gathered again."""
    turns = [(7, 4)] * 30
    counts = [sum(_cleared(_session(*turns[:size]))) for size in range(31)]
    steps_up = [new - old for old, new in pairwise(counts)]
    assert min(steps_up) == 0
    assert all(step in (0, 3, 4, 5) for step in steps_up)
    assert 6 <= sum(step > 0 for step in steps_up) <= 12


def _opencode(sizes: list[list[int]], protect: int, minimum: int) -> set[tuple[int, int]]:
    """The walk of ``SessionCompaction.prune``, run when each turn has ended."""
    gone: set[tuple[int, int]] = set()
    for now in range(1, len(sizes) + 1):
        total = pruned = 0
        picked: list[tuple[int, int]] = []
        # Recent are the turns of the last two user messages.
        parts = [(turn, i) for turn in range(now - 2) for i in range(len(sizes[turn]))]
        for turn, index in reversed(parts):
            if (turn, index) in gone:
                break
            total += sizes[turn][index]
            if total > protect:
                pruned += sizes[turn][index]
                picked.append((turn, index))
        if pruned > minimum:
            gone |= set(picked)
    return gone


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=12),
    st.integers(0, 80),
    st.integers(0, 60),
)
def test_opencodes_walk_clears_the_same(sizes: list[list[int]], protect: int, minimum: int) -> None:
    """For any session, the same results are cleared as by running opencode's rule turn by turn."""
    # A placeholder counts nothing in the walk, so no result may look like one.
    messages = _session(*map(tuple, sizes))
    cleared = _cleared(messages, protect_tokens=protect, minimum_tokens=minimum)
    places = [(turn, i) for turn, turn_sizes in enumerate(sizes) for i in range(len(turn_sizes))]
    gone = _opencode(sizes, protect, minimum)
    assert cleared == [place in gone for place in places]


@given(st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=12))
def test_what_is_cleared_is_not_counted_again(sizes: list[list[int]]) -> None:
    """The policy leaves its own output as it is."""
    policy = Prune(protect_tokens=40, minimum_tokens=20)
    once = apply(policy, _session(*map(tuple, sizes)), 0, _context())
    assert apply(policy, once, 0, _context()) == once


def test_placeholders_reclaim_nothing() -> None:
    """Results that a client has cleared itself don't make up for what is too little to clear."""
    messages = _session((40, 10, 30), (10,), (), ())
    assert _cleared(messages, minimum_tokens=35) == [True, False, False, False]
    itself = apply(Prune(protect_tokens=40, minimum_tokens=35), messages, 0, _context())
    assert _cleared(itself, minimum_tokens=35) == [True, False, False, False]


def test_user_messages_beside_each_other_end_no_turn() -> None:
    """A second user message before any answer doesn't move the cut."""
    messages = _session((50, 40), (300,))
    assert not any(_cleared([*messages, USER]))
    assert any(_cleared([*messages, DONE, USER]))


def test_nothing_to_prune_hands_the_list_on() -> None:
    """A short session comes back as the same list."""
    messages = _session((1,), (1,), (1,))
    assert run(Prune(), messages, 0, Context()) is messages


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"protect_tokens": -1}, "protect_tokens=-1"),
        ({"minimum_tokens": -1}, "minimum_tokens=-1"),
        ({"recent_turns": 0}, "recent_turns=0"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """A setting that can't work is refused, by name."""
    with pytest.raises(ValueError, match=said):
        Prune(**settings)
