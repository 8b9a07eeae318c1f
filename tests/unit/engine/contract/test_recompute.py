"""Tokens that are computed again after an edit: the boundary and the quotes."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Recompute, find_quotes, recomputed, uncovered
from leyline_engine.contract.recompute import MAX_QUOTES

TOKENS = st.lists(st.integers(0, 6), min_size=1, max_size=60).map(lambda ids: array("q", ids))


@st.composite
def cut_prompts(draw: st.DrawFn) -> tuple[array[int], list[tuple[int, int]]]:
    """A prompt of few different tokens, and up to three disjoint cuts, some of them empty."""
    tokens = draw(TOKENS)
    edges = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    return tokens, sorted(set(pairs))


def occurs(run: list[int], text: list[int]) -> bool:
    """Return True if ``run`` is somewhere in ``text``."""
    return any(text[at : at + len(run)] == run for at in range(len(text) - len(run) + 1))


def is_quoted(tokens: list[int], place: int, cuts: list[tuple[int, int]], length: int) -> bool:
    """Judge by brute force: a run over the place is in a cut before it, and nowhere earlier."""
    for start in range(max(0, place - length + 1), min(place, len(tokens) - length) + 1):
        run = tokens[start : start + length]
        for low, high in cuts:
            own = tokens[low:high]
            if high <= start and occurs(run, own):
                first = next(at for at in range(len(tokens)) if tokens[at : at + length] == run)
                if low <= first and first + length <= high:
                    return True
    return False


@given(cut_prompts(), st.integers(0, 20), st.sampled_from([0, 1, 2, 3]))
def test_what_is_computed_again_is_kept_text_after_a_cut(
    prompt: tuple[array[int], list[tuple[int, int]]], boundary: int, quotes: int
) -> None:
    """Spans are sorted, disjoint and outside of the cuts, and all of the boundary is in them."""
    tokens, cuts = prompt
    spans = recomputed(tokens, cuts, Recompute(boundary, quotes))
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(edges)
    assert all(low < high for low, high in spans)
    again = {place for low, high in spans for place in range(low, high)}
    gone = {place for low, high in cuts for place in range(low, high)}
    first = min((low for low, _ in cuts), default=len(tokens))
    assert not again & gone
    assert all(first <= place < len(tokens) for place in again)
    wanted = {at for _, end in cuts for at in range(end, min(end + boundary, len(tokens)))}
    assert wanted - gone <= again


@given(cut_prompts(), st.sampled_from([1, 2, 3]))
def test_quotes_are_runs_of_the_cut_that_nothing_before_it_has(
    prompt: tuple[array[int], list[tuple[int, int]]], shortest: int
) -> None:
    """Brute force marks the same tokens; only short gaps between them are added."""
    tokens, cuts = prompt
    spans = find_quotes(tokens, cuts, shortest)
    found = {place for low, high in spans for place in range(low, high)}
    ids = tokens.tolist()
    truth = {at for at in range(len(ids)) if is_quoted(ids, at, cuts, shortest)}
    ends = {edge for low, high in spans for edge in (low, high - 1)}
    assert ends <= truth
    if len(found) <= 20 and len(spans) < MAX_QUOTES:
        assert truth <= found or len(truth) > 32


def test_what_the_prompt_had_in_front_of_the_cut_is_no_quote() -> None:
    """Later text may have it from there."""
    tokens = array("q", [1, 2, 3, 9, 9, 1, 2, 3, 4, 8, 1, 2, 3, 8, 2, 3, 4])
    assert find_quotes(tokens, [(5, 9)], 3) == [(14, 17)]
    assert find_quotes(tokens[3:], [(2, 6)], 3) == [(7, 14)]


def test_long_and_many_quotes_stay_within_the_budget() -> None:
    """A hundredth of the prompt is computed again for quotes at most, and eight pieces of it."""
    cut = list(range(1000, 1200))
    pieces = [piece for at in range(0, 60, 5) for piece in (*cut[at : at + 4], *range(20))]
    tokens = array("q", [1, 2, 3, *cut, *range(500, 540), *pieces])
    spans = find_quotes(tokens, [(3, 203)], 3)
    assert len(spans) == MAX_QUOTES
    assert sum(high - low for low, high in spans) == 32
    longer = [piece for at in range(0, 60, 10) for piece in (*cut[at : at + 9], *range(20))]
    found = find_quotes(array("q", [1, 2, 3, *cut, *range(500, 540), *longer]), [(3, 203)], 3)
    assert [high - low for low, high in found] == [9, 9, 9]
    whole = array("q", [1, 2, 3, *cut, *range(500, 540), *cut])
    assert find_quotes(whole, [(3, 203)], 3) == []


@given(cut_prompts(), st.integers(0, 60), st.integers(0, 60))
def test_the_rest_of_an_extent_is_what_no_span_covers(
    prompt: tuple[array[int], list[tuple[int, int]]], one: int, other: int
) -> None:
    """Place by place it is the difference of the sets."""
    _, spans = prompt
    disjoint = [span for span in spans if span[0] < span[1]]
    extent = min(one, other), max(one, other)
    rest = uncovered(extent, disjoint)
    covered = {place for low, high in disjoint for place in range(low, high)}
    assert [at for low, high in rest for at in range(low, high)] == [
        at for at in range(*extent) if at not in covered
    ]
