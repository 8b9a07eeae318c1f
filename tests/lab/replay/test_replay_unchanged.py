"""The independent count of unchanged tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_lab.replay.unchanged import SINK, lcs_length, unchanged_tokens

TOKENS = st.lists(st.integers(0, 5), max_size=120)


def table_lcs(left: list[int], right: list[int]) -> int:
    """The textbook quadratic table."""
    above = [0] * (len(right) + 1)
    for item in left:
        row = [0]
        for column, other in enumerate(right):
            row.append(above[column] + 1 if item == other else max(row[-1], above[column + 1]))
        above = row
    return above[-1]


@given(TOKENS, TOKENS)
def test_lcs_equals_the_table(left: list[int], right: list[int]) -> None:
    """The bit-parallel length is that of the quadratic table, both ways round."""
    assert lcs_length(left, right) == table_lcs(left, right) == lcs_length(right, left)


@given(TOKENS, TOKENS, TOKENS)
def test_lcs_of_a_shared_prefix(prefix: list[int], left: list[int], right: list[int]) -> None:
    """A common prefix is part of a longest common subsequence."""
    whole = lcs_length(prefix + left, prefix + right)
    assert whole == len(prefix) + lcs_length(left, right)


def test_sink_and_last_token_do_not_count() -> None:
    """Resending a prompt of n tokens leaves n - 33 that the cache could give."""
    prompt = list(range(100))
    assert unchanged_tokens(prompt, prompt) == 100 - SINK - 1


def test_short_prompts_have_nothing_unchanged() -> None:
    """A prompt within the sink has no reusable token, and the count never goes negative."""
    assert unchanged_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert unchanged_tokens([], list(range(50))) == 0
    assert unchanged_tokens(list(range(50)), list(range(50)), boundary=40) == 0


def test_a_declared_boundary_is_left_out() -> None:
    """Tokens that the caller asks to be recomputed are not counted as missed."""
    prompt = list(range(100))
    assert unchanged_tokens(prompt, prompt, boundary=7) == 100 - SINK - 1 - 7


def test_a_removed_message_shifts_but_does_not_lose_tokens() -> None:
    """Text after a removed span is unchanged although its position moved."""
    before = list(range(200))
    after = before[:60] + before[90:] + [1000]
    assert unchanged_tokens(before, after) == 200 - 30 - SINK
