"""Chunks by content: equal to a plain loop, within the clamps, and the same at any position."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import token_digest
from leyline_engine.reuse.chunking import Chunk, ChunkRule, chunks, gear, sub_windows

RESET = 7
SMALL = ChunkRule(exponent=3, least=4, most=12)
MARKER = (1, 2, 3)
RULES = st.builds(
    ChunkRule,
    exponent=st.integers(1, 5),
    least=st.integers(1, 8),
    most=st.integers(8, 80),
    resets=st.sampled_from([frozenset(), frozenset({RESET}), frozenset({RESET, 0})]),
    marker=st.sampled_from([(), MARKER, (5, 5)]),
    seed=st.integers(0, 3),
)
TOKENS = st.lists(st.integers(0, 9), max_size=300)
CALM = st.lists(st.integers(10, 10_000), min_size=20, max_size=200)
"""Sequences without resets and markers."""


def scalar_value(token: int, seed: int) -> int:
    """The value of a token by plain integers."""
    mixed = (token * 0x9E3779B97F4A7C15 + seed) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def scalar_spans(tokens: list[int], rule: ChunkRule) -> list[tuple[int, int]]:
    """The chunks by a loop that sees one token at a time."""
    spans, start, rolled, length = [], 0, 0, len(rule.marker)
    for at, token in enumerate(tokens):
        begins = token in rule.resets
        if rule.marker:
            begins |= tuple(tokens[at : at + length]) == rule.marker
            begins |= at >= length and tuple(tokens[at - length : at]) == rule.marker
        if begins:
            spans += [(start, at)] if at > start else []
            start, rolled = at, 0
        rolled = (2 * rolled + scalar_value(token, rule.seed)) % 2**64
        size = at + 1 - start
        if (size >= rule.least and rolled < 2 ** (64 - rule.exponent)) or size == rule.most:
            spans.append((start, at + 1))
            start = at + 1
    return spans + ([(start, len(tokens))] if start < len(tokens) else [])


def spans(found: tuple[Chunk, ...], offset: int = 0) -> list[tuple[int, int, int]]:
    """Bounds relative to an offset, with digests, of the chunks from there on."""
    return [
        (chunk.start - offset, chunk.end - offset, chunk.digest)
        for chunk in found
        if chunk.start >= offset
    ]


@given(TOKENS, RULES)
def test_chunks_are_those_of_a_plain_loop(tokens: list[int], rule: ChunkRule) -> None:
    """The vectorised chunker cuts where one that reads token by token cuts."""
    found = chunks(tokens, rule)
    assert [(chunk.start, chunk.end) for chunk in found] == scalar_spans(tokens, rule)


@given(TOKENS, RULES)
def test_chunks_cover_the_sequence_within_the_clamps(tokens: list[int], rule: ChunkRule) -> None:
    """Chunks join without gaps; only the last before a forced boundary is shorter than allowed."""
    found = chunks(tokens, rule)
    assert [0, *(chunk.end for chunk in found)] == [*(c.start for c in found), len(tokens)]
    forced = {len(tokens)}
    forced |= {at for at, token in enumerate(tokens) if token in rule.resets}
    for at in range(len(tokens)):
        if rule.marker and tuple(tokens[at : at + len(rule.marker)]) == rule.marker:
            forced |= {at, at + len(rule.marker)}
    for chunk in found:
        assert 0 < len(chunk) <= rule.most
        assert len(chunk) >= rule.least or chunk.end in forced
        digest = token_digest(tokens[chunk.start : chunk.end])
        assert f"{chunk.digest:016x}" == digest


@given(CALM, CALM, CALM)
def test_nothing_before_a_reset_matters(one: list[int], two: list[int], body: list[int]) -> None:
    """Behind a special token, chunks are equal whatever came before it."""
    rule = replace(SMALL, resets=frozenset({RESET}))
    after = [RESET, *body]
    alone = spans(chunks(after, rule))
    assert spans(chunks(one + after, rule), len(one)) == alone
    assert spans(chunks(two + after, rule), len(two)) == alone


@given(CALM, CALM)
def test_a_marker_makes_a_region_chunk_equally_anywhere(head: list[int], body: list[int]) -> None:
    """Behind a marker, and from its first token on, chunks don't depend on the offset."""
    rule = replace(SMALL, marker=MARKER)
    region = [*MARKER, *body]
    assert spans(chunks(head + region, rule), len(head)) == spans(chunks(region, rule))
    assert (0, len(MARKER)) == spans(chunks(region, rule))[0][:2]


def test_without_reset_or_marker_boundaries_drift() -> None:
    """The same regions chunk differently at other offsets if nothing cuts the dependence."""
    random = Random(3)
    body = [random.randrange(10, 100_000) for _ in range(60)]
    head = [random.randrange(10, 100_000) for _ in range(21)]
    plain = SMALL
    for region, rule in (
        ([RESET, *body], replace(SMALL, resets=frozenset({RESET}))),
        ([*MARKER, *body], replace(SMALL, marker=MARKER)),
    ):
        alone, moved = chunks(region, plain), chunks(head + region, plain)
        assert spans(moved, len(head)) != spans(alone)
        assert spans(chunks(head + region, rule), len(head)) == spans(chunks(region, rule))


def test_the_hash_depends_on_its_window_only() -> None:
    """A token changes the hash of the 64 positions from its own on, and no other."""
    ids = np.array(Random(1).choices(range(100_000), k=300))
    other = ids.copy()
    other[100] += 1
    start = np.zeros(1, dtype=np.int64)
    changed = np.flatnonzero(gear(ids, start) != gear(other, start))
    assert (changed[0], changed[-1]) == (100, 163)


def test_chunks_have_about_the_expected_length() -> None:
    """By default chunks of random tokens have the paper's clamps and expected size."""
    found = chunks(Random(2).choices(range(129_000), k=50_000))
    lengths = [len(chunk) for chunk in found[:-1]]
    assert min(lengths) >= 32
    assert max(lengths) <= 512
    assert 120 < sum(lengths) / len(lengths) < 180  # 128, the fewest allowed, less the longest


def test_windows_cover_their_chunk() -> None:
    """The fallback's windows have a fixed width from the chunk's start on."""
    tokens = list(range(1000))
    windows = sub_windows(tokens, Chunk(100, 400, 0))
    assert [(w.start, w.end) for w in windows] == [(100, 228), (228, 356), (356, 400)]
    assert windows[0].digest == chunks(tokens[100:228], ChunkRule(least=128, most=128))[0].digest
    assert len(sub_windows(tokens, Chunk(0, 128, 0))) == 1


@pytest.mark.parametrize(
    "settings",
    [{"exponent": 0}, {"exponent": 64}, {"least": 0}, {"least": 9, "most": 8}, {"seed": -1}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    """The message names the setting."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        ChunkRule(**settings)  # type: ignore[arg-type]
