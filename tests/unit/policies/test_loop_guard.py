"""loop_guard, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from tool_talks import SYSTEM, USER, asks, call, contents, result

from leyline_policies import Context, Message, SpecError, load_pipeline
from leyline_policies.builtin.loop_guard import LoopGuard
from leyline_policies.context import apply


def _steps(*said: tuple[str, str], start: int = 0) -> list[Message]:
    """A call with these arguments and this result each."""
    messages: list[Message] = []
    for place, (arguments, content) in enumerate(said, start):
        messages += [asks(call(f"c{place}", "bash", arguments)), result(f"c{place}", content)]
    return messages


def _guarded(messages: list[Message], **settings: Any) -> list[Message]:
    return apply(LoopGuard(**settings), messages, 0, Context())


def _note(times: int, what: str = "This step was") -> str:
    return (
        f"[{what} taken {times} times in a row with the same result; "
        "the earlier times are left out. Try something else.]"
    )


A, B, C = ('{"a": 1}', "out a"), ('{"b": 1}', "out b"), ('{"c": 1}', "out c")


def test_repeats_go_but_for_the_last() -> None:
    """Three equal steps become one, the newest, whose result says so."""
    messages = [SYSTEM, USER, *_steps(C, A, A, A)]
    after = _guarded(messages)
    assert after[:4] == messages[:4]
    assert after[4] is messages[8]
    assert after[5]["content"] == f"out a\n\n{_note(3)}"
    assert len(after) == 6


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_fewer_repeats_are_none(repeats: int) -> None:
    """One step less than the limit stays as it is."""
    messages = [USER, *_steps(*[A] * (repeats - 1))]
    assert _guarded(messages, repeats=repeats) == messages


def test_pruned_stays_pruned_when_the_agent_goes_on() -> None:
    """The circle is not brought back by what comes after it."""
    messages = [USER, *_steps(A, A, A, B)]
    during, after = _guarded(messages[:7]), _guarded(messages)
    assert after[: len(during)] == during
    assert contents(after) == [f"out a\n\n{_note(3)}", "out b"]


@pytest.mark.parametrize(
    "said",
    [
        (A, A, (A[0], "changed")),
        (A, (B[0], A[1]), A),
        (A, B, A, C, A, B),
    ],
)
def test_another_call_or_result_ends_a_circle(said: tuple[tuple[str, str], ...]) -> None:
    """An agent that polls and sees something new is not stuck."""
    messages = [USER, *_steps(*said)]
    assert _guarded(messages) == messages


def test_a_word_of_the_user_ends_a_circle() -> None:
    """A repeat that the user asks for is no repeat."""
    messages = [USER, *_steps(A, A), USER, *_steps(A, start=2)]
    assert _guarded(messages) == messages


def test_circles_of_several_steps_are_found() -> None:
    """A, B, A, B, A, B is a circle of two; with ``max_period=1`` it is none."""
    messages = [USER, *_steps(A, B, A, B, A, B, A)]
    after = _guarded(messages)
    assert contents(after) == ["out a", f"out b\n\n{_note(3, 'These 2 steps were')}", "out a"]
    assert _guarded(messages, max_period=1) == messages


def test_parallel_calls_are_one_step() -> None:
    """All calls of a message and their results must be the same; they go together."""
    turn = [asks(call("x", "f"), call("y", "g")), result("x", "1"), result("y", "2")]
    messages = [USER, *turn, *turn, *turn]
    after = _guarded(messages)
    assert after == [USER, turn[0], turn[1], {**turn[2], "content": f"2\n\n{_note(3)}"}]


def test_what_the_assistant_says_beside_makes_no_difference() -> None:
    """The model's musings vary while it is stuck."""
    messages = [USER, *_steps(A, A, A)]
    for place in (1, 3, 5):
        messages[place] = {**messages[place], "content": f"try {place}"}
    assert len(_guarded(messages)) == 3


def test_an_unanswered_call_is_no_step() -> None:
    """Calls whose results are still to come are left alone."""
    messages = [USER, *_steps(A, A, A)[:-1]]
    assert _guarded(messages) == messages


def test_a_circle_is_reported() -> None:
    """The note ``loop`` says how often, and nothing of the text."""
    context = Context(policy="loop_guard")
    apply(LoopGuard(), [USER, *_steps(A, A, A, A)], 0, context)
    assert [(n.kind, dict(n.values)) for n in context.notes] == [
        ("loop", {"repeats": 4, "period": 1})
    ]


@pytest.mark.parametrize("settings", ["repeats=1", "max_period=0", "max_period=17"])
def test_bad_settings_are_refused(settings: str) -> None:
    """The message names the setting."""
    with pytest.raises(SpecError, match=settings):
        load_pipeline(f"loop_guard:{settings}")
