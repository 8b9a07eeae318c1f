"""Claims in the engine's thread: who waits, who gets a report, and when time passes."""

from __future__ import annotations

import asyncio
import time

import pytest
from claims_kit import SESSION, TENANT, ask, named, tokens
from claims_service_kit import Clock, Stage, end, refused, stage, stages
from support.waiting import until

from leyline_engine.contract import (
    ClaimState,
    EditPayload,
    ForgetCounts,
    Outcome,
    Reason,
    ReleaseClaim,
    SpanLabel,
)
from leyline_replay.engine import GenerationRequest, PromptTooLongError, RefusedByClaimError
from leyline_replay.generation import (
    ErrorEvent,
    FinishEvent,
    FinishReason,
    JobSpec,
)
from leyline_replay.text.sampling import SamplingParams

__all__ = ["stage", "stages"]


async def test_a_refused_request_ends_with_a_named_error_and_a_receipt(stage: Stage) -> None:
    """It never ran; after the claim's release it does."""
    await stage.keep("plan", 200, 1)
    await stage.claim("plan", 200)
    job = stage.submit(250, 2, "big")
    error = await refused(job)
    assert error.refusal.own == ("c",)
    receipt = stage.record(job).receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.REFUSED_BY_CLAIM)
    assert receipt.refused == error.refusal
    assert (receipt.session, receipt.turn, receipt.tokens.prompt) == (SESSION, "", 250)
    assert stage.record(job).finished
    await stage.do(ReleaseClaim(TENANT, "c"))
    assert isinstance(await end(stage.submit(250, 2, "big")), FinishEvent)


async def test_one_behind_others_in_the_queue_is_refused_at_once(stages: list[Stage]) -> None:
    """It doesn't wait for its turn to hear that it can't run."""
    stage = Stage(max_running=1)
    stages.append(stage)
    await stage.keep("plan", 200, 1)
    await stage.claim("plan", 200)
    stage.close_gate()
    running = stage.submit(50, 2)
    await until(lambda: stage.running)
    ahead = [stage.submit(50, seed) for seed in (3, 4)]
    behind = stage.submit(250, 5)
    stage.gate.release(1)
    await refused(behind)
    assert stage.waiting == 2
    stage.open_gate()
    for job in (running, *ahead):
        assert isinstance(await end(job), FinishEvent)


async def test_those_that_wait_are_looked_at_again_when_a_claim_comes(stages: list[Stage]) -> None:
    """Only requests without room any more end; the queue's order stays."""
    stage = Stage(max_running=1)
    stages.append(stage)
    await stage.keep("plan", 200, 1)
    stage.close_gate()
    running = stage.submit(50, 2, room=40)
    await until(lambda: stage.running)
    small, large, third = stage.submit(60, 3), stage.submit(250, 4), stage.submit(70, 5)
    claiming = asyncio.create_task(stage.claim("plan", 200))
    for _ in range(3):
        stage.gate.release(1)
        await asyncio.sleep(0.01)
    await claiming
    await refused(large)
    assert [job.cancelled for job in (small, third)] == [False, False]
    assert stage.running and stage.waiting == 2
    stage.open_gate()
    for job in (running, small, third):
        assert isinstance(await end(job), FinishEvent)


async def test_a_claim_lets_go_by_itself_when_its_time_is_up(stage: Stage) -> None:
    """Nothing asks and no request comes: the thread's own clock does it."""
    await stage.keep("plan", 200, 1)
    await stage.claim("plan", 200, ttl_s=1)
    error = await refused(stage.submit(250, 2))
    assert error.refusal.retry_after_ms is not None and error.refusal.retry_after_ms <= 1000
    assert (await stage.ended()).state is ClaimState.EXPIRED
    assert isinstance(await end(stage.submit(250, 2)), FinishEvent)


async def test_a_refusal_counts_the_time_that_has_passed(stages: list[Stage]) -> None:
    """It does so even if nothing was asked since the claim came."""
    clock = Clock()
    stage = Stage(clock=clock)
    stages.append(stage)
    await stage.keep("plan", 200, 1)
    await stage.claim("plan", 200, ttl_s=600)
    await asyncio.sleep(0.05)  # until the thread has nothing to do
    clock.pass_time(250)
    error = await refused(stage.submit(250, 2))
    assert error.refusal.retry_after_ms == 350_000
    assert "350 s" in str(error)
    await asyncio.sleep(0.05)
    clock.pass_time(350)
    assert isinstance(await end(stage.submit(250, 2)), FinishEvent)


async def test_who_outgrows_its_room_beside_a_claim_is_told(stage: Stage) -> None:
    """The younger of two answers ends with the error; its slots let the other continue."""
    await stage.keep("plan", 100, 1)
    await stage.claim("plan", 100)
    first = stage.submit(100, 2, "first", room=60)
    second = stage.submit(100, 3, "second", room=60)
    ends = [await end(job) for job in (first, second)]
    (broken,) = [event for event in ends if isinstance(event, ErrorEvent)]
    assert isinstance(broken.error, RefusedByClaimError) and broken.error.began
    assert sum(isinstance(event, FinishEvent) for event in ends) == 1
    job = (first, second)[ends.index(broken)]
    record = stage.record(job)
    assert record.finished and record.receipt.refused == broken.error.refusal
    assert record.receipt.refused.own == ("c",)
    assert record.receipt.reason is Reason.REFUSED_BY_CLAIM
    assert "outgrew" in record.receipt.detail and record.receipt.turn == ""
    turn = job.spec.request.payload
    assert turn is not None
    assert stage.engine.cache.registry.get((TENANT, SESSION), turn.turn) is None


async def test_without_claims_an_answer_is_cut_short_as_before(stages: list[Stage]) -> None:
    """Both finish, one of them at the pool's limit."""
    stage = Stage(pool=300)
    stages.append(stage)
    jobs = [stage.submit(100, seed, room=60) for seed in (2, 3)]
    ends = [await end(job) for job in jobs]
    assert all(isinstance(event, FinishEvent) for event in ends)
    assert [e.reason for e in ends if isinstance(e, FinishEvent)] == [FinishReason.LENGTH] * 2
    assert all(stage.record(job).receipt.refused is None for job in jobs)


async def test_a_waiting_request_that_is_too_long_is_no_claims_fault(stages: list[Stage]) -> None:
    """It learns so when its turn comes."""
    stage = Stage()
    stages.append(stage)
    await stage.keep("plan", 200, 1)
    await stage.claim("plan", 200)
    event = await end(stage.submit(450, 2))
    assert isinstance(event, ErrorEvent) and isinstance(event.error, PromptTooLongError)


async def test_a_waiting_request_that_cannot_be_examined_is_answered(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is its own; the engine continues."""

    def broken(request: GenerationRequest) -> GenerationRequest:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(stage.engine, "examine", broken)
        event = await end(stage.submit(50, 2))
        assert isinstance(event, ErrorEvent) and isinstance(event.error, ZeroDivisionError)
    assert isinstance(await end(stage.submit(50, 2)), FinishEvent)


def forgetful(turn: str) -> EditPayload:
    """A turn that forgets the plan's second half and keeps the first."""
    return named(turn, spans=(SpanLabel("head", 0, 100), SpanLabel("tail", 100, 200)))


async def test_a_waiting_request_forgets_what_would_keep_it_out(stages: list[Stage]) -> None:
    """The claim over what it forgets is harmed while it waits, and its receipt has it all."""
    stage = Stage(max_running=1)
    stages.append(stage)
    prompt = tokens(200, 1)
    first = ask(prompt, forgetful("plan"))
    spec = JobSpec(first, SamplingParams(temperature=0))
    assert isinstance(await end(stage.service.submit(spec)), FinishEvent)
    await stage.claim("plan", 200)
    stage.close_gate()
    running = stage.submit(50, 2)
    await until(lambda: stage.running)
    spans = (SpanLabel("head", 0, 100), SpanLabel("new", 100, 320))
    payload = named("after", spans=spans, forget=("tail",))
    request = ask([*prompt[:100], *tokens(220, 3)], payload)
    job = stage.service.submit(JobSpec(request, SamplingParams(temperature=0)))
    stage.gate.release(1)
    assert (await stage.ended()).cause == "forgotten"
    assert stage.waiting == 1
    stage.open_gate()
    for waited in (running, job):
        assert isinstance(await end(waited), FinishEvent)
    # Its own last token has no KV: 100 of the plan's prompt and 3 of its answer.
    assert stage.record(job).receipt.forgot == ForgetCounts(overwritten=103)


async def test_the_check_of_what_waits_takes_no_time_worth_naming(stages: list[Stage]) -> None:
    """Sixty waiting requests, each asked about once for each lock and not once a round."""
    stage = Stage(max_running=1)
    stages.append(stage)
    await stage.keep("plan", 200, 1)
    await stage.claim("plan", 200)
    examined = 0
    original = stage.engine.examine

    def counted(request: GenerationRequest) -> GenerationRequest:
        nonlocal examined
        examined += 1
        return original(request)

    stage.engine.examine = counted  # type: ignore[method-assign]
    started = time.monotonic()
    jobs = [stage.submit(20, seed) for seed in range(2, 62)]
    for job in jobs:
        assert isinstance(await end(job), FinishEvent)
    # Once in the queue, once when it is admitted.
    assert examined <= 2 * len(jobs)
    assert time.monotonic() - started < 60
