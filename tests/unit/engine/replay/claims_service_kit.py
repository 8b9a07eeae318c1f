"""A service over an engine whose steps a test can hold up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from claims_kit import TENANT, ask, make_claim, make_engine, named, tokens
from support.waiting import until

from leyline_engine.claims.answers import UnknownClaimError
from leyline_engine.contract import (
    ClaimCommand,
    ClaimReply,
    ClaimStatus,
    SubmitClaim,
    TurnRecord,
)
from leyline_replay.claim_desk import ClaimDesk
from leyline_replay.engine import GenerationRequest, RefusedByClaimError
from leyline_replay.generation import (
    ErrorEvent,
    Event,
    FinishEvent,
    Job,
    JobSpec,
)
from leyline_replay.sequence import Sequence
from leyline_replay.service import EngineService, ServiceLimits
from leyline_replay.text.sampling import SamplingParams


class Clock:
    """Nanoseconds as a test says."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Move on."""
        self.now += round(seconds * 1e9)


class Stage:
    """A service over an engine whose forwards wait for a gate."""

    def __init__(self, pool: int = 400, *, clock: Any = None, **limits: int) -> None:
        self.engine = make_engine(pool)
        self.gate = threading.Semaphore(100_000)
        self.forwards = 0
        original = self.engine.admit

        def admit(request: GenerationRequest) -> Sequence:
            sequence = original(request)
            forward = sequence.forward

            def waiting(*args: Any) -> Any:
                self.gate.acquire()
                self.forwards += 1
                return forward(*args)

            sequence.forward = waiting
            return sequence

        self.engine.admit = admit  # type: ignore[method-assign]
        options = {} if clock is None else {"now_ns": clock}
        self.service = EngineService(
            self.engine,
            lambda tokens: "x" * len(tokens),
            limits=ServiceLimits(**limits),
            desk=ClaimDesk(self.engine, **options),
        )

    @property
    def running(self) -> int:
        """Requests that are admitted."""
        return len(self.service._running)

    @property
    def waiting(self) -> int:
        """Requests that aren't."""
        return len(self.service._waiting)

    def close_gate(self) -> None:
        """No forward begins until :meth:`open_gate`."""
        self.gate = threading.Semaphore(0)

    def open_gate(self) -> None:
        """Let the thread continue."""
        self.gate.release(100_000)

    def submit(self, prompt: int, seed: int, turn: str = "", *, room: int = 4, **more: Any) -> Job:
        """Queue a request of so many tokens."""
        payload = named(turn, **more) if turn else None
        return self.service.submit(
            JobSpec(ask(tokens(prompt, seed), payload, room=room), SamplingParams(temperature=0))
        )

    async def keep(self, turn: str, length: int, seed: int) -> None:
        """Retain a turn whose first ``length`` tokens can be claimed."""
        assert isinstance(await end(self.submit(length, seed, turn)), FinishEvent)

    async def do(self, command: ClaimCommand) -> ClaimReply:
        """Carry out a command."""
        return await asyncio.wait_for(self.service.claims(command), 20)

    async def claim(self, turn: str, length: int, **terms: Any) -> ClaimReply:
        """Claim the beginning of a turn."""
        reply = await self.do(SubmitClaim(make_claim(turn, length, **terms)))
        assert reply.problem is None
        return reply

    async def ended(self, name: str = "c") -> ClaimStatus:
        """A claim's last status, once it isn't live: the thread may be moving it meanwhile."""
        book = self.engine.claims.keeper.book
        await until(lambda: not book.live())
        found: list[ClaimStatus] = []

        def filed() -> bool:
            with suppress(UnknownClaimError):
                found.append(book.status(TENANT, name))
            return bool(found)

        await until(filed)
        return found[0]

    def record(self, job: Job) -> TurnRecord:
        """The filed record of a job."""
        record = self.service.records.get(job.spec.request.request_id)
        assert record is not None
        return record


async def end(job: Job) -> Event:
    """The last event of a request."""
    while True:
        events: list[Event] = await asyncio.wait_for(job.channel.get(), 30)
        if not hasattr(events[-1], "text"):
            return events[-1]


async def refused(job: Job) -> RefusedByClaimError:
    """The refusal that a request ends with."""
    event = await end(job)
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, RefusedByClaimError)
    return event.error


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    """Closes what a test opens."""
    made: list[Stage] = []
    yield made
    for stage in made:
        stage.open_gate()
        stage.service.close(grace=5)
        assert stage.service.failure is None
        assert stage.engine.stats().in_flight == 0


@pytest.fixture
def stage(stages: list[Stage]) -> Stage:
    """A service with room for several."""
    stages.append(Stage())
    return stages[-1]
