"""The place of a claim's tokens after an edit: the longest part that is left in one piece."""

from __future__ import annotations

from array import array
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.claims.following import followed
from leyline_engine.contract import CopySegment, LineageRun
from leyline_engine.sources import SourceTurn

SOURCE = SourceTurn("t1", array("q", range(100)), "", (), "t", "s")


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
    assert followed(SOURCE.keys()[:80], 50, turn, [SOURCE], copies) == span


def test_tokens_that_stay_where_they_were_concern_no_claim() -> None:
    """A cut after it leaves it where it is."""
    turn, copies = edited([(0, 85), (90, 100)])
    assert followed(SOURCE.keys()[:80], 50, turn, [SOURCE], copies) is None


def test_a_turn_that_drew_on_something_else_concerns_no_claim() -> None:
    """Its source has other tokens, or had them under another lineage."""
    turn, copies = edited([(0, 20), (30, 100)])
    other = SourceTurn("t0", array("q", range(500, 600)), "", (), "t", "s")
    assert followed(SOURCE.keys()[:80], 50, turn, [other], copies) is None
    assert followed(SOURCE.keys()[:80], 50, turn, [], []) is None
    spliced = SourceTurn("t3", SOURCE.tokens, "", (LineageRun(40, "x"),), "t", "s")
    assert followed(spliced.keys()[:80], 50, turn, [SOURCE], copies) is None
    assert followed(spliced.keys()[:30], 20, turn, [SOURCE], copies) == (0, 0)


def test_copies_of_other_sources_are_not_the_claims() -> None:
    """Their index distinguishes them."""
    turn, copies = edited([(0, 20), (30, 100)])
    theirs = [CopySegment(1, copy.start, copy.end, copy.dest) for copy in copies]
    other = SourceTurn("t0", array("q", range(500, 600)), "", (), "t", "s")
    assert followed(SOURCE.keys()[:80], 50, turn, [SOURCE, other], theirs) == (0, 0)
    assert followed(SOURCE.keys()[:80], 50, turn, [other, SOURCE], theirs) == (40, 70)


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
    found = followed(SOURCE.keys()[:end], start, turn, [SOURCE], copies)
    claimed = [start <= token < end for token in turn.tokens]
    if found is None:
        assert turn.keys()[:end] == SOURCE.keys()[:end]
        return
    runs = [len(list(group)) for mine, group in groupby(claimed) if mine]
    first, last = found
    assert last - first == max(runs, default=0)
    assert all(claimed[first:last])
    assert list(turn.tokens[first:last]) == sorted(turn.tokens[first:last])
