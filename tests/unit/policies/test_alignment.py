"""Finding again what a policy edited by hand, and undoing it for some messages."""

from __future__ import annotations

from collections import Counter
from time import process_time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, drop, edit
from leyline_policies.alignment import align, put_back, rejoin
from leyline_policies.marks import is_dropped


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(*ids: str) -> Message:
    calls = [{"id": each, "type": "function", "function": {"name": "bash"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(identifier: str, text: str = "x") -> Message:
    return {"role": "tool", "tool_call_id": identifier, "content": text}


def test_copies_by_hand_are_found() -> None:
    """Equal copies, edited results and edited neighbours are each found."""
    talk = [_user("a"), _call("1", "2"), _result("1"), _result("2"), _user("b")]
    after = [
        _user("a"),  # a copy
        _call("1", "2"),
        _result("2", "short"),  # its neighbour is gone
        {**talk[4], "content": "B"},
    ]
    assert align(talk, after) == [(0, 0), (1, 1), (3, 2), (4, 3)]


def test_what_cannot_be_told_is_not_paired() -> None:
    """One edited message of two of its role isn't guessed."""
    assert align([_user("a"), _user("b")], [_user("c")]) == []
    assert align([_user("a")], [_call("1")]) == []


def test_edited_copy_of_a_kept_message_goes() -> None:
    """Text that is put back replaces its edited copy and doesn't appear beside it."""
    talk = [_user("a"), _call("1"), _result("1", "long"), _user("b")]
    after = [*talk[:2], {**talk[2], "content": "l"}, talk[3]]
    assert put_back(talk, after, {2}) == talk
    assert put_back(talk, after, {0}) == after


def test_moved_message_is_put_back_once() -> None:
    """A kept message that the policy moved is in its old place only."""
    talk = [_user("a"), _user("b"), _user("c")]
    assert put_back(talk, [talk[2], talk[0], talk[1]], {2}) == talk
    assert put_back(talk, [edit(talk[2], content="C"), talk[0], talk[1]], {2}) == talk
    assert put_back(talk, [talk[1], talk[2], talk[0]], {0}) == talk


def test_unclear_edit_around_a_kept_message_is_undone() -> None:
    """If a kept message may be the edited one, all around it stays."""
    talk = [_user("a"), _user("b"), _call("1"), _result("1")]
    assert put_back(talk, [_user("?"), *talk[2:]], {0}) == talk


def test_summary_stands_in_front_of_what_is_put_back() -> None:
    """The policy's replacement of a span stays, where it can't be an edit of a kept message."""
    talk = [_call("1"), _result("1"), _call("2"), _result("2"), _user("b")]
    summary = {"role": "system", "content": "sum"}
    assert put_back(talk, [summary, talk[4]], {2, 3}) == [summary, *talk[2:]]


def test_tombstones_survive_unless_kept() -> None:
    """A drop that says how stays, but for a message that is put back."""
    talk = [_user("a"), _user("b")]
    after = [drop(talk[0], mode="forget"), drop(talk[1])]
    found = put_back(talk, after, {1})
    assert is_dropped(found[0])
    assert found[1] is talk[1]


def test_rejoined_graves_keep_their_places() -> None:
    """Tombstones that a later policy didn't see are where they were."""
    a, b, c, d = (_user(name) for name in "abcd")
    graves = [drop(_user("x")), drop(_user("y")), drop(_user("z"))]
    whole = [graves[0], a, graves[1], b, c, graves[2]]
    live = [a, b, c]
    assert rejoin(whole, live, live) == whole
    assert rejoin(whole, live, [a, d, c]) == [graves[0], a, graves[1], d, c, graves[2]]
    assert rejoin(whole, live, []) == graves


roles = st.sampled_from(["user", "assistant", "system"])
talks = st.lists(
    st.builds(lambda r, n: {"role": r, "content": f"t{n}"}, roles, st.integers(0, 3)), max_size=7
)


@given(talks, st.data())
def test_kept_messages_stand_once_in_their_order(talk: list[Message], data: Any) -> None:
    """Kept messages are there once, unchanged and in their old order, whatever a policy did."""
    after = []
    for message in data.draw(st.permutations(talk)):
        fate = data.draw(st.sampled_from(["same", "copy", "by hand", "marked", "gone", "dropped"]))
        changed = {
            "same": [message],
            "copy": [dict(message)],
            "by hand": [{**message, "content": "hand"}],
            "marked": [edit(message, content="marked")],
            "gone": [],
            "dropped": [drop(message)],
        }
        after += changed[fate]
    kept = data.draw(st.sets(st.integers(0, len(talk) - 1))) if talk else set()
    found = put_back(talk, after, kept)
    wanted = [talk[index] for index in sorted(kept)]
    assert [m for m in found if any(m is each for each in wanted)] == wanted
    assert max(Counter(map(id, found)).values(), default=1) == 1


def test_thousands_that_are_alike_are_aligned_in_time() -> None:
    """Text that occurs once in either list is found; the rest is left as it was."""
    before = [_user(f"{index}" if index % 100 == 0 else "ok") for index in range(6_000)]
    after = [dict(m) for i, m in enumerate(before) if i % 9 != 1]
    started = process_time()
    pairs = align(before, after)
    assert process_time() - started < 2.0
    assert {before[old]["content"] for old, _ in pairs} >= {"200", "400", "5900"}
    assert all(before[old] == after[new] for old, new in pairs)
    assert put_back(before, after, {0, 200})[0] is before[0]
