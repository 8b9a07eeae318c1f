"""The place of a claim's tokens after an edit: the longest part that is left in one piece."""

from __future__ import annotations

from array import array
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.claims.keeper import followed
from leyline_engine.claims.place import ClaimPlace
from leyline_engine.contract import CopySegment, LineageRun
from leyline_engine.records.sources import SourceTurn

SOURCE = SourceTurn("t1", array("q", range(101)), "", (), "t", "s")


def place(end: int, start: int, turn: SourceTurn = SOURCE, page: int = 1) -> ClaimPlace:
    """The place of a claim's tokens in a turn."""
    return ClaimPlace.of(turn, start, end, page)


def edited(pieces: list[tuple[int, int]], tail: int = 3) -> tuple[SourceTurn, list[CopySegment]]:
    """A turn that has these parts of the source, one after the other, and the copies for it.

    Tokens that keep their place are a prefix and aren't copied.
    """
    tokens: list[int] = []
    copies: list[CopySegment] = []
    for start, end in pieces:
        if start != len(tokens) or copies:
            copies.append(CopySegment(0, start, end, len(tokens)))
        tokens += range(start, end)
    first = copies[0].dest if copies else len(tokens)
    lineage = (LineageRun(first, "spliced"),)
    turn = SourceTurn("t2", array("q", [*tokens, *([999] * tail)]), "", lineage, "t", "s")
    return turn, copies


@pytest.mark.parametrize(
    ("pieces", "span"),
    [
        ([(0, 20), (30, 100)], (40, 70)),  # cut before it: moved
        ([(0, 60), (65, 100)], (50, 75)),  # cut within: both halves touch
        ([(0, 50), (80, 100)], (0, 0)),  # all of it cut
        ([(0, 70), (90, 100)], (50, 70)),  # its end cut
        ([(0, 10), (60, 100)], (10, 30)),  # its beginning cut
        ([(0, 10), (50, 60), (20, 30), (62, 80)], (30, 48)),  # torn: the longer piece
    ],
)
def test_a_claim_goes_where_its_tokens_went(
    pieces: list[tuple[int, int]], span: tuple[int, int]
) -> None:
    """A claim over tokens 50 to 80 of the source."""
    turn, copies = edited(pieces)
    assert followed(place(80, 50), turn, [SOURCE], copies) == span


def test_tokens_that_stay_where_they_were_concern_no_claim() -> None:
    """A cut after it leaves it where it is."""
    turn, copies = edited([(0, 85), (90, 100)])
    assert followed(place(80, 50), turn, [SOURCE], copies) is None


def test_a_turn_that_drew_on_something_else_concerns_no_claim() -> None:
    """Its source has other tokens, or had them under another lineage."""
    turn, copies = edited([(0, 20), (30, 100)])
    other = SourceTurn("t0", array("q", range(500, 600)), "", (), "t", "s")
    assert followed(place(80, 50), turn, [other], copies) is None
    assert followed(place(80, 50), turn, [], []) is None
    spliced = SourceTurn("t3", SOURCE.tokens, "", (LineageRun(40, "x"),), "t", "s")
    assert followed(place(80, 50, spliced), turn, [SOURCE], copies) is None
    assert followed(place(30, 20, spliced), turn, [SOURCE], copies) == (0, 0)


def test_copies_of_other_sources_are_not_the_claims() -> None:
    """Their index distinguishes them."""
    turn, copies = edited([(0, 20), (30, 100)])
    theirs = [CopySegment(1, copy.start, copy.end, copy.dest) for copy in copies]
    other = SourceTurn("t0", array("q", range(500, 600)), "", (), "t", "s")
    assert followed(place(80, 50), turn, [SOURCE, other], theirs) == (0, 0)
    assert followed(place(80, 50), turn, [other, SOURCE], theirs) == (40, 70)


@given(
    cuts=st.lists(st.integers(0, 100), max_size=8, unique=True).map(sorted),
    start=st.integers(0, 98),
    length=st.integers(1, 100),
    begin=st.booleans(),
)
def test_the_span_is_the_longest_run_of_claimed_tokens(
    cuts: list[int], start: int, length: int, begin: bool
) -> None:
    """Counted token by token in the new turn."""
    end = min(start + length, 100)
    edges = [0, *cuts, 100] if begin else [*cuts, 100]
    pieces = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b]
    turn, copies = edited(pieces)
    found = followed(place(end, start), turn, [SOURCE], copies)
    claimed = [start <= token < end for token in turn.tokens]
    if found is None:
        assert turn.keys()[:end] == SOURCE.keys()[:end]
        return
    runs = [len(list(group)) for mine, group in groupby(claimed) if mine]
    first, last = found
    assert last - first == max(runs, default=0)
    assert all(claimed[first:last])
    assert list(turn.tokens[first:last]) == sorted(turn.tokens[first:last])


@pytest.mark.parametrize(("page", "keys", "before"), [(1, 80, 50), (16, 80, 3), (32, 96, 1)])
def test_a_claim_has_the_pages_that_hold_its_tokens(page: int, keys: int, before: int) -> None:
    """Its keys end where its last page does; the first page begins at or before its start."""
    found = place(80, 50, page=page)
    assert (len(found.keys), found.before) == (keys, before)
    assert (found.start, found.end) == (50, 80)
    assert found.covered_by(SOURCE.keys(), keys)
    assert not found.covered_by(SOURCE.keys(), keys - 1)


@pytest.mark.parametrize(("end", "keys", "own"), [(100, 96, 96), (97, 96, 96), (96, 96, 96)])
def test_a_sources_last_partial_page_is_nobodys(end: int, keys: int, own: int) -> None:
    """The cache has none of it, so a claim ends with the page before."""
    found = place(end, 50, page=16)
    assert (len(found.keys), found.end) == (keys, own)


def test_a_claim_leaves_a_page_that_it_shares_with_an_edit() -> None:
    """Its tokens are where they were, but the page that they end in has been computed again."""
    turn, copies = edited([(0, 85), (90, 100)])
    assert followed(place(80, 50, page=32), turn, [SOURCE], copies) == (50, 80)
    assert followed(place(80, 50, page=16), turn, [SOURCE], copies) is None


def test_a_claim_is_found_in_a_source_that_has_its_tokens() -> None:
    """The rest of its last page may be another there."""
    between = SourceTurn("t0", array("q", [*range(85), *range(500, 550)]), "", (), "t", "s")
    turn = SourceTurn("t2", array("q", [*range(10), *range(20, 85), 9]), "", (), "t", "s")
    copies = [CopySegment(0, 20, 85, 10)]
    assert followed(place(80, 50, page=32), turn, [between], copies) == (40, 70)
    assert followed(place(90, 50, page=32), turn, [between], copies) is None
