"""Proofs: work on the engine's thread that grows with the rows, not with their square."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from msgspec.structs import replace
from proof_kit import TEXT, place_of, proven
from support.replay_engine import SCOPE, edit, make_engine, register, run

from leyline_engine.contract import Directive, EditPayload, ProvePayload, SpanLabel
from leyline_engine.proof.digests import Part
from leyline_engine.proof.judging import Owner
from leyline_replay.engine import ReplayEngine
from leyline_replay.proving import ReplaySite


def keeps_copies(engine: ReplayEngine) -> int:
    """Two sessions send one text, and one of them edits it; the tokens that it copies."""
    run(engine, TEXT, register("t1"))
    spans = (SpanLabel("m0", 0, 60), SpanLabel("m1", 60, len(TEXT)))
    run(engine, TEXT, EditPayload(session="y", scope=SCOPE, turn="a1", spans=spans))
    cut = Directive(40, 45)
    prompt, payload = edit(TEXT, [cut], tail=[9], session="y", source_turn="a1", turn="a2")
    changed = (SpanLabel("m2", 0, 55), SpanLabel("m1", 55, 95), SpanLabel("m3", 95, 96))
    _, record = run(engine, prompt, replace(payload, spans=changed))
    return record.receipt.tokens.spliced


def test_what_sessions_sent_is_computed_once_and_not_per_row() -> None:
    """A session's turns are digested once per look, however many rows it keeps as copies."""

    class Counting(ReplaySite):
        calls = 0

        def sent(self, owners: Collection[Owner]) -> set[int]:
            Counting.calls += 1
            return super().sent(owners)

    engine = make_engine()
    copied = keeps_copies(engine)
    engine.proofs._site = Counting(engine.cache, engine._running)
    assert place_of(proven(engine), "pool.tree").kept == len(TEXT) + copied > 100
    assert Counting.calls == 1


def test_a_tenant_with_many_proofs_ends_its_own() -> None:
    """Of too many open proofs, the tenant that has most loses its oldest."""
    engine = make_engine()
    others = ProvePayload(nonce="5e" * 32)
    engine.proofs.expect("theirs", ("other", "s"), others)
    for number in range(9):
        engine.proofs.expect(f"p{number}", (SCOPE, f"s{number}"), others)
    found = engine.settled_proofs({})
    assert set(found) == {"p0", "p1"} and all(each.unscanned for each in found.values())


def test_the_slots_of_entries_are_those_that_name_them() -> None:
    """Entries of one part lead to all their slots, and to none if no slot has them."""
    part = Part("origin", "turned 1", torch.zeros(4, 2), np.array([2, -1, 0, 2]))
    assert part.slots([0, 1, 2]) == {0: [2], 1: [], 2: [0, 3]}
    assert Part("pool", "free 1", torch.zeros(4, 2)).slots([3]) == {3: [3]}
