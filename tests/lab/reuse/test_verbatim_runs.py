"""The ceiling of verbatim reuse: equal to comparing everything with everything."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lab.reuse.verbatim_runs import GrowingRuns, covered

SEQUENCE = st.lists(st.integers(0, 2), max_size=40)
LIVE = st.lists(SEQUENCE, max_size=4)


def compared(live: list[list[int]], prompt: list[int], min_run: int) -> list[bool]:
    """Every place of the prompt beside every place of every sequence."""
    mask = [False] * len(prompt)
    for sequence in live:
        for at in range(len(prompt)):
            for there in range(len(sequence)):
                run = 0
                while prompt[at + run : at + run + 1] == sequence[there + run : there + run + 1]:
                    if at + run == len(prompt):
                        break
                    run += 1
                if run >= min_run:
                    mask[at : at + run] = [True] * run
    return mask


@given(LIVE, SEQUENCE, st.integers(1, 9))
def test_covered_tokens_are_those_of_a_full_comparison(
    live: list[list[int]], prompt: list[int], min_run: int
) -> None:
    """A token is covered exactly if it lies in an equal run of the length or more."""
    assert covered(live, prompt, min_run).tolist() == compared(live, prompt, min_run)


@given(st.lists(st.tuples(SEQUENCE, st.integers(0, 40)), max_size=7), SEQUENCE, st.integers(1, 6))
def test_a_growing_history_covers_the_same(
    steps: list[tuple[list[int], int]], prompt: list[int], min_run: int
) -> None:
    """Sequences added one by one, each without what it shares with the last, cover as together."""
    growing, live = GrowingRuns(min_run), list[list[int]]()
    for tail, shared in steps:
        known = live[-1][:shared] if live else []
        live.append(known + tail)
        growing.add(live[-1], known=len(known))
        assert growing.covered(prompt).tolist() == covered(live, prompt, min_run).tolist()


def test_one_token_fewer_is_no_run() -> None:
    """A run of 64 tokens is found at any place; one of 63 isn't, nor one across two sequences."""
    random = Random(5)
    source = random.sample(range(10_000), 300)
    for length, expected in ((64, 64), (63, 0)):
        prompt = [20_000] * 10 + source[100 : 100 + length] + [20_000] * 10
        assert covered([source], prompt).sum() == expected
    assert covered([source[:40], source[40:80]], source[:80]).sum() == 0
    assert covered([], source).sum() == covered([source], []).sum() == 0


def test_what_is_no_token_is_refused() -> None:
    """Negative ids and lengths that aren't positive are errors of the caller."""
    with pytest.raises(ValueError, match="negative"):
        covered([[1, -1]], [1])
    with pytest.raises(ValueError, match="min_run"):
        covered([[1]], [1], 0)
