"""Proofs of forgets where copies lie in the host's memory, which is a place of its own."""

from __future__ import annotations

import pytest
import torch
from hosted_scheduler import HostedScheduler
from secret_kit import TOLD, telling
from test_scheduler_proofs import OTHER, ask, position_free, proven, survivors

from leyline_engine.contract import EditPayload, Proof
from leyline_engine.sglang.proving import HostCopies
from leyline_engine.sglang.rows.host import HOST

pytestmark = pytest.mark.usefixtures("server_args", "position_free")
__all__ = ["position_free"]


def filled(**options: object) -> HostedScheduler:
    """Two sessions with other text each, which only the host has."""
    scheduler = HostedScheduler(**options)  # type: ignore[arg-type]
    scheduler.serve(TOLD, telling())
    scheduler.serve(OTHER, EditPayload(session="z", scope="t", turn="t1"))
    scheduler.demote()
    return scheduler


def plant(scheduler: HostedScheduler, target: int) -> None:
    """Copy one of the session's rows on the host to another slot there."""
    (path,) = scheduler.engine.publications.of(("t", "s"))
    row = int(scheduler.tree.copies_of(path, alone=True)[1][70])
    for layer in scheduler.host_pool.data_refs:
        layer[target] = layer[row]


def in_free_slot(scheduler: HostedScheduler) -> None:
    free = torch.nonzero(~scheduler.host_pool.slot_used).flatten()
    plant(scheduler, int(free[-1]))


def in_anothers_copy(scheduler: HostedScheduler) -> None:
    (path,) = scheduler.engine.publications.of(("t", "z"))
    plant(scheduler, int(scheduler.tree.copies_of(path, alone=True)[1][40]))


def not_overwritten(scheduler: HostedScheduler) -> None:
    assert scheduler.splicing is not None and scheduler.splicing.host is not None
    scheduler.splicing.host.erase = lambda _: None  # type: ignore[method-assign]


def not_removed(scheduler: HostedScheduler) -> None:
    scheduler.engine.publications.of = lambda _: ()  # type: ignore[method-assign]


PLANTS = {
    "a free slot": in_free_slot,
    "another session's copy": in_anothers_copy,
    "slots that were never overwritten": not_overwritten,
    "paths that were never removed": not_removed,
}


def place(proof: Proof) -> dict[str, int]:
    """Counts of the host's memory."""
    found = next(each for each in proof.places if each.place == HOST)
    return {"scanned": found.scanned, "kept": found.kept, "survivors": found.survivors}


def test_copies_are_digested_and_gone() -> None:
    """A proof counts them, and finds none of them."""
    scheduler = filled()
    proof = proven(scheduler)
    assert proof.complete and not proof.survivors, proof
    assert proof.doomed == 112
    assert place(proof) == {"scanned": scheduler.host_pool.size, "kept": 0, "survivors": 0}


@pytest.mark.parametrize("name", PLANTS)
def test_a_copy_that_survives_is_found(name: str) -> None:
    """A rest of a session on the host is found, and named by its place."""
    scheduler = filled()
    PLANTS[name](scheduler)
    assert HOST in survivors(proven(scheduler))


def test_copies_that_another_session_sent_itself_are_kept() -> None:
    """They are no survivors, but counted."""
    scheduler = filled()
    scheduler.serve(TOLD, telling(session="y"))
    scheduler.demote()
    proof = proven(scheduler)
    assert proof.complete and not proof.survivors
    assert place(proof)["kept"] == 112


def test_a_proof_waits_for_a_copy_on_its_way() -> None:
    """It is pending until the copy has arrived and is overwritten; then it is clean."""
    scheduler = HostedScheduler()
    scheduler.holds = True
    scheduler.serve(TOLD, telling())
    ask(scheduler)
    scheduler.drain()
    first = scheduler.sender.proofs["p"]
    assert first.pending and not first.complete and not first.survivors
    scheduler.release()
    scheduler.settle()
    last = scheduler.sender.proofs["p"]
    assert last.complete and not last.survivors, last


def test_a_proof_waits_for_copies_of_what_a_request_holds() -> None:
    """They go when it ends; until then, they are no survivors."""
    scheduler = HostedScheduler()
    scheduler.submit(TOLD, telling(), decode=12)
    while scheduler.copies() == 0 or scheduler.tree.ongoing_write_through:
        scheduler.step()
    ask(scheduler)
    while "p" not in scheduler.sender.proofs:
        scheduler.step()
    first = scheduler.sender.proofs["p"]
    assert first.pending and not first.survivors, first
    scheduler.drain()
    scheduler.settle()
    last = scheduler.sender.proofs["p"]
    assert last.complete and not last.survivors, last


def test_copies_in_front_of_a_span_wait_for_nothing() -> None:
    """Only numbers of copies after a condemned path's start count as waiting."""
    scheduler = filled()
    (path,) = scheduler.engine.publications.of(("t", "s"))
    assert scheduler.splicing is not None
    copies = HostCopies(scheduler.tree, scheduler.splicing.host)
    places, slots = scheduler.tree.copies_of(path, alone=False)
    first = scheduler.splicing.tensors.slots
    wanted = [int(slot) + first for at, slot in zip(places, slots, strict=True) if at >= 80]
    assert len(wanted) == 112 - 80
    assert copies.after(path, 80) == set(wanted)


def test_a_late_copy_is_looked_at_as_it_is_overwritten() -> None:
    """A row that is still there by then counts, whatever is written to its place later."""
    scheduler = HostedScheduler()
    scheduler.holds = True
    scheduler.serve(TOLD, telling())
    ask(scheduler)
    scheduler.drain()
    assert scheduler.splicing is not None
    rows = scheduler.splicing.host
    assert rows is not None
    erase = rows.erase

    def too_late(slots: torch.Tensor) -> None:
        rows.erased(torch.from_numpy(rows.numbers(slots.numpy())))
        erase(slots)

    rows.erase = too_late  # type: ignore[method-assign]
    scheduler.release()
    scheduler.settle()
    assert survivors(scheduler.sender.proofs["p"]) == {"pool.free"}


def test_a_late_copy_that_is_not_overwritten_is_found() -> None:
    """A row that arrives after a forget, and stays, is a survivor."""
    scheduler = HostedScheduler()
    scheduler.holds = True
    scheduler.serve(TOLD, telling())
    ask(scheduler)
    scheduler.drain()
    not_overwritten(scheduler)
    scheduler.release()
    scheduler.settle()
    assert HOST in survivors(scheduler.sender.proofs["p"])
