"""sliding_window, case by case."""

from __future__ import annotations

import pytest
from tool_talks import SYSTEM, USER, asks, call, result

from leyline_policies import Context, Message, SpecError, load_pipeline
from leyline_policies.builtin.sliding_window import SlidingWindow
from leyline_policies.context import apply


def _step(number: int) -> list[Message]:
    return [asks(call(f"c{number}")), result(f"c{number}", f"out {number}")]


def _talk(steps: int) -> list[Message]:
    return [SYSTEM, USER, *(message for number in range(steps) for message in _step(number))]


def _sent(policy: SlidingWindow, messages: list[Message], **facts: int) -> list[Message]:
    return apply(policy, messages, 0, Context(**facts))


def _cuts(policy: SlidingWindow, messages: list[Message]) -> list[int]:
    """The number of messages gone at each request of the conversation."""
    ends = [end for end in range(2, len(messages) + 1) if messages[end - 1]["role"] != "assistant"]
    return [end - len(_sent(policy, messages[:end])) for end in ends]


def test_the_cut_moves_seldom_and_by_half() -> None:
    """Past the limit half of it stays, and then nothing moves until the limit is passed again."""
    policy = SlidingWindow(max_messages=11)
    # The user's task and ten messages fit; with twelve the window falls back to four.
    assert _cuts(policy, _talk(12)) == [0] * 6 + [8] * 4 + [16] * 3


def test_head_and_tail_stay() -> None:
    """Instructions, the first message after them, and the newest messages are kept unchanged."""
    messages = _talk(6)
    after = _sent(SlidingWindow(max_messages=12, keep_messages=4), messages)
    assert after == [*messages[:2], *messages[-4:]]
    assert all(any(message is given for given in messages) for message in after)


def test_calls_and_results_go_together() -> None:
    """A cut that would split them moves to before the call."""
    messages = _talk(6)
    after = _sent(SlidingWindow(max_messages=12, keep_messages=3), messages)
    assert after == [*messages[:2], *messages[-4:]]


def test_parallel_results_are_not_split() -> None:
    """All results of one message stay with it."""
    wide = [asks(*(call(f"w{n}") for n in range(4))), *(result(f"w{n}", "x") for n in range(4))]
    messages = [SYSTEM, USER, *_step(0), *wide]
    after = _sent(SlidingWindow(max_messages=7, keep_messages=2), messages)
    assert after == [SYSTEM, USER, *wide]


def test_keep_first_takes_whole_pairs() -> None:
    """A call among the first messages keeps its result, and with 0 only instructions are kept."""
    messages = _talk(6)
    after = _sent(SlidingWindow(max_messages=12, keep_messages=2, keep_first=2), messages)
    assert after == [*messages[:4], *messages[-2:]]


def test_the_task_at_hand_stays() -> None:
    """The user's last message is kept when the cut is after it, until the cut moves again."""
    task: Message = {"role": "user", "content": "and now this"}
    messages = [*_talk(1), task, *(m for n in range(1, 7) for m in _step(n))]
    policy = SlidingWindow(max_messages=12, keep_messages=4)
    assert _sent(policy, messages[:13]) == messages[:13]
    after = _sent(policy, messages)
    assert after == [SYSTEM, USER, task, *messages[11:]]
    later: list[Message] = [*messages, {"role": "assistant", "content": "done"}, USER]
    assert _sent(policy, later) == [*after, *later[-2:]]


def test_the_cut_of_a_prefix_is_the_cut_it_had() -> None:
    """The start of the window on a turn doesn't depend on what came after."""
    messages, policy = _talk(40), SlidingWindow(max_messages=20, keep_first=0)
    cuts = _cuts(policy, messages)
    assert cuts == sorted(cuts)
    assert len(set(cuts)) == 7


def test_tokens_are_limited() -> None:
    """Past ``max_tokens`` the newest messages stay that have half of it, or ``keep_tokens``."""
    context = Context(count=lambda message: 10)
    messages = _talk(6)
    after = apply(SlidingWindow(max_tokens=130), messages, 0, context)
    assert after == [*messages[:2], *messages[-8:]]
    exact = apply(SlidingWindow(max_tokens=130, keep_tokens=40), messages, 0, context)
    assert exact == [*messages[:2], *messages[-4:]]
    assert apply(SlidingWindow(max_tokens=140), messages, 0, context) == messages
    kept = apply(SlidingWindow(max_tokens=130, keep_tokens=20), messages, 0, context)
    assert kept == [*messages[:2], *messages[-2:]]


def test_a_fraction_needs_a_window() -> None:
    """The limit follows the model; where its window is unknown nothing is cut."""
    messages, policy = _talk(6), SlidingWindow(max_fraction=0.5)
    tens = Context(window=260, count=lambda message: 10)
    assert apply(policy, messages, 0, tens) == [*messages[:2], *messages[-8:]]
    assert apply(policy, messages, 0, Context(count=lambda message: 10)) == messages


def test_without_limits_a_hundred_messages_fit() -> None:
    """The default is OpenHands' hundred, halved."""
    assert _sent(SlidingWindow(), _talk(49)) == _talk(49)
    assert len(_sent(SlidingWindow(), _talk(50))) == 1 + 1 + 50


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("max_messages=0", "max_messages=0"),
        ("max_fraction=1.5", "max_fraction=1.5"),
        ("keep_first=-1", "keep_first=-1"),
        ("max_messages=4,keep_messages=4", "less than max_messages=4"),
        ("max_tokens=4,keep_tokens=9", "less than max_tokens=4"),
        ("max_tokens=9,keep_messages=4", "needs max_messages"),
        ("keep_tokens=4", "needs max_tokens"),
    ],
)
def test_bad_settings_are_refused(settings: str, words: str) -> None:
    """The message names the setting and what is wrong with it."""
    with pytest.raises(SpecError, match=words):
        load_pipeline(f"sliding_window:{settings}")
