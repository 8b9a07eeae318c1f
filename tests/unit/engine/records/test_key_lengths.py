"""Comparisons of sequences and of lineage maps, against one element at a time."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import LineageRun, token_digest
from leyline_engine.records.keys import shared_length
from leyline_engine.records.lineage import alike_length, fold_keys
from leyline_engine.records.sources import SourceTurn

MAPS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["l1", "l2"])),
    max_size=3,
    unique_by=lambda run: run[0],
).map(lambda runs: tuple(LineageRun(*run) for run in sorted(runs)))


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 9), st.integers(0, 9))
def test_shared_length_ends_at_the_first_difference(
    length: int, differs: int, start: int, second_start: int
) -> None:
    """At any place, in any portion, and from any element on."""
    same = array("q", (n * n for n in range(length)))
    other = same[:]
    if differs < length:
        other[differs] += 1
    first = array("q", [5] * start) + same
    second = array("q", [6] * second_start) + other + array("q", [1])
    assert shared_length(first, second, start, second_start) == min(length, differs)
    assert shared_length(second, first, second_start, start) == min(length, differs)
    assert shared_length(first, first) == len(first)


@pytest.mark.parametrize("differs", [0, 63, 64, 65, 1087, 1088, 1089, 17471, 17472, 17473])
def test_no_difference_is_missed_between_two_portions(differs: int) -> None:
    """The last element of a portion is compared, and so is the first one of the next."""
    same = array("q", range(20_000))
    other = same[:]
    other[differs] += 1
    assert shared_length(same, other) == differs


@given(MAPS, MAPS, st.integers(0, 12), st.integers(0, 12))
def test_turns_share_the_keys_that_folding_gives(
    first: tuple[LineageRun, ...], second: tuple[LineageRun, ...], length: int, differs: int
) -> None:
    """Tokens and maps must agree; maps that name one lineage twice may count as different."""
    tokens = array("q", range(length))
    others = array("q", (n + 50 * (n >= differs) for n in range(length)))
    turns = [
        SourceTurn("t", ids, token_digest(ids), runs, "scope")
        for ids, runs in ((tokens, first), (others, second))
    ]
    keys = [turn.keys() for turn in turns]
    same = [one == other for one, other in zip(*keys, strict=True)]
    shared = turns[0].shared_keys(turns[1])
    assert shared == turns[1].shared_keys(turns[0]) <= [*same, False].index(False)
    if first == second:
        assert shared == min(length, differs)
        assert alike_length(first, second, 99) == 99


@given(MAPS, st.integers(0, 12), st.integers(0, 12))
def test_keys_of_a_part_are_a_part_of_the_keys(
    lineage: tuple[LineageRun, ...], length: int, start: int
) -> None:
    """Folding from a position on gives what folding all gives there."""
    tokens = array("q", range(length))
    whole = fold_keys(tokens, lineage, "t")
    assert fold_keys(tokens[start:], lineage, "t", start=start) == whole[start:]
