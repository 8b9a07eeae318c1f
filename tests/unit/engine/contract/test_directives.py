"""Directives: their checks, and that lowering says the same as applying."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import (
    MAX_DIRECTIVES,
    CopySegment,
    Directive,
    DirectiveError,
    LiteralSegment,
    apply_directives,
    check_directives,
    lower_directives,
)


@pytest.mark.parametrize(
    ("directives", "index"),
    [
        ([Directive(-1, 2)], 0),
        ([Directive(3, 2)], 0),
        ([Directive(0, 11)], 0),
        ([Directive(11, 11)], 0),
        ([Directive(0, 2), Directive(1, 3)], 1),
        ([Directive(4, 5), Directive(1, 2)], 1),
        ([Directive(2, 2, (1,)), Directive(2, 4)], 1),
        ([Directive(0, 1), Directive(2, 3), Directive(-5, -1)], 2),
        ([Directive(0, 2**80)], 0),
    ],
)
def test_bad_directives_name_their_index(directives: list[Directive], index: int) -> None:
    """Negative, reversed, overlapping, unordered and overlong spans are refused by index."""
    for function in (
        lambda: check_directives(directives, 10),
        lambda: apply_directives(range(10), directives),
        lambda: lower_directives(directives, 10, 10),
    ):
        with pytest.raises(DirectiveError, match=f"directive {index}:") as caught:
            function()
        assert caught.value.index == index


def test_ten_thousand_directives_are_refused() -> None:
    """There is a limit, and it is refused before any work is done."""
    many = [Directive(i, i + 1) for i in range(10_000)]
    with pytest.raises(DirectiveError, match="more than 1024"):
        check_directives(many, 10_000)
    check_directives(many[:MAX_DIRECTIVES], 10_000)


def test_touching_spans_are_allowed() -> None:
    """[2, 4) and [4, 6) don't overlap, nor does an insertion after a cut."""
    assert apply_directives(range(8), [Directive(2, 4), Directive(4, 6)]) == [0, 1, 6, 7]
    assert apply_directives(range(4), [Directive(1, 2), Directive(2, 2, (9,))]) == [0, 9, 2, 3]


@st.composite
def edits(draw: st.DrawFn) -> tuple[list[int], list[Directive]]:
    """A source and directives that fit it."""
    source = draw(st.lists(st.integers(0, 50), max_size=40))
    cuts = sorted(draw(st.sets(st.integers(0, len(source)), max_size=8)))
    directives = []
    for start, end in zip(cuts[::2], cuts[1::2], strict=False):
        stop = draw(st.sampled_from([start, end]))
        directives.append(
            Directive(start, stop, tuple(draw(st.lists(st.integers(51, 99), max_size=4))))
        )
    return source, directives


@given(edits(), st.lists(st.integers(100, 120), max_size=5), st.integers(0, 60))
def test_lowering_agrees_with_applying(
    case: tuple[list[int], list[Directive]], tail: list[int], clip: int
) -> None:
    """Segments tile the prompt in order, and every copy finds its tokens there, clipped or not."""
    source, directives = case
    applied = apply_directives(source, directives)
    assert len(applied) == len(source) + sum(d.delta for d in directives)
    for prompt in (applied + tail, applied[:clip]):
        cursor = copied = 0
        for segment in lower_directives(directives, len(source), len(prompt), source=3):
            assert segment.dest == cursor < segment.dest_end
            cursor = segment.dest_end
            if isinstance(segment, CopySegment):
                assert segment.source == 3
                assert source[segment.start : segment.end] == prompt[segment.dest : cursor]
                copied += segment.length
            else:
                assert isinstance(segment, LiteralSegment)
        assert cursor == len(prompt)
        if len(prompt) >= len(applied):
            assert copied == len(source) - sum(d.end - d.start for d in directives)
