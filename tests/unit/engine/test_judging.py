"""Judgements on rows that equal doomed ones."""

from __future__ import annotations

import pytest

from leyline_engine.ledger import Carried, SpanKey, SpanLedger
from leyline_engine.lineage import TOKEN_BITS, lineage_bits
from leyline_engine.paths import Paths
from leyline_engine.proof.doomed import DoomedRow
from leyline_engine.proof.dooming import doomed_text
from leyline_engine.proof.judging import Equal, Holder, Judgement, judge
from leyline_engine.proof.session_proof import SessionProof

ME, OTHER = ("t", "me"), ("t", "other")
READER, LINEAGE, TOKEN = 7, 8, 3
PLACE = 10
COMPUTED = DoomedRow(b"path", TOKEN)
COPY = DoomedRow(None, TOKEN)
WHOLE, PART = 6, 2


def judged(
    row: DoomedRow,
    *,
    lineage: int = LINEAGE,
    path: bytes | None = None,
    owner: tuple[str, str] = OTHER,
    position: int = PLACE,
    parts: int = WHOLE,
    token: int = TOKEN,
    known: frozenset[object] = frozenset(),
    again: bool = True,
) -> Judgement:
    """The judgement on a row that one session holds, where a lineage reads from a place on."""
    key = (lineage << TOKEN_BITS) | token
    holder = Holder("pool.tree", path, frozenset({owner}), key, position)
    return judge(
        Equal([row], parts, WHOLE),
        [holder],
        ME,
        lambda owners: known if owner in owners else frozenset(),
        readers={READER: PLACE},
        again=again,
    )


@pytest.mark.parametrize("row", [COMPUTED, COPY])
def test_a_free_row_survives(row: DoomedRow) -> None:
    """Nobody holds it, so nobody may keep it."""
    found = judge(Equal([row], PART, WHOLE), [], ME, lambda _: {b"path"}, readers={}, again=True)
    assert found is Judgement.SURVIVOR


@pytest.mark.parametrize("lineage", [0, LINEAGE])
def test_a_row_that_another_computed_of_the_same_tokens_is_kept(lineage: int) -> None:
    """Its path says so, under a lineage too; with another path, it is a survivor."""
    assert judged(COMPUTED, lineage=lineage, path=b"path") is Judgement.KEPT
    assert judged(COMPUTED, lineage=lineage, path=b"else") is Judgement.SURVIVOR
    assert judged(COPY, lineage=READER, path=b"path") is Judgement.SURVIVOR


@pytest.mark.parametrize(("row", "path"), [(COMPUTED, b"path"), (COPY, None)])
def test_a_lineage_reads_from_its_place_on(row: DoomedRow, path: bytes | None) -> None:
    """In front of it, its rows are others'; from there on, they have to go."""
    assert judged(row, lineage=READER, path=path, position=PLACE - 1) is Judgement.KEPT
    for position in (PLACE, PLACE + 1):
        found = judged(row, lineage=READER, path=path, position=position)
        assert found is Judgement.SURVIVOR


def test_what_the_session_also_computed_was_not_lent() -> None:
    """A copy may be of its own row; then another's is a survivor."""
    holder = Holder("pool.tree", None, frozenset({OTHER}), LINEAGE << TOKEN_BITS, PLACE)

    def found(*rows: DoomedRow) -> Judgement:
        equal = Equal(rows, WHOLE, WHOLE)
        return judge(equal, [holder], ME, lambda _: (), readers={}, again=True)

    assert found(COPY) is Judgement.KEPT
    assert found(COPY, COMPUTED) is Judgement.SURVIVOR


def test_lineages_and_running_splices_read_from_their_first_span_on() -> None:
    """Those that run aren't in the ledger yet; all may have read other sessions, too."""
    proof, ledger = SessionProof(bytes(32), ME, Paths(bytes(16))), SpanLedger()
    spans = {SpanKey(*ME, "m1"): 9, SpanKey(*ME, "m0"): 5, SpanKey(*OTHER, "m0"): 2}
    splices = [("t", Carried("l", 1, spans)), ("t", Carried("k", 1, {SpanKey(*OTHER, "m0"): 2}))]
    ledger.enter("t", Carried("cached", 1, {SpanKey(*ME, "m2"): 7}))
    doomed_text(proof, [], ledger, None, spared=[], splices=splices)
    assert proof.readers == {lineage_bits("l", "t"): 5, lineage_bits("cached", "t"): 7}


def test_a_copy_is_kept_if_its_holder_sent_what_it_is_of() -> None:
    """So is a copy of a computed row. An exact row needs the same path."""
    known = frozenset({b"path"})
    assert judged(COMPUTED, known=known) is Judgement.KEPT
    assert judged(COMPUTED) is Judgement.SURVIVOR
    assert judged(COMPUTED, known=known, lineage=0, path=b"else") is Judgement.SURVIVOR


def test_what_the_session_sent_again_counts_only_later() -> None:
    """Right after the forget, nothing of it may be there."""
    assert judged(COMPUTED, owner=ME, path=b"path") is Judgement.SENT_AGAIN
    assert judged(COMPUTED, owner=ME, path=b"path", again=False) is Judgement.SURVIVOR
    assert judged(COMPUTED, owner=ME, known=frozenset({b"path"})) is Judgement.SENT_AGAIN
    assert judged(COPY, owner=ME) is Judgement.SURVIVOR


def test_the_smaller_part_of_anothers_row_may_be_equal_by_chance() -> None:
    """It needs the same token, and no lineage that has read the session."""
    assert judged(COMPUTED, parts=PART) is Judgement.CHANCE
    assert judged(COMPUTED, parts=PART, lineage=0, path=b"else") is Judgement.CHANCE
    assert judged(COMPUTED, parts=WHOLE // 2) is Judgement.SURVIVOR
    assert judged(COMPUTED, parts=PART, token=TOKEN + 1) is Judgement.SURVIVOR
    assert judged(COMPUTED, parts=PART, lineage=READER) is Judgement.SURVIVOR
    assert judged(COMPUTED, parts=PART, owner=ME) is Judgement.SURVIVOR
