"""Lineages: keys stay in range, and different histories never share a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import CopySegment, LineageRun, token_digest
from leyline_engine.records.lineage import (
    MAX_TOKEN,
    derive_lineage,
    first_spliced,
    fold_keys,
    lineage_bits,
    runs_before,
)

TOKENS = st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=40)


@st.composite
def runs(draw: st.DrawFn) -> tuple[LineageRun, ...]:
    """A sorted lineage map."""
    starts = sorted(draw(st.sets(st.integers(0, 50), max_size=4)))
    return tuple(LineageRun(start, draw(st.text("abc", min_size=1))) for start in starts)


@given(TOKENS, runs())
def test_keys_fit_a_signed_word_and_unfold(
    tokens: list[int], lineage: tuple[LineageRun, ...]
) -> None:
    """Keys are never negative, stay below 2**63, and hold token and lineage apart."""
    keys = fold_keys(tokens, lineage, "t")
    assert len(keys) == len(tokens)
    for position, (key, token) in enumerate(zip(keys, tokens, strict=True)):
        governing = [run for run in lineage if run.start <= position]
        expected = lineage_bits(governing[-1].lineage, "t") if governing else 0
        assert 0 <= key < 2**63
        assert (key >> 24, key & MAX_TOKEN) == (expected, token)


@given(st.text(min_size=1).filter(lambda text: text.isascii()))
def test_lineage_bits_are_never_the_exact_ones(name: str) -> None:
    """No lineage folds to zero, which is what exact keys carry."""
    assert 1 <= lineage_bits(name, "t") < 2**39


@pytest.mark.parametrize("token", [-1, MAX_TOKEN + 1])
def test_tokens_that_do_not_fold_are_refused(token: int) -> None:
    """A token id that would run into the lineage's bits raises."""
    with pytest.raises(ValueError, match="token ids"):
        fold_keys([1, token], ())


def test_folding_leaves_the_tokens_alone() -> None:
    """The caller's array isn't the one that is folded."""
    from array import array

    tokens = array("q", [1, 2, 3])
    fold_keys(tokens, (LineageRun(0, "x"),))
    assert tokens.tolist() == [1, 2, 3]


def test_equal_tokens_by_different_edits_are_two_lineages() -> None:
    """Cutting either of two equal tokens gives equal prompts and different names."""
    digest = token_digest([1, 2, 2, 3])
    cut_first = [CopySegment(0, 0, 1, 0), CopySegment(0, 2, 4, 1)]
    cut_second = [CopySegment(0, 0, 2, 0), CopySegment(0, 3, 4, 2)]
    names = {derive_lineage("", "t", [(digest, ())], copies) for copies in (cut_first, cut_second)}
    assert len(names) == 2


def test_every_ingredient_changes_the_name() -> None:
    """Parent, scope, source digest and lineage, copies and salt all count; repeats agree."""
    copy = CopySegment(0, 5, 9, 3)
    base = derive_lineage("p", "t", [("d", ())], [copy])
    others = {
        derive_lineage("q", "t", [("d", ())], [copy]),
        derive_lineage("p", "u", [("d", ())], [copy]),
        derive_lineage("p", "t", [("e", ())], [copy]),
        derive_lineage("p", "t", [("d", (LineageRun(4, "l"),))], [copy]),
        derive_lineage("p", "t", [("d", ()), ("d", ())], [copy]),
        derive_lineage("p", "t", [("d", ())], [CopySegment(0, 5, 9, 4)]),
        derive_lineage("p", "t", [("d", ())], [CopySegment(1, 5, 9, 3)]),
        derive_lineage("p", "t", [("d", ())], [copy, copy]),
        derive_lineage("pt", "", [("d", ())], [copy]),
        derive_lineage("", "pt", [("d", ())], [copy]),
        derive_lineage("p", "t", [("d", ())], [copy], salt=b"s"),
    }
    assert len(others | {base}) == 12
    assert derive_lineage("p", "t", [("d", ())], [copy]) == base
    assert len(base) == 32


@given(runs(), st.integers(0, 60))
def test_runs_before_govern_the_same_keys(lineage: tuple[LineageRun, ...], position: int) -> None:
    """Cutting a map at a position changes no key before it."""
    tokens = list(range(60))
    cut = runs_before(lineage, position)
    assert fold_keys(tokens, lineage)[:position] == fold_keys(tokens, cut)[:position]
    assert first_spliced(lineage, position) == min([position, *(run.start for run in lineage)])


def test_a_lineage_is_bound_to_its_scope() -> None:
    """The same name in another tenant's scope, or split otherwise, folds to other keys."""
    bits = {
        lineage_bits("l", "t"),
        lineage_bits("l", "u"),
        lineage_bits("tl", ""),
        lineage_bits("", "tl"),
    }
    assert len(bits) == 4
    runs_ = (LineageRun(1, "l"),)
    assert fold_keys([5, 5], runs_, "t")[0] == fold_keys([5, 5], runs_, "u")[0] == 5
