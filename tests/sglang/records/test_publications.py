"""The index of published paths, against brute force."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import LineageRun
from leyline_engine.records.publications import (
    MIN_WEIGHT,
    Publication,
    Publications,
    Space,
)

SESSIONS = [("tenant", "a"), ("tenant", "b"), ("other", "a")]
SPACES = [Space(), Space("adapter")]
KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda keys: array("q", keys))
RUNS = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from(["l1", "l2"])),
    max_size=2,
    unique_by=lambda r: r[0],
).map(lambda runs: tuple(LineageRun(*run) for run in sorted(runs)))
PATHS = st.builds(Publication, KEYS, RUNS, st.sampled_from(SPACES))
NOTES = st.lists(st.tuples(st.sampled_from(SESSIONS), PATHS), max_size=24)


def noted(notes: list[tuple[tuple[str, str], Publication]]) -> Publications:
    """An index after all notes."""
    index = Publications()
    for session, path in notes:
        index.note(session, path)
    return index


def covers(held: tuple[Publication, ...], path: Publication) -> bool:
    """Return True if one of the paths begins with ``path``."""
    return any(p.space == path.space and p.keys[: len(path.keys)] == path.keys for p in held)


@given(NOTES)
def test_every_path_is_held_and_none_twice(
    notes: list[tuple[tuple[str, str], Publication]],
) -> None:
    """A session's publications are covered by its paths, of which none begins another."""
    index = noted(notes)
    for session, path in notes:
        assert covers(index.of(session), path)
    for session in SESSIONS:
        held = index.of(session)
        for path in held:
            assert not covers(tuple(other for other in held if other is not path), path)


@given(NOTES, PATHS, st.integers(0, 8))
def test_shared_is_the_longest_common_part_with_others(
    notes: list[tuple[tuple[str, str], Publication]], path: Publication, start: int
) -> None:
    """Others' reach along a path is what comparing with each of them gives."""
    index = noted(notes)
    start = min(start, len(path.keys))
    common = [index.common(path, other) for session in SESSIONS[1:] for other in index.of(session)]
    assert index.shared(SESSIONS[0], path, start) == max([start, *common])


@given(NOTES, st.lists(PATHS, max_size=3))
def test_agreed_is_the_longest_common_part_with_any_kept_path(
    notes: list[tuple[tuple[str, str], Publication]], kept: list[Publication]
) -> None:
    """Each path of a session has its own length, and those of other namespaces share nothing."""
    index = noted(notes)
    found = list(index.agreed(SESSIONS[0], kept))
    assert {id(path) for path, _ in found} == {id(path) for path in index.of(SESSIONS[0])}
    for path, length in found:
        assert length == max((index.common(path, other) for other in kept), default=0)


@given(NOTES, st.dictionaries(st.sampled_from(["l1", "l2"]), st.integers(0, 8)))
def test_under_finds_every_tainted_position(
    notes: list[tuple[tuple[str, str], Publication]], lineages: dict[str, int]
) -> None:
    """A tenant's paths under a lineage are found, from the first position that matters on."""
    index = noted(notes)
    marked = {("tenant", name): at for name, at in lineages.items()}
    found = {(session, id(path)): at for session, path, at in index.under(marked)}
    for session in SESSIONS:
        for path in index.of(session):
            starts = [
                max(run.start, lineages[run.lineage])
                for run in path.runs
                if run.lineage in lineages
            ]
            first = min(starts, default=len(path.keys))
            wanted = first if session[0] == "tenant" and first < len(path.keys) else None
            assert found.get((session, id(path))) == wanted


@given(NOTES, st.integers(1, 8))
def test_what_goes_for_want_of_room_is_named(
    notes: list[tuple[tuple[str, str], Publication]], bound: int
) -> None:
    """No key that was published is dropped without being returned, and the bound holds."""
    index = Publications(max_tokens=bound * MIN_WEIGHT, max_paths=2)
    gone: list[Publication] = []
    for session, path in notes:
        for old, length in index.note(session, path):
            held = [p for name in SESSIONS for p in index.of(name)]
            assert length == max((index.common(old, p) for p in held), default=0)
            gone.append(old)
        assert covers(index.of(session), path)
        own = len(index.of(session)) * MIN_WEIGHT
        assert index.tokens == sum(len(index.of(name)) for name in SESSIONS) * MIN_WEIGHT
        assert index.tokens <= max(bound * MIN_WEIGHT, own)
    held = tuple(p for name in SESSIONS for p in index.of(name))
    for _, path in notes:
        assert covers((*held, *gone), path)
    assert all(len(index.of(name)) <= 2 for name in SESSIONS)


def path_of(number: int, length: int) -> Publication:
    """A path that shares nothing with one of another number."""
    return Publication(array("q", range(number * 1_000_000, number * 1_000_000 + length)))


@pytest.mark.parametrize("scope", ["mine", "theirs"])
def test_many_small_sessions_take_nothing_from_a_large_one(scope: str) -> None:
    """A thousand sessions of three tokens weigh less than what they would push out."""
    index = Publications(max_tokens=200_000)
    large = path_of(0, 100_000)
    index.note(("mine", "large"), large)
    gone = [out for n in range(1, 1025) for out in index.note((scope, f"s{n}"), path_of(n, 3))]
    assert gone == []
    assert index.of(("mine", "large")) == (large,)


def test_the_tenant_that_noted_most_loses_first() -> None:
    """Another's single path stays, however many sessions a tenant begins and however long ago it
    was published; of the tenant's own, the one that published least recently goes."""
    index = Publications(max_tokens=100_000)
    lone = path_of(0, 20_000)
    index.note(("quiet", "s"), lone)
    gone: list[Publication] = []
    for n in range(1, 100):
        gone += [old for old, _ in index.note(("busy", f"s{n}"), path_of(n, 5_000))]
        assert index.tokens <= 100_000
    assert index.of(("quiet", "s")) == (lone,)
    assert gone == [path_of(n, 5_000) for n in range(1, len(gone) + 1)]
    assert len(gone) < 99 - 14, "room is made for more than one path at once"


def test_what_is_not_cached_any_more_goes_before_anything_else() -> None:
    """If the cache has evicted as much as there is too much of, no session loses a path."""
    lengths: dict[int, int] = {}
    index = Publications(
        max_tokens=100_000, cached=lambda path: lengths.get(path.keys[0] // 1_000_000, 0)
    )
    for n in range(1, 100):
        for kept in range(n - 6, n):
            lengths[kept] = max(0, 4_000 if kept > n - 6 else 0)
        assert index.note(("t", f"s{n}"), path_of(n, 5_000)) == ()
    assert index.of(("t", "s1")) == ()
    assert index.of(("t", "s99")) == (path_of(99, 5_000),)


def test_what_is_still_cached_of_a_path_stays_noted() -> None:
    """While room is short, paths lose what the cache has evicted, and nothing else: a forget must
    find the rest."""
    index = Publications(max_tokens=100_000, cached=lambda path: min(len(path.keys), 4_000))
    for n in range(18):
        assert index.note(("t", f"s{n}"), path_of(n, 5_000)) == ()
    assert index.of(("t", "s0")) == (path_of(0, 4_000),)


@given(PATHS, st.integers(0, 8))
def test_a_cut_path_keeps_its_beginning(path: Publication, length: int) -> None:
    """Cutting leaves the first keys and the runs that govern them, or nothing at all."""
    index = noted([(SESSIONS[0], path)])
    length = min(length, len(path.keys))
    index.cut(SESSIONS[0], path, length)
    assert index.of(SESSIONS[0]) == ((path.cut(length),) if length else ())
    assert all(run.start < length for run in path.cut(length).runs)
