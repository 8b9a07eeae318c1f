"""Winnowing against its definition, and the guarantee that it exists for."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.reuse.winnowing import (
    GRAM,
    GUARANTEE,
    WINDOW,
    Fingerprints,
    Winnower,
    ends_of_chains,
)

SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def texts(draw: st.DrawFn, least: int = 0, most: int = 400) -> array[int]:
    """Token ids of a small or a large alphabet; small ones repeat themselves."""
    alphabet = draw(st.sampled_from([1, 2, 3, 200_000]))
    seed = draw(st.integers(0, 2**32 - 1))
    length = draw(st.integers(least, most))
    return array("q", np.random.default_rng(seed).integers(0, alphabet, length).tolist())


def hashes(winnower: Winnower, tokens: array[int]) -> list[int]:
    """The hash of each k-gram, from a winnower that selects each."""
    every = Winnower(window=1)
    every._seed = winnower._seed
    found = every.select(tokens)
    assert found.positions.tolist() == list(range(max(0, len(tokens) - GRAM + 1)))
    return [int(value) for value in found.values]


@given(SEEDS, texts())
def test_the_leftmost_smallest_hash_of_each_window_is_selected(
    seed: int, tokens: array[int]
) -> None:
    """The vectorised selection is that of the paper's definition, window by window."""
    winnower = Winnower(seed)
    each = hashes(winnower, tokens)
    wanted = {
        start + min(range(WINDOW), key=lambda at: (each[start + at] >> 24, at))
        for start in range(len(each) - WINDOW + 1)
    }
    found = winnower.select(tokens)
    assert found.positions.tolist() == sorted(wanted)
    assert found.values.tolist() == [each[at] for at in sorted(wanted)]


@given(SEEDS, texts(GUARANTEE, GUARANTEE + 40), texts(), texts(), texts())
def test_a_common_run_shares_a_fingerprint_at_the_same_place(
    seed: int, run: array[int], before: array[int], other: array[int], after: array[int]
) -> None:
    """Whatever surrounds it, a run of the guaranteed length is found."""
    winnower = Winnower(seed)
    one = winnower.select(before + run + after)
    two = winnower.select(other + run)

    def inside(prints: Fingerprints, offset: int) -> set[tuple[int, int]]:
        pairs = zip(prints.positions.tolist(), prints.values.tolist(), strict=True)
        return {(at - offset, value) for at, value in pairs if 0 <= at - offset <= len(run) - GRAM}

    assert inside(one, len(before)) & inside(two, len(other))


@given(SEEDS, texts(GUARANTEE, 400), st.data())
def test_a_sequence_may_be_read_in_parts(
    seed: int, tokens: array[int], data: st.DataObject
) -> None:
    """A first part and the rest, read later, give the fingerprints of the whole."""
    winnower = Winnower(seed)
    cut = data.draw(st.integers(0, len(tokens)))
    whole = winnower.select(tokens)
    parts = [
        winnower.select(tokens, 0, cut),
        winnower.select(tokens, max(0, cut - GUARANTEE + 1)),
    ]
    found = {
        pair
        for part in parts
        for pair in zip(part.positions.tolist(), part.values.tolist(), strict=True)
    }
    assert found == set(zip(whole.positions.tolist(), whole.values.tolist(), strict=True))


def test_few_fingerprints_are_selected() -> None:
    """Of random tokens it is about 2 of 34, and of one repeated token only two remain."""
    tokens = array("q", np.random.default_rng(1).integers(0, 50_000, 50_000).tolist())
    assert 0.9 < len(Winnower(7).select(tokens).positions) / (50_000 * 2 / 34) < 1.1
    chain = Winnower(7).select(array("q", [5]) * 50_000)
    assert ends_of_chains(chain).positions.tolist() == [0, 50_000 - GUARANTEE]


def test_another_seed_selects_other_hashes() -> None:
    """Nobody who doesn't know the seed can prepare tokens of equal hashes."""
    tokens = array("q", range(500))
    one, two = Winnower(1).select(tokens), Winnower(2).select(tokens)
    assert not set(one.values.tolist()) & set(two.values.tolist())
