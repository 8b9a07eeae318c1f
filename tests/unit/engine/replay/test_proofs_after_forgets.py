"""Proofs of a session that another forget has reached before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from proof_kit import TEXT, begin, proven, settled, survivors
from support.replay_engine import (
    LIVE,
    admit,
    cached,
    free_slots,
    make_engine,
    prefill,
    random_tokens,
    register,
    run,
)

from leyline_replay.cache.slots import Slots
from leyline_replay.engine import ReplayEngine


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


def test_a_proof_that_only_waits_for_rows_looks_at_each_call() -> None:
    """Rows may be freed without a report on any forget; the proof that waits for them closes."""
    engine = make_engine()
    run(engine, TEXT, register("t1"))
    holder = admit(engine, [*TEXT, 5, 6], register("t2", session="y"))
    first = begin(engine)
    prefill(first)
    first.finish()
    second = begin(engine)
    ticket = second.receipt.message_id
    assert settled(engine)[ticket].pending
    prefill(second)
    second.finish()
    assert ticket not in engine.settled_proofs({})
    prefill(holder)
    holder.finish()
    engine.settled_forgets()  # the report is lost
    closed = engine.settled_proofs({})
    assert closed[ticket].complete and not survivors(closed[ticket])


def but_the_first_layer(engine: ReplayEngine) -> Callable[[Slots], None]:
    """Pool.erase, but for the first layer."""
    erase, layers = engine.cache.pool.erase, engine.cache.pool._tensors

    def some(slots: Slots) -> None:
        at = torch.from_numpy(slots)
        saved = [each[at].clone() for each in layers[0]]
        erase(slots)
        for each, rows in zip(layers[0], saved, strict=True):
            each[at] = rows

    return some


def test_a_first_layer_that_stays_is_found() -> None:
    """A row of the first layer gives its token away: in a free slot, it is a survivor."""
    engine = make_engine()
    run(engine, TEXT, register("t1"))
    engine.cache.pool.erase = but_the_first_layer(engine)  # type: ignore[method-assign]
    assert survivors(proven(engine)) == {"pool.free": len(TEXT)}


def test_what_was_evicted_before_is_found_too() -> None:
    """Rows that were evicted were never digested, but the forget has to overwrite them."""
    engine = make_engine(pool=300)
    run(engine, TEXT, register("t1"))
    slots = cached(engine, TEXT).copy()
    for seed, count in ((9, 150), (8, 60)):
        run(engine, random_tokens(count, seed), register("t1", session=f"z{seed}"))
    assert not len(cached(engine, TEXT))
    left = held_rows(engine, np.intersect1d(slots, free_slots(engine)))
    assert left

    def kept(some: Slots) -> None:
        engine.cache.pool._left[some] = False

    erase, engine.cache.pool.erase = engine.cache.pool.erase, kept  # type: ignore[method-assign]
    proof = proven(engine)
    # The request that asks takes a free slot itself.
    assert proof.doomed == 0 and survivors(proof)["pool.free"] == left - 1
    erase(free_slots(engine))
    assert not survivors(proven(engine))


def test_no_count_tells_what_another_tenant_sends() -> None:
    """Equal rows of another tenant are neither survivors nor counted, in any place."""
    alone, shared = make_engine(), make_engine()
    for engine, there in ((alone, random_tokens(len(TEXT), 8)), (shared, TEXT)):
        run(engine, TEXT, register("t1"), reuse=LIVE)
        run(engine, there, register("t1", session="x", scope="other"), reuse=LIVE)
    found = [proven(engine) for engine in (alone, shared)]
    assert len(cached(shared, TEXT)) == len(TEXT)
    for proof in found:
        assert proof.complete and not proof.survivors
        assert not any(place.kept for place in proof.places)
