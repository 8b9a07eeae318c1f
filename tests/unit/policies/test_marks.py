"""A policy's remarks on single edits, and finding again what it was given."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, drop, edit
from leyline_policies.marks import (
    Mark,
    is_dropped,
    mark_of,
    pair_by_origin,
    remark,
    without_dropped,
)


def _talk(count: int) -> list[Message]:
    return [{"role": "user", "content": f"message {index}"} for index in range(count)]


def test_edit_copies_and_marks() -> None:
    """An edited message has the new members, not those left out, and the given one stays."""
    message = {"role": "tool", "content": "long", "tool_call_id": "a", "extra": [1]}
    edited = edit(
        message, stub="[cleared]", mode="forget", cause="stale", without=("extra",), name="bash"
    )
    assert edited == {
        "role": "tool",
        "content": "[cleared]",
        "tool_call_id": "a",
        "name": "bash",
    }
    assert mark_of(edited) == Mark("forget", "stale", stub=True)
    assert message == {"role": "tool", "content": "long", "tool_call_id": "a", "extra": [1]}
    assert mark_of(message) is None


def test_marked_message_is_a_plain_one_to_all_others() -> None:
    """It is written as JSON, compared and deeply copied like the dictionary that it holds."""
    message = {"role": "user", "content": "a"}
    edited = edit(message, content="b")
    assert json.loads(json.dumps(edited)) == {"role": "user", "content": "b"} == edited
    copied = copy.deepcopy(edited)
    assert copied == edited
    assert mark_of(copied) == mark_of(edited)


def test_dropped_messages_are_tombstones() -> None:
    """A dropped message says how, and isn't among those that stay."""
    talk = _talk(3)
    grave = drop(talk[1], mode="forget", cause="quarantine")
    assert is_dropped(grave)
    assert mark_of(grave) == Mark("forget", "quarantine", dropped=True)
    assert without_dropped([talk[0], grave, talk[2]]) == [talk[0], talk[2]]


@pytest.mark.parametrize("cause", ["", "Two words", "ümlaut", "x" * 49, "-a", "a\n"])
def test_cause_is_a_short_word(cause: str) -> None:
    """A cause that could carry the conversation's text is refused."""
    with pytest.raises(ValueError, match="short word"):
        edit({"role": "user"}, cause=cause)


def test_unknown_mode_is_refused() -> None:
    """A mode is amortize or forget."""
    with pytest.raises(ValueError, match="'amortize' or 'forget'"):
        drop({"role": "user"}, mode="sometimes")  # type: ignore[arg-type]


def test_remark_keeps_cause_and_origin() -> None:
    """Another mode leaves the rest of the mark as it is."""
    message, other = _talk(2)
    marked = remark(edit(message, stub="x", cause="old"), other, "forget")
    assert mark_of(marked) == Mark("forget", "old", stub=True)
    assert pair_by_origin([message, other], [marked]) == [(1, 0)]


def test_edits_of_edits_are_traced_back() -> None:
    """A message that was edited twice still belongs to the one that was given."""
    talk = _talk(3)
    twice = edit(edit(talk[1], content="b"), content="c")
    assert pair_by_origin(talk, [talk[0], twice, talk[2]]) == [(0, 0), (1, 1), (2, 2)]
    assert pair_by_origin(talk, [drop(talk[2])]) == [(2, 0)]


def test_one_moved_message_leaves_the_others_paired() -> None:
    """A message moved to the front costs its own pair only."""
    talk = _talk(4)
    assert pair_by_origin(talk, [talk[3], *talk[:3]]) == [(0, 1), (1, 2), (2, 3)]
    assert pair_by_origin(talk, [*talk[1:], talk[0]]) == [(1, 0), (2, 1), (3, 2)]


def test_one_object_in_several_places_is_paired_in_each() -> None:
    """A message that a list holds twice is two messages."""
    again, other = _talk(2)
    talk = [again, other, again]
    assert pair_by_origin(talk, talk) == [(0, 0), (1, 1), (2, 2)]
    assert pair_by_origin(talk, [other, again]) == [(1, 0), (2, 1)]
    assert pair_by_origin(talk, [again, again]) == [(0, 0), (2, 1)]
    assert pair_by_origin(talk, [again, again, again]) == [(0, 0), (2, 1)]


@given(st.lists(st.integers(0, 7), max_size=12))
def test_pairs_are_as_many_as_can_be(order: list[int]) -> None:
    """Pairs rise in both lists and are a longest common subsequence of distinct messages."""
    talk = _talk(8)
    after = [talk[index] for index in dict.fromkeys(order)]
    pairs = pair_by_origin(talk, after)
    assert all(talk[old] is after[new] for old, new in pairs)
    assert pairs == sorted(pairs)
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
    assert len(pairs) == _longest([talk.index(message) for message in after])


def _longest(numbers: list[int]) -> int:
    """Length of the longest rising subsequence, the slow way."""
    best: list[int] = []
    for at, number in enumerate(numbers):
        best.append(1 + max((best[i] for i in range(at) if numbers[i] < number), default=0))
    return max(best, default=0)


def test_thousands_of_repeats_take_no_time() -> None:
    """Pairing is no work for the square of a long list of one and the same object."""
    same = {"role": "user", "content": "ok"}
    talk = [same] * 50_000
    assert len(pair_by_origin(talk, talk)) == 50_000
