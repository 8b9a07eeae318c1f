"""The runs in memory: bounded, fair, and without what a session forgets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from warm_kit import run

from leyline_proxy.warm_start.book import MAX_FORGETS, RunBook

OWNER = ("t", "s")
TENANTS = "abc"
kept = st.tuples(st.sampled_from(TENANTS), st.integers(0, 5), st.integers(1, 9))


@given(st.lists(kept, max_size=40), st.integers(1, 30), st.integers(1, 8))
def test_memory_is_bounded_and_no_tenant_takes_anothers_part(
    steps: list[tuple[str, int, int]], tokens: int, runs: int
) -> None:
    """The sums are right and within their bounds after every step, and a tenant that has no more
    than an equal part loses nothing to the others."""
    book = RunBook(tokens, runs)
    for tenant, session, length in steps:
        before = {name: [r for r in book if r.tenant == name] for name in TENANTS}
        book.keep(run([1] * length, f"s{session}", tenant=tenant))
        held = list(book)
        assert book.tokens == sum(len(r.tokens) for r in held) <= tokens
        assert len(book) == len({r.owner for r in held}) == len(held) <= runs
        for name in set(TENANTS) - {tenant}:
            share = len(TENANTS) * sum(len(r.tokens) for r in before[name])
            if share <= tokens and len(TENANTS) * len(before[name]) <= runs:
                assert [r for r in held if r.tenant == name] == before[name]


def test_a_session_has_its_latest_run_alone() -> None:
    """A later turn takes the earlier one's place, and the oldest run is lost first."""
    book = RunBook(6)
    book.keep(run([1, 2], "one"))
    book.keep(run([1, 2], "two"))
    book.keep(run([1, 2, 3], "one"))
    assert sorted(r.session for r in book) == ["one", "two"]
    book.keep(run([4, 5], "three"))
    assert sorted(r.session for r in book) == ["one", "three"]


def test_a_turn_that_was_planned_before_a_forget_is_not_kept() -> None:
    """The turn that forgets is kept, one that ran beside it never is, and later ones are again."""
    book = RunBook(100)
    book.keep(run([1, 2]))
    assert book.forget(OWNER, "t2", 0)
    assert book.get(OWNER) is None
    assert not book.settle(run([1, 2]), "t1", 0)
    assert book.settle(run([3]), "t2", 0)
    assert not book.settle(run([1, 2]), "t1", 0)
    assert book.get(OWNER) == run([3], at=book.get(OWNER).at)  # type: ignore[union-attr]
    assert book.settle(run([4]), "t3", 1)


def test_of_two_forgets_at_once_neither_turn_is_kept() -> None:
    """Each may hold what the other one demands; a turn after both is kept."""
    book = RunBook(100)
    book.forget(OWNER, "t1", 3)
    book.forget(OWNER, "t2", 3)
    assert not book.settle(run([1]), "t1", 3)
    assert not book.settle(run([2]), "t2", 3)
    assert not book.settle(run([2]), "t9", 2)
    assert book.settle(run([3]), "t3", 4)


def test_a_forget_that_was_planned_long_ago_spoils_no_later_one() -> None:
    """A late demand from before the last one still counts against the turns of its time."""
    book = RunBook(100)
    book.forget(OWNER, "t5", 5)
    book.forget(OWNER, "t1", 1)
    assert not book.settle(run([1]), "t1", 1)
    assert not book.settle(run([1]), "t4", 5)


def test_forgets_are_remembered_within_bounds() -> None:
    """The account of forgets doesn't grow without end, and each is another one."""
    book = RunBook(100)
    first = book.last_forget(OWNER)
    book.forget(OWNER, "t1", 0)
    assert book.last_forget(OWNER) is not first
    for number in range(MAX_FORGETS):
        book.forget(("t", f"other{number}"), "t1", 0)
    assert book.last_forget(OWNER) is None


def test_idle_and_unwanted_runs_go() -> None:
    """Runs from before a time are dropped, and all of a tenant that wants none."""
    book = RunBook(100)
    book.keep(run([1], "old", at=10.0))
    book.keep(run([1], "new", at=20.0))
    book.keep(run([1], "other", tenant="u", at=20.0))
    book.expire(15.0)
    assert sorted(r.session for r in book) == ["new", "other"]
    book.drop_tenant("t")
    assert [r.session for r in book] == ["other"]


def test_a_replayed_run_is_at_its_new_engine() -> None:
    """A cut copy of the run counts; a run that a later turn replaced doesn't."""
    book = RunBook(100)
    old = run([1, 2, 3], at=1.0)
    book.keep(old)
    book.replayed(old.first(2), "weights@new")
    assert book.get(OWNER) == run([1, 2, 3], at=1.0, engine="weights@new")
    book.keep(run([1, 2, 3, 4], at=2.0))
    book.replayed(old, "weights@newer")
    assert book.get(OWNER).engine == "weights@run"  # type: ignore[union-attr]
