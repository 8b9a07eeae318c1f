"""Proofs of forgets in a scheduler: clean ones, planted survivors, late slots."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from scheduler_kit import Scheduler, text
from secret_kit import SPANS, TOLD, forgetting, telling

from leyline_engine.contract import EditPayload, Proof, ProvePayload, edit_envelope
from leyline_engine.proof.digests import Part
from leyline_engine.rows.pool import SplicePool

pytestmark = pytest.mark.usefixtures("server_args", "position_free")
NONCE = ProvePayload(nonce="5e" * 32)
OTHER = text(80, 9)


@pytest.fixture
def position_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in model's rotary keys depend on positions alone, so they prove nothing."""
    parts = SplicePool.parts

    def some(self: SplicePool) -> list[Part]:
        return [part for part in parts(self) if part.group.startswith("free")]

    monkeypatch.setattr(SplicePool, "parts", some)


def filled() -> Scheduler:
    """Two sessions with other text each."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    scheduler.serve(OTHER, EditPayload(session="z", scope="t", turn="t1"))
    return scheduler


def ask(scheduler: Scheduler, **changes: object) -> None:
    """Queue a request that forgets everything of the session, with a proof."""
    payload = forgetting(forget=("*",), spans=(), **changes)
    scheduler.submit([7], message_id="p", hints=edit_envelope("p", payload, prove=NONCE))


def proven(scheduler: Scheduler) -> Proof:
    """Forget with a proof; the last one that was sent."""
    ask(scheduler)
    scheduler.drain()
    return scheduler.sender.proofs["p"]


def survivors(proof: Proof) -> set[str]:
    return {place.place for place in proof.places if place.survivors}


def slots_of(scheduler: Scheduler, session: str) -> list[int]:
    """Slots that a session published."""
    site = scheduler.engine._site
    paths = scheduler.engine.publications.of(("t", session))
    return [slot for path in paths for slot in site.cached(path).tolist()]


def plant(scheduler: Scheduler, target: int) -> None:
    """Copy one of the session's rows to another slot."""
    row = slots_of(scheduler, "s")[70]
    for layer in scheduler.pool.kv_buffer:
        layer[target] = layer[row]


def in_free_slot(scheduler: Scheduler) -> None:
    plant(scheduler, int(scheduler.allocator.get_all_free_pages()[-1]))
    scheduler.cache.scrub = lambda: None  # it would find the row and overwrite it


def in_anothers_node(scheduler: Scheduler) -> None:
    plant(scheduler, slots_of(scheduler, "z")[40])


def not_overwritten(scheduler: Scheduler) -> None:
    scheduler.cache.overwrite = lambda _: None
    scheduler.cache.scrub = lambda: None


def not_unlinked(scheduler: Scheduler) -> None:
    scheduler.engine.publications.of = lambda _: ()


def in_the_sources(scheduler: Scheduler) -> None:
    scheduler.engine.registry.drop = lambda *_: None


PLANTS: dict[str, tuple[Callable[[Scheduler], None], str]] = {
    "a free slot": (in_free_slot, "pool.free"),
    "another session's node": (in_anothers_node, "pool.tree"),
    "slots that were never overwritten": (not_overwritten, "pool.free"),
    "paths that were never removed": (not_unlinked, "pool.tree"),
    "the retained turns": (in_the_sources, "sources"),
}


def test_a_forget_is_proven_clean() -> None:
    """All rows that the session published are digested, and none is found."""
    scheduler = filled()
    count = len(slots_of(scheduler, "s"))
    proof = proven(scheduler)
    assert proof.complete and not proof.survivors, proof
    assert proof.doomed == count > len(TOLD) - 1


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_survivor_is_found(name: str) -> None:
    """A rest of a session is found, and named by its place."""
    scheduler = filled()
    put, place = PLANTS[name]
    put(scheduler)
    assert place in survivors(proven(scheduler))


def test_what_others_sent_themselves_is_kept() -> None:
    """Rows that another session published from the beginning, too, are no survivors."""
    scheduler = filled()
    scheduler.serve(TOLD, telling(session="y"))
    proof = proven(scheduler)
    assert proof.complete and not proof.survivors
    kept = next(place.kept for place in proof.places if place.place == "pool.tree")
    # One generated token has KV, and is the same.
    assert kept == len(TOLD) + 1


def test_what_nobody_claims_is_a_survivor() -> None:
    """A forget spares nothing of requests without a session, so they excuse no row that stays."""
    scheduler = filled()
    scheduler.serve(TOLD, None)
    not_unlinked(scheduler)
    assert "pool.tree" in survivors(proven(scheduler))
    scheduler = filled()
    scheduler.serve(TOLD, None)
    assert not proven(scheduler).survivors


def test_a_proof_waits_for_running_turns() -> None:
    """While another turn of the session runs, the proof is pending; then it covers that, too."""
    scheduler = filled()
    scheduler.submit([*TOLD, 5, 6], telling(turn="t2"), decode=12)
    scheduler.step()
    ask(scheduler)
    while "p" not in scheduler.sender.proofs:
        scheduler.step()
    first = scheduler.sender.proofs["p"]
    assert first.pending and not first.survivors
    scheduler.drain()
    last = scheduler.sender.proofs["p"]
    assert last.complete and not last.survivors, last
    assert last.doomed > first.doomed


def test_a_first_layer_that_stays_is_found() -> None:
    """A row of the first layer gives its token away: in a free slot, it is a survivor."""
    scheduler = filled()
    first = scheduler.pool.kv_buffer[0]
    before = first.clone()
    erased = scheduler.engine.prover.overwritten

    def restored(slots: object) -> None:
        first[:] = before
        erased(slots)  # type: ignore[arg-type]

    scheduler.engine.prover.overwritten = restored  # type: ignore[method-assign]
    assert survivors(proven(scheduler)) == {"pool.free"}


def test_late_slots_that_are_not_overwritten_are_found() -> None:
    """A running turn's slots are checked when it gives them back."""
    scheduler = filled()
    scheduler.submit([*TOLD, 5, 6], telling(turn="t2"), decode=12)
    scheduler.step()
    ask(scheduler)
    while "p" not in scheduler.sender.proofs:
        scheduler.step()
    not_overwritten(scheduler)
    scheduler.drain()
    assert survivors(scheduler.sender.proofs["p"])


def test_a_span_is_proven_alone() -> None:
    """KV in front of the span isn't doomed."""
    scheduler = filled()
    payload = forgetting(spans=())
    prompt = [*TOLD[: SPANS[1].start], 9]
    scheduler.submit(prompt, hints=edit_envelope("p", payload, prove=NONCE))
    scheduler.drain()
    proof = scheduler.sender.proofs["p"]
    assert proof.complete and not proof.survivors
    assert 0 < proof.doomed <= len(TOLD) + 2 - SPANS[1].start


def test_a_pool_that_cannot_be_read_proves_nothing() -> None:
    """Without rows to look at, the proof is never complete."""
    scheduler = Scheduler(splices=False)
    scheduler.serve(TOLD, telling())
    ask(scheduler)
    scheduler.drain()
    proof = scheduler.sender.proofs.get("p")
    assert proof is None or (proof.unscanned and not proof.complete)


def test_ranks_that_disagree_make_it_incomplete() -> None:
    """If another rank's shard isn't clean, this one's proof says so."""
    scheduler = filled()
    from leyline_engine.sglang.proving import agreed_proof

    scheduler.engine.prover._agreed = agreed_proof(lambda _: False)
    proof = proven(scheduler)
    assert not proof.complete and not proof.survivors
    assert msgspec.structs.asdict(proof.places[-1])["place"] == "ranks"
