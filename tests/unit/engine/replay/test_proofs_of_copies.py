"""Proofs of text that others copied, and of rows that are equal in part."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from proof_kit import (
    LAYERS,
    OTHER,
    TEXT,
    deep_engine,
    place_of,
    plant,
    proven,
    same_rows,
    survivors,
)
from support.replay_engine import (
    LIVE,
    SCOPE,
    cached,
    edit,
    make_engine,
    register,
    run,
)

from leyline_engine.contract import Directive, EditPayload, ReusePayload, SpanLabel
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_replay.engine import ReplayEngine

CUT = Directive(40, 45)


def amortized(engine: ReplayEngine, session: str) -> int:
    """A turn, and one that cuts tokens out of it; the tokens that it copies."""
    spans = (SpanLabel("m0", 0, 60), SpanLabel("m1", 60, len(TEXT)))
    run(engine, TEXT, EditPayload(session=session, scope=SCOPE, turn="a1", spans=spans))
    prompt, payload = edit(TEXT, [CUT], tail=[9], session=session, source_turn="a1", turn="a2")
    spans = (SpanLabel("m2", 0, 55), SpanLabel("m1", 55, 95), SpanLabel("m3", 95, 96))
    _, record = run(engine, prompt, replace(payload, spans=spans))
    return record.receipt.tokens.spliced


@pytest.mark.parametrize("noted", [True, False])
def test_a_copy_outlives_the_turn_that_it_came_from(noted: bool) -> None:
    """Copies that an owner made of its own text stay, though the turn isn't retained any more."""
    engine = make_engine()
    run(engine, TEXT, register("t1"))
    copied = amortized(engine, "y")
    # Only the turn with the cut is left to tell what the session sent.
    engine.cache.registry.drop((SCOPE, "y"), "a1")
    if not noted:
        engine.cache.ledger.provenance.forget((SCOPE, "y"))
    proof = proven(engine)
    assert survivors(proof).get("pool.tree", 0) == (0 if noted else copied)
    assert proof.complete


def test_what_a_third_session_lent_is_no_survivor() -> None:
    """Reuse from one that sent the same tokens is that one's, until it forgets, too."""
    engine = make_engine()
    labelled = replace(register("t1", session="x"), spans=(SpanLabel("m0", 0, len(TEXT)),))
    run(engine, TEXT, labelled, reuse=LIVE)
    prompt = [*OTHER[:30], *TEXT, 5]
    _, record = run(engine, prompt, register("t1", session="z"), reuse=LIVE)
    run(engine, TEXT, register("t1"))
    proof = proven(engine)
    lent = record.receipt.tokens.reused
    assert lent and proof.complete and not proof.survivors
    assert place_of(proof, "pool.tree").kept == len(TEXT) + lent
    engine.cache.ledger.lineages_reading = lambda *_: {}  # type: ignore[method-assign]
    assert survivors(proven(engine, "x"))["pool.tree"] == lent


def test_a_row_computed_after_a_splice_is_found_with_others() -> None:
    """Only copies may be lent: a row that the session computed is a survivor wherever it stays."""
    engine = make_engine()
    run(engine, OTHER, register("t1", session="z"))
    assert amortized(engine, "s")
    spliced = [node for node in engine.cache.tree.nodes() if node.keys[-1] > MAX_TOKEN]
    computed = max(spliced, key=lambda node: len(node.keys)).slots[-1]
    plant(engine, int(computed), int(cached(engine, OTHER)[20]))
    assert survivors(proven(engine))["pool.tree"] == 1


def spliced_tail(
    engine: ReplayEngine, session: str, *last: int, reuse: ReusePayload | None = None
) -> list[int]:
    """Two turns of a session: a text with a last token, and that without a few tokens, but more.

    Sessions with other last tokens copy the same rows under other lineages.
    """
    source = [*TEXT, *last]
    run(engine, source, labelled(register("a1", session=session), len(source)))
    cuts = [CUT, Directive(len(TEXT), len(source))]
    prompt, payload = edit(source, cuts, tail=OTHER, session=session, source_turn="a1", turn="a2")
    run(engine, prompt, labelled(payload, len(prompt)), reuse=reuse)
    return prompt


def labelled(payload: EditPayload, length: int) -> EditPayload:
    """The payload of a prompt that is one message."""
    return replace(payload, spans=(SpanLabel("m0", 0, length),))


def tail_slots(engine: ReplayEngine, session: str, prompt: list[int]) -> list[int]:
    """Slots of what a session computed after its splice."""
    turn = engine.cache.registry.get((SCOPE, session), "a2")
    assert turn is not None
    found: list[int] = cached(engine, prompt, turn.lineage)[-len(OTHER) :].tolist()
    return found


def test_what_others_computed_after_the_same_splice_is_no_survivor() -> None:
    """It is theirs, and so are copies of it; in any other place, it is a survivor."""
    engine = make_engine(pool=1200)
    prompt = spliced_tail(engine, "q", 9, reuse=LIVE)
    copy = [*TEXT[50:70], *OTHER, 5]
    _, record = run(engine, copy, labelled(register("t1", session="z"), len(copy)), reuse=LIVE)
    assert spliced_tail(engine, "s", 8) == prompt
    own, others = (tail_slots(engine, session, prompt) for session in ("s", "q"))
    assert not {*own} & {*others} and same_rows(engine, own[40], others[40])
    plant(engine, own[3], others[5])
    proof = proven(engine)
    assert survivors(proof)["pool.tree"] == 1
    assert record.receipt.tokens.reused > len(OTHER) // 2
    assert place_of(proof, "pool.tree").kept > len(prompt) + record.receipt.tokens.reused - 2


def deep() -> ReplayEngine:
    """An engine of several layers, and two sessions with other text."""
    engine = deep_engine()
    run(engine, TEXT, register("t1"))
    run(engine, OTHER, register("t1", session="z"))
    return engine


@pytest.mark.damages
@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_one_layer_of_a_row_is_found_with_others(layer: int) -> None:
    """A part of a row isn't there by chance if its token is another."""
    engine = deep()
    plant(engine, int(cached(engine, TEXT)[50]), int(cached(engine, OTHER)[20]), layer=layer)
    assert survivors(proven(engine))["pool.tree"] == 1


@pytest.mark.damages
@pytest.mark.parametrize(("rows", "complete"), [(1, True), (2, False)])
def test_few_parts_may_be_equal_by_chance(rows: int, complete: bool) -> None:
    """A part of one row of the same token may be, in any number of sessions; of more rows, the
    proof isn't complete."""
    engine = deep()
    run(engine, OTHER[1:], register("t1", session="y"))
    source, targets = cached(engine, TEXT), (cached(engine, OTHER)[1:], cached(engine, OTHER[1:]))
    # The first row depends on its token alone.
    same = {token: at for at, token in enumerate(TEXT) if at and token in OTHER[1:]}
    for token, at in [*same.items()][:rows]:
        for target in targets:
            plant(engine, int(source[at]), int(target[OTHER.index(token, 1) - 1]), layer=2)
    proof = proven(engine)
    assert not proof.survivors and place_of(proof, "pool.tree").chance == rows
    assert proof.complete is complete


def test_what_no_session_sent_stays() -> None:
    """Requests without a session keep what they sent, and aren't counted: nothing names them."""
    engine = make_engine()
    run(engine, TEXT, register("t1"))
    run(engine, TEXT[:80])
    proof = proven(engine)
    assert proof.complete and not proof.survivors and not place_of(proof, "pool.tree").kept
    assert len(cached(engine, TEXT)) == 80
