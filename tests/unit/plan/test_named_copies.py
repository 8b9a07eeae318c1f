"""Copies by name: which contents of a prompt another session's turn may serve."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import (
    MAX_NAMED_COPIES,
    MAX_NAMED_SOURCES,
    CopySegment,
    LiteralSegment,
    SourceRef,
)
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.plan.named import NamedCopies, name_copies, served_extents
from leyline_proxy.sessions.contents import MIN_CONTENT, ContentPlace

SINK = 32
LENGTHS = (5, 16, 20, 40)
Library = dict[SourceRef, list[tuple[int, int]]]
"""The contents of turns, each as its number and its start."""


def length_of(content: int) -> int:
    """The tokens of a content."""
    return LENGTHS[content % len(LENGTHS)]


def source(number: int, session: str = "other") -> SourceRef:
    """A turn of a session."""
    return SourceRef(f"t{number}", 10_000, f"{number:016x}", session)


def laid_out(contents: list[int], mark: int = 3) -> tuple[Rendered, list[tuple[int, int]]]:
    """A prompt of contents with marks between them, and the start of each."""
    spans, starts, at = [], [], 0
    for message, content in enumerate(contents):
        at += mark
        spans.append(MessageSpan(message, at, at + length_of(content)))
        starts.append((content, at))
        at += length_of(content)
    return Rendered(array("q", range(at + mark)), tuple(spans)), starts


def named(
    contents: list[int], library: Library, served: tuple[tuple[int, int], ...] = ((0, 0),)
) -> NamedCopies:
    """The copies of a prompt of these contents."""
    prompt, starts = laid_out(contents)
    by_start = {start: content for content, start in starts}

    def places_of(span: MessageSpan) -> list[ContentPlace]:
        return [
            ContentPlace(ref, start, start + length_of(content))
            for ref, held in library.items()
            for content, start in held
            if content == by_start[span.start]
        ]

    return name_copies(prompt, served, places_of, session="me", sink=SINK)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Library, tuple[tuple[int, int], ...]]:
    """A prompt, turns that hold some of its contents once each, and what is served already."""
    content = st.integers(0, 11)
    contents = draw(st.lists(content, min_size=1, max_size=12))
    library: Library = {}
    for number in range(draw(st.integers(0, 4))):
        session = draw(st.sampled_from(["me", "other", "third"]))
        held = draw(st.lists(content, max_size=8, unique=True))
        library[source(number, session)] = laid_out(held)[1]
    edges = sorted(draw(st.sets(st.integers(0, 300), max_size=4)))
    served = tuple(zip(edges[::2], edges[1::2], strict=False))
    return contents, library, served


@given(cases())
def test_copies_are_of_contents_that_nothing_serves(
    case: tuple[list[int], Library, tuple[tuple[int, int], ...]],
) -> None:
    """Every copy is made of named contents, each is needed, and each that has a place is named."""
    contents, library, served = case
    found = named(contents, library, served)
    prompt, starts = laid_out(contents)
    needed = {
        span.start: span.end
        for span in prompt.spans
        if span.end - span.start >= MIN_CONTENT
        and span.end > SINK
        and not any(begin <= span.start and span.end <= end for begin, end in served)
    }
    own = {
        SourceRef(r.turn, r.length, r.digest) if r.session == "me" else r: h
        for r, h in library.items()
    }
    cursor, covered = 0, set()
    for copy in found.copies:
        assert copy.dest >= cursor
        cursor = copy.dest_end
        held = {start: content for content, start in own[found.sources[copy.source]]}
        inside = [at for at in needed if copy.dest <= at < copy.dest_end]
        assert inside[0] == copy.dest
        assert needed[inside[-1]] == copy.dest_end
        for content, start in starts:
            if start in inside:
                assert held[start - copy.dest + copy.start] == content
                covered.add(start)
    has_place = {
        start
        for content, start in starts
        if start in needed
        and any(content == other for held in library.values() for other, _ in held)
    }
    assert covered == has_place
    assert len(set(found.sources)) == len(found.sources)
    assert {copy.source for copy in found.copies} == set(range(len(found.sources)))


def test_neighbours_become_one_copy() -> None:
    """Contents that follow in one turn as in the prompt are one copy, also over a short message."""
    library = {source(1): laid_out([3, 2, 4, 7, 6])[1]}
    found = named([11, 2, 4, 7, 6], library)
    assert found.sources == (source(1),)
    (copy,) = found.copies
    assert (copy.start, copy.dest) == (46, 46)
    assert copy.length == 20 + 3 + 5 + 3 + 40 + 3 + 20


def test_a_content_without_a_place_ends_a_copy() -> None:
    """Only what is known to be equal is named: between two copies, other text may stand."""
    library = {source(1): laid_out([11, 2, 3, 6])[1]}
    found = named([11, 2, 7, 6], library)
    assert [(copy.dest, copy.length) for copy in found.copies] == [(3, 63), (112, 20)]


def test_the_sessions_own_places_come_first() -> None:
    """KV of the session itself is closer to the prompt than that of another."""
    library = {source(1): laid_out([3, 7])[1], source(2, "me"): laid_out([7, 3])[1]}
    found = named([10, 10, 7], library)
    assert found.sources == (SourceRef("t2", 10_000, f"{2:016x}"),)


def test_a_copy_continues_in_its_turn() -> None:
    """A run of one turn is preferred to the pieces of several, even if they are the session's."""
    library = {source(1): laid_out([3, 7, 6])[1], source(2, "me"): laid_out([3, 3, 6])[1]}
    found = named([11, 7, 6], library)
    assert [each.session for each in found.sources] == ["other"]
    assert len(found.copies) == 1


def test_payloads_are_bounded() -> None:
    """Of too many turns those with the most tokens stay, and of too many copies the longest."""
    many = {source(n): [(n, 50)] for n in range(MAX_NAMED_SOURCES + 20)}
    found = named([3, *range(MAX_NAMED_SOURCES + 20)], many)
    assert len(found.sources) == MAX_NAMED_SOURCES
    assert min(copy.length for copy in found.copies) == 20
    assert any(copy.length == 40 for copy in found.copies)
    scattered = [3, *[1, 0, 2] * MAX_NAMED_COPIES]
    found = named(scattered, {source(1): [(1, 500), (2, 100)]})
    assert len(found.copies) == MAX_NAMED_COPIES
    assert {copy.length for copy in found.copies} == {20}


def test_what_the_session_has_itself_is_served() -> None:
    """The common beginning and an edit's copies are, and literals between them aren't."""
    segments = (
        CopySegment(0, 0, 50, 0),
        LiteralSegment(50, 20),
        CopySegment(0, 90, 130, 70),
        CopySegment(1, 0, 20, 110),
    )
    assert served_extents(40, segments) == ((0, 40), (40, 50), (70, 110), (110, 130))
    assert served_extents(100, segments) == ((0, 100), (100, 110), (110, 130))
    assert served_extents(0, ()) == ((0, 0),)
