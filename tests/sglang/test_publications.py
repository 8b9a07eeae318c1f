"""The index of published paths, against brute force."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import LineageRun
from leyline_engine.sglang.publications import Publication, Publications, Space

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


def noted(notes: list[tuple[tuple[str, str], Publication]], **bounds: int) -> Publications:
    """An index after all notes."""
    index = Publications(**bounds)
    for session, path in notes:
        index.note(session, path)
    return index


def covers(held: tuple[Publication, ...], path: Publication) -> bool:
    """Whether one of the paths begins with ``path``."""
    return any(p.space == path.space and p.keys[: len(path.keys)] == path.keys for p in held)


@given(NOTES)
def test_every_path_is_held_and_none_twice(
    notes: list[tuple[tuple[str, str], Publication]],
) -> None:
    """What a session published is covered by its paths, of which none begins another."""
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
    common = [path.common(other) for session in SESSIONS[1:] for other in index.of(session)]
    assert index.shared(SESSIONS[0], path, start) == max([start, *common])


@given(NOTES, st.dictionaries(st.sampled_from(["l1", "l2"]), st.integers(0, 8)))
def test_under_finds_every_tainted_position(
    notes: list[tuple[tuple[str, str], Publication]], lineages: dict[str, int]
) -> None:
    """A tenant's paths under a lineage are found, from the first position that matters on."""
    index = noted(notes)
    found = {(session, id(path)): at for session, path, at in index.under("tenant", lineages)}
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


@given(NOTES)
def test_what_goes_for_want_of_room_is_named(
    notes: list[tuple[tuple[str, str], Publication]],
) -> None:
    """No key that was published is dropped without being returned."""
    index = Publications(max_sessions=2, max_paths=2)
    gone: list[Publication] = []
    for session, path in notes:
        for old, length in index.note(session, path):
            held = [p for name in SESSIONS for p in index.of(name)]
            assert length <= max((old.common(p) for p in held), default=0)
            gone.append(old)
    held = tuple(p for name in SESSIONS for p in index.of(name))
    for _, path in notes:
        assert covers((*held, *gone), path)
    assert sum(1 for name in SESSIONS if index.of(name)) <= 2
    assert all(len(index.of(name)) <= 2 for name in SESSIONS)


@given(PATHS, st.integers(0, 8))
def test_a_cut_path_keeps_its_beginning(path: Publication, length: int) -> None:
    """Cutting leaves the first keys and the runs that govern them, or nothing at all."""
    index = noted([(SESSIONS[0], path)])
    length = min(length, len(path.keys))
    index.cut(SESSIONS[0], path, length)
    assert index.of(SESSIONS[0]) == ((path.cut(length),) if length else ())
    assert all(run.start < length for run in path.cut(length).runs)
