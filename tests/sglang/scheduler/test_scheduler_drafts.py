"""EAGLE's drafts in SGLang's queue: pairs of tokens as keys, and draft rows that move and go with
the model's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from claim_scheduler import ClaimScheduler, opens
from draft_scheduler import DraftScheduler
from scheduler_kit import Scheduler, histories, text
from secret_kit import HEAD, REDACTED, SECRET, TOLD, forgetting, telling
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import release_kv_cache
from test_scheduler_forgets import several_answers
from test_scheduler_pages import editing, in_pool, told
from test_scheduler_proofs import NONCE

from leyline_engine.contract import (
    ATTENTION_SINK,
    Directive,
    EditPayload,
    LineageRun,
    Outcome,
    ProblemCode,
    SpanLabel,
    edit_envelope,
    token_array,
)
from leyline_engine.proof.digests import Part
from leyline_engine.records.ledger import SpanKey
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.publications import Publication, Space
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.claim_desk import SchedulerClaims
from leyline_engine.sglang.tree_keys import TreeKeys

pytestmark = pytest.mark.usefixtures("server_args")
PAGES = (1, 16, 64)


def whole(slots: int, page: int) -> int:
    return slots // page * page


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("core", ["rust", "python"])
def test_a_cut_is_spliced_without_a_forward_of_its_own(page: int, core: str) -> None:
    """The slot before a cut was found by a token that is gone: it is copied with what follows.

    The scheduler compares each draft row's next token, history and rotary key.
    """
    scheduler = DraftScheduler(page=page, core=core, min_copy=8)
    req = told(scheduler)
    before = scheduler.forwards
    prompt, payload = editing(req, Directive(70, 107))
    edited, record = scheduler.serve(prompt, payload)
    assert record is not None
    assert scheduler.forwards - before == 2, "one prefill, and one more token"
    first = whole(69, page)
    last = whole(min(len(prompt) - 2, whole(300, page) - 37), page)
    tokens = record.receipt.tokens
    assert record.receipt.outcome is Outcome.SPLICED
    assert (tokens.prefix, tokens.spliced) == (first, last - first)
    assert [run.start for run in record.receipt.lineage] == [first]
    scheduler.check_idle()
    keys = edited.leyline.keys(token_array([*prompt, edited.output_ids[0]]))
    assert scheduler.cache.find(keys, Space()).device_prefix_len == whole(len(prompt), page)


@pytest.mark.parametrize("page", PAGES)
def test_a_seams_draft_row_is_left_empty(page: int) -> None:
    """A draft row isn't kept if another token follows than in the source; the model's row is."""
    scheduler = DraftScheduler(page=page)
    req = told(scheduler)
    prompt, payload = editing(req, Directive(70, 107))
    branch = scheduler.submit(prompt, payload, decode=3)
    scheduler.step()
    slots = scheduler.slots_of(branch)
    nonces = [nonce for _, _, nonce in scheduler.read_drafts(slots)]
    assert [at for at, nonce in enumerate(nonces) if not nonce] == [69]
    assert scheduler.rows_of(branch)[69][:2] == (prompt[69], histories(prompt)[69])


@pytest.mark.parametrize("page", PAGES)
def test_a_replacement_is_prefilled_up_to_the_copy(page: int) -> None:
    """A gap's row ends one token after the gap, by which the tree finds the gap's last slot."""
    scheduler = DraftScheduler(page=page, min_copy=8)
    prompt, payload = editing(told(scheduler), Directive(70, 77, tuple(text(30, 5))))
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    first = max(-(-100 // page) * page, ATTENTION_SINK)
    tokens = record.receipt.tokens
    assert record.receipt.outcome is Outcome.SPLICED
    assert tokens.prefix == whole(69, page)
    assert tokens.spliced == whole(min(len(prompt) - 2, whole(300, page) + 23), page) - first
    scheduler.check_idle()


@pytest.mark.parametrize("page", PAGES)
def test_nobody_else_finds_spliced_pairs(page: int) -> None:
    """Others who send the same text get the exact slots before the first copy, draft rows
    included."""
    scheduler = DraftScheduler(page=page)
    prompt, payload = editing(told(scheduler), Directive(70, 75))
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    exact = whole(69, page)
    assert len(scheduler.cache.peek(token_array(prompt), Space())) == exact
    own = EditPayload(session="s", scope="t", turn="t4", lineage=record.receipt.lineage)
    _, mine = scheduler.serve([*prompt, 4], own)
    assert mine is not None
    assert mine.receipt.tokens.prefix >= whole(len(prompt) - 1, page)
    assert mine.receipt.lineage == record.receipt.lineage
    theirs = EditPayload(session="s", scope="u", turn="t3", lineage=record.receipt.lineage)
    _, foreign = scheduler.serve([*prompt, 3], theirs, decode=4)
    assert foreign is not None
    assert foreign.receipt.tokens.prefix == exact
    scheduler.serve([*prompt, 5], None, decode=4)
    scheduler.check_idle()


@pytest.mark.parametrize("page", PAGES)
def test_a_forget_reaches_the_draft_row_before_the_span(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of both pools are overwritten from that on: it has read the span's first token.

    The control forgets as if each slot had read its own token alone.
    """

    def run() -> tuple[DraftScheduler, int]:
        scheduler = DraftScheduler(page=page)
        # The span begins a page, so that its page isn't that of the slot before it.
        head = HEAD if page == 1 else page
        told_ = [*text(head, 1), SECRET, *text(100, 2)]
        scheduler.serve(told_, telling(spans=()))
        redacted = [*told_[:head], 7, *told_[head + 1 :]]
        _, record = scheduler.serve(redacted, forgetting(forget=("*",), spans=()))
        assert record is not None and record.receipt.forgot is not None
        assert record.receipt.forgot.pending == 0
        return scheduler, record.receipt.forgot.overwritten - whole(len(told_), page)

    scheduler, kept = run()
    assert SECRET not in in_pool(scheduler)
    assert kept == -whole((HEAD if page == 1 else page) - 1, page)
    scheduler.check_idle()
    monkeypatch.setattr(TreeKeys, "slots_within", lambda self, keys: whole(keys, self.page))
    assert SECRET in in_pool(run()[0]), "control"


@pytest.mark.parametrize("page", PAGES)
def test_condemned_pairs_are_found_by_nobody(page: int) -> None:
    """A forget waits for a request that reads the span; nobody finds its slots meanwhile."""
    scheduler = DraftScheduler(page=page)
    scheduler.serve(TOLD, telling())
    scheduler.submit([*TOLD, 5], telling(turn="b"), decode=40)
    scheduler.step()
    scheduler.submit(REDACTED, forgetting(), message_id="f")
    scheduler.step()
    start = whole(HEAD - 1, page)
    assert {each.start for each in scheduler.cache.condemned} == {start}
    assert scheduler.cache.find(token_array(TOLD), Space()).device_prefix_len == start
    scheduler.drain()
    assert scheduler.sender.forgotten["f"].pending == 0
    assert SECRET not in in_pool(scheduler)
    scheduler.check_idle()


def test_answers_that_several_ask_for_are_forgotten_with_their_drafts() -> None:
    """The KV of one message's ``n`` requests is found by pairs, too."""
    scheduler = DraftScheduler()
    several_answers(scheduler, TOLD, telling(), "told")
    scheduler.serve(REDACTED, forgetting())
    assert SECRET not in in_pool(scheduler)


OTHER = text(100, 9)
BRANCH = [*TOLD[:HEAD], *text(60, 9)]
PLANTED = {
    "nothing": (OTHER, None, 40),
    "a draft row of the span": (OTHER, HEAD + 1, 40),
    "the one before": (OTHER, HEAD - 1, 40),
    "the one before, at one that continues otherwise": (BRANCH, HEAD - 1, HEAD - 1),
}
"""The other session's text, the draft row that is left, and the place that has it."""


@pytest.mark.parametrize("planted", PLANTED)
def test_a_forget_of_draft_rows_is_proven(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof is clean after a forget, and finds draft rows that are left, also the one that has
    read the span as its next token."""
    parts, drafts = SplicePool.parts, SplicePool.draft_parts

    def free(found: list[Part]) -> list[Part]:
        return [part for part in found if "free" in part.group]

    monkeypatch.setattr(SplicePool, "parts", lambda self: free(parts(self)))
    monkeypatch.setattr(SplicePool, "draft_parts", lambda self: free(drafts(self)))
    scheduler = DraftScheduler()
    scheduler.serve(TOLD, telling())
    other, at, to = PLANTED[planted]
    scheduler.serve(other, EditPayload(session="z", scope="t", turn="t1"))
    if at is not None:
        site, publications = scheduler.engine._site, scheduler.engine.publications
        row, target = (
            int(site.cached(publications.of(("t", session))[0])[place])
            for session, place in (("s", at), ("z", to))
        )
        for values in scheduler.draft_pool.v_buffer:
            values[target] = values[row]
    envelope = edit_envelope("p", forgetting(), prove=NONCE)
    scheduler.submit(REDACTED, message_id="p", hints=envelope)
    scheduler.drain()
    proof = scheduler.sender.proofs["p"]
    assert proof.complete
    found = {place.place for place in proof.places if place.survivors}
    assert found == (set() if at is None else {"pool.tree"})


def test_claims_beside_drafts_are_refused_by_name() -> None:
    """SGLang reserves slots for drafts that the arithmetic of claims doesn't know."""
    scheduler = ClaimScheduler(100)
    scheduler.cache.speculative = "EAGLE3"
    engine = scheduler.engine
    engine.claims = SchedulerClaims(scheduler.cache, engine.registry, usable=scheduler.capacity)
    scheduler.serve(text(30, 1), opens("s"))
    reply = scheduler.try_claim("s", 20)
    assert reply.problem is not None
    assert reply.problem.code is ProblemCode.UNSUPPORTED
    assert "--speculative-algorithm EAGLE3" in reply.problem.message


def test_a_forget_empties_the_corpus_of_drafts_until_its_last_reader_ends() -> None:
    """A request that reads the span adds to the corpus while it runs; when it ends, that goes."""
    scheduler = Scheduler()
    emptied: list[int] = []
    scheduler.cache.empty_corpus = lambda: emptied.append(scheduler.forwards)
    scheduler.serve(TOLD, telling())
    assert not emptied
    branch = scheduler.submit([*TOLD, 5], telling(turn="b"), decode=9)
    scheduler.step()
    scheduler.submit(REDACTED, forgetting(), message_id="f")
    scheduler.step()
    assert len(emptied) == 1
    scheduler.cache.scrub = lambda: None  # what is condemned goes later, and empties it, too
    scheduler.drain()
    assert branch.finished()
    assert len(emptied) == 2
    proof = scheduler.engine._site.extra_places()
    assert [place.place for place in proof] == ["corpus"]


def test_keys_move_lineages_to_the_second_token_of_a_pair() -> None:
    """A pair is private if its slot is; paths share what they share in the tree."""
    pairs = TreeKeys(page=4, lookahead=1)
    plain = token_array([1, 2, 3, 4, 5, 6])
    folded = fold_keys(plain, _runs(2), "t")
    shifted = pairs.shifted(folded)
    assert [key > 1 << 24 for key in shifted] == [False, False, False, True, True, True]
    assert [key & 0xFFFFFF for key in shifted] == list(plain)
    assert pairs.shifted(plain) is plain
    assert TreeKeys().shifted(folded) is folded
    assert pairs.common(plain, folded) == 3, "slots 0 and 1, which need three keys"
    assert TreeKeys().common(plain, folded) == 2
    assert [pairs.slots_within(keys) for keys in (0, 1, 4, 5, 9)] == [0, 0, 0, 4, 8]
    assert [pairs.keys_of(slots) for slots in (0, 4)] == [0, 5]


def _runs(start: int) -> tuple[LineageRun, ...]:
    return (LineageRun(start, "l"),)


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("page", [1, 64])
def test_a_path_of_pairs_has_a_slot_less_than_keys(core: str, page: int) -> None:
    """Looking up, peeking at and removing a path count slots, each found by two tokens."""
    scheduler = DraftScheduler(core=core, page=page)
    scheduler.serve(text(200, 1), EditPayload(session="s", scope="t", turn="t1"), decode=1)
    keys, cache = token_array(text(200, 1)), scheduler.cache
    for length in (1, 64, 65, 66, 200):
        slots = whole(length - 1, page)
        assert cache.find(keys, Space(), length).device_prefix_len == slots
        assert len(cache.peek(keys[:length], Space())) == slots
        assert cache.tree_keys.keys_of(cache.slot_count(Publication(keys[:length]))) == (
            slots + 1 if slots else 0
        )
    assert cache.unpublish(Publication(keys), 100).erased == whole(199, page) - whole(100, page)
    assert len(cache.slots_of(Publication(keys))) == whole(100, page)


def test_draft_rows_are_moved_and_overwritten_with_the_models() -> None:
    """A pool hands its drafts every splice and erasure, and reports their bytes and parts."""
    scheduler = DraftScheduler(200)
    pool = scheduler.splicing
    assert pool is not None
    (draft,) = pool.drafts
    assert pool.bytes_per_token == pool.tensors.bytes_per_token + draft.tensors.bytes_per_token
    assert len(pool.every_tensor) == len(pool.tensors.keys) + 4
    for tensor in pool.every_tensor:
        tensor.fill_(1.0)
    pool.blank_drafts(torch.tensor([5]))
    assert not any(bool(t[5].any()) for t in draft.every_tensor)
    assert all(bool(t[5].all()) for t in pool.tensors.keys)
    pool.erase(torch.tensor([6]))
    assert not any(bool(t[6].any()) for t in pool.every_tensor)
    for tensor in pool.tensors.keys:
        tensor[7] = 0
    pool.erase_used(torch.tensor([7]))
    assert not any(bool(t[7].any()) for t in pool.every_tensor), "only the draft row was used"
    names = [part.group for part in pool.parts()]
    assert "draft 0 turned 0" in names and "turned 0" not in names


def reserving(scheduler: Scheduler, running: Req, count: int) -> torch.Tensor:
    """Let a request reserve slots that hold what was evicted, as SGLang does for drafts."""
    slots = scheduler.allocator.alloc(count)
    assert slots is not None
    scheduler.pool.kv_buffer[0][slots, 0, 2] = next(
        nonce for nonce, read in scheduler.has_read.items() if SECRET in read
    )
    held = running.kv.kv_allocated_len
    scheduler.rows.write((running.kv.req_pool_idx, slice(held, held + count)), slots)
    running.kv.kv_allocated_len += count
    return slots


@pytest.mark.parametrize("ends", ["written", "given back"])
def test_slots_that_a_request_reserved_are_waited_for(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forget is done when they were written to, or given back and overwritten; not before."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    other = scheduler.submit(text(40, 9), EditPayload(session="z", scope="t", turn="z"), decode=30)
    scheduler.step()
    reserved = reserving(scheduler, other, 3)
    engine = scheduler.engine
    engine.forgets._forgetter.forget(("t", "s"), None, spared=(), ticket="f")
    assert SECRET in in_pool(scheduler)
    engine.forgets.stepped()
    assert engine.forgets._forgetter.pending.counts("f").pending == 3
    if ends == "written":
        scheduler.pool.kv_buffer[0][reserved] = 0
        other.kv.kv_committed_len += 2
        engine.forgets.stepped()
        assert "f" not in scheduler.sender.forgotten
        other.kv.kv_committed_len += 1
    else:
        drafting = SimpleNamespace(speculative_algorithm="EAGLE")
        monkeypatch.setattr("sglang.srt.mem_cache.common.get_spec", lambda: drafting)
        (running,) = scheduler.running
        scheduler.running.remove(running)
        release_kv_cache(other, scheduler.cache, checkpoint=False)
    engine.forgets.stepped()
    assert scheduler.sender.forgotten["f"].pending == 0
    assert SECRET not in in_pool(scheduler)


def test_a_lineages_draft_row_before_its_first_reader_goes_too() -> None:
    """A span that a splice kept in part is forgotten from the copied slot before it on."""
    scheduler = DraftScheduler()
    labels = (SpanLabel("head", 0, 60), SpanLabel("secret", 60, 100), SpanLabel("tail", 100, 161))
    prompt = [*text(60, 1), SECRET, *text(100, 2)]
    req, _ = scheduler.serve(prompt, telling(spans=labels))
    cut, payload = editing(req, Directive(40, 45), Directive(70, 80))
    scheduler.serve(cut, payload)
    path = next(p for p in scheduler.engine.publications.of(("t", "s")) if p.runs)
    slots = scheduler.cache.slots_of(path)
    assert SECRET in scheduler.remembered(slots[54:55])
    assert SECRET not in scheduler.remembered(slots[:54])
    spans = frozenset({SpanKey("t", "s", "secret")})
    forgetter = scheduler.engine.forgets._forgetter
    forgetter.forget(("t", "s"), spans, spared=(path,), ticket="direct")
    assert len(scheduler.cache.slots_of(path)) == 54
    assert SECRET not in in_pool(scheduler)
