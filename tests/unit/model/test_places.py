"""The engines where a session's KV may lie, as it moves from engine to engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.places import MAX_PLACES, after_turn, all_owed, erased, owed
from leyline_proxy.model.session import Place

moves = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), min_size=1, max_size=30
)


@given(moves)
def test_a_forget_is_owed_wherever_the_session_was_and_isnt_now(
    turns: list[tuple[str, int, bool]],
) -> None:
    """Every live run of another engine that was given a turn before owes what is demanded now,
    also when the session comes back to it, and also if it is taken for another run by then."""
    places: dict[str, Place] = {}
    last: dict[str, str] = {}
    unmet: set[str] = set()
    for replica, run, demanded in turns:
        last[replica] = f"{replica}{run}"
        if demanded:
            unmet |= set(last) - {replica}
        places = dict(after_turn(places, last[replica], replica, demanded=demanded))
        assert set(places) == set(last.values())
        assert owed(places) == {last[each]: each for each in unmet}


def test_a_run_owes_what_it_did_not_confirm() -> None:
    """The engine of the turn itself, until it is asked again; others owe it in any case."""
    places = after_turn({}, "a1", "a", demanded=False)
    places = after_turn(places, "b1", "b", demanded=True, owes=True)
    assert owed(places) == {"a1": "a", "b1": "b"}
    places = after_turn(erased(places, "a1", places["a1"]), "b1", "b", demanded=True)
    assert owed(places) == {"b1": "b"}, "a later receipt is of a later demand"
    assert owed(all_owed({"a1": Place("a"), "b1": Place("b")})) == {"a1": "a", "b1": "b"}


def test_an_engine_that_retains_nothing_is_no_place_and_its_demands_are_owed_by_others() -> None:
    """A turn that an ordinary server took leaves the others' debt in place."""
    places = after_turn({}, "a1", "a", demanded=False)
    places = after_turn(places, "", "plain", demanded=True)
    assert owed(places) == {"a1": "a"}
    assert erased(places, "a1", places["a1"]) == {}


def test_a_place_that_has_changed_since_its_erasure_began_stays() -> None:
    """Its new KV or new debt meanwhile isn't erased."""
    seen = after_turn({}, "a1", "a", demanded=False)["a1"]
    for changed in (
        after_turn({"a1": seen}, "a1", "a", demanded=False),
        after_turn({"a1": seen}, "b1", "b", demanded=True),
    ):
        assert "a1" in erased(changed, "a1", seen)
    unchanged = after_turn({"a1": seen}, "b1", "b", demanded=False)
    assert "a1" not in erased(unchanged, "a1", seen)


def test_engines_that_have_changed_names_stay_places() -> None:
    """A run known to continue isn't taken for one that ended, whatever it was called."""
    places = {"r1": Place("a", owed=True), "r2": Place("b")}
    found = after_turn(places, "r2", "a", demanded=False, alive={"r1", "r2"})
    assert owed(found) == {"r1": "a"}


def test_a_place_that_owes_goes_last() -> None:
    """Of more engines than fit, those stay that still have to forget."""
    places = dict(after_turn({}, "r", "e", demanded=False))
    places = dict(after_turn(places, "r0", "e0", demanded=True))
    for number in range(2 * MAX_PLACES):
        places = dict(after_turn(places, f"r{number}", f"e{number}", demanded=False))
    assert owed(places) == {"r": "e"}
    assert len(places) == MAX_PLACES


def test_places_are_bounded_and_the_newest_stay() -> None:
    """A session's account stays small, however often it moves."""
    places: dict[str, Place] = {}
    for number in range(3 * MAX_PLACES):
        places = dict(after_turn(places, f"r{number}", f"e{number}", demanded=False))
    assert len(places) == MAX_PLACES
    assert f"r{3 * MAX_PLACES - 1}" in places
