"""Hits against a search by brute force; bounds; the preference for clean KV."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from leyline_engine.contract import LineageRun, ReuseKind, token_digest
from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse import matching
from leyline_engine.reuse.fingerprints import Fingerprinter
from leyline_engine.reuse.index import MAX_PLACES, ReuseIndex
from leyline_engine.reuse.matching import MIN_HIT, Hits, ReuseMatcher
from leyline_engine.reuse.winnowing import Winnower

CAPACITY = 200_000


class Library:
    """An index over turns that lie one after the other in a pool.

    Args:
        max_places: places of one hash.
    """

    def __init__(
        self, fingerprinter: Fingerprinter | None = None, *, max_places: int = MAX_PLACES
    ) -> None:
        prints = fingerprinter or Winnower(3)
        self.index = ReuseIndex(prints, CAPACITY, max_places=max_places)
        self.matcher = ReuseMatcher(self.index, prints, sink=0, min_piece=1)
        self.slots: dict[str, NDArray[np.int64]] = {}
        self._free = 0

    def add(
        self,
        tokens: Sequence[int],
        session: str = "other",
        scope: str = "t",
        lineage: tuple[LineageRun, ...] = (),
        groups: frozenset[str] = frozenset(),
    ) -> SourceTurn:
        """Retain a turn whose tokens are all cached."""
        ids = array("q", tokens)
        name = f"t{len(self.slots)}"
        source = SourceTurn(name, ids, token_digest(ids), lineage, scope, session, groups=groups)
        self.slots[name] = np.arange(self._free, self._free + len(ids))
        self._free += len(ids)
        self.index.add(source, self.slots[name])
        return source

    def find(
        self,
        prompt: Sequence[int],
        gaps: Sequence[tuple[int, int]] = (),
        scope: str = "t",
        cached: int = CAPACITY,
        groups: frozenset[str] = frozenset(),
    ) -> Hits:
        """Hits in a prompt of session ``own``; each is checked to be what it says."""
        ids = array("q", prompt)
        hits = self.matcher.find(
            ids,
            gaps or [(0, len(ids))],
            (scope, "own"),
            lambda source: min(cached, len(source.tokens)),
            groups,
        )
        at = 0
        for hit in hits.found:
            assert hit.dest >= at, "hits overlap, or are out of order"
            assert hit.source.tokens[hit.start : hit.end] == ids[hit.dest : hit.dest_end]
            assert hit.source.scope == scope or not groups.isdisjoint(hit.source.groups)
            at = hit.dest_end
        return hits


def covered(hits: Hits, length: int) -> NDArray[np.bool_]:
    """A mask of the positions that hits cover."""
    mask = np.zeros(length, dtype=np.bool_)
    for hit in hits.found:
        mask[hit.dest : hit.dest_end] = True
    return mask


def recoverable(sources: Sequence[Sequence[int]], prompt: Sequence[int]) -> NDArray[np.bool_]:
    """A mask of the positions in runs of :data:`MIN_HIT` tokens or more that a source has, too."""
    mask = np.zeros(len(prompt), dtype=np.bool_)
    ours = np.asarray(prompt)
    for source in map(np.asarray, sources):
        for shift in range(-len(ours) + 1, len(source)):
            low, high = max(0, -shift), min(len(ours), len(source) - shift)
            same = ours[low:high] == source[low + shift : high + shift]
            edges = np.flatnonzero(np.diff(np.concatenate([[0], same, [0]])))
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                if end - start >= MIN_HIT:
                    mask[low + start : low + end] = True
    return mask


def words(rng: random.Random, alphabet: int, periods: Sequence[int] = (1, 40)) -> list[int]:
    """A random text, or one that repeats itself."""
    length = rng.randint(20, 200)
    period = rng.choice([length, length, *periods])
    base = [rng.randrange(alphabet) for _ in range(period)]
    return (base * (length // period + 1))[:length]


def library_and_prompt(
    seed: int, alphabet: int, periods: Sequence[int]
) -> tuple[Library, list[list[int]], list[int]]:
    """Three sources and a prompt that are put together from the same blocks."""
    rng = random.Random(seed)
    blocks = [words(rng, alphabet, periods) for _ in range(8)]

    def written(count: int) -> list[int]:
        parts = [rng.choice(blocks)[rng.choice([0, 0, 5]) :] for _ in range(count)]
        return [token for part in parts for token in (*part, *words(rng, alphabet)[:9])]

    sources, prompt = [written(4) for _ in range(3)], written(5)
    library = Library(Winnower(seed), max_places=1000)
    for number, source in enumerate(sources):
        library.add(source, f"s{number}")
    return library, sources, prompt


@given(st.integers(0, 2**32 - 1), st.sampled_from([50, 50_000]))
def test_every_common_run_is_found(seed: int, alphabet: int) -> None:
    """Hits cover the runs that brute force finds, and nothing else."""
    library, sources, prompt = library_and_prompt(seed, alphabet, (40, 70))
    found = covered(library.find(prompt), len(prompt))
    assert found.tolist() == recoverable(sources, prompt).tolist()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5, 31]))
def test_hits_on_text_that_repeats_itself_are_common_runs(seed: int, period: int) -> None:
    """With a short period, hits may miss the ends of runs, and never say more than there is."""
    library, sources, prompt = library_and_prompt(seed, 50, (period,))
    found = covered(library.find(prompt), len(prompt))
    assert not (found & ~recoverable(sources, prompt)).any()


def test_a_hash_alone_never_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash equal, hits are still runs of equal tokens, in bounded time."""
    monkeypatch.setattr(
        Winnower, "_hashes", lambda _, tokens: np.full(max(0, len(tokens) - 31), 1 << 40, np.uint64)
    )
    rng = random.Random(5)
    library = Library()
    doc = [rng.randrange(9000) for _ in range(300)]
    for number in range(MAX_PLACES + 4):
        library.add([rng.randrange(9000) for _ in range(300)], f"s{number}")
    library.add(doc)
    prompt = [rng.randrange(9000) for _ in range(100)] + doc
    hits = library.find(prompt)
    assert all(hit.length >= 1 for hit in hits.found)
    assert len(library.index._tenants["t"]._places[1 << 40]) <= MAX_PLACES


def test_a_repeated_token_takes_bounded_time() -> None:
    """Short sources cover as many of 100,000 equal tokens as the bound on hits allows."""
    short = Library()
    short.add([7] * 80)
    hits = short.find([7] * 100_000)
    assert (len(hits.found), hits.bounded) == (matching.MAX_HITS, True)
    whole = Library()
    whole.add([7] * 100_000)
    hits = whole.find([7] * 100_000)
    assert (hits.tokens, len(hits.found), hits.bounded) == (100_000, 1, False)


def test_ten_thousand_overlapping_hits_take_bounded_time() -> None:
    """The number of compared places is bounded, and the result says so."""
    rng = random.Random(2)
    pieces = [[rng.randrange(50_000) for _ in range(80)] for _ in range(400)]
    library = Library()
    for number in range(25):
        rng.shuffle(pieces)
        library.add(
            [token for piece in pieces for token in piece[: 70 + number % 10]], f"s{number}"
        )
    rng.shuffle(pieces)
    hits = library.find([token for piece in pieces * 3 for token in piece])
    assert hits.bounded
    assert hits.tokens > 0


def test_few_turns_are_compared_with_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content of more turns than the bound allows is left out, and that of others is found."""
    monkeypatch.setattr(matching, "MAX_SOURCES", 3)
    rng = random.Random(2)
    docs = [[rng.randrange(50_000) for _ in range(80)] for _ in range(5)]
    library = Library()
    for number, doc in enumerate(docs):
        library.add(doc, f"s{number}")
    hits = library.find([token for doc in [*docs, docs[0]] for token in doc])
    assert (hits.tokens, hits.bounded) == (4 * 80, True)


def test_the_longest_hits_are_kept() -> None:
    """A bound on copies leaves out the shortest, and says so."""
    rng = random.Random(2)
    docs = [[rng.randrange(50_000) for _ in range(length)] for length in (70, 90, 80)]
    library = Library()
    for number, doc in enumerate(docs):
        library.add(doc, f"s{number}")
    hits = library.find([token for doc in docs for token in (*doc, 1)])
    assert hits.longest(3) is hits
    kept = hits.longest(2)
    assert ([hit.length for hit in kept.found], kept.bounded) == ([90, 80], True)


def test_clean_kv_is_preferred_then_the_session_s_own() -> None:
    """Of equal runs, the one whose context the prompt begins with wins, however short."""
    rng = random.Random(1)
    head, doc, other = ([rng.randrange(50_000) for _ in range(200)] for _ in range(3))
    prompt = [*head, *other[:50], *doc]
    gaps = [(250, 450)]
    for sessions, kind in (
        (("x", "own", "clean"), ReuseKind.CLEAN),
        (("x", "own"), ReuseKind.SESSION),
        (("x",), ReuseKind.TENANT),
    ):
        library = Library()
        for session in sessions:
            library.add([*(head if session == "clean" else other), *doc], session)
        (hit,) = library.find(prompt, gaps).found
        assert (hit.kind, hit.length) == (kind, 200)


def test_spliced_kv_is_never_clean() -> None:
    """KV after a splice remembers more than its tokens show."""
    rng = random.Random(1)
    head, doc = ([rng.randrange(50_000) for _ in range(200)] for _ in range(2))
    library = Library()
    library.add([*head, *doc], lineage=(LineageRun(100, "l"),))
    (hit,) = library.find([*head, 1, 2, 3, *doc], [(200, 403)]).found
    assert hit.kind is ReuseKind.TENANT


def test_no_hit_is_another_tenant_s() -> None:
    """Equal content of another scope isn't found."""
    library = Library()
    doc = list(range(300))
    library.add(doc, scope="a")
    assert library.find(doc, scope="b").found == ()
    assert library.find(doc, scope="a").tokens == 300


@given(st.integers(0, 2**32 - 1))
def test_others_content_serves_only_what_the_tenant_lacks(seed: int) -> None:
    """A hit of a group never covers what a turn of the tenant's own has, whatever the hashes."""
    library, sources, prompt = library_and_prompt(seed, 50_000, (1, 40))
    library.add(prompt, scope="giver", groups=frozenset("g"))
    hits = library.find(prompt, groups=frozenset("g"))
    others = Hits(tuple(hit for hit in hits.found if hit.kind is ReuseKind.GROUP))
    assert not (covered(others, len(prompt)) & recoverable(sources, prompt)).any()
    assert covered(hits, len(prompt)).all()


def test_tenants_over_the_same_kv_have_it_each() -> None:
    """Tenants that share the slots of an exact prefix both find it, and both lose it with them."""
    library = Library()
    source = library.add(list(range(300)), scope="a")
    theirs = SourceTurn("b", source.tokens, source.digest, (), "b", "s")
    library.index.add(theirs, library.slots[source.turn])
    assert [library.find(range(300), scope=each).tokens for each in ("a", "b")] == [300, 300]
    library.index.drop(source)
    assert [library.find(range(300), scope=each).tokens for each in ("a", "b")] == [0, 300]
    library.index.freed(library.slots[source.turn])
    assert len(library.index) == 0


def test_only_cached_tokens_are_hits() -> None:
    """The part of a source that is no longer cached ends a hit."""
    library = Library()
    library.add(range(300))
    assert library.find(range(300), cached=200).tokens == 200
    assert library.find(range(300), cached=40).tokens == 0


def test_entries_leave_with_their_slots() -> None:
    """Freed slots drop their entries at once, and a turn that computes them again brings them."""
    library = Library()
    source = library.add(random.Random(3).choices(range(9000), k=2000))
    before = len(library.index)
    slots = library.slots[source.turn]
    library.index.freed(slots[500:])
    assert len(library.index) < before / 3
    fresh = np.concatenate([slots[:500], np.arange(5000, 6500)])
    library.index.add(source, fresh)
    assert len(library.index) == before
    library.index.freed(fresh)
    assert len(library.index) == 0


def test_turns_that_continue_each_other_have_their_content_once() -> None:
    """A dropped turn leaves what a later one continues, and takes the rest with it."""
    rng = random.Random(4)
    stem = [rng.randrange(9000) for _ in range(1000)]
    library = Library()
    first = library.add([*stem, *(rng.randrange(9000) for _ in range(500))], "s")
    slots = library.slots[first.turn]
    count = len(library.index)
    ids = array("q", [*stem, *(rng.randrange(9000) for _ in range(500))])
    branch = SourceTurn("b", ids, token_digest(ids), (), "t", "s")
    library.index.add(branch, np.concatenate([slots[:1000], np.arange(5000, 5500)]))
    assert len(library.index) < count * 1.5
    library.index.drop(first, (branch,))
    hits = library.find([*stem[100:900]])
    assert [hit.source for hit in hits.found] == [branch]
    assert library.find(first.tokens[1000:]).found == ()
    library.index.drop(branch)
    assert len(library.index) == 0


def test_the_heaviest_tenant_loses_entries_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that fills the index doesn't push out another's content."""
    rng = random.Random(4)
    library = Library()
    library.index._max_entries = 150
    mine = [rng.randrange(9000) for _ in range(800)]
    library.add(mine, scope="small")
    for number in range(5):
        library.add([rng.randrange(9000) for _ in range(2000)], f"s{number}", scope="large")
    assert len(library.index) <= 150
    assert library.find(mine, scope="small").tokens == 800


def test_others_places_never_use_up_the_tenant_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that floods the search is cut off alone: own content at the end is still found."""
    monkeypatch.setattr(matching, "MAX_FOREIGN_PROBES", 20)
    rng = random.Random(4)
    flood, own = ([rng.randrange(50_000) for _ in range(length)] for length in (3000, 200))
    broken = [rng.randrange(50_000) if at % 45 == 0 else word for at, word in enumerate(flood)]
    library = Library()
    for other in range(6):
        library.add(broken, scope=f"other {other}", groups=frozenset("g"))
    library.add([1, 2, 3, *own])
    hits = library.find([*flood, *own], groups=frozenset("g"))
    assert hits.bounded
    assert [(hit.kind, hit.length) for hit in hits.found] == [(ReuseKind.TENANT, 200)]
