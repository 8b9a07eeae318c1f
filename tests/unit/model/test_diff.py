"""The difference of two message lists, in bounded memory however long they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model import diff
from leyline_proxy.model.diff import apply_chars, apply_diff, common_subsequence, diff_messages
from leyline_proxy.model.messages import Message, fingerprint, text_of

MESSAGES = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "assistant"]),
        st.text("ab", max_size=3),
    ),
    max_size=8,
)


def test_beyond_the_cap_only_the_ends_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle counts as different; the common beginning and end are still found."""
    left, right = [0, 1, 2, 3, 9], [0, 2, 1, 3, 4, 9]
    assert len(common_subsequence(left, right)) == 4
    monkeypatch.setattr(diff, "MAX_COMPARED_CELLS", 11)
    assert common_subsequence(left, right) == [(0, 0), (4, 5)]


def test_long_lists_without_a_common_message_are_told_apart() -> None:
    """Ten thousand messages against as many others: each is in one step."""
    old = [{"role": "user", "content": f"old {index}"} for index in range(10_000)]
    new = [{"role": "assistant", "content": f"new {index}"} for index in range(10_000)]
    found = diff_messages(old, new)
    assert [step.kind for step in found.steps] == ["removed"] * 10_000 + ["inserted"] * 10_000
    assert apply_diff(old, found, new) == new


@given(MESSAGES, MESSAGES)
def test_a_diff_turns_old_into_new(old: list[Message], new: list[Message]) -> None:
    """Applying it gives the new list; its character edits give the new texts."""
    diff = diff_messages(old, new)
    assert list(map(fingerprint, apply_diff(old, diff, new))) == list(map(fingerprint, new))
    assert [s.old for s in diff.steps if s.old is not None] == list(range(len(old)))
    assert [s.new for s in diff.steps if s.new is not None] == list(range(len(new)))
    for step in diff.steps:
        if step.kind == "replaced" and step.old is not None and step.new is not None:
            assert apply_chars(text_of(old[step.old]), step.chars) == text_of(new[step.new])


@given(MESSAGES.filter(bool), st.data())
def test_a_single_edit_is_a_single_step(old: list[Message], data: st.DataObject) -> None:
    """Changing, removing or adding one message changes one step."""
    place = data.draw(st.integers(0, len(old) - 1))
    fresh = {**old[place], "content": "unlike all others"}
    for new in (
        [*old[:place], fresh, *old[place + 1 :]],
        [*old[:place], *old[place + 1 :]],
        [*old[:place], fresh, *old[place:]],
    ):
        assert sum(step.kind != "kept" for step in diff_messages(old, new).steps) == 1
