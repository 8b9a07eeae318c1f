"""The tokens that a recall may add to a prompt."""

from __future__ import annotations

import pytest

from leyline_proxy.turns.recalling import room_for


@pytest.mark.parametrize(
    ("prompt", "room"), [(0, 350), (300, 200), (600, 50), (699, 0), (700, 0), (900, 0), (2000, 0)]
)
def test_a_recall_leaves_room_for_the_answer(prompt: int, room: int) -> None:
    """An eighth of the window stays free, even if a text has twice the estimated tokens."""
    assert room_for(5000, window=800, prompt=prompt) == room
    assert room_for(40, window=800, prompt=prompt) == min(40, room)
    assert prompt + 2 * room <= 700 or not room
