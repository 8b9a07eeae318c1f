"""Where a session's KV may lie, as it moves from engine to engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.core.places import MAX_PLACES, after_turn, erased, owed
from leyline_proxy.core.session import Place

moves = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), min_size=1, max_size=30
)


@given(moves)
def test_a_forget_is_owed_wherever_the_session_was_and_isnt_now(
    turns: list[tuple[str, int, bool]],
) -> None:
    """Every live run of another engine that was given a turn before owes what is demanded now,
    also when the session comes back to it."""
    places: dict[str, Place] = {}
    last: dict[str, str] = {}
    unmet: set[str] = set()
    for replica, run, demanded in turns:
        name = f"{replica}{run}"
        last[replica] = name
        if demanded:
            unmet |= set(last.values()) - {name}
        unmet &= set(last.values())
        places = dict(after_turn(places, name, replica, demanded=demanded))
        assert set(places) == set(last.values())
        assert owed(places) == {each: each[0] for each in unmet}


def test_an_engine_that_retains_nothing_is_no_place_and_its_demands_are_owed_by_others() -> None:
    """A turn that an ordinary server took leaves the others' debt behind it."""
    places = after_turn({}, "a1", "a", demanded=False)
    places = after_turn(places, "", "plain", demanded=True)
    assert owed(places) == {"a1": "a"}
    assert erased(places, "a1") == {}


def test_places_are_bounded_and_the_newest_stay() -> None:
    """However often a session moves, its account stays small."""
    places: dict[str, Place] = {}
    for number in range(3 * MAX_PLACES):
        places = dict(after_turn(places, f"r{number}", f"e{number}", demanded=False))
    assert len(places) == MAX_PLACES
    assert f"r{3 * MAX_PLACES - 1}" in places
