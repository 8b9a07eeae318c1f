"""Proofs of forgets: clean ones, survivors in every place, and rows that others keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from proof_kit import (
    OTHER,
    TEXT,
    begin,
    place_of,
    plant,
    plant_origin,
    proven,
    same_rows,
    settled,
    survivors,
)
from support.replay_engine import (
    LIVE,
    SCOPE,
    admit,
    cached,
    edit,
    free_slots,
    make_engine,
    prefill,
    random_tokens,
    register,
    run,
)

from leyline_engine.contract import Directive, EditPayload, SpanLabel
from leyline_engine.reuse.entering import Entry, Path
from leyline_replay.engine import ReplayEngine

Plant = Callable[[ReplayEngine], None]
ROW = 50
AMORTIZE = Directive(40, 45)


def filled(kind: str = "gqa") -> ReplayEngine:
    """Two sessions with other text each, and an index of their content."""
    engine = make_engine(kind)
    run(engine, TEXT, register("t1"), decode=3, reuse=LIVE)
    run(engine, OTHER, register("t1", session="z"), decode=3, reuse=LIVE)
    return engine


def amortize(engine: ReplayEngine, session: str) -> int:
    """A turn of two messages, and one that cuts tokens out of the first; the tokens it copies."""
    spans = (SpanLabel("m0", 0, 60), SpanLabel("m1", 60, len(TEXT)))
    run(engine, TEXT, EditPayload(session=session, scope=SCOPE, turn="a1", spans=spans))
    prompt, payload = edit(TEXT, [AMORTIZE], tail=[9], session=session, source_turn="a1", turn="a2")
    spans = (SpanLabel("m2", 0, 55), SpanLabel("m1", 55, 95), SpanLabel("m3", 95, 96))
    _, record = run(engine, prompt, replace(payload, spans=spans))
    return record.receipt.tokens.spliced


def row(engine: ReplayEngine) -> int:
    return int(cached(engine, TEXT)[ROW])


def free(engine: ReplayEngine) -> int:
    # Of those that are allocated last.
    return int(free_slots(engine)[0])


def in_free_slot(engine: ReplayEngine) -> None:
    plant(engine, row(engine), free(engine))


def one_layer(engine: ReplayEngine) -> None:
    plant(engine, row(engine), free(engine), layer=1)


def in_anothers_node(engine: ReplayEngine) -> None:
    plant(engine, row(engine), int(cached(engine, OTHER)[20]))


def in_a_running_request(engine: ReplayEngine) -> None:
    request = admit(engine, [*OTHER[:30], *random_tokens(60, 5)], register("t2", session="z"))
    request.prefill_step()
    plant(engine, row(engine), int(request.owned[2]))


def moved(engine: ReplayEngine) -> None:
    slots = free_slots(engine)[:1]
    engine.cache.pool.copy(cached(engine, TEXT)[ROW : ROW + 1], slots, 7)


def in_the_origin_store(engine: ReplayEngine) -> None:
    plant_origin(engine, row(engine), free(engine))


def in_the_index(engine: ReplayEngine) -> None:
    index = engine.cache.reuse
    assert index is not None
    (source,) = engine.cache.registry.turns((SCOPE, "s"))
    slot = int(cached(engine, OTHER)[5])
    index._tenants[SCOPE].enter(slot, Entry(Path(source), 20, 1))


def in_the_sources(engine: ReplayEngine) -> None:
    engine.cache.registry.drop = lambda *_: None  # type: ignore[method-assign]


def in_the_ledger(engine: ReplayEngine) -> None:
    amortize(engine, "s")
    engine.cache.ledger.strike = lambda *_: None  # type: ignore[method-assign]


def not_overwritten(engine: ReplayEngine) -> None:
    engine.cache.pool.erase = lambda _: None  # type: ignore[method-assign]


def not_unlinked(engine: ReplayEngine) -> None:
    engine.cache._remove = lambda *_: ([], [])  # type: ignore[method-assign]


PLANTS: dict[str, tuple[Plant, str]] = {
    "a free slot": (in_free_slot, "pool.free"),
    "one layer of a free slot": (one_layer, "pool.free"),
    "a free slot, at another position": (moved, "pool.free"),
    "another session's node": (in_anothers_node, "pool.tree"),
    "a running request": (in_a_running_request, "pool.running"),
    "the as-computed keys": (in_the_origin_store, "origin"),
    "the index of content": (in_the_index, "index"),
    "the retained turns": (in_the_sources, "sources"),
    "the ledger": (in_the_ledger, "ledger"),
    "slots that were never overwritten": (not_overwritten, "pool.free"),
    "nodes that were never removed": (not_unlinked, "pool.tree"),
}


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_forget_is_proven_clean(kind: str) -> None:
    """Every row of the session is digested, and none is found in any place."""
    engine = filled(kind)
    proof = proven(engine)
    assert proof.complete and not proof.survivors
    # The output's last token has no KV.
    assert proof.doomed == len(TEXT) + 3
    assert place_of(proof, "pool.tree").scanned == len(OTHER) + 3
    assert place_of(proof, "index").scanned and place_of(proof, "sources").scanned == 1


@pytest.mark.damages
@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_planted_survivor_is_found(kind: str, name: str) -> None:
    """A rest of a session is found, and named by its place."""
    engine = filled(kind)
    put, place = PLANTS[name]
    put(engine)
    proof = proven(engine)
    assert place in survivors(proof)
    if place in {"index", "ledger", "origin", "pool.running"}:
        assert set(survivors(proof)) == {place}
    if place == "sources":
        # A turn that isn't dropped may stay in the index of content, too.
        assert set(survivors(proof)) <= {place, "index"}


def test_what_others_sent_themselves_is_no_survivor() -> None:
    """Rows of a session that sent the same tokens from the beginning are counted as kept."""
    engine = filled()
    run(engine, TEXT[:80], register("t1", session="y"))
    proof = proven(engine)
    assert proof.complete and not proof.survivors
    assert place_of(proof, "pool.tree").kept == 80


def test_anothers_copy_at_another_place_is_no_survivor() -> None:
    """A session that sent the same tokens and edited them since keeps the copies, too."""
    engine = filled()
    copied = amortize(engine, "y")
    proof = proven(engine)
    assert proof.complete and not proof.survivors
    assert place_of(proof, "pool.tree").kept == len(TEXT) + copied


def test_a_copy_that_read_the_session_is_a_survivor() -> None:
    """Reuse in a session that sent other text in front of it isn't its own, wherever it stays."""
    engine = make_engine()
    run(engine, TEXT, register("t1"), reuse=LIVE)
    prompt = [*OTHER[:30], *TEXT, 5]
    _, record = run(engine, prompt, register("t1", session="z"), reuse=LIVE)
    assert record.receipt.tokens.reused
    assert not proven(engine).survivors

    engine = make_engine()
    run(engine, TEXT, register("t1"), reuse=LIVE)
    run(engine, prompt, register("t1", session="z"), reuse=LIVE)
    engine.cache.ledger.lineages_reading = lambda *_: {}  # type: ignore[method-assign]
    assert survivors(proven(engine))["pool.tree"] == record.receipt.tokens.reused


def test_equal_tokens_elsewhere_are_no_survivors() -> None:
    """The first layer depends on tokens alone, so it isn't looked at."""
    engine = filled()
    run(engine, [OTHER[0], *TEXT], register("t1", session="y"))
    slots = cached(engine, [OTHER[0], *TEXT])
    first = engine.cache.pool._tensors[0][1]
    assert torch.equal(first[row(engine)], first[int(slots[ROW + 1])])
    assert not same_rows(engine, row(engine), int(slots[ROW + 1]))
    proof = proven(engine)
    assert proof.complete and not proof.survivors


def test_a_proof_waits_for_running_requests() -> None:
    """It is pending while a request holds doomed rows, and covers what that computed meanwhile."""
    engine = filled()
    holder = admit(engine, [*TEXT, 5, 6], register("t2"))
    asking = begin(engine)
    ticket = asking.receipt.message_id
    first = settled(engine)[ticket]
    assert first.pending and not first.complete and not first.survivors
    prefill(holder)
    assert ticket not in settled(engine)
    holder.finish()
    last = settled(engine)[ticket]
    assert last.complete and not last.survivors
    assert last.doomed > first.doomed


def leaves_rows(engine: ReplayEngine) -> Any:
    """Pool.erase, but for slots that were waited for."""
    erase, waited = engine.cache.pool.erase, engine.cache.tree.doomed()
    slots = {slot for node in waited for slot in node.slots.tolist()}
    return lambda some: None if slots & set(some.tolist()) else erase(some)


def test_a_late_slot_that_is_not_overwritten_is_found() -> None:
    """Rows for which a forget waited are checked as soon as they are said to be overwritten."""
    engine = filled()
    holder = admit(engine, [*TEXT, 5, 6], register("t2", session="y"))
    ticket = begin(engine).receipt.message_id
    assert settled(engine)[ticket].pending
    engine.cache.pool.erase = leaves_rows(engine)  # type: ignore[method-assign]
    prefill(holder)
    holder.finish()
    last = settled(engine)[ticket]
    assert not last.pending and survivors(last)


def test_a_late_row_counts_though_it_is_gone_when_the_proof_closes() -> None:
    """A slot that was free with doomed KV in it may have been read, whoever overwrote it since."""
    engine = filled()
    holder = admit(engine, [*TEXT, 5, 6], register("t2", session="y"))
    ticket = begin(engine).receipt.message_id
    erase, engine.cache.pool.erase = engine.cache.pool.erase, leaves_rows(engine)  # type: ignore[method-assign]
    slots = [node.slots for node in engine.cache.tree.doomed()]
    prefill(holder)
    holder.finish()
    erase(np.concatenate(slots))
    assert survivors(settled(engine)[ticket])["pool.free"]


def test_a_survivor_found_at_first_is_not_lost_later() -> None:
    """A row that another request overwrites before the proof is closed still counts."""
    engine = filled()
    holder = admit(engine, [*TEXT, 5, 6], register("t2", session="y"))
    in_free_slot(engine)
    slot = free(engine)
    ticket = begin(engine).receipt.message_id
    engine.cache.pool.erase(torch.tensor([slot]).numpy())
    prefill(holder)
    holder.finish()
    assert survivors(settled(engine)[ticket]) == {"pool.free": 1}


def test_text_that_is_sent_again_is_counted_apart() -> None:
    """A session that goes on after its forget, before the proof closes, leaves no survivors."""
    engine = filled()
    holder = admit(engine, [*TEXT, 5, 6], register("t2", session="y"))
    ticket = begin(engine).receipt.message_id
    run(engine, TEXT, register("t9"))
    prefill(holder)
    holder.finish()
    last = settled(engine)[ticket]
    assert last.complete and not last.survivors
    # Other chunks may round otherwise.
    assert place_of(last, "pool.tree").sent_again > len(TEXT) // 2
    assert place_of(last, "sources").sent_again == 1


def labelled(turn: str, tokens: list[int], cut: int) -> EditPayload:
    """A turn of two messages."""
    spans = (SpanLabel("m0", 0, cut), SpanLabel("m1", cut, len(tokens)))
    return EditPayload(session="s", scope=SCOPE, turn=turn, spans=spans)


def test_a_span_is_proven_alone() -> None:
    """KV in front of the span stays, and isn't doomed; a reader is found if it stays."""
    engine = make_engine()
    run(engine, TEXT, labelled("t1", TEXT, 60))
    proof = proven(engine, spans=["m1"], prompt=[*TEXT[:60], 9])
    assert proof.complete and not proof.survivors
    assert proof.doomed == 40
    assert len(cached(engine, TEXT)) == 60

    engine = make_engine()
    run(engine, TEXT, labelled("t1", TEXT, 60))
    engine.cache.ledger.first_reader = lambda turn, _: len(turn.tokens)  # type: ignore[method-assign]
    assert survivors(proven(engine, spans=["m1"], prompt=[*TEXT[:60], 9]))["pool.tree"] == 40


def test_digests_that_do_not_fit_make_the_proof_incomplete() -> None:
    """A proof over a sample of the rows gives both numbers, and never counts as complete."""
    engine = filled()
    engine.proofs.max_bytes = 4_000
    proof = proven(engine)
    assert 0 < proof.digested < proof.doomed == len(TEXT) + 3
    assert not proof.complete and not proof.survivors


def test_a_model_of_one_layer_proves_nothing() -> None:
    """Without a layer that reads other rows, the proof says that it looked for nothing."""
    engine = filled()
    engine.cache.pool.parts = lambda: []  # type: ignore[method-assign]
    proof = proven(engine)
    assert proof.unscanned and not proof.complete


def test_of_too_many_open_proofs_the_oldest_fails() -> None:
    """An engine keeps digests of a few proofs only, and reports the one that it gave up."""
    engine = make_engine()
    run(engine, TEXT, register("t1"))
    admit(engine, [*TEXT, 5, 6], register("t2", session="y"))
    tickets = [begin(engine).receipt.message_id for _ in range(9)]
    found = settled(engine)
    assert found[tickets[0]].unscanned and not found[tickets[0]].pending
    assert found[tickets[1]].pending and not found[tickets[1]].unscanned
