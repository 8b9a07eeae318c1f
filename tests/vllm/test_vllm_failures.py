"""Rows that vLLM counts on before they are there: copies that fail, and blocks filed too early."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from contract_kit import BLOCK, BOUND, PlayedSession, distance, draw_tokens, expect, load_reference
from oracle_models import OracleModel
from oracle_reference import Fresh
from splice_kit import Answer, SplicingEngine, splicing_engine
from vllm.v1.request import RequestStatus

from leyline_engine.contract import Directive, EditPayload, Outcome, Reason

_names = count()


@pytest.fixture(scope="module")
def engine(vllm_model: Path) -> Iterator[SplicingEngine]:
    """An engine with Leyline."""
    with splicing_engine(vllm_model) as started:
        yield started


@pytest.fixture(scope="module")
def subject(vllm_model: Path) -> OracleModel:
    """The same model in transformers."""
    return load_reference(vllm_model)


def once(original: Callable[..., Any], number: int) -> Callable[..., Any]:
    """A function whose ``number``-th call fails after it has done its work."""
    calls = count()

    def call(*args: Any, **options: Any) -> Any:
        done = original(*args, **options)
        if next(calls) == number:
            raise RuntimeError("injected")
        return done

    return call


def clean_error(subject: OracleModel, answer: Answer) -> float:
    """The distance of an answer from a run that has seen its own tokens only."""
    return distance(answer, expect(subject, [Fresh(answer.prompt)], answer))


class Edit:
    """An opened session and an edit of it, whose copies begin after the prefix or after a gap."""

    def __init__(self, engine: SplicingEngine, subject: OracleModel, gap: bool = False) -> None:
        self.engine, self.subject = engine, subject
        rng = random.Random(next(_names))
        self.played = PlayedSession(engine, subject, f"f{next(_names)}")
        self.source = self.played.open(draw_tokens(rng, 400))
        new = draw_tokens(rng, 5) if gap else ()
        cuts = [Directive(96, 140, new), Directive(280, 300, draw_tokens(rng, 7))]
        tokens = self.source.tokens
        self.prompt = (*tokens[:96], *new, *tokens[140:280], *cuts[1].replacement)
        self.prompt = (*self.prompt, *tokens[300:], 77)
        self.payload = EditPayload(
            session=self.played.session,
            scope=self.played.scope,
            turn="edited",
            sources=(self.source.answer.ref(self.source.name),),
            directives=tuple(cuts),
            share="crew",
        )

    def start(self) -> str:
        """Queue the edit."""
        return self.engine.start(self.prompt, self.payload, decode=12, scores=20)

    def check_prefilled(self, answer: Answer, reason: Reason = Reason.TRANSFORM_FAILED) -> None:
        """An ordinary prefill, as the receipt and vLLM's own count report it."""
        assert answer.record is not None
        receipt = answer.record.receipt
        assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, reason)
        assert receipt.tokens.spliced == 0
        assert receipt.tokens.prefix + receipt.tokens.prefilled == len(answer.prompt)
        assert answer.cached <= 96
        assert clean_error(self.subject, answer) <= BOUND
        cache = self.engine.leyline.cache
        assert cache.free == cache.capacity // BLOCK
        assert not self.engine.leyline.turns


PLACES: dict[str, Callable[[SplicingEngine], tuple[Any, str]]] = {
    "worker": lambda engine: (engine.rows.pool, "splice"),
    "orders": lambda engine: (engine.leyline._stepper, "_move"),
    "ledger": lambda engine: (engine.leyline, "_enter"),
    "planner": lambda engine: (engine.leyline._admission, "_splice"),
}


@pytest.mark.parametrize("gap", [False, True], ids=["first", "after-a-gap"])
@pytest.mark.parametrize("place", [*PLACES, "worker-again"])
def test_a_failed_copy_costs_a_prefill_and_no_answer(
    engine: SplicingEngine,
    subject: OracleModel,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    gap: bool,
) -> None:
    """The request is computed as a whole, and so is one that shared its first rows in that step;
    neither leaves anything that a later turn would find."""
    edit = Edit(engine, subject, gap)
    owner, name = PLACES[place.partition("-")[0]](engine)
    failing = once(getattr(owner, name), number=int(place.endswith("again")))
    monkeypatch.setattr(owner, name, failing)
    sharing = EditPayload(session="sharing", scope="tenant", turn="x", share="crew")
    names = [edit.start(), engine.start(edit.prompt, sharing, decode=12, scores=20)]
    first, second = engine.run(names)
    edit.check_prefilled(first)
    monkeypatch.undo()
    third = engine.ask((*edit.prompt, 5), sharing, scores=20)
    if place != "worker-again":  # the rows that they shared have been copied
        assert clean_error(subject, second) <= BOUND
        assert clean_error(subject, third) <= BOUND
    after = engine.ask(
        (*first.tokens, 5),
        EditPayload(
            session=edit.played.session,
            scope="tenant",
            turn="later",
            lineage=first.record.receipt.lineage if first.record else (),
        ),
        scores=20,
    )
    assert clean_error(subject, after) <= BOUND


def test_an_aborted_request_leaves_no_row_that_failed(
    engine: SplicingEngine, subject: OracleModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's report comes when vLLM doesn't know the request any more."""
    edit = Edit(engine, subject)
    owner, name = PLACES["worker"](engine)
    monkeypatch.setattr(owner, name, once(lambda *_: None, number=0))
    scheduler = engine.scheduler
    update = scheduler.update_from_output

    def aborting(*args: Any) -> Any:
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        return update(*args)

    monkeypatch.setattr(scheduler, "update_from_output", aborting)
    started = edit.start()
    engine.llm.llm_engine.step()
    monkeypatch.undo()
    engine.llm.llm_engine.abort_request([started])
    engine.settle()
    sharing = EditPayload(session="sharing", scope="tenant", turn="x", share="crew")
    after = engine.ask((*edit.prompt, 5), sharing, scores=20)
    assert clean_error(subject, after) <= BOUND


def test_the_same_edit_is_spliced_without_a_failure(
    engine: SplicingEngine, subject: OracleModel
) -> None:
    """A control: nothing else keeps these copies from being made."""
    for gap in (False, True):
        edit = Edit(engine, subject, gap)
        (answer,) = engine.run([edit.start()])
        assert answer.record is not None
        assert answer.record.receipt.outcome is Outcome.SPLICED
        assert answer.record.receipt.stages == 1 + gap
        assert clean_error(subject, answer) > 100 * BOUND


@pytest.mark.parametrize("written", [False, True], ids=["same-step", "next-step"])
def test_blocks_that_a_step_is_about_to_write_are_no_source(
    engine: SplicingEngine, subject: OracleModel, written: bool
) -> None:
    """Another request computes an evicted source's text in the very step that plans the edit: vLLM
    files its blocks at once, and copies made in front of the forward would be of nothing."""
    edit = Edit(engine, subject)
    pool = engine.scheduler.kv_cache_manager.block_pool
    for number in range(1, len(pool.blocks)):
        pool.evict_blocks({number})
    names = [engine.start(edit.source.answer.prompt, decode=3, scores=20)]
    if written:
        engine.llm.llm_engine.step()
    plain, answer = engine.run([*names, edit.start()])
    assert clean_error(subject, plain) <= BOUND
    assert answer.record is not None
    receipt = answer.record.receipt
    if written:
        assert receipt.outcome is Outcome.SPLICED
    else:
        assert receipt.reason is Reason.SOURCE_EVICTED
        assert clean_error(subject, answer) <= BOUND


def test_sources_are_held_until_they_are_copied(
    engine: SplicingEngine, subject: OracleModel
) -> None:
    """The blocks that vLLM would give to an edit first are those that its last run is copied from,
    two steps later."""
    rng = random.Random("held")
    session = PlayedSession(engine, subject, "held")
    opened = session.open(draw_tokens(rng, 400))
    pool = engine.scheduler.kv_cache_manager.block_pool
    blocks = [pool.blocks[number] for number in engine.held[opened.answer.message]]
    for block in blocks:
        pool.free_block_queue.remove(block)
        pool.free_block_queue.prepend_n([block])
    cuts = [Directive(96, 140, draw_tokens(rng, 5)), Directive(280, 300, draw_tokens(rng, 7))]
    played = session.edit(opened, cuts, draw_tokens(rng, 3))
    assert played.receipt.stages == 2
    assert played.error <= BOUND
    assert all(block.ref_cnt == 0 for block in pool.blocks[1:])


def test_a_preempted_request_leaves_no_block_that_was_never_written(
    engine: SplicingEngine, subject: OracleModel
) -> None:
    """vLLM's policy of priorities takes a request out of the step that it is scheduled in; blocks
    that were filed for that step are found by nobody."""
    scheduler = engine.scheduler
    prompt = draw_tokens(random.Random("preempted"), 300)
    name = engine.start(prompt, decode=4, scores=20)
    (request,) = [each for each in scheduler.requests.values() if each.request_id.startswith(name)]
    hashed = scheduler.kv_cache_manager
    blocks = hashed.allocate_slots(request, 300)
    assert blocks is not None
    scheduler.waiting.remove_requests([request])
    request.status = RequestStatus.RUNNING
    scheduler._preempt_request(request, 0.0)
    # The workers don't know it yet.
    scheduler.reset_preempted_req_ids.clear()
    request.status = RequestStatus.WAITING
    (answer,) = engine.run([name])
    assert answer.cached == 0
    assert clean_error(subject, answer) <= BOUND


def test_a_preempted_turn_counts_its_copies_once(
    engine: SplicingEngine, subject: OracleModel, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reports a request's first prefill alone: copies that are made again aren't added."""
    edit, scheduler = Edit(engine, subject, gap=True), engine.scheduler
    name = edit.start()
    (request,) = [each for each in scheduler.requests.values() if each.request_id.startswith(name)]
    for _ in range(2):  # a gap, then copies and another gap
        engine.llm.llm_engine.step()
    counted = request.prefill_stats.num_cached_tokens
    assert counted > 96
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    (answer,) = engine.run([name])
    assert answer.cached == counted
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
