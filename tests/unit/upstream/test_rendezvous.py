"""Rendezvous hashing: who moves, who stays, and how many each gets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.upstream.rendezvous import ranked

SESSIONS = [f"s-{number}" for number in range(3000)]

names = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=8, unique=True)


def even(*engines: str) -> dict[str, float]:
    return dict.fromkeys(engines, 1.0)


@given(names, st.text(max_size=20), st.data())
def test_an_order_without_a_name_is_the_order_less_that_name(
    engines: list[str], key: str, data: st.DataObject
) -> None:
    """The others keep their order for every session, whichever is taken away or added."""
    gone = data.draw(st.sampled_from(engines))
    whole = ranked(key, even(*engines))
    rest = ranked(key, even(*(name for name in engines if name != gone)))
    assert rest == [name for name in whole if name != gone]


@given(names, st.text(max_size=20), st.randoms())
def test_the_order_doesnt_depend_on_the_order_of_names(
    engines: list[str], key: str, random: object
) -> None:
    """Two proxies that list the engines in another order agree."""
    assert ranked(key, even(*engines)) == ranked(key, even(*reversed(engines)))


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_adding_an_engine_moves_its_share_and_no_more(count: int) -> None:
    """One in n sessions moves to the nth engine, and none between the others."""
    before = {key: ranked(key, even(*map(str, range(count - 1))))[0] for key in SESSIONS}
    after = {key: ranked(key, even(*map(str, range(count))))[0] for key in SESSIONS}
    moved = [key for key in SESSIONS if before[key] != after[key]]
    assert all(after[key] == str(count - 1) for key in moved)
    assert len(moved) / len(SESSIONS) == pytest.approx(1 / count, rel=0.15)


def test_an_engine_gets_sessions_by_its_weight() -> None:
    """Three times the weight is three times the sessions."""
    first = Counter(ranked(key, {"big": 3.0, "small": 1.0})[0] for key in SESSIONS)
    assert first["big"] / len(SESSIONS) == pytest.approx(0.75, rel=0.05)


def test_a_weight_that_changes_moves_sessions_to_or_from_that_engine_only() -> None:
    """Raising one weight takes sessions from the others and moves none between them."""
    before = {key: ranked(key, {"a": 1.0, "b": 1.0, "c": 1.0})[0] for key in SESSIONS}
    after = {key: ranked(key, {"a": 2.0, "b": 1.0, "c": 1.0})[0] for key in SESSIONS}
    assert {after[key] for key in SESSIONS if before[key] != after[key]} == {"a"}
