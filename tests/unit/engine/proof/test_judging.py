"""Judgements on rows that equal doomed ones."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_engine.proof.doomed import DoomedRow
from leyline_engine.proof.dooming import doomed_text
from leyline_engine.proof.judging import Equal, Holder, Judgement, judge
from leyline_engine.proof.session_proof import SessionProof
from leyline_engine.records.ledger import Carried, SpanKey, SpanLedger
from leyline_engine.records.lineage import TOKEN_BITS, lineage_bits
from leyline_engine.records.paths import Paths
from leyline_engine.records.provenance import Content

ME, OTHER = ("t", "me"), ("t", "other")
READER, LINEAGE, TOKEN = 7, 8, 3
PLACE = 10
CONTENT, ELSE = 17, 18
ROW = DoomedRow(Content(CONTENT), TOKEN)
WHOLE, PART = 6, 2


def judged(
    *,
    lineage: int = LINEAGE,
    content: int = CONTENT,
    copied: bool = False,
    owner: tuple[str, str] = OTHER,
    position: int = PLACE,
    parts: int = WHOLE,
    token: int = TOKEN,
    known: frozenset[object] = frozenset(),
    origins: tuple[int, ...] = (),
    row: DoomedRow = ROW,
    again: bool = True,
) -> Judgement:
    """The judgement on a row that one session holds, where a lineage reads from a place on."""
    key = (lineage << TOKEN_BITS) | token
    holder = Holder(
        "pool.tree", Content(content, copied, origins), frozenset({owner}), key, position
    )
    return judge(
        Equal([row], parts, WHOLE),
        [holder],
        ME,
        lambda owners: known if owner in owners else frozenset(),
        readers={READER: PLACE},
        again=again,
    )


def test_a_free_row_survives() -> None:
    """Nobody holds it, so nobody may keep it."""
    found = judge(Equal([ROW], PART, WHOLE), [], ME, lambda _: {CONTENT}, readers={}, again=True)
    assert found is Judgement.SURVIVOR


@pytest.mark.parametrize("lineage", [0, LINEAGE])
def test_a_row_that_another_computed_of_the_same_is_kept(lineage: int) -> None:
    """Content and token say so, under a lineage too."""
    assert judged(lineage=lineage) is Judgement.KEPT
    assert judged(lineage=lineage, content=ELSE) is Judgement.SURVIVOR
    assert judged(lineage=lineage, token=TOKEN + 1) is Judgement.SURVIVOR


@pytest.mark.parametrize("copied", [False, True])
def test_a_lineage_reads_from_its_place_on(copied: bool) -> None:
    """In front of it, its rows are others'; from there on, they have to go, whoever sent them."""

    def at(position: int, **given: Any) -> Judgement:
        known = frozenset({CONTENT})
        return judged(lineage=READER, copied=copied, position=position, known=known, **given)

    assert at(PLACE - 1) is Judgement.KEPT
    for position in (PLACE, PLACE + 1):
        assert at(position) is Judgement.SURVIVOR
        assert at(position, owner=ME) is Judgement.SURVIVOR
        assert at(position, parts=PART) is Judgement.SURVIVOR


def test_a_copy_is_kept_if_its_holder_or_a_lender_sent_what_it_is_of() -> None:
    """A computed row needs no such note."""
    known = frozenset({CONTENT})
    assert judged(copied=True, known=known) is Judgement.KEPT
    assert judged(copied=True) is Judgement.SURVIVOR
    assert judged(copied=True, known=known, content=ELSE) is Judgement.SURVIVOR
    assert judged(content=ELSE, known=known | {ELSE}) is Judgement.SURVIVOR


def test_a_shared_lineages_row_may_be_any_prompts_copy() -> None:
    """It is kept with the row that it may be of, and as a copy of what its holder sent."""
    shared = DoomedRow(Content(ELSE, origins=(5, CONTENT)), TOKEN)
    assert judged(row=shared) is Judgement.KEPT
    assert judged(row=shared, content=6) is Judgement.SURVIVOR
    assert judged(row=shared, copied=True) is Judgement.SURVIVOR
    known = frozenset({CONTENT})
    assert judged(content=ELSE, origins=(5, CONTENT), known=known) is Judgement.KEPT
    assert judged(content=ELSE, origins=(5, CONTENT)) is Judgement.SURVIVOR


def test_lineages_and_running_splices_read_from_their_first_span_on() -> None:
    """Those that run aren't in the ledger yet; all may have read other sessions, too."""
    proof, ledger = SessionProof(bytes(32), ME, Paths(bytes(16))), SpanLedger()
    spans = {SpanKey(*ME, "m1"): 9, SpanKey(*ME, "m0"): 5, SpanKey(*OTHER, "m0"): 2}
    splices = [("t", Carried("l", 1, spans)), ("t", Carried("k", 1, {SpanKey(*OTHER, "m0"): 2}))]
    ledger.enter("t", Carried("cached", 1, {SpanKey(*ME, "m2"): 7}))
    doomed_text(proof, [], ledger, None, spared=[], splices=splices)
    assert proof.readers == {lineage_bits("l", "t"): 5, lineage_bits("cached", "t"): 7}


def test_what_the_session_sent_again_counts_only_later() -> None:
    """Right after the forget, nothing of it may be there."""
    assert judged(owner=ME) is Judgement.SENT_AGAIN
    assert judged(owner=ME, again=False) is Judgement.SURVIVOR
    assert judged(owner=ME, copied=True) is Judgement.SURVIVOR
    known = frozenset({CONTENT})
    assert judged(owner=ME, copied=True, known=known) is Judgement.SENT_AGAIN


def test_the_smaller_part_of_anothers_row_may_be_equal_by_chance() -> None:
    """It needs the same token."""
    for copied in (False, True):
        assert judged(content=ELSE, parts=PART, copied=copied) is Judgement.CHANCE
        assert judged(content=ELSE, parts=WHOLE // 2, copied=copied) is Judgement.SURVIVOR
    assert judged(content=ELSE, parts=PART, token=TOKEN + 1) is Judgement.SURVIVOR
    assert judged(content=ELSE, parts=PART, owner=ME) is Judgement.SURVIVOR
