"""The names of slots: by whoever brought them first, each page once, as long as it is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.claims.events import Run
from leyline_engine.claims.keeper import PageNames
from leyline_engine.claims.runs import count, pages_of


def test_a_path_is_named_by_its_source_and_what_it_shares_by_the_first() -> None:
    """Sources that begin alike have those pages under one name."""
    names = PageNames()
    assert names.name("x", [5, 6, 7]) == (Run("x", 0, 3),)
    assert names.name("y", [5, 6, 9, 8]) == (Run("x", 0, 2), Run("y", 2, 4))
    assert names.name("x", [5, 6, 7]) == (Run("x", 0, 3),)
    assert len(names) == 5


def test_only_named_slots_are_known() -> None:
    """Runs that touch are one, whatever lies between them."""
    names = PageNames()
    names.name("x", [5, 6, 7, 8])
    assert names.known([5, 6, 99, 7]) == (Run("x", 0, 3),)
    assert names.known([8, 5]) == (Run("x", 3, 4), Run("x", 0, 1))
    assert names.known([]) == names.known([99]) == ()


def test_what_is_forgotten_can_be_named_anew() -> None:
    """A slot is used again for something else; a page can come back in another slot."""
    names = PageNames()
    names.name("x", [5, 6, 7])
    names.forget([Run("x", 1, 9), Run("never", 0, 4)])
    assert names.known([5, 6, 7]) == (Run("x", 0, 1),)
    assert names.name("y", [6, 7]) == (Run("y", 0, 2),)
    assert names.name("x", [5, 8, 9]) == (Run("x", 0, 3),)
    names.clear()
    assert len(names) == 0 and names.known([5]) == ()


def test_sources_of_one_name_are_told_apart() -> None:
    """Two sessions may call a turn alike; a page of one is never a page of the other."""
    names = PageNames()
    assert names.name("t1", [1, 2, 3]) == (Run("t1", 0, 3),)
    other = names.name("t1", [7, 8])
    assert count(other) == 2 and other[0].source != "t1"
    third = names.name("t1", [9])
    assert len({"t1", other[0].source, third[0].source}) == 3
    assert names.known([1, 7, 9]) == (Run("t1", 0, 1), Run(other[0].source, 0, 1), *third)
    names.forget(other)
    assert names.known([1, 2, 3]) == (Run("t1", 0, 3),) and names.known([7, 8]) == ()


PATHS = st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True)
STEPS = st.lists(
    st.tuples(st.sampled_from("xyz"), PATHS)
    | st.tuples(st.none(), st.sampled_from("xyz"), st.integers(0, 5), st.integers(1, 6)),
    max_size=30,
)


@given(steps=STEPS)
def test_names_are_one_to_one_whatever_is_named_and_forgotten(
    steps: list[tuple[object, ...]],
) -> None:
    """A slot has one name until it is forgotten, a name one slot; runs say no more and no less."""
    names = PageNames()
    model: dict[int, tuple[str, int]] = {}
    for step in steps:
        match step:
            case (str(source), list(slots)):
                pages = list(pages_of(names.name(source, slots)))
                assert len(pages) == len(set(pages)) == len(slots)
                for place, (slot, page) in enumerate(zip(slots, pages, strict=True)):
                    assert model.setdefault(slot, page) == page
                    assert slot in model or page[1] == place
            case (None, str(source), int(start), int(length)):
                names.forget([Run(source, start, start + length)])
                gone = {(source, start + offset) for offset in range(length)}
                model = {slot: page for slot, page in model.items() if page not in gone}
        assert len(names) == len(model) == len(set(model.values()))
        for slot in range(16):
            assert list(pages_of(names.known([slot]))) == ([model[slot]] if slot in model else [])


@pytest.mark.parametrize("slots", [[3, 1, 2], [1, 2, 3]])
def test_runs_are_as_few_as_can_be(slots: list[int]) -> None:
    """A path that one source brought is one run, whatever the slots' numbers."""
    names = PageNames()
    assert names.name("x", slots) == names.known(slots) == (Run("x", 0, 3),)
