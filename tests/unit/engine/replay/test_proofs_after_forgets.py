"""Proofs of a session that another forget has reached before."""

from __future__ import annotations

from proof_kit import TEXT, begin, settled, survivors
from support.replay_engine import admit, cached, make_engine, prefill, register, run

from leyline_engine.replay.cache.slots import Slots
from leyline_engine.replay.engine import ReplayEngine


def held_rows(engine: ReplayEngine, slots: Slots) -> int:
    """Number of slots that hold anything."""
    values = engine.cache.pool._tensors[-1][1]
    return sum(bool(values[slot].any()) for slot in slots.tolist())


def test_a_second_proof_waits_for_what_the_first_waits_for() -> None:
    """A forget that finds nothing left to remove isn't proven while an earlier one is pending."""
    engine = make_engine()
    run(engine, TEXT, register("t1"))
    slots = cached(engine, TEXT).copy()
    holder = admit(engine, [*TEXT, 5, 6], register("t2", session="y"))
    first = begin(engine)
    assert settled(engine)[first.receipt.message_id].pending
    prefill(first)
    first.finish()
    second = begin(engine)
    ticket = second.receipt.message_id
    proof = settled(engine)[ticket]
    assert held_rows(engine, slots) > 90
    assert proof.pending and not proof.complete
    prefill(second)
    second.finish()
    run(engine, [8, 9], register("t1", session="w"))
    assert ticket not in settled(engine)
    prefill(holder)
    holder.finish()
    last = settled(engine)
    assert set(last) == {first.receipt.message_id, ticket}
    assert all(each.complete and not survivors(each) for each in last.values())
    assert not held_rows(engine, slots) and not engine.proofs.busy
