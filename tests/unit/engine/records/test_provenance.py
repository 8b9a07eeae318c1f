"""Digests of paths, and origins of copied KV: bounded, and forgotten with their session."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import CopySegment, LineageRun
from leyline_engine.records.lineage import TOKEN_BITS, lineage_bits
from leyline_engine.records.paths import Paths, head
from leyline_engine.records.provenance import MAX_RANGES, Provenance, Sent
from leyline_engine.records.sources import SessionKey, SourceTurn

PATHS = Paths(bytes(range(16)))
ME, X, Y = ("t", "me"), ("t", "x"), ("t", "y")
KEYS = st.lists(st.integers(0, 2**63 - 1), max_size=40).map(lambda keys: array("q", keys))


def source(session: SessionKey, tokens: list[int], *, exact: int | None = None) -> SourceTurn:
    runs = () if exact is None else (LineageRun(exact, "l"),)
    return SourceTurn("t", array("q", tokens), "d", runs, *session)


def knows(provenance: Provenance, tokens: list[int], owner: SessionKey, *, but: SessionKey) -> bool:
    """True if an owner copied from somebody, except one, who sent just these tokens."""
    content = int(provenance.contents(array("q", tokens)).ids[-1])
    return content in Sent(set(), provenance.sent([owner], but))


@given(KEYS, KEYS)
def test_paths_continue_each_other(first: array[int], more: array[int]) -> None:
    """The digests of a path are those of its pieces, one after the other, and all are distinct."""
    state = PATHS.root()
    pieces = PATHS.along(state, first) + PATHS.along(state, more)
    assert pieces == PATHS.of(first + more)
    assert len(set(pieces)) == len(pieces)
    assert PATHS.heads(first + more).tolist() == [head(path) for path in pieces]


@given(KEYS, st.data())
def test_each_key_changes_all_later_digests(keys: array[int], data: st.DataObject) -> None:
    """Other keys in front of a place, in any bits, have other digests there."""
    if not keys:
        return
    at = data.draw(st.integers(0, len(keys) - 1))
    other = array("q", keys)
    other[at] ^= 1 << data.draw(st.integers(0, 62))
    one, two = PATHS.of(keys), PATHS.of(other)
    assert one[:at] == two[:at] and not set(one[at:]) & set(two[at:])


def test_long_paths_are_hashed_in_portions() -> None:
    """A path of several portions has the digests that its two halves have."""
    keys = array("q", range(40_000))
    state = PATHS.root()
    assert PATHS.along(state, keys[:7]) + PATHS.along(state, keys[7:]) == PATHS.of(keys)
    assert PATHS.of(keys)[:100] != Paths(bytes(16)).of(keys)[:100]


def test_copied_paths_are_those_of_exact_tokens() -> None:
    """Only what was copied, and what nothing was spliced into, is noted with its sender."""
    provenance = Provenance()
    provenance.note(ME, 7, [source(X, [1, 2, 3, 4, 5], exact=4)], [CopySegment(0, 2, 5, 9)])
    assert knows(provenance, [1, 2, 3], ME, but=Y) and knows(provenance, [1, 2, 3, 4], ME, but=Y)
    assert not knows(provenance, [1, 2], ME, but=Y)
    assert not knows(provenance, [1, 2, 3, 4, 5], ME, but=Y)
    assert not knows(provenance, [1, 2, 3], ME, but=X) and not knows(
        provenance, [1, 2, 3], X, but=Y
    )
    keys = array("q", [7 << TOKEN_BITS | token for token in range(20)])
    assert provenance.contents(keys).copies.nonzero()[0].tolist() == [9, 10, 11]
    assert not provenance.contents(array("q", [8 << TOKEN_BITS] * 20)).copies.any()


def test_what_a_source_computed_after_its_own_splice_is_noted_and_its_copies_are_not() -> None:
    """Its content has no lineage's name, so that it equals those of other sessions."""
    provenance, bits = Provenance(), lineage_bits("l", "t")
    provenance.note(Y, bits, [source(X, [1, 2, 3])], [CopySegment(0, 0, 3, 2)])
    spliced = source(Y, [9, 9, 1, 2, 3, 4, 5], exact=2)
    provenance.note(ME, 8, [spliced], [CopySegment(0, 2, 6, 0)])
    ids, copies, _ = provenance.contents(spliced.keys())
    known = Sent(set(), provenance.sent([ME], X))
    assert copies.tolist() == [False] * 2 + [True] * 3 + [False] * 2
    assert [int(each) in known for each in ids] == [False] * 5 + [True, False]


def test_content_is_what_a_row_has_read() -> None:
    """Equal for copies of a row and copies of them, and for what is computed after such; another
    after other hidden text, and under a lineage whose copies aren't known."""
    provenance, whole = Provenance(), [1, 2, 3, 4]
    contents: dict[str, list[int]] = {}

    def spliced(name: str, from_: SourceTurn, start: int, *, shared: bool = False) -> SourceTurn:
        copy = CopySegment(0, start, start + 2, 2)
        provenance.note(ME, lineage_bits(name, "t"), [from_], [copy], shared=shared)
        turn = SourceTurn("t", array("q", [9, 9, 3, 4, 5]), "d", (LineageRun(2, name),), *Y)
        contents[name] = provenance.contents(turn.keys()).ids.tolist()
        return turn

    plain = source(X, whole)
    first = spliced("first", plain, 2)
    spliced("second", first, 2)
    spliced("hidden", source(X, [1, 7, 3, 4]), 2)
    spliced("shared", plain, 2, shared=True)
    assert contents["first"][2:4] == provenance.contents(plain.keys()).ids.tolist()[2:]
    assert contents["first"] == contents["second"]
    for name in ("hidden", "shared"):
        assert contents[name][:2] == contents["first"][:2]
        assert not {*contents[name][2:]} & {*contents["first"][2:]}
    computed = provenance.contents(array("q", [9, 9, 3, 4, 5])).ids.tolist()
    assert computed[4] != contents["first"][4]


@given(*[st.integers(0, 9000)] * 3, st.integers(1, 3000), st.integers(1, 3000))
def test_computed_rows_are_noted_wherever_they_lie(
    exact: int, copied: int, start: int, copies: int, length: int
) -> None:
    """Of a long source: those in front of its splice, and after it those that are no copies."""
    tokens = [n % 97 for n in range(12_000)]
    provenance, place = Provenance(defers=True), max(exact, copied)
    lent = CopySegment(0, 0, copies, place)
    provenance.note(Y, lineage_bits("l", "t"), [source(X, tokens)], [lent])
    spliced = source(Y, tokens, exact=exact)
    provenance.note(ME, 8, [spliced], [CopySegment(0, start, start + length, 0)])
    heads = provenance.contents(spliced.keys()).ids.tolist()
    own = {n for n in range(start, start + length) if not place <= n < place + copies}
    known = {head for found in provenance.sent([ME], X) for head in found.tolist()}
    assert known == {heads[n] for n in own}


def test_copies_of_copies_keep_their_sender() -> None:
    """A session that copies from a copy has KV of the one that sent it."""
    provenance = Provenance()
    provenance.note(Y, 7, [source(X, [1, 2, 3])], [CopySegment(0, 0, 3, 5)])
    provenance.note(ME, 8, [source(Y, [9, 9, 1, 2, 3], exact=2)], [CopySegment(0, 2, 5, 1)])
    assert knows(provenance, [1, 2, 3], ME, but=Y)
    provenance.forget(X)
    assert not knows(provenance, [1, 2, 3], ME, but=Y)


def test_notes_are_bounded() -> None:
    """The sessions that spliced least recently go first; of a lineage, few ranges are noted."""
    provenance = Provenance(max_paths=10)
    for name in "abc":
        long = source(("t", name), list(range(4)))
        provenance.note(("t", name), 7, [long], [CopySegment(0, 0, 4, 0)])
    assert not knows(provenance, [0, 1], ("t", "a"), but=ME)
    assert knows(provenance, [0, 1], ("t", "b"), but=ME)
    provenance.forget(("t", "b"))
    provenance.note(ME, 7, [source(ME, list(range(6)))], [CopySegment(0, 0, 6, 0)])
    assert knows(provenance, [0, 1], ("t", "c"), but=ME)
    keys = array("q", [9 << TOKEN_BITS] * (4 * MAX_RANGES))
    for count, noted in ((MAX_RANGES, MAX_RANGES), (MAX_RANGES + 1, 0)):
        provenance = Provenance()
        many = [CopySegment(0, 0, 1, 2 * at) for at in range(count)]
        provenance.note(ME, 9, [source(ME, [1])], many)
        assert provenance.contents(keys).copies.sum() == noted
    for lineage in range(20, 24):
        small = Provenance(max_paths=8)
        small.note(ME, 20, [long], [CopySegment(0, 0, 4, 0)])
        small.note(ME, lineage, [long], [CopySegment(0, 0, 4, 0)])
        small.note(ME, 30, [long], [CopySegment(0, 0, 4, 0)])
        oldest = small.contents(array("q", [20 << TOKEN_BITS])).copies.all()
        assert oldest == (lineage == 20)
    assert provenance.sent([ME], X)[0].dtype == np.uint64


@given(st.integers(0, 9000), st.integers(1, 3000))
def test_paths_that_wait_are_noted_before_anybody_asks(start: int, length: int) -> None:
    """Copies are noted in portions, and a question or a forget never meets half of them."""
    tokens = [n % 97 for n in range(12_000)]
    provenance = Provenance(defers=True)
    copy = CopySegment(0, start, start + length, 5)
    provenance.note(ME, 1, [source(X, tokens)], [copy])
    provenance.work()
    assert knows(provenance, tokens[: start + length], ME, but=Y)
    assert not knows(provenance, tokens[: start + length + 1], ME, but=Y)
    assert not provenance.work()
    provenance.note(X, 1, [source(X, tokens)], [copy])
    provenance.forget(X)
    assert not knows(provenance, tokens[: start + length], ME, but=Y)
    assert provenance.sent([X], ME) == ()
    assert not provenance.work()
