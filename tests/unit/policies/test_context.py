"""A policy's knowledge, and its delivery to policies that ask for it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import (
    Context,
    EditCost,
    Memo,
    Message,
    Note,
    apply,
    approximate_tokens,
    drop,
    function_policy,
    run,
)
from leyline_policies.registry import Candidate, Registry

TALK: list[Message] = [{"role": "user", "content": "abcd" * 10}, {"role": "user", "content": "b"}]


class Plain:
    """A policy of two parameters."""

    name = "plain"
    mode = "amortize"

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Keep as many messages as there were turns."""
        return messages[:turn_idx]


class Asking(Plain):
    """A policy that asks for the context."""

    def transform(
        self, messages: list[Message], turn_idx: int, context: Context | None = None
    ) -> list[Message]:
        """Count its calls."""
        assert context is not None
        context.state["calls"] = context.state.get("calls", 0) + 1
        return messages


def test_context_is_given_to_who_asks() -> None:
    """A method, a function and a decorated method get the context if they name it, else not."""
    context = Context()
    assert run(Plain(), TALK, 1, context) == TALK[:1]
    run(Asking(), TALK, 1, context)

    @function_policy()
    def noting(messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        context.state["calls"] += 10
        return messages

    @function_policy()
    def deaf(messages: list[Message], turn_idx: int, *, limit: int = 1) -> list[Message]:
        return messages[:limit]

    run(noting, TALK, 1, context)
    assert run(deaf, TALK, 1, context) == TALK[:1]

    class Wrapped(Asking):
        @functools.wraps(Asking.transform)
        def transform(self, *given: Any, **named: Any) -> list[Message]:
            return super().transform(*given, **named)

    run(Wrapped(), TALK, 1, context)
    assert context.state == {"calls": 12}


def test_apply_leaves_out_what_was_dropped() -> None:
    """The messages to send hold no tombstones."""

    @function_policy()
    def first_goes(messages: list[Message], turn_idx: int) -> list[Message]:
        return [drop(messages[0]), *messages[1:]]

    assert apply(first_goes, TALK, 0) == TALK[1:]
    assert len(run(first_goes, TALK, 0, Context())) == 2


def test_messages_are_counted_once_in_their_life() -> None:
    """Tokens of a message are counted again only when it is another object."""
    counted: list[Message] = []

    def count(message: Message) -> int:
        counted.append(message)
        return 5

    memo = Memo()
    for _ in range(3):
        memo.next_turn()
        assert Context(count=count, memo=memo).total(TALK) == 10
    assert counted == TALK
    assert Context(count=count, memo=memo).tokens(dict(TALK[0])) == 5
    assert len(counted) == 3


def test_memo_forgets_what_a_turn_did_not_ask_for() -> None:
    """A result lives on for some turns after the one that last asked for it, not for ever."""
    memo, subject, made = Memo(), {"role": "user"}, []

    def compute(_: Message) -> object:
        made.append(1)
        return None

    memo.get(subject, "key", compute)
    memo.next_turn()
    memo.get(subject, "key", compute)
    assert len(made) == 1
    for _ in range(64):
        memo.next_turn()
    memo.get(subject, "key", compute)
    assert len(made) == 2


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=8))
def test_results_of_lists_are_those_of_their_messages(lists: list[list[int]]) -> None:
    """This holds whatever came, went or moved since the last list; each message is computed at most
    once."""
    messages = [{"role": "user", "content": str(number)} for number in range(10)]
    memo, made = Memo(), []

    def compute(message: Message) -> str:
        made.append(message["content"])
        return f"of {message['content']}"

    for numbers in lists:
        found = memo.map([messages[number] for number in numbers], "key", compute)
        assert found == [f"of {number}" for number in numbers]
    assert len(made) == len(set(made))


def test_failed_computation_is_tried_again() -> None:
    """An exception is handed on and nothing is remembered of it."""
    memo, subject = Memo(), {"role": "user"}
    with pytest.raises(KeyError):
        memo.get(subject, "key", lambda message: message["content"])
    subject["content"] = "x"
    assert memo.get(subject, "key", lambda message: message["content"]) == "x"


def test_memo_is_not_fooled_by_addresses_used_again() -> None:
    """An object that takes the place of a dead one in memory is another subject."""
    memo = Memo()
    seen = [memo.get({"number": number}, "key", lambda m: m["number"]) for number in range(1000)]
    assert seen == list(range(1000))


def test_results_are_told_apart_by_slot_and_key() -> None:
    """Two policies, or two computations of one, never get each other's results."""
    memo = Memo()
    first, second = Context(memo=memo, slot="0.a"), Context(memo=memo, slot="1.a")
    assert first.once(TALK[0], lambda _: 1) == 1
    assert second.once(TALK[0], lambda _: 2) == 2
    assert first.once(TALK[0], lambda _: 3, key="k") == 3
    assert first.once(TALK[0], lambda _: 4) == 1
    assert first.inner("a").once(TALK[0], lambda _: 5) == 5
    assert first.calls(TALK) is second.calls(TALK)


def test_inner_state_is_a_part_of_the_outer() -> None:
    """The state that an inner policy leaves is found again, and kept from its neighbours."""
    context = Context(turn=9, idle_s=3.0)
    context.inner("a").state["x"] = 1
    assert context.inner("a").state == {"x": 1}
    assert context.inner("b").state == {}
    assert (context.inner("a").turn, context.inner("a", turn=4, idle_s=8.0).turn) == (9, 4)
    assert context.inner("a", idle_s=8.0).idle_s == 8.0


def test_attempt_leaves_no_trace() -> None:
    """States and notes of an attempt, of inner policies too, lead nowhere."""
    context = Context(policy="p")
    context.inner("a").state["list"] = [1]
    attempt = context.attempt()
    attempt.inner("a").state["list"].append(2)
    attempt.note("tried", times=1)
    assert context.inner("a").state == {"list": [1]}
    assert context.notes == []


def test_notes_name_their_policy() -> None:
    """A note of an inner policy is in the same list, under the outer one's name."""
    context = Context(policy="p")
    context.inner("a").note("near_limit", fraction=0.9)
    assert context.notes == [Note("p", "near_limit", {"fraction": 0.9})]
    with pytest.raises(ValueError, match="short word"):
        context.note("The user said hello")


def test_cost_of_an_edit_depends_on_the_engine() -> None:
    """After an edit tokens are moved on an engine that splices, computed on any other."""
    assert EditCost(splices=True, prefill_us=10, splice_us=0.5).of(100) == 50
    assert EditCost(splices=False, prefill_us=10, splice_us=0.5).of(100) == 1000


@pytest.mark.parametrize(
    ("message", "characters"),
    [
        ({"role": "user", "content": "x" * 40}, 40),
        ({"role": "user", "content": [{"type": "text", "text": "x" * 40}]}, 40),
        ({"role": "assistant", "content": None, "reasoning_content": "x" * 40}, 40),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}, 3),
        ({"role": "assistant", "tool_calls": [{"custom": {"name": "a", "input": "x" * 39}}]}, 40),
        ({"role": "assistant", "function_call": {"name": "a", "arguments": "x" * 39}}, 40),
        ({"role": "assistant", "content": None, "tool_calls": None, "function_call": None}, 0),
        ({"role": "assistant", "tool_calls": ["junk", {"function": "junk"}]}, 0),
    ],
)
def test_rough_count_sees_all_that_is_prompted(message: Message, characters: int) -> None:
    """Texts, reasoning and calls of every form count a quarter of a token per character."""
    assert approximate_tokens(message) == characters // 4 + 3


def test_a_setting_called_context_is_no_context() -> None:
    """Only the third argument is; a keyword is the policy's own."""

    def marked(messages: list[Message], turn_idx: int, *, context: str = "c") -> list[Message]:
        return [*messages, {"role": "user", "content": context}]

    class Marked:
        name, mode = "marked", "amortize"

        def transform(
            self, messages: list[Message], turn_idx: int, *, context: str = "d"
        ) -> list[Message]:
            return marked(messages, turn_idx, context=context)

    assert apply(function_policy()(marked), list(TALK), 0)[-1]["content"] == "c"
    assert apply(Marked(), list(TALK), 0)[-1]["content"] == "d"  # type: ignore[arg-type]
    registry = Registry([Candidate("marked", "a test", lambda: marked)])
    assert [each.name for each in registry.get("marked").parameters] == ["context"]
