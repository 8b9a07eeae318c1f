"""The chunker as the choice of fingerprints, beside winnowing."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.replay_engine import LIVE, make_engine, random_tokens, register, run
from test_reuse_matching import Library, covered, library_and_prompt, recoverable

from leyline_engine.reuse.chunking import ChunkRule
from leyline_engine.reuse.fingerprints import Chunker, MatcherKind, fingerprinter, read_matcher
from leyline_replay.engine import ReplayEngine
from leyline_replay.models.loader import LoadedModel

LONG = 2048


@given(st.integers(0, 2**32 - 1))
def test_hits_by_chunks_are_common_runs(seed: int) -> None:
    """A chunk only proposes a place, as a k-gram does: hits are runs of equal ids."""
    _, sources, prompt = library_and_prompt(seed, 50, (40, 70))
    library = Library(Chunker(ChunkRule(seed=seed)))
    for number, source in enumerate(sources):
        library.add(source, f"s{number}")
    found = covered(library.find(prompt), len(prompt))
    assert not (found & ~recoverable(sources, prompt)).any()


def test_long_content_is_found_by_chunks_and_short_content_by_winnowing_alone() -> None:
    """Without a marker, chunks of a long text agree again after a few; a short one has none."""
    rng = random.Random(8)
    texts = {length: [rng.randrange(50_000) for _ in range(length)] for length in (LONG, 70)}
    for length, finds in ((LONG, True), (70, False)):
        head, other = ([rng.randrange(50_000) for _ in range(97)] for _ in range(2))
        by_kind = {}
        for kind in MatcherKind:
            library = Library(fingerprinter(kind, 5))
            library.add([*head, *texts[length], *head])
            by_kind[kind] = library.find([*other, *texts[length], *other]).tokens
        assert by_kind[MatcherKind.WINNOW] == length
        assert (by_kind[MatcherKind.CDC] > length / 2) == finds


def test_a_marker_makes_short_content_agree() -> None:
    """After the marker, chunks begin alike wherever it is, so that even a short text is found."""
    rng = random.Random(9)
    marker = tuple(range(60_000, 60_064))
    text = [rng.randrange(50_000) for _ in range(70)]
    library = Library(Chunker(ChunkRule(marker=marker)))
    heads = [[rng.randrange(50_000) for _ in range(length)] for length in (97, 33)]
    library.add([*heads[0], *marker, *text, *marker])
    hits = library.find([*heads[1], *marker, *text, *marker])
    assert hits.tokens >= len(text) + len(marker)


def test_a_chunk_is_found_in_front_of_its_last_token() -> None:
    """Positions are sorted, and lie within what was asked for."""
    tokens = array("q", random.Random(1).choices(range(50_000), k=3000))
    found = Chunker(ChunkRule()).select(tokens, 700, 2500)
    positions = found.positions.tolist()
    assert positions == sorted(positions)
    assert positions[0] >= 700 and positions[-1] < 2500


def test_an_unknown_matcher_is_named() -> None:
    """The error lists those that there are."""
    assert read_matcher("cdc") is MatcherKind.CDC
    with pytest.raises(ValueError, match="'lsh'; there are winnow, cdc"):
        read_matcher("lsh")


def test_an_engine_can_find_content_by_chunks() -> None:
    """The replay engine copies a long document that it finds by its chunks."""
    plain = make_engine()
    loaded = LoadedModel("tiny", plain._model, None, "f" * 32, "")  # type: ignore[arg-type]
    engine = ReplayEngine(loaded, pool_tokens=6000, chunk_tokens=512, matcher=MatcherKind.CDC)
    document = random_tokens(1500, 9)
    run(engine, [*random_tokens(70, 1), *document, 5], register("t1", session="a"), reuse=LIVE)
    again = [*random_tokens(33, 2), *document, 6]
    _, record = run(engine, again, register("t1", session="b"), reuse=LIVE)
    assert record.receipt.tokens.reused > 1000
