"""A memo takes over from the turn before only results that it would work out from scratch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Context, Memo, Message, edit, pair_calls
from leyline_policies.changes import Changes, changed_places

NUMBERS = st.integers(0, 11)


def _pool() -> list[Message]:
    """Messages to make conversations of: some call, some answer, ids come twice."""
    pool: list[Message] = []
    for number in range(4):
        call = {"id": f"c{number % 3}", "type": "function", "function": {"name": f"f{number}"}}
        pool += [
            {"role": "assistant", "content": str(number), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": str(number)},
            {"role": "user", "content": str(number)},
        ]
    return pool


@st.composite
def histories(draw: st.DrawFn) -> list[list[Message]]:
    """The lists of some turns: most continue the last, others edit, drop, put in, move or begin
    again. A message that stays is the same object."""
    pool = _pool()
    turns: list[list[Message]] = [[]]
    for change in draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=8)):
        turns.append(change(draw, pool, list(turns[-1])))
    return turns


Draw = Callable[[st.SearchStrategy[Any]], Any]


def _grow(draw: Draw, pool: list[Message], now: list[Message]) -> list[Message]:
    return now + [pool[number] for number in draw(st.lists(NUMBERS, max_size=12))]


def _edited(draw: Draw, pool: list[Message], now: list[Message]) -> list[Message]:
    for at in draw(st.lists(st.integers(0, max(0, len(now) - 1)), max_size=10)):
        if now:
            now[at] = edit(now[at], content=f"{now[at]['content']}+")
    return [*now, pool[draw(NUMBERS)]]


def _drop(draw: Draw, pool: list[Message], now: list[Message]) -> list[Message]:
    gone = draw(st.sets(st.integers(0, len(now)), max_size=3))
    return [message for at, message in enumerate(now) if at not in gone]


def _put_in(draw: Draw, pool: list[Message], now: list[Message]) -> list[Message]:
    now.insert(draw(st.integers(0, len(now))), pool[draw(NUMBERS)])
    return now


def _move(draw: Draw, pool: list[Message], now: list[Message]) -> list[Message]:
    moved: list[Message] = draw(st.permutations(now))
    return list(moved)


def _anew(draw: Draw, pool: list[Message], now: list[Message]) -> list[Message]:
    return _grow(draw, pool, [])


CHANGES = [_grow, _grow, _grow, _edited, _drop, _put_in, _move, _anew]


def _shout(message: Message) -> Message:
    """An edit of what ends in an odd number, nothing for all else."""
    text = str(message["content"])
    return edit(message, content=text + "!") if text[:1] in "13" else message


def _chosen(turn: list[Message], every: int) -> list[int]:
    return [at for at, message in enumerate(turn) if message["role"] == "tool"][:: every + 1]


def _contexts(turns: list[list[Message]], settled: Sequence[bool]) -> Any:
    """For each turn the context of a session, and one that knows of nothing before."""
    memo = Memo()
    for turn, is_settled in zip(turns, settled, strict=False):
        memo.next_turn()
        fresh = Memo()
        if is_settled:
            memo.settle(turn)
        yield turn, Context(memo=memo, slot="0.p"), Context(memo=fresh, slot="0.p")


SETTLED = st.lists(st.booleans(), min_size=9, max_size=9)


@given(histories(), SETTLED)
def test_calls_and_results_are_those_of_the_list(
    turns: list[list[Message]], settled: list[bool]
) -> None:
    """They are, however the list came about, and with or without permission to change it."""
    for turn, context, _ in _contexts(turns, settled):
        assert context.calls(turn) == pair_calls(turn)
        assert context.results(turn) == tuple(
            at for at, message in enumerate(turn) if message["role"] == "tool"
        )


@given(histories(), SETTLED, st.integers(0, 2))
def test_edited_lists_are_made_as_from_scratch(
    turns: list[list[Message]], settled: list[bool], every: int
) -> None:
    """Edits are in the chosen places only, and one of a message is the same object on every turn; a
    list without any is the one that was given."""
    made: dict[int, tuple[Message, Message]] = {}
    for number, (turn, context, fresh) in enumerate(_contexts(turns, settled)):
        places = _chosen(turn, every if number % 3 else 0)
        before = list(turn)
        now = context.edited(turn, _shout, places)
        assert now == fresh.edited(turn, _shout, places)
        assert all(map(lambda old, new: old is new, turn, before))
        for at, (old, new) in enumerate(zip(turn, now, strict=True)):
            if at in places:
                assert made.setdefault(id(old), (old, new))[1] is new
            else:
                assert new is old
        assert (now is turn) == (changed_places(turn, now) == [])


@given(histories(), SETTLED)
def test_what_is_said_of_each_message_counts(
    turns: list[list[Message]], settled: list[bool]
) -> None:
    """A message with other arguments than before is computed again."""

    def joined(message: Message, number: int) -> str:
        return f"{message['content']}/{number}"

    for turn, context, _ in _contexts(turns, settled):
        told = [sum(m["role"] == "tool" for m in turn[:at]) for at in range(len(turn))]
        expected = [joined(message, each) for message, each in zip(turn, told, strict=True)]
        assert context.each(turn, joined, told=told) == expected


@given(histories(), SETTLED)
def test_questions_about_a_list_are_answered_for_the_list(
    turns: list[list[Message]], settled: list[bool]
) -> None:
    """The answers say if any message is such a one, and where they are."""

    def odd(message: Message) -> bool:
        return str(message["content"])[:1] in "13"

    for turn, context, _ in _contexts(turns, settled):
        assert context.any(turn, odd, "any") == any(map(odd, turn))
        assert context.where(turn, odd) == [at for at, m in enumerate(turn) if odd(m)]
        assert context.users(turn) == [at for at, m in enumerate(turn) if m["role"] == "user"]


@given(histories(), SETTLED)
def test_folded_state_is_that_of_the_whole_list(
    turns: list[list[Message]], settled: list[bool]
) -> None:
    """Steps taken on earlier turns count where what they read is still there, and else are taken
    again."""
    for turn, context, _ in _contexts(turns, settled):
        texts = context.each(turn, lambda message: message["content"], "text")

        def step(
            seen: list[tuple[str, str]], message: Message, texts: Sequence[str] = texts
        ) -> None:
            seen.append((message["role"], texts[len(seen)]))

        roles = [{"role": message["role"]} for message in turn]
        found = context.fold(roles, step, list[tuple[str, str]], texts)
        assert found == [(message["role"], message["content"]) for message in turn]


def test_a_fold_takes_only_the_new_steps() -> None:
    """A list that continues costs only its new part."""
    taken: list[int] = []
    context = Context()

    def step(total: list[int], number: int) -> None:
        taken.append(number)
        total.append(number)

    assert context.fold([1, 2], step, list[int]) == [1, 2]
    assert context.fold([1, 2, 3], step, list[int]) == [1, 2, 3]
    assert taken == [1, 2, 3]
    assert context.fold([2, 3], step, list[int]) == [2, 3]
    assert taken == [1, 2, 3, 2, 3]


def test_a_step_that_fails_leaves_nothing() -> None:
    """The next turn begins again, and not with half of a state."""
    context, fails = Context(), [True]

    def step(total: list[int], number: int) -> None:
        total.append(number)
        if number == 2 and fails.pop():
            raise KeyError(number)

    with pytest.raises(KeyError):
        context.fold([1, 2], step, list[int])
    fails.append(False)
    assert context.fold([1, 2], step, list[int]) == [1, 2]


def test_an_edit_that_fails_is_tried_again() -> None:
    """Of a computation that raised nothing is kept, in a list either."""
    context, turn = Context(), [{"role": "tool", "content": "1"}]
    context.memo.settle(turn)
    with pytest.raises(ZeroDivisionError):
        context.edited(turn, lambda _: {"content": 1 // 0}, [0])
    assert context.edited(turn, _shout, [0]) == [{"role": "tool", "content": "1!"}]


def test_lists_are_compared_once() -> None:
    """A second question about the difference of two lists gets the first answer; a list that may
    change is looked at again."""
    changes, first, second = Changes(), ({}, {}), [{}, {}]
    changes.settle(second)
    assert changes.between(first, second) == [0, 1]
    assert changes.between(first, second) is changes.between(first, second)
    open_list = list(first)
    assert changes.between(first, open_list) == []
    open_list[1] = {}
    assert changes.between(first, open_list) == [1]


def test_who_makes_a_list_tells_what_differs() -> None:
    """A noted difference of a list isn't looked for, until the turn ends."""
    changes, first, second = Changes(), ({}, {}), ({}, {})
    changes.note(first, second, (1,))
    assert changes.between(first, second) == (1,)
    changes.next_turn()
    assert changes.between(first, second) == [0, 1]
