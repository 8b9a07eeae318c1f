"""Commands about claims on their way to the engine's thread and back."""

from __future__ import annotations

import asyncio

import pytest
from claims_kit import TENANT, make_engine
from claims_service_kit import Stage, end, stage, stages
from support.waiting import until, wait

from leyline_engine.contract import (
    ClaimCommand,
    ClaimReply,
    ClaimState,
    DemoteClaim,
    GetClaim,
    GetClaimEvents,
    ListClaims,
    ProblemCode,
    ReleaseClaim,
)
from leyline_replay.engine import ReplayEngine
from leyline_replay.generation import FinishEvent
from leyline_replay.service import EngineService, EngineStoppedError

__all__ = ["stage", "stages"]


async def test_commands_come_through_while_the_engine_is_busy(stages: list[Stage]) -> None:
    """One round is the longest wait, however many requests queue."""
    # A fifth side by side would outgrow what the claim leaves.
    stage = Stage(max_running=4)
    stages.append(stage)
    await stage.keep("plan", 100, 1)
    stage.close_gate()
    jobs = [stage.submit(60, seed, room=8) for seed in range(2, 20)]
    asked = asyncio.create_task(stage.claim("plan", 100))
    await until(lambda: stage.running)
    begun = stage.forwards
    while not asked.done():
        stage.gate.release(1)
        await asyncio.sleep(0.005)
    assert stage.forwards - begun <= 3
    stage.open_gate()
    for job in jobs:
        assert isinstance(await end(job), FinishEvent)


async def test_every_command_is_answered(stage: Stage) -> None:
    """Submit, get, list, demote, release and events; what is wrong is in the answer."""
    await stage.keep("plan", 100, 1)
    (submitted,) = (await stage.claim("plan", 100, ttl_s=60)).claims
    assert submitted.state is ClaimState.MATERIALIZED
    assert (await stage.do(GetClaim(TENANT, "c"))).claims[0].claim == submitted.claim
    assert [found.claim.id for found in (await stage.do(ListClaims(TENANT))).claims] == ["c"]
    assert (await stage.do(ListClaims("other"))).claims == ()
    (demoted,) = (await stage.do(DemoteClaim(TENANT, "c"))).claims
    assert demoted.state is ClaimState.DEMOTED
    (released,) = (await stage.do(ReleaseClaim(TENANT, "c"))).claims
    assert released.state is ClaimState.RELEASED
    events = (await stage.do(GetClaimEvents(TENANT, "c"))).events
    assert [event["event"] for event in events] == [
        "claim_requested",
        "entered",
        "found",
        "locked",
        "unlocked",
        "ranked",
        "released",
        "unranked",
    ]
    for foreign in (GetClaim("other", "c"), ReleaseClaim("other", "c"), GetClaim(TENANT, "never")):
        problem = (await stage.do(foreign)).problem
        assert problem is not None and problem.code is ProblemCode.UNKNOWN_CLAIM
    problem = (await stage.do(DemoteClaim(TENANT, "c"))).problem
    assert problem is not None


async def test_looking_costs_no_check_of_the_whole_pool(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy asks every few seconds; only what may have changed something is checked."""
    await stage.keep("plan", 100, 1)
    await stage.claim("plan", 100)
    checks = 0
    original = ReplayEngine.check_integrity

    def counted(self: ReplayEngine) -> None:
        nonlocal checks
        checks += 1
        original(self)

    await asyncio.sleep(0.05)
    monkeypatch.setattr(ReplayEngine, "check_integrity", counted)
    for _ in range(5):
        await stage.do(ListClaims())
    await asyncio.sleep(0.05)
    assert checks == 0
    await stage.do(ReleaseClaim(TENANT, "c"))
    await until(lambda: checks)


async def test_a_command_that_breaks_is_answered_and_the_engine_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller hears of it, and the next one is served."""

    def broken(command: ClaimCommand) -> ClaimReply:
        raise ZeroDivisionError

    keeper = stage.engine.claims.keeper
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "carry_out", broken)
        with pytest.raises(ZeroDivisionError):
            await stage.do(ListClaims())
    assert (await stage.do(ListClaims())).claims == ()


async def test_whoever_stops_waiting_for_an_answer_holds_nobody_up(stage: Stage) -> None:
    """The command is carried out all the same."""
    await stage.keep("plan", 100, 1)
    stage.close_gate()
    running = stage.submit(50, 2)
    await until(lambda: stage.running)
    asked = asyncio.create_task(stage.claim("plan", 100))
    await asyncio.sleep(0)
    asked.cancel()
    stage.open_gate()
    assert isinstance(await end(running), FinishEvent)
    assert len((await stage.do(ListClaims())).claims) == 1


def test_an_asker_whose_loop_is_gone_holds_nobody_up(stage: Stage) -> None:
    """Its answer is dropped."""
    stage.close_gate()

    async def leave() -> None:
        stage.submit(50, 2)
        await until(lambda: stage.running)
        stage.service._desk.ask(ListClaims())  # type: ignore[union-attr]

    asyncio.run(leave())
    stage.open_gate()
    wait(lambda: not stage.running)
    assert asyncio.run(stage.do(ListClaims())).claims == ()


async def test_a_stopped_engine_carries_nothing_out(stage: Stage) -> None:
    """Those who wait for an answer get one."""
    stage.close_gate()
    stage.submit(50, 2)
    await until(lambda: stage.running)
    asked = asyncio.create_task(stage.service.claims(ListClaims()))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(stage.service.close, 0))
    await asyncio.sleep(0.05)
    stage.open_gate()
    with pytest.raises(EngineStoppedError):
        await asked
    await closing
    with pytest.raises(EngineStoppedError):
        await stage.service.claims(ListClaims())


async def test_an_engine_without_a_desk_takes_no_claims() -> None:
    """It says so."""
    service = EngineService(make_engine(), lambda tokens: "")
    reply = await service.claims(ListClaims())
    assert reply.problem is not None and reply.problem.code is ProblemCode.UNSUPPORTED
    service.close()
