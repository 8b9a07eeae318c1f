"""Pages of several tokens in SGLang's queue: what is copied, found, forgotten and overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scheduler_kit import Scheduler, histories, sealed, source_of, text
from secret_kit import HEAD, REDACTED, SECRET, TOLD, forgetting, telling
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_scheduler_forgets import readers
from test_scheduler_margin import NEWS, SECOND, ask, prepared, turn
from test_scheduler_proofs import NONCE

from leyline_engine.contract import (
    ATTENTION_SINK,
    CopySegment,
    Directive,
    EditPayload,
    Outcome,
    Reason,
    ReuseCounts,
    ReuseMode,
    SourceRef,
    apply_directives,
    edit_envelope,
    token_array,
)
from leyline_engine.proof.digests import Part
from leyline_engine.records.publications import Publication, Space
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.rows.pages import free_slots, unwritten_slots, whole_pages

pytestmark = pytest.mark.usefixtures("server_args")
PAGES = (1, 16, 64)


def told(scheduler: Scheduler, length: int = 300) -> Req:
    """A turn that has run."""
    req, _ = scheduler.serve(text(length, 1), EditPayload(session="s", scope="t", turn="t1"))
    return req


def editing(req: Req, *cuts: Directive, **fields: Any) -> tuple[list[int], EditPayload]:
    """The prompt and payload of an edit of that turn."""
    payload = EditPayload(
        session="s",
        scope="t",
        turn="t2",
        sources=(SourceRef("t1", len(source_of(req)), sealed(req)),),
        directives=cuts,
        **fields,
    )
    return [*apply_directives(source_of(req), cuts), 9, 8], payload


def in_pool(scheduler: Scheduler) -> frozenset[int]:
    """Every secret in any slot, free ones included."""
    return scheduler.remembered(torch.arange(scheduler.page, scheduler.capacity + scheduler.page))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("by", [-37, -16, -1, 1, 64])
def test_copies_cover_whole_pages_whatever_their_shift(page: int, by: int) -> None:
    """Rows are copied to where position modulo page asks for; the rest is prefilled.

    The scheduler's own check compares each row's place in its page, token and rotary key.
    """
    scheduler = Scheduler(page=page)
    req = told(scheduler)
    cut = Directive(40, 40 + max(0, -by), tuple(text(max(0, by), 5)))
    prompt, payload = editing(req, cut)
    edited, record = scheduler.serve(prompt, payload)
    assert record is not None
    receipt = record.receipt
    cached = 301 // page * page  # one token of the answer has KV
    # Without a replacement, what is before the cut and what is after it share a page.
    new = len(cut.replacement)
    first = max(cut.start + new if new else cut.start // page * page, ATTENTION_SINK)
    first = -(-first // page) * page
    last = min(len(prompt) - 1, cached + by) // page * page
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.prefix == 40 // page * page
    assert receipt.tokens.spliced == last - first > 0
    assert [run.start for run in receipt.lineage] == [first]
    scheduler.check_idle()
    whole = (len(prompt) + 1) // page * page
    keys = edited.leyline.keys(source_of(edited))
    assert scheduler.cache.find(keys, Space()).device_prefix_len == whole


@pytest.mark.parametrize("page", PAGES)
def test_spliced_pages_are_found_under_their_history_only(page: int) -> None:
    """Others who send the same text get the exact pages before the first copy."""
    scheduler = Scheduler(page=page)
    prompt, payload = editing(told(scheduler), Directive(70, 75))
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    assert record.receipt.outcome is Outcome.SPLICED
    exact = 70 // page * page
    assert len(_cached(scheduler, prompt)) == exact
    mine = EditPayload(session="s", scope="t", turn="t3", lineage=record.receipt.lineage)
    other = EditPayload(session="s", scope="u", turn="t3", lineage=record.receipt.lineage)
    _, own = scheduler.serve([*prompt, 4], mine)
    _, foreign = scheduler.serve([*prompt, 3], other)
    assert own is not None and foreign is not None
    assert own.receipt.tokens.prefix == len(prompt) // page * page
    assert own.receipt.lineage == record.receipt.lineage
    assert foreign.receipt.tokens.prefix == exact
    assert foreign.receipt.lineage == ()
    rows = scheduler.read(_cached(scheduler, prompt))
    assert [history for _, history, _ in rows] == _clean(prompt, page)
    scheduler.check_idle()


def _cached(scheduler: Scheduler, tokens: list[int]) -> torch.Tensor:
    return scheduler.cache.peek(token_array(tokens), Space())


def _clean(tokens: list[int], page: int) -> list[int]:
    return histories(tokens)[: len(tokens) // page * page]


@pytest.mark.parametrize("page", [16, 64])
def test_adjacent_copies_are_one_run(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that follow one another take slots once, and pages across their seams are copied."""
    scheduler = Scheduler(page=page)
    req = told(scheduler)
    cut = Directive(70, 73)
    tokens = [*apply_directives(source_of(req), (cut,))]
    segments = (
        CopySegment(0, 0, 70, 0),
        CopySegment(0, 73, 150, 70),
        CopySegment(0, 150, 161, 147),
        CopySegment(0, 161, len(source_of(req)), 158),
    )
    payload = EditPayload(
        session="s",
        scope="t",
        turn="t2",
        sources=(SourceRef("t1", len(source_of(req)), sealed(req)),),
        directives=(cut,),
        segments=segments,
    )
    taken: list[int] = []
    take = scheduler.cache.take
    monkeypatch.setattr(scheduler.cache, "take", lambda n: (taken.append(n), take(n))[1])
    _, record = scheduler.serve(tokens, payload)
    assert record is not None
    first, last = 70 // page * page, (301 // page * page - 3) // page * page
    assert record.receipt.tokens.spliced == last - first
    assert taken == [last - first]


def test_a_partial_page_at_the_end_of_a_turn_was_not_evicted() -> None:
    """An edit of less than a page finds nothing to copy; one whose source went says so."""
    scheduler = Scheduler(page=64)
    req = told(scheduler, 100)
    prompt, payload = editing(req, Directive(66, 70))
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    assert record.receipt.reason is Reason.NOTHING_TO_REUSE
    scheduler = Scheduler(page=64)
    req = told(scheduler, 300)
    prompt, payload = editing(req, Directive(66, 70))
    scheduler.cache.evict(EvictParams(num_tokens=2000))
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    assert record.receipt.reason is Reason.SOURCE_EVICTED


@pytest.mark.parametrize("page", PAGES)
def test_a_forget_removes_pages_that_have_read_any_of_the_span(page: int) -> None:
    """The page in which the span begins goes whole; pages before it stay."""
    scheduler = Scheduler(page=page)
    scheduler.serve(TOLD, telling())
    assert readers(scheduler) > 0
    _, record = scheduler.serve(REDACTED, forgetting())
    assert record is not None
    forgot = record.receipt.forgot
    assert forgot is not None
    assert forgot.pending == 0
    cached = (len(TOLD) + 1) // page * page
    assert forgot.overwritten == cached - HEAD // page * page
    assert record.receipt.tokens.prefix == HEAD // page * page
    assert SECRET not in in_pool(scheduler)
    scheduler.check_idle()


@pytest.mark.parametrize("page", PAGES)
def test_condemned_pages_are_found_by_nobody(page: int) -> None:
    """A forget waits for a request that reads the span; nobody else finds its page meanwhile."""
    scheduler = Scheduler(page=page)
    scheduler.serve(TOLD, telling())
    scheduler.submit([*TOLD, 5], telling(turn="b"), decode=40)
    scheduler.step()
    scheduler.submit(REDACTED, forgetting(), message_id="f")
    scheduler.step()
    start = HEAD // page * page
    assert {each.start for each in scheduler.cache.condemned} == {start}
    found = scheduler.cache.find(token_array(TOLD), Space())
    assert found.device_prefix_len == start
    assert scheduler.sender.records["f"].receipt.forgot.pending > 0
    scheduler.drain()
    assert scheduler.sender.forgotten["f"].pending == 0
    assert SECRET not in in_pool(scheduler)
    scheduler.check_idle()


def stale(scheduler: Scheduler) -> Req:
    """A running request in whose last page an evicted secret is still written.

    Pages are given out in order, so the whole pool is freed and taken again, but for a page.
    """
    scheduler.serve([*text(HEAD, 3), SECRET, *text(100, 4)], telling(spans=()))
    scheduler.cache.evict(EvictParams(num_tokens=2000))
    assert SECRET in in_pool(scheduler)
    return scheduler.submit(text(scheduler.capacity - scheduler.page * 2 + 1, 9), decode=3)


@pytest.mark.parametrize("page", [16, 64])
def test_the_rest_of_a_running_requests_page_is_overwritten(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forget reaches rows that an earlier owner left in a page that is being filled."""

    def run(*, broken: bool) -> frozenset[int]:
        scheduler = Scheduler(page * 20, page=page)
        if broken:
            monkeypatch.setattr("leyline_engine.sglang.radix.unwritten_slots", lambda *_: [])
        running = stale(scheduler)
        scheduler.step()
        assert running.kv.holds_kv and running.kv.kv_allocated_len % page
        rest = unwritten_slots([running], scheduler.rows.req_to_token, page)[0]
        last = int(scheduler.slots_of(running)[-1])
        assert rest.tolist() == list(range(last + 1, last // page * page + page))
        for layer in scheduler.pool.kv_buffer:
            layer[rest[-1]] = torch.tensor([SECRET, 1, _nonce(scheduler), 0, *[1.0] * 8])
        scheduler.engine.forgets._forgetter.forget(("t", "s"), None, spared=(), ticket="direct")
        return in_pool(scheduler)

    assert SECRET in run(broken=True), "control"
    monkeypatch.undo()
    assert SECRET not in run(broken=False)


def _nonce(scheduler: Scheduler) -> int:
    return next(nonce for nonce, read in scheduler.has_read.items() if SECRET in read)


@pytest.mark.parametrize("page", [16, 64])
def test_a_withheld_requests_pages_are_overwritten_whole(page: int) -> None:
    """A token after an early stop has a row, in the same page, that no range of SGLang's names."""
    scheduler = Scheduler(page=page)
    scheduler.serve(TOLD, telling())
    branch = scheduler.submit([*TOLD, 5, 6, 7], telling(turn="b"), decode=40)
    scheduler.step()
    scheduler.submit(REDACTED, forgetting(), message_id="f")
    scheduler.step()
    last = int(scheduler.slots_of(branch)[-1])
    assert last // page == (last + 3) // page, "the page has other slots"
    for layer in scheduler.pool.kv_buffer:
        layer[last + 3] = layer[last]
    # Else it would find the row a little later, as a condemned path goes with it.
    scheduler.cache.scrub = lambda: None
    scheduler.abort(branch)
    scheduler.drain()
    assert SECRET not in in_pool(scheduler)


@pytest.mark.parametrize("page", [16, 64])
def test_a_forget_over_pages_is_proven(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof looks at all slots of free pages: clean after a forget, and not after a planted
    row."""
    parts = SplicePool.parts

    def some(self: SplicePool) -> list[Part]:
        return [part for part in parts(self) if part.group.startswith("free")]

    monkeypatch.setattr(SplicePool, "parts", some)
    for planted in (False, True):
        scheduler = Scheduler(page=page)
        scheduler.serve(TOLD, telling())
        scheduler.serve(text(100, 9), EditPayload(session="z", scope="t", turn="t1"))
        payload = forgetting(forget=("*",), spans=())
        if planted:
            (path,) = scheduler.engine.publications.of(("t", "s"))
            row = scheduler.engine._site.cached(path).tolist()[HEAD + 1]
            target = int(free_slots(scheduler.allocator)[-2])
            for layer in scheduler.pool.kv_buffer:
                layer[target] = layer[row]
            assert target in scheduler.engine._site.filled_free()["pool"]
            monkeypatch.setattr(scheduler.cache, "scrub", lambda: None)
        scheduler.submit([7], message_id="p", hints=edit_envelope("p", payload, prove=NONCE))
        scheduler.drain()
        proof = scheduler.sender.proofs["p"]
        assert proof.complete
        assert bool(proof.survivors) == planted
        assert proof.doomed == (len(TOLD) + 1) // page * page


@pytest.mark.parametrize("page", [2, 16])
def test_free_slots_are_those_of_free_pages(page: int) -> None:
    """Slots are free with their page, also those that a batch is about to free, each once."""
    scheduler = Scheduler(page * 8, page=page)
    allocator = scheduler.allocator
    taken = allocator.alloc(page * 3)
    everything = set(range(page, page * 9))
    assert set(free_slots(allocator).tolist()) == everything - set(taken.tolist())
    allocator.free_group_begin()
    allocator.free(taken[: page + 1])
    allocator.free_segment(taken[page * 2 :], start_pos=0)
    found = free_slots(allocator).tolist()
    allocator.free_group_end()
    assert set(found) == everything
    assert len(found) == len(everything)
    assert whole_pages(taken[page + 1 : page + 2], page).tolist() == taken[page : 2 * page].tolist()


@pytest.mark.parametrize("core", ["rust", "python"])
def test_unaligned_paths_end_at_page_edges(core: str) -> None:
    """Looking up, peeking at and removing a path treat its partial page as not there."""
    scheduler = Scheduler(core=core, page=16)
    scheduler.serve(text(100, 1), EditPayload(session="s", scope="t", turn="t1"))
    keys = token_array(text(100, 1))
    cache = scheduler.cache
    for length, whole in ((15, 0), (16, 16), (40, 32), (100, 96)):
        assert cache.find(keys, Space(), length).device_prefix_len == whole
        assert len(cache.peek(keys[:length], Space())) == whole
        assert cache.tree_keys.keys_of(cache.slot_count(Publication(keys[:length]))) == whole
    assert cache.unpublish(Publication(keys), 40).erased == 64
    assert cache.slot_count(Publication(keys)) == 32


def test_reused_content_is_copied_in_whole_pages_and_judged() -> None:
    """A hit is clipped to pages; a small margin takes its pages away, and overwrites them."""
    scheduler = prepared(page=16)
    exact = scheduler.cache.all_values_flatten().numel()
    doubted = ask(scheduler, SECOND, turn("b"), margin=0.5)
    assert doubted.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=144, margin=0.5, extents=((64, 208),)
    )
    assert scheduler.cache.all_values_flatten().numel() == exact + 64
    left = scheduler.pool.kv_buffer[0][free_slots(scheduler.allocator), 0]
    assert not left.any()
    after = ask(scheduler, [*SECOND, 7, *NEWS, 8], turn("b", "t2"))
    assert after.reuse == ReuseCounts(mode=ReuseMode.LIVE, gated=True)
    assert after.tokens.prefix == 64
