"""SGLang's hierarchical cache in its queue: loads, splices beside copies, and forgets that reach
them, with copies to the host on their way or not.

The scheduler checks at each step that a running request's KV is that of its tokens, and with others
that a copy is its node's.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
import torch
from hosted_scheduler import HostedScheduler
from pool_kit import FP8
from scheduler_kit import Scheduler, sealed, source_of, text
from secret_kit import HEAD, REDACTED, SECRET, TOLD, forgetting, telling
from sglang.srt.managers.schedule_batch import Req
from test_scheduler_fp8 import Session
from test_scheduler_pages import editing
from test_scheduler_reuse import FIRST, LIVE, SECOND
from test_scheduler_reuse import turn as reuse_turn

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    ProblemCode,
    Reason,
    Receipt,
    SourceRef,
    token_array,
)
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.publications import Publication, Space
from leyline_engine.server.claim_clock import ClaimMessage
from leyline_engine.sglang.host_tree import NO_STORAGE

pytestmark = pytest.mark.usefixtures("server_args")
POLICIES = ("write_through", "write_back")
PAGES = (1, 16, 64)
ALL = forgetting(forget=("*",), spans=())
"""The turn that forgets all of its session, in a prompt too short to take its slots."""


def told(scheduler: Scheduler, length: int = 200) -> Req:
    """A turn that has run."""
    req, _ = scheduler.serve(text(length, 1), EditPayload(session="s", scope="t", turn="t1"))
    return req


def receipt_of(scheduler: Scheduler, prompt: list[int], payload: EditPayload) -> Receipt:
    """Run one turn alone."""
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    return record.receipt


def known(receipt: Receipt) -> dict[str, Any]:
    """A receipt without what took how long."""
    return {
        name: getattr(receipt, name)
        for name in ("outcome", "reason", "tokens", "lineage", "stages")
    }


def own_keys(prompt: list[int], receipt: Receipt) -> array[int]:
    """The keys of a turn's own conversation."""
    return fold_keys(token_array(prompt), receipt.lineage, "t")


def count_slots(scheduler: HostedScheduler) -> None:
    """Compare the census of slots by owner with the tree."""
    scheduler.forwards = 0
    scheduler.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page", PAGES)
def test_an_evicted_prefix_is_loaded_back(page: int, policy: str) -> None:
    """KV that only the host has is a prefix again, as it was computed once."""
    scheduler = HostedScheduler(page=page, policy=policy)
    req = told(scheduler)
    scheduler.demote()
    assert len(scheduler.cache.all_values_flatten()) == 0
    more = EditPayload(session="s", scope="t", turn="t2")
    receipt = receipt_of(scheduler, [*source_of(req), 5], more)
    assert receipt.tokens.prefix == 201 // page * page
    assert receipt.tokens.prefilled == 203 - receipt.tokens.prefix
    scheduler.settle()
    scheduler.check_idle()


@pytest.mark.parametrize("page", PAGES)
def test_a_splice_is_that_of_a_server_without_a_host_pool(page: int) -> None:
    """The same turns get the same receipts and rows, while copies are on their way and after."""
    receipts = []
    for scheduler in (Scheduler(800, page=page), HostedScheduler(800, page=page, delay=3)):
        first = told(scheduler)
        prompt, payload = editing(first, Directive(70, 80))
        second = receipt_of(scheduler, prompt, payload)
        assert second.outcome is Outcome.SPLICED
        again = EditPayload(session="s", scope="t", turn="t3", lineage=second.lineage)
        receipts.append([known(second), known(receipt_of(scheduler, [*prompt, 4], again))])
        scheduler.check_idle()
    assert receipts[0] == receipts[1]


def test_a_spliced_path_is_loaded_back_under_its_lineage() -> None:
    """Spliced KV comes back for its own conversation, and for nobody else; the census sees it."""
    scheduler = HostedScheduler(800)
    prompt, payload = editing(told(scheduler), Directive(70, 80))
    spliced = receipt_of(scheduler, prompt, payload)
    scheduler.demote()
    mine = EditPayload(session="s", scope="t", turn="t3", lineage=spliced.lineage)
    other = EditPayload(session="o", scope="o", turn="t1", lineage=spliced.lineage)
    own = receipt_of(scheduler, [*prompt, 4], mine)
    assert own.tokens.prefix == len(prompt)
    assert own.lineage == spliced.lineage
    count_slots(scheduler)
    scheduler.demote()
    found = scheduler.tree.find(own_keys(prompt, spliced), Space())
    assert scheduler.tree.load_back(found.best_match_node)
    scheduler.tree.ready_to_load_host_cache()
    count_slots(scheduler)
    scheduler.settle()
    scheduler.demote()
    assert receipt_of(scheduler, [*prompt, 3], other).tokens.prefix == 70


def test_a_source_on_the_host_alone_is_no_source() -> None:
    """Tokens that the device lost are prefilled, and the receipt says so; the prefix is loaded."""
    scheduler = HostedScheduler(800)
    prompt, payload = editing(told(scheduler), Directive(70, 80))
    scheduler.demote()
    receipt = receipt_of(scheduler, prompt, payload)
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.SOURCE_EVICTED)
    assert receipt.tokens.spliced == 0
    assert receipt.tokens.prefix == 70
    assert receipt.tokens.prefilled == len(prompt) - 70


def test_a_gap_on_the_host_is_loaded_not_computed() -> None:
    """Tokens in front of a copy that the host has are loaded, and count as prefix."""
    scheduler = HostedScheduler(800)
    put = Directive(40, 40, tuple(text(80, 9)))
    prompt, payload = editing(first := told(scheduler), put)
    scheduler.serve([*prompt[:120], 7])
    scheduler.tree.find(source_of(first), Space())  # the source was used last
    scheduler.demote(80)
    assert scheduler.tree.find(token_array(prompt), Space()).device_prefix_len == 40
    receipt = receipt_of(scheduler, prompt, payload)
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.spliced == 161
    assert (receipt.tokens.prefix, receipt.tokens.prefilled) == (119, 4)


def test_a_splice_continues_what_the_device_has() -> None:
    """A path that only the host has doesn't name the lineage of copies that are made instead."""
    scheduler = HostedScheduler(800)
    prompt, payload = editing(first := told(scheduler), Directive(70, 80))
    spliced = receipt_of(scheduler, prompt, payload)
    scheduler.tree.find(source_of(first), Space())  # the source was used last
    scheduler.demote(100)
    keys = token_array(prompt)
    assert scheduler.tree.find(keys, Space()).device_prefix_len == 70
    payload = msgspec.structs.replace(payload, turn="t3", lineage=spliced.lineage)
    again = receipt_of(scheduler, prompt, payload)
    assert known(again) == known(spliced)
    count_slots(scheduler)


def test_an_edit_of_nothing_continues_what_the_host_has() -> None:
    """A turn whose only source is its own history, which the device lost, loads that."""
    scheduler = HostedScheduler(800)
    prompt, payload = editing(told(scheduler), Directive(70, 80))
    req, record = scheduler.serve(prompt, payload)
    assert record is not None
    scheduler.demote()
    source = SourceRef("t2", len(source_of(req)), sealed(req))
    lineage = record.receipt.lineage
    payload = msgspec.structs.replace(
        payload, turn="t3", sources=(source,), directives=(), lineage=lineage
    )
    receipt = receipt_of(scheduler, [*source_of(req), 5], payload)
    assert receipt.tokens.prefix == len(prompt) + 1
    assert receipt.lineage == lineage


def test_a_prefix_on_the_host_is_loaded_not_reused() -> None:
    """A prompt's own KV comes back, though the device holds equal text of another session."""
    scheduler = HostedScheduler(800)
    scheduler.serve(FIRST, reuse_turn("a"), reuse=LIVE)
    scheduler.serve(SECOND, reuse_turn("b"))
    scheduler.tree.find(token_array(FIRST), Space())  # the other session's was used last
    scheduler.demote(200)
    prompt = [*SECOND, 7]
    assert scheduler.tree.find(token_array(prompt), Space()).device_prefix_len == 0
    _, record = scheduler.serve(prompt, reuse_turn("b", "t2"), reuse=LIVE)
    assert record is not None
    tokens = record.receipt.tokens
    assert (tokens.prefix, tokens.reused) == (len(SECOND), 0)


def test_a_source_that_is_being_loaded_is_not_read() -> None:
    """Rows that a request loads in the same step have not arrived: nothing is copied from them."""
    scheduler = HostedScheduler(800)
    first = told(scheduler)
    prompt, payload = editing(first, Directive(70, 80))
    scheduler.demote()
    scheduler.submit([*source_of(first), 5])
    scheduler.submit(prompt, payload, message_id="e")
    scheduler.drain()
    receipt = scheduler.sender.records["e"].receipt
    assert receipt.tokens.spliced == 0
    prompt, payload = editing(first, Directive(60, 80))
    assert receipt_of(scheduler, prompt, payload).tokens.spliced > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page", PAGES)
def test_a_forget_reaches_what_only_the_host_has(page: int, policy: str) -> None:
    """Copies go, their rows are zero, and the same prompt is computed again."""
    scheduler = HostedScheduler(page=page, policy=policy)
    req, _ = scheduler.serve(TOLD, telling())
    scheduler.demote()
    path = Publication(source_of(req))
    assert scheduler.copies() == scheduler.tree.slot_count(path) == 112 // page * page
    assert len(scheduler.tree.slots_of(path)) == 0
    assert scheduler.remembered_by_host() == {SECRET}
    kept = HEAD // page * page
    receipt = receipt_of(scheduler, REDACTED, forgetting())
    assert receipt.forgot is not None
    assert receipt.forgot.overwritten == 112 // page * page - kept
    assert (receipt.forgot.pending, scheduler.everywhere()) == (0, frozenset())
    assert receipt.tokens.prefix == kept
    scheduler.demote()
    assert receipt_of(scheduler, TOLD, telling(session="z")).tokens.prefix == kept
    scheduler.check_idle()


def test_a_forget_reaches_copies_of_what_the_device_has() -> None:
    """Both go, and are counted once."""
    scheduler = HostedScheduler()
    scheduler.serve(TOLD, telling())
    scheduler.settle()
    assert scheduler.copies() == 112
    receipt = receipt_of(scheduler, REDACTED, forgetting())
    assert receipt.forgot is not None and receipt.forgot.overwritten == 112 - HEAD
    assert scheduler.everywhere() == frozenset()


def test_a_removal_overwrites_copies_without_a_forget() -> None:
    """A path that is only unpublished leaves nothing on the host, where nobody scrubs for it."""
    scheduler = HostedScheduler()
    req, _ = scheduler.serve(TOLD, telling())
    scheduler.settle()
    done = scheduler.tree.unpublish(Publication(source_of(req)), 80)
    assert (done.erased, done.held) == (112 - 80, 0)
    assert scheduler.copies() == 80
    rows = scheduler.read_host(torch.arange(scheduler.host_pool.size))
    assert sum(nonce > 0 for *_, nonce in rows) == 80


def test_a_copy_on_its_way_brings_nothing_back() -> None:
    """A forget waits for it: nobody finds the KV meanwhile, and it goes once the copy is there."""
    scheduler = HostedScheduler()
    scheduler.holds = True
    scheduler.serve(TOLD, telling())
    assert scheduler.held and not scheduler.remembered_by_host()
    scheduler.submit(REDACTED, forgetting(), message_id="f")
    scheduler.drain()
    forgot = scheduler.sender.records["f"].receipt.forgot
    assert forgot is not None and forgot.pending == 112 - HEAD
    assert receipt_of(scheduler, TOLD, telling(session="z", turn="z")).tokens.prefix == HEAD
    scheduler.serve(REDACTED, forgetting(session="z", turn="z2"))
    scheduler.release()
    assert scheduler.remembered_by_host() == {SECRET}
    scheduler.settle()
    assert scheduler.sender.forgotten["f"].pending == 0
    assert scheduler.everywhere() == frozenset()
    scheduler.demote()
    assert receipt_of(scheduler, TOLD, telling(session="y")).tokens.prefix == HEAD


def test_what_a_running_request_loaded_goes_when_it_ends() -> None:
    """A request that loads what is being forgotten finishes; after it, neither tier has any."""
    scheduler = HostedScheduler()
    scheduler.serve(TOLD, telling())
    scheduler.demote()
    scheduler.submit([*TOLD, 5], telling(turn="b"), decode=12)
    scheduler.step()
    assert scheduler.tree.ongoing_load_back
    scheduler.submit(REDACTED, forgetting(), message_id="f")
    scheduler.step()
    forgot = scheduler.sender.records["f"].receipt.forgot
    assert forgot is not None and forgot.pending
    assert scheduler.everywhere() == {SECRET}
    scheduler.drain()
    scheduler.settle()
    assert scheduler.sender.forgotten["f"].pending == 0
    assert scheduler.everywhere() == frozenset()


def test_what_the_host_evicted_is_overwritten() -> None:
    """A row that no node has any more, of a span that is forgotten later, doesn't stay."""
    scheduler = HostedScheduler(400, ratio=0.5)
    scheduler.serve(TOLD, telling())
    scheduler.demote()
    for seed in (5, 6):
        scheduler.serve(text(80, seed))
        scheduler.demote()
    assert not scheduler.tree.slot_count(Publication(token_array(TOLD)))
    assert scheduler.remembered_by_host() == {SECRET}
    scheduler.serve([7], ALL)
    assert scheduler.everywhere() == frozenset()


def test_rows_that_a_copy_is_about_to_replace_are_waited_for() -> None:
    """A host slot that was evicted, and given to a copy on its way, doesn't outlast a forget."""
    scheduler = HostedScheduler(400, ratio=0.28)  # 113 slots
    scheduler.serve(TOLD, telling())
    scheduler.demote()
    scheduler.holds = True
    scheduler.serve(text(100, 5))
    assert scheduler.held and scheduler.remembered_by_host() == {SECRET}
    scheduler.serve(REDACTED, forgetting())
    assert scheduler.everywhere() == frozenset()


def test_anothers_copies_stay() -> None:
    """Text that another session sent as well is kept on the host, and loaded for it."""
    scheduler = HostedScheduler()
    scheduler.serve(TOLD, telling())
    scheduler.serve(TOLD, telling(session="y"))
    scheduler.demote()
    receipt = receipt_of(scheduler, [7], ALL)
    assert receipt.forgot is not None and receipt.forgot.shared_retained == 112
    scheduler.demote()
    assert receipt_of(scheduler, [*TOLD, 5], telling(session="y", turn="t2")).tokens.prefix >= 111


def test_a_flush_leaves_nothing_to_a_forget() -> None:
    """A forget overwrites what the host held when the cache was flushed."""
    scheduler = HostedScheduler()
    scheduler.serve(TOLD, telling())
    scheduler.demote()
    scheduler.flush()
    assert scheduler.remembered_by_host() == {SECRET}
    scheduler.serve([7], ALL)
    assert scheduler.everywhere() == frozenset()


def test_eight_bit_rows_that_were_loaded_are_not_turned() -> None:
    """Nobody knows any more if a splice turned them: elsewhere, they are prefilled."""
    scheduler = HostedScheduler(800, dtype=FP8)
    session = Session(scheduler, "s")
    assert session.edit(Directive(40, 50)).tokens.spliced > 80
    scheduler.demote()
    went_on = EditPayload(session="s", scope="t", turn="t3", lineage=session.receipt.lineage)
    session.turns = 3
    prompt = [*source_of(session.last), 5]
    req = scheduler.submit(prompt, went_on, message_id="s.3")
    scheduler.drain()
    assert session.take(req).tokens.prefix == len(prompt) - 2
    receipt = session.edit(Directive(36, 38))
    assert receipt.tokens.spliced < 8
    assert receipt.tokens.prefilled > 80
    scheduler.check_idle()


def test_a_load_takes_nothing_from_turns_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be the turn that is being admitted; a load that finds no room is left out."""
    scheduler = HostedScheduler(400)
    first = told(scheduler)
    scheduler.demote()
    scheduler.submit(text(300, 5), decode=30)
    scheduler.step()
    monkeypatch.setattr(scheduler.engine, "give_way", lambda: pytest.fail("it took memory"))
    found = scheduler.tree.find(source_of(first), Space())
    assert found.host_hit_length == 201
    assert not scheduler.tree.load_back(found.best_match_node)


def test_a_storage_back_end_is_not_attached() -> None:
    """No forget would reach it."""
    scheduler = HostedScheduler()
    assert scheduler.tree.attach_storage_backend("file") == (False, NO_STORAGE)
    assert not scheduler.tree.enable_storage


def test_claims_are_refused_by_name() -> None:
    """A claim's KV would move between tiers without its knowledge."""
    scheduler = HostedScheduler()
    answer = scheduler.engine.claims.carry_out(ClaimMessage(1, 0, '{"release": "x"}'))
    assert answer.reply.problem is not None
    assert answer.reply.problem.code is ProblemCode.UNSUPPORTED
    assert "--enable-hierarchical-cache" in answer.reply.problem.message
