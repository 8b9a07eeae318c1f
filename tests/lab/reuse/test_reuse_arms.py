"""Each way to find reusable runs, on sequences whose shared parts are known."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import common_prefix
from leyline_engine.reuse.chunking import ChunkRule
from leyline_lab.reuse.arms import (
    AlignedRuns,
    Arm,
    Ceiling,
    ContentChunks,
    FixedBlocks,
    Winnowed,
    new_arms,
)

ROLE = 200_000


@dataclass
class Everything:
    """A fingerprint at every second k-gram, without choosing."""

    positions: list[int]
    values: list[int]


def fingerprints(tokens: array[int]) -> Everything:
    """Fingerprints dense enough to find every run of 64 tokens."""
    places = range(max(0, len(tokens) - 31))
    values = {at: crc32(tokens[at : at + 32]) for at in places}
    chosen = {at: value for at, value in values.items() if value % 2 == 0}
    return Everything(list(chosen), list(chosen.values()))


def fresh(count: int, seed: int = 0) -> array[int]:
    """Random tokens, different for every seed and count."""
    random = Random(1000 * count + seed)
    return array("q", (random.randrange(100_000) for _ in range(count)))


def found(arm: Arm, source: array[int], prompt: array[int]) -> list[int]:
    """The positions of a prompt that an arm finds in a source; no prefix is known."""
    arm.remember(source, 0)
    return arm.served(prompt, 0).nonzero()[0].tolist()


SOURCE = fresh(700, seed=1)
TEXTS = (SOURCE, fresh(700, seed=2), fresh(700, seed=3))


def test_fixed_blocks_need_the_same_alignment() -> None:
    """Blocks of 64 are found at another multiple of 64, and nowhere else."""
    moved = fresh(64) + SOURCE[:200]
    assert found(FixedBlocks(), SOURCE, moved) == list(range(64, 256))
    assert found(FixedBlocks(), SOURCE, fresh(63) + SOURCE[:200]) == []


def test_aligned_runs_are_found_at_any_offset() -> None:
    """Of the source only whole runs at multiples of 256 are found, in the prompt anywhere."""
    assert found(AlignedRuns(), SOURCE, fresh(77) + SOURCE) == list(range(77, 77 + 512))
    assert found(AlignedRuns(), SOURCE, fresh(77) + SOURCE[1:511]) == []
    with pytest.raises(ValueError, match="width"):
        AlignedRuns(100)


def test_chunks_are_found_when_boundaries_meet_again() -> None:
    """A moved text is found from some chunk on; one that begins with a reset, from there on."""
    text = array("q", [ROLE]) + SOURCE
    source, prompt = fresh(90) + text, fresh(333) + text
    plain = found(ContentChunks(), source, prompt)
    end = plain[-1] + 1
    assert len(prompt) - 32 < end <= len(prompt)  # perhaps without a last chunk that is too short
    assert 333 < plain[0] < end - 100
    assert plain == list(range(plain[0], end))
    rule = ChunkRule(resets=frozenset({ROLE}))
    whole = found(ContentChunks(rule), source, prompt)
    assert whole == list(range(333, whole[-1] + 1))
    assert len(prompt) - 32 < whole[-1] + 1


def test_windows_find_the_beginning_of_a_chunk() -> None:
    """The fallback finds whole windows of a chunk that ends differently."""
    rule = ChunkRule(exponent=63, least=300, most=300)
    prompt = SOURCE[:270] + fresh(30)
    assert found(ContentChunks(rule), SOURCE[:300], prompt) == []
    short = ChunkRule(exponent=63, least=32, most=300)
    assert found(ContentChunks(short, fallback=True), SOURCE[:300], prompt) == list(range(256))


def test_winnowing_extends_hits_as_far_as_ids_are_equal() -> None:
    """A hit grows to both sides up to the first difference; short runs don't count."""
    prompt = fresh(50) + SOURCE[111:400] + fresh(50) + SOURCE[:63]
    assert found(Winnowed(fingerprints), SOURCE, prompt) == list(range(50, 50 + 289))


def test_a_hash_alone_decides_nothing() -> None:
    """Fingerprints and rolling hashes that collide serve no token that differs."""
    arm = Winnowed(lambda tokens: Everything([0], [1]))
    assert found(arm, SOURCE, fresh(100)) == []
    aligned = AlignedRuns()
    aligned.remember(SOURCE, 0)
    for value in aligned._runs:
        aligned._runs[value] = fresh(256).tobytes()
    assert aligned.served(SOURCE, 0).sum() == 0


PIECES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 1), st.integers(0, 600), st.integers(0, 300)),
        st.tuples(st.just(2), st.just(0), st.integers(0, 90)),
    ),
    max_size=6,
)


@given(PIECES, PIECES)
def test_no_arm_exceeds_the_ceiling(
    one: list[tuple[int, int, int]], two: list[tuple[int, int, int]]
) -> None:
    """Beyond the prefix, arms find only what the ceiling has, and winnowing finds all of it."""
    first, second = (
        array("q", [token for text, at, size in pieces for token in TEXTS[text][at : at + size]])
        for pieces in (one, two)
    )
    arms: dict[str, Arm] = {
        **new_arms(frozenset({ROLE}), fingerprints),
        "chunks": ContentChunks(ChunkRule(least=64)),
        "chunks, windows": ContentChunks(ChunkRule(least=64), fallback=True),
        "chunks, windows, resets": ContentChunks(ChunkRule(least=64, most=100), fallback=True),
    }
    known = common_prefix(second, first)
    for arm in arms.values():
        arm.remember(first, 0)
    ceiling = arms["ceiling"].served(second, known)[known:]
    for name, arm in arms.items():
        served = arm.served(second, known)
        assert len(served) == len(second)
        assert not (served[known:] & ~ceiling).any(), name
    assert (arms["winnowing"].served(second, known)[known:] == ceiling).all()


def test_what_a_prefix_shares_is_learnt_once() -> None:
    """Both parts of a sequence that continues a known one are found at another place."""
    arms = (
        FixedBlocks(),
        AlignedRuns(),
        ContentChunks(),
        Winnowed(fingerprints),
        Ceiling(),
    )
    for arm in arms:
        arm.remember(SOURCE[:300], 0)
        arm.remember(SOURCE, 300)
        served = arm.served(fresh(256) + SOURCE, 0)
        assert not served[:256].any()
        assert served[256:556].any()
        assert served[556:].sum() > 140, arm
