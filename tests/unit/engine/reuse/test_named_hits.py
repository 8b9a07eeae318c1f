"""Named places become hits only where ids agree, and only in gaps."""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import (
    CopySegment,
    ReuseKind,
    ReuseMode,
    ReusePayload,
    SourceRef,
    token_digest,
)
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_engine.reuse.matching import MIN_PIECE
from leyline_engine.reuse.named import Named, left_over, named_hits, named_places

SINK = 32
OWN = ("tenant", "me")


def turn_of(tokens: list[int], session: str = "other", scope: str = "tenant") -> SourceTurn:
    """A turn that an engine retains."""
    ids = array("q", tokens)
    return SourceTurn("t1", ids, token_digest(ids), (), scope, session)


class Case(NamedTuple):
    """A prompt, and what may serve it."""

    prompt: array[int]
    gaps: list[tuple[int, int]]
    places: list[Named]
    """Places that hold text of the prompt, or claim to."""
    cached: int
    """Number of the source's tokens that are cached."""


@st.composite
def named_prompts(draw: st.DrawFn) -> Case:
    """A prompt of pieces of one source, with some tokens changed and some places too long."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    source = [rng.randint(1, 3) for _ in range(rng.randint(60, 200))]
    prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 40))]
    turn, places = turn_of(source), list[Named]()
    for _ in range(draw(st.integers(1, 4))):
        start = rng.randrange(len(source) - 5)
        end = rng.randint(start + 5, len(source))
        dest = len(prompt)
        prompt += source[start:end]
        if rng.random() < 0.5:
            prompt[rng.randrange(dest, len(prompt))] = 9
        prompt += [rng.randint(1, 3) for _ in range(rng.choice([0, 3, 30]))]
        claimed = min(end + rng.choice([0, 0, 15]), len(source), start + len(prompt) - dest)
        places.append(Named(turn, CopySegment(0, start, claimed, dest)))
    edges = sorted(rng.sample(range(len(prompt)), 2 * rng.randint(0, 3)))
    gaps = list(zip(edges[::2], edges[1::2], strict=True)) or [(0, len(prompt) - 1)]
    cached = rng.choice([len(source), rng.randrange(len(source))])
    return Case(array("q", prompt), gaps, places, cached)


@given(named_prompts())
def test_hits_agree_and_stay_in_their_gaps(
    case: Case,
) -> None:
    """Hits are disjoint, equal, cached, long enough, and leave the source's sink alone."""
    prompt, gaps, places, cached = case
    hits = named_hits(prompt, gaps, places, OWN, lambda _: cached, sink=SINK)
    cursor = 0
    for hit in hits:
        assert hit.dest >= cursor
        assert hit.length >= MIN_PIECE
        assert hit.start >= SINK
        assert hit.end <= cached
        assert any(begin <= hit.dest and hit.dest_end <= stop for begin, stop in gaps)
        assert prompt[hit.dest : hit.dest_end] == hit.source.tokens[hit.start : hit.end]
        cursor = hit.dest_end
    rest = list(left_over(gaps, hits))
    free = {at for begin, stop in gaps for at in range(begin, stop)}
    served = {at for hit in hits for at in range(hit.dest, hit.dest_end)}
    left = {at for begin, stop in rest for at in range(begin, stop)}
    assert left <= free - served
    assert all(stop - begin >= MIN_PIECE for begin, stop in rest)
    for begin, stop in gaps:
        run = 0
        for at in range(begin, stop):
            run = 0 if at in served | left else run + 1
            assert run < MIN_PIECE


@given(named_prompts())
def test_a_right_place_is_used_whole(
    case: Case,
) -> None:
    """All of a place that agrees, is cached and lies in a gap is served, if it isn't too short."""
    prompt, gaps, places, cached = case
    hits = named_hits(prompt, gaps, places, OWN, lambda _: cached, sink=SINK)
    served = {at for hit in hits for at in range(hit.dest, hit.dest_end)}
    for place in places:
        shift = place.copy.start - place.copy.dest
        for begin, stop in gaps:
            low = max(place.copy.dest, begin, SINK - shift)
            high = min(place.copy.dest_end, stop, cached - shift)
            run = 0
            for at in range(low, high):
                agrees = prompt[at] == place.source.tokens[at + shift] and at not in served
                run = run + 1 if agrees else 0
                assert run < MIN_PIECE


def test_marks_between_messages_come_along() -> None:
    """Two messages with equal marks between them become one hit, and a changed mark splits it."""
    one, two = list(range(100, 120)), list(range(200, 230))
    turn = turn_of([*range(40), *one, 7, 8, *two, 5])
    prompt = array("q", [*range(500, 550), *one, 7, 8, *two, 6, 6])
    places = [Named(turn, CopySegment(0, 40, 60, 50)), Named(turn, CopySegment(0, 62, 92, 72))]
    gaps = [(40, len(prompt) - 1)]
    hits = named_hits(prompt, gaps, places, OWN, lambda s: len(s.tokens), sink=SINK)
    assert [(hit.dest, hit.dest_end, hit.kind) for hit in hits] == [(50, 102, ReuseKind.TENANT)]
    prompt[70] = 9
    merged = [Named(turn, CopySegment(0, 40, 92, 50))]
    for named in (places, merged):
        hits = named_hits(prompt, gaps, named, OWN, lambda s: len(s.tokens), sink=SINK)
        assert [(hit.dest, hit.dest_end) for hit in hits] == [(50, 70), (71, 102)]


def test_kinds_are_those_of_the_search() -> None:
    """A place is clean if the prompt begins with all that its KV has read; else it has an owner."""
    text = list(range(100, 200))
    prompt = array("q", [*text, *text])
    kinds = {}
    for session in ("me", "other"):
        turn = turn_of(text, session)
        for dest in (0, 100):
            copy = CopySegment(0, 40, 100, dest + 40)
            (hit,) = named_hits(
                prompt, [(32, 199)], [Named(turn, copy)], OWN, lambda _: 100, sink=SINK
            )
            kinds[session, dest] = hit.kind
    assert set(kinds.values()) == {ReuseKind.CLEAN}
    other = array("q", [1, *text, 2])
    for session, kind in (("me", ReuseKind.SESSION), ("other", ReuseKind.TENANT)):
        place = Named(turn_of(text, session), CopySegment(0, 40, 100, 41))
        (hit,) = named_hits(other, [(32, 101)], [place], OWN, lambda _: 100, sink=SINK)
        assert hit.kind is kind


def test_only_what_the_record_has_is_a_place() -> None:
    """Wrong turns, digests, bounds and orders are left out, and right places beside them stay."""
    registry = SourceRegistry(secret="s")
    tokens = list(range(100))
    for session, scope in (("other", "tenant"), ("me", "tenant"), ("theirs", "else")):
        registry.retain((scope, session), turn_of(tokens, session, scope))
    seal = registry.seal(turn_of(tokens))
    good = SourceRef("t1", 100, seal, "other")
    sources = (
        good,
        SourceRef("t1", 100, seal),
        SourceRef("t2", 100, seal, "other"),
        SourceRef("t1", 99, seal, "other"),
        SourceRef("t1", 100, token_digest(tokens), "other"),
        SourceRef("t1", 100, seal, "theirs"),
        SourceRef("t1", 100, seal, "unknown"),
    )
    wrong = [CopySegment(index, 0, 5, 5) for index in (2, 3, 4, 5, 6, 7, -1)]
    wrong += [
        CopySegment(0, -1, 5, 5),
        CopySegment(0, 5, 5, 5),
        CopySegment(0, 6, 5, 5),
        CopySegment(0, 96, 101, 5),
        CopySegment(0, 0, 5, 4),
        CopySegment(0, 0, 5, 16),
    ]
    for copy in wrong:
        copies = (CopySegment(0, 0, 5, 0), copy, CopySegment(1, 10, 20, 10))
        asked = ReusePayload(mode=ReuseMode.LIVE, sources=sources, copies=copies)
        found = named_places(registry, OWN, asked, 20)
        assert [(each.source.session, each.copy.dest) for each in found] == [
            ("other", 0),
            ("me", 10),
        ]
