"""The rows that a forget reaches in a real vLLM engine, wherever they have been left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from contract_kit import BLOCK, BOUND, distance, expect, load_reference
from forget_story import HEAD, SECRET, TAIL, Story, asked, counts_of, started
from oracle_models import OracleModel
from oracle_reference import Fresh
from secret_rows import SecretRows, draw_ordinary
from splice_kit import SplicingEngine, splicing_engine

from leyline_engine.contract import Directive, EditPayload, ForgetCounts, Outcome, SpanLabel
from leyline_engine.vllm.orders import block_slots


@pytest.fixture(scope="module")
def engine(vllm_model: Path) -> Iterator[SplicingEngine]:
    """An engine with Leyline."""
    with splicing_engine(vllm_model) as started:
        yield started


@pytest.fixture(scope="module")
def subject(vllm_model: Path) -> OracleModel:
    """The same model in transformers."""
    return load_reference(vllm_model)


@pytest.fixture(scope="module")
def rows(engine: SplicingEngine, subject: OracleModel) -> SecretRows:
    """Finds tokens in the pool."""
    return SecretRows(engine, subject)


@pytest.fixture
def story(engine: SplicingEngine) -> Story:
    """A session with nothing told yet."""
    return Story(engine)


def values_of(engine: SplicingEngine, blocks: list[int]) -> list[torch.Tensor]:
    """Keys and values of whole blocks, in every layer."""
    keys, values = engine.rows_in(block_slots(blocks, BLOCK))
    return [*keys, *values]


def same_rows(old: torch.Tensor, new: torch.Tensor) -> int:
    """The number of rows that are as they were."""
    return int((old == new).flatten(1).all(dim=1).sum())


def check_at_rest(engine: SplicingEngine) -> None:
    """Nothing is held, pending or pinned."""
    cache = engine.leyline.cache
    assert cache.free == cache.capacity // BLOCK
    assert not engine.leyline.turns
    assert not cache._doomed
    assert not cache._leaving
    assert not cache.pending._waiting


def test_every_row_that_read_the_secret_is_overwritten(story: Story, rows: SecretRows) -> None:
    """All blocks from the secret's first on are zero, the ended turn's partial last one included;
    those in front of it keep their rows."""
    engine = story.engine
    told = story.tell()
    held = engine.held[told.message]
    first = HEAD // BLOCK
    assert len(told.tokens) % BLOCK > 1
    assert rows.held(story.secret) == set(story.secret)
    before = values_of(engine, held)
    # Or else the forgetting turn would take it, as it hasn't a key.
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.free_block_queue.remove(pool.blocks[held[-1]])
    pool.free_block_queue.append(pool.blocks[held[-1]])
    counts = story.forget()
    full = (len(told.tokens) - 1) // BLOCK
    assert counts == ForgetCounts(overwritten=(full - first) * BLOCK)
    after = values_of(engine, held)
    kept, written = first * BLOCK, len(told.tokens) - 1
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:kept], new[:kept])
        assert not same_rows(old[kept:written], new[kept:written])
    assert not rows.held(story.secret)
    check_at_rest(engine)


def test_without_the_erasure_the_rows_stay(
    story: Story, rows: SecretRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: what makes the rows go is the workers' overwriting."""
    story.tell()
    monkeypatch.setattr(story.engine.rows.pool, "erase", lambda slots: None)
    story.forget()
    assert rows.held(story.secret)


def test_text_that_another_session_sent_itself_stays(story: Story, rows: SecretRows) -> None:
    """It stays findable for the other one, who may then have it forgotten, too."""
    engine = story.engine
    story.tell()
    other = asked(engine, story.told, story.telling(session="other", scope="u"))
    counts = story.forget()
    full = len(story.told) // BLOCK * BLOCK
    assert counts.shared_retained == full - HEAD // BLOCK * BLOCK
    assert counts.pending == 0
    assert rows.held(story.secret[:4]) == set(story.secret[:4])
    again = asked(engine, other.tokens, story.telling("t2", session="other", scope="u"))
    assert again.cached >= full
    last = asked(engine, story.redacted, story.forgetting(session="other", scope="u"))
    assert counts_of(engine, last).pending == 0
    assert not rows.held(story.secret)


@pytest.mark.parametrize("enveloped", [True, False], ids=["own-turn", "stranger"])
@pytest.mark.parametrize("at_once", [True, False], ids=["same-step", "running"])
def test_a_running_reader_publishes_nothing_more(
    story: Story, rows: SecretRows, enveloped: bool, at_once: bool
) -> None:
    """A running request that continues what is forgotten is withheld, also if it was admitted in
    the forget's own step; its rows are pending until it ends, then overwritten."""
    engine = story.engine
    told = story.tell()
    prompt = (*told.tokens, *draw_ordinary(random.Random(story.session), 40))
    reader = started(engine, prompt, story.telling("t2") if enveloped else None, decode=60)
    if not at_once:
        for _ in range(3):
            engine.llm.llm_engine.step()
    forget = started(engine, story.redacted, story.forgetting(), decode=1)
    answers = {}
    pending = 0
    while len(answers) < 2:
        for output in engine.llm.llm_engine.step():
            if output.finished:
                answers[output.request_id] = output
        record = engine.sent.records.get(forget)
        if record is not None and reader not in answers and record.receipt.forgot is not None:
            pending = max(pending, record.receipt.forgot.pending)
        closed = engine.sent.forgot.get(forget)
        if closed is not None and not closed.pending:
            assert not rows.held(story.secret)
    engine.settle()
    assert pending > 0
    counts = engine.sent.forgot[forget]
    assert counts.pending == 0
    assert counts.overwritten >= len(prompt) // BLOCK * BLOCK - HEAD // BLOCK * BLOCK
    assert not rows.held(story.secret)
    again = asked(engine, (*prompt, *answers[reader].outputs[0].token_ids), decode=1)
    assert again.cached <= HEAD // BLOCK * BLOCK
    if enveloped:
        assert engine.leyline.registry.get(("t", story.session), "t2") is None
    check_at_rest(engine)


@pytest.mark.parametrize("first", [False, True])
def test_what_a_stranger_continued_with_is_overwritten_too(
    story: Story, rows: SecretRows, first: bool
) -> None:
    """KV of requests without a session keeps nothing of a session's, whichever came first."""
    engine = story.engine
    more = draw_ordinary(random.Random(f"more {first}"), 2 * BLOCK)
    continued = (*story.told, *more)
    stranger = asked(engine, continued) if first else None
    story.tell()
    if stranger is None:
        stranger = asked(engine, continued)
    held = engine.held[stranger.message]
    before = values_of(engine, held)
    assert story.forget().pending == 0
    kept, written = HEAD // BLOCK * BLOCK, len(continued)
    for old, new in zip(before, values_of(engine, held), strict=True):
        assert torch.equal(old[:kept], new[:kept])
        assert not same_rows(old[kept:written], new[kept:written])
    assert not rows.held(story.secret)
    assert asked(engine, continued, decode=1).cached == kept
    check_at_rest(engine)


@pytest.mark.parametrize("session", ["its own", "another"])
def test_a_turn_that_runs_during_a_forget_takes_nothing_clean_with_it(
    story: Story, rows: SecretRows, session: str
) -> None:
    """The blocks in front of the secret that it computed stay for the new prompt and for another
    session's, and a later forget of all still finds them."""
    engine = story.engine
    running = started(engine, story.told, story.telling(), decode=60)
    for _ in range(3):
        engine.llm.llm_engine.step()
    theirs = story.telling(session="other", scope="u", spans=())
    other = [started(engine, story.told, theirs, decode=2)] if session == "another" else []
    forget = started(engine, story.redacted, story.forgetting(), decode=2)
    engine.run([running, forget, *other])
    if session == "another":
        assert asked(engine, story.told, theirs).cached == len(story.told) // BLOCK * BLOCK
        whole = msgspec.structs.replace(theirs, forget=("never heard of",))
        assert counts_of(engine, asked(engine, story.tail, whole)).pending == 0
    assert not rows.held(story.secret)
    again = asked(engine, story.redacted, story.telling("t3", spans=()))
    assert again.cached == len(story.redacted) // BLOCK * BLOCK
    ended = asked(engine, story.tail, story.forgetting("t4", spans=(), forget=("never heard of",)))
    assert counts_of(engine, ended).pending == 0
    assert not asked(engine, story.head, decode=1).cached
    check_at_rest(engine)


def test_nothing_stays_once_all_that_run_with_the_text_have_forgotten_it(
    story: Story, rows: SecretRows
) -> None:
    """Two sessions' turns run with the same blocks: what the first one leaves to the other goes
    with the other's forget, though neither turn has ended."""
    engine = story.engine
    theirs = story.telling(session="other", scope="u", spans=())
    running = [started(engine, story.told, each, decode=60) for each in (story.telling(), theirs)]
    for _ in range(3):
        engine.llm.llm_engine.step()
    running.append(started(engine, story.redacted, story.forgetting(), decode=20))
    for _ in range(2):
        engine.llm.llm_engine.step()
    whole = msgspec.structs.replace(theirs, turn="t2", forget=("never heard of",))
    running.append(started(engine, story.tail, whole, decode=2))
    engine.run(running)
    assert not rows.held(story.secret)
    assert asked(engine, story.told, decode=1).cached <= HEAD
    check_at_rest(engine)


def test_what_a_withheld_turn_leaves_is_found_by_a_later_forget(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demanding turn hangs up before it has computed all that both have in front: the other
    turn's blocks stay, and go when the session forgets everything."""
    engine = story.engine
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 2 * BLOCK)
    config = engine.scheduler.scheduler_config
    monkeypatch.setattr(config, "long_prefill_token_threshold", BLOCK)
    running = started(engine, story.told, story.telling(), decode=20)
    forget = started(engine, story.redacted, story.forgetting(), decode=2)
    engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request([forget])
    engine.run([running])
    left = engine.held[running][2 : HEAD // BLOCK]
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert [pool.blocks[number].block_hash is None for number in left] == [False]
    before = values_of(engine, left)
    asked(engine, story.tail, story.forgetting("t4", spans=(), forget=("never heard of",)))
    for old, new in zip(before, values_of(engine, left), strict=True):
        assert not same_rows(old, new)


@contextmanager
def step_ahead(engine: SplicingEngine) -> Iterator[None]:
    """vLLM counts on a step that its workers haven't finished, as with asynchronous scheduling:
    blocks are taken back a step later."""
    scheduler = engine.scheduler
    scheduler.defer_block_free = True
    scheduler.sched_step_seq += 1
    for request in scheduler.running:
        request.last_sched_seq = scheduler.sched_step_seq
    yield
    scheduler.processed_step_seq = scheduler.sched_step_seq
    scheduler._drain_deferred_frees()
    scheduler.defer_block_free = False
    engine.settle()


def test_blocks_that_vllm_has_yet_to_take_back_are_overwritten(
    story: Story, rows: SecretRows
) -> None:
    """A turn is aborted while its step is in flight: nobody holds its blocks any more, and they
    aren't free yet. Its last one has no key."""
    engine = story.engine
    prompt = story.told[: HEAD + SECRET]
    name = started(engine, prompt, story.telling("t2", spans=()), decode=40)
    for _ in range(3):
        engine.llm.llm_engine.step()
    with step_ahead(engine):
        engine.llm.llm_engine.abort_request([name])
        assert engine.scheduler.deferred_frees
        forget = started(engine, story.redacted, story.forgetting())
        while forget not in engine.sent.records:
            engine.llm.llm_engine.step()
        forgot = engine.sent.records[forget].receipt.forgot
        assert forgot is not None
        assert forgot.pending > 0
    assert engine.sent.forgot[forget].pending == 0
    assert not rows.held(story.secret)
    check_at_rest(engine)


def test_a_forget_is_reported_as_done_when_it_is(story: Story, rows: SecretRows) -> None:
    """A withheld turn has ended, and vLLM has yet to take its blocks back: they are pending."""
    engine = story.engine
    reader = started(engine, story.told, story.telling("t2"), decode=30)
    for _ in range(3):
        engine.llm.llm_engine.step()
    with step_ahead(engine):
        forget = started(engine, story.redacted, story.forgetting(), decode=2)
        while engine.scheduler.get_num_unfinished_requests():
            engine.llm.llm_engine.step()
        assert engine.scheduler.deferred_frees
        assert engine.sent.records[reader].finished
        engine.scheduler.schedule()
        reported = engine.sent.forgot.get(forget)
        assert reported is None or reported.pending > 0
        assert rows.held(story.secret)
    assert engine.sent.forgot[forget].pending == 0
    assert not rows.held(story.secret)
    check_at_rest(engine)


def test_moved_kv_serves_up_to_its_first_reader(story: Story, rows: SecretRows) -> None:
    """A lineage's blocks in front of the first that read the secret stay, and are found by the
    turn that demands forgetting; the ones after it aren't, though they have its lineage."""
    engine = story.engine
    told = asked(engine, story.told, story.telling())
    cuts = (Directive(40, 45), Directive(HEAD, HEAD + SECRET))
    prompt = (*story.head[:40], *story.head[45:], *story.tail)
    spans = (SpanLabel("head", 0, HEAD - 5), SpanLabel("tail", HEAD - 5, len(prompt)))
    payload = story.telling("t2", sources=(told.ref("t1"),), directives=cuts, spans=spans)
    cut = asked(engine, (*prompt, *told.output, 7), payload)
    assert cut.record is not None
    lineage = cut.record.receipt.lineage
    assert [run.start for run in lineage] == [BLOCK]
    again = asked(engine, prompt, story.forgetting(lineage=lineage, spans=spans))
    assert again.cached == (HEAD - 5) // BLOCK * BLOCK > BLOCK
    assert counts_of(engine, again).pending == 0
    assert not rows.held(story.secret)


def test_the_rest_of_a_block_that_others_took_is_overwritten(
    story: Story, rows: SecretRows
) -> None:
    """Blocks that were evicted and are now held by a running request, which has written only a few
    rows of them."""
    engine = story.engine
    story.tell()
    cache = engine.leyline.cache
    filler = draw_ordinary(random.Random("filler"), 2 * BLOCK)
    # What is cached is given away first.
    queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
    for block in reversed(queue.get_all_free_blocks()):
        if block.block_hash is not None:
            queue.remove(block)
            queue.prepend_n([block])
    readers = [started(engine, filler[: BLOCK + 1 + at], decode=20) for at in range(6)]
    for _ in range(3):
        engine.llm.llm_engine.step()
    forget = started(engine, story.redacted, story.forgetting(), decode=2)
    while forget not in engine.sent.records or not engine.sent.records[forget].finished:
        engine.llm.llm_engine.step()
    assert engine.scheduler.running
    assert not rows.held(story.secret)
    engine.run_out(readers)
    assert not rows.held(story.secret)
    assert cache.free == cache.capacity // BLOCK


def test_an_emptied_cache_still_forgets(story: Story, rows: SecretRows) -> None:
    """After vLLM has reset its prefix cache no key finds the rows, and a forget overwrites them."""
    story.tell()
    assert story.engine.llm.reset_prefix_cache()
    assert rows.held(story.secret)
    story.forget()
    assert not rows.held(story.secret)


def test_an_unknown_span_reaches_all_that_the_session_has(story: Story, rows: SecretRows) -> None:
    """A name that the ledger doesn't know may be any text's."""
    story.tell()
    counts = story.forget(forget=("never heard of",))
    assert counts.overwritten > 0
    assert counts.pending == 0
    assert not rows.held(story.secret)


def test_a_cut_secret_is_forgotten_from_moved_kv(
    story: Story, rows: SecretRows, subject: OracleModel
) -> None:
    """KV that read the secret before a cut is overwritten, also while another edit of the session
    copies from it, and the answer is that of a run that never saw it."""
    engine = story.engine
    told = story.tell()
    end = HEAD + SECRET
    prompt = (*story.head, *told.tokens[end:], 7)
    spans = (
        SpanLabel("head", 0, HEAD),
        SpanLabel("tail", HEAD, HEAD + TAIL),
        SpanLabel("t1.out", HEAD + TAIL, len(prompt) - 1),
        SpanLabel("rest", len(prompt) - 1, len(prompt)),
    )
    members: dict[str, Any] = {
        "sources": (told.ref("t1"),),
        "directives": (Directive(HEAD, end),),
        "spans": spans,
    }
    cut = asked(engine, prompt, story.telling("t2", **members))
    assert cut.record is not None
    assert cut.record.receipt.outcome is Outcome.SPLICED
    before = values_of(engine, engine.held[cut.message])
    # Two gaps, hence three steps: the forget comes after the first.
    gap = draw_ordinary(random.Random("gap"), 3)
    at = (70, 75)
    staged = (*story.told[: at[0]], *gap, *told.tokens[at[1] :], 9)
    copies = story.telling(
        "t3", sources=(told.ref("t1"),), directives=(Directive(*at, gap),), spans=()
    )
    name = started(engine, staged, copies, decode=30)
    engine.llm.llm_engine.step()
    lineage = cut.record.receipt.lineage
    answer = asked(engine, story.redacted, story.forgetting(lineage=lineage), scores=20)
    engine.run_out([name])
    counts = counts_of(engine, answer)
    assert counts.pending == 0
    assert counts.overwritten > TAIL
    assert not rows.held(story.secret)
    assert distance(answer, expect(subject, [Fresh(answer.prompt)], answer)) <= BOUND
    private = slice(HEAD // BLOCK * BLOCK, len(cut.tokens) - 1)
    after = values_of(engine, engine.held[cut.message])
    for old, new in zip(before, after, strict=True):
        assert not same_rows(old[private], new[private])
    check_at_rest(engine)


def test_a_session_that_shares_moved_kv_is_reached_while_it_runs(
    story: Story, rows: SecretRows
) -> None:
    """KV that has read the secret before a cut goes, whichever session of the tenant holds it."""
    engine = story.engine
    told = asked(engine, story.told, story.telling())
    prompt = (*story.redacted, *told.output, 7)
    payload = story.telling(
        "t2",
        sources=(told.ref("t1"),),
        directives=(Directive(HEAD, HEAD + SECRET),),
        spans=(SpanLabel("head", 0, HEAD), SpanLabel("rest", HEAD, len(prompt))),
        share=story.session,
    )
    cut = asked(engine, prompt, payload)
    other = EditPayload(session=f"{story.session}.b", scope="t", turn="b1", share=story.session)
    name = started(engine, (*cut.tokens, 5, 6), other, decode=40)
    for _ in range(3):
        engine.llm.llm_engine.step()
    forget = started(engine, story.redacted, story.forgetting())
    engine.run_out([name, forget])
    assert engine.sent.forgot[forget].pending == 0
    receipt = engine.sent.records[name].receipt
    assert receipt.tokens.prefix > HEAD // BLOCK * BLOCK
    assert engine.leyline.registry.get(("t", other.session), "b1") is None
    private = engine.held[name][HEAD // BLOCK :]
    assert not any(each.any() for each in values_of(engine, private))
    assert not rows.held(story.secret)
    check_at_rest(engine)


def test_several_answers_of_one_prompt_keep_their_kv(story: Story, rows: SecretRows) -> None:
    """Requests of one message forget together: none withholds what another one computes."""
    engine = story.engine
    story.tell()
    name = started(engine, story.redacted, story.forgetting(), decode=4, answers=2)
    engine.run([name])
    counts = engine.sent.forgot.get(name, engine.sent.records[name].receipt.forgot)
    assert counts is not None
    assert counts.pending == 0
    assert not rows.held(story.secret)
    assert asked(engine, story.redacted, decode=1).cached == len(story.redacted) // BLOCK * BLOCK
