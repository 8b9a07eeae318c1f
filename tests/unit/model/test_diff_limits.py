"""Comparing message lists takes bounded memory, however long they are."""

from __future__ import annotations

import pytest

from leyline_proxy.model import diff
from leyline_proxy.model.diff import apply_diff, common_subsequence, diff_messages


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
