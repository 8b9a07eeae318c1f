"""The engine thread's scheduling, over an engine of which only the outside is real."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until, wait

from leyline_engine.contract import EditPayload, ForgetCounts, Proof, Receipt, TurnRecord
from leyline_engine.metrics import NoMetrics
from leyline_engine.records.turn_records import RecordBook
from leyline_replay.engine import GenerationRequest, PoolExhaustedError, PromptTooLongError
from leyline_replay.fair_queue import ScopedQueues
from leyline_replay.generation import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    JobSpec,
)
from leyline_replay.service import (
    EngineOverloadedError,
    EngineService,
    EngineStoppedError,
    ServiceLimits,
)
from leyline_replay.text.sampling import SamplingParams


class FakeSequence:
    """Counts its steps in the engine's log; logits always favour token 1."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.engine = engine
        self.request = request
        self.receipt = Receipt(message_id=request.request_id)
        self.chunks = len(request.tokens)

    def prefill_step(self) -> torch.Tensor | None:
        self._step()
        self.chunks -= 1
        return None if self.chunks else torch.tensor([0.0, 1.0])

    def decode_step(self, token: int) -> torch.Tensor:
        self._step()
        return torch.tensor([0.0, 1.0])

    def _step(self) -> None:
        self.engine.gate.acquire()
        self.engine.log.append(self.request.request_id)

    def finish(self, last_token: int | None) -> TurnRecord:
        if self.engine.finish_error is not None:
            raise self.engine.finish_error
        return self._end()

    def abort(self) -> TurnRecord:
        return self._end()

    def _end(self) -> TurnRecord:
        self.engine.running -= 1
        return TurnRecord(receipt=self.receipt, finished=True)


class FakeEngine:
    """Room for ``room`` requests; each step waits for ``gate``."""

    def __init__(self, room: int = 100) -> None:
        self.capability: Any = SimpleNamespace(instance="run")
        self.metrics = NoMetrics()
        self.max_context = 1000
        self.room = room
        self.running = 0
        self.log: list[str] = []
        self.gate = threading.Semaphore(10_000)
        self.checks = 0
        self.integrity_error: Exception | None = None
        self.finish_error: Exception | None = None

    def admit(self, request: GenerationRequest) -> FakeSequence:
        if len(request.tokens) > self.max_context:
            raise PromptTooLongError("too long")
        if self.running >= self.room:
            raise PoolExhaustedError("full")
        self.running += 1
        return FakeSequence(self, request)

    def settled_forgets(self) -> dict[str, ForgetCounts]:
        return {}

    def settled_proofs(self, forgets: dict[str, ForgetCounts]) -> dict[str, Proof]:
        return {}

    def check_integrity(self) -> None:
        self.checks += 1
        if self.integrity_error is not None:
            raise self.integrity_error


@pytest.fixture
def engine() -> FakeEngine:
    """A fake engine with room for everything."""
    return FakeEngine()


@pytest.fixture
def service(engine: FakeEngine) -> Iterator[EngineService]:
    """A service over the fake engine."""
    service = make_service(engine)
    yield service
    service.close(grace=0)


def make_service(engine: FakeEngine, **limits: int) -> EngineService:
    """A service with the given limits."""
    fake: Any = engine
    return EngineService(fake, lambda tokens: "x" * len(tokens), limits=ServiceLimits(**limits))


def spec(name: str, *, scope: str = "", prompt: int = 1, new: int = 3) -> JobSpec:
    """A greedy request of ``prompt`` chunks and ``new`` tokens."""
    payload = EditPayload(session="s", scope=scope, turn="t") if scope else None
    request = GenerationRequest(name, array("q", [0] * prompt), payload, max_new_tokens=new)
    return JobSpec(request, SamplingParams(temperature=0))


async def last(channel: Any) -> Event:
    """The last event of a request."""
    while True:
        events: list[Event] = await asyncio.wait_for(channel.get(), 20)
        if not hasattr(events[-1], "text"):
            return events[-1]


async def test_scopes_take_turns(engine: FakeEngine, service: EngineService) -> None:
    """A scope with many requests gets no more steps than a scope with one."""
    engine.gate = threading.Semaphore(0)
    many = [service.submit(spec(f"a{n}", scope="a", prompt=9, new=1)) for n in range(3)]
    one = service.submit(spec("b", scope="b", prompt=9, new=1))
    engine.gate.release(1000)
    for job in (*many, one):
        assert isinstance(await last(job.channel), FinishEvent)
    until_b_ends = engine.log[: len(engine.log) - engine.log[::-1].index("b")]
    others = len(until_b_ends) - until_b_ends.count("b")
    assert abs(others - 9) <= 2
    assert {name for name in until_b_ends[:8] if name != "b"} == {"a0", "a1", "a2"}


async def test_no_room_means_waiting(engine: FakeEngine, service: EngineService) -> None:
    """A request that doesn't fit waits for the others, in order, and is served."""
    engine.room = 1
    jobs = [service.submit(spec(f"r{n}")) for n in range(4)]
    for job in jobs:
        event = await last(job.channel)
        assert isinstance(event, FinishEvent)
        assert event.reason is FinishReason.LENGTH
    assert engine.log == [f"r{n}" for n in range(4) for _ in range(3)]


async def test_no_room_and_nobody_to_wait_for(engine: FakeEngine, service: EngineService) -> None:
    """With nothing running, waiting would never end: the request fails at once."""
    engine.room = 0
    event = await last(service.submit(spec("r")).channel)
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, PoolExhaustedError)


async def test_a_request_that_cannot_be_finished_fails_alone(
    engine: FakeEngine, service: EngineService
) -> None:
    """A fault while a turn is published or retained ends that request; the next one is served."""
    engine.finish_error = RuntimeError("no")
    event = await last(service.submit(spec("a", prompt=2, new=1)).channel)
    assert isinstance(event, ErrorEvent) and event.error is engine.finish_error
    engine.finish_error = None
    assert isinstance(await last(service.submit(spec("b", prompt=2, new=1)).channel), FinishEvent)
    assert engine.running == 0


async def test_what_never_fits_fails_alone(service: EngineService) -> None:
    """A prompt that is too long fails; the next request is served."""
    event = await last(service.submit(spec("long", prompt=2000)).channel)
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, PromptTooLongError)
    assert isinstance(await last(service.submit(spec("next")).channel), FinishEvent)


async def test_waiting_queue_is_bounded(engine: FakeEngine) -> None:
    """Beyond the bound a request is refused, and cancelled ones make room."""
    engine.gate = threading.Semaphore(0)
    service = make_service(engine, max_running=1, max_waiting=2)
    jobs = [service.submit(spec("r0"))]
    await until(lambda: engine.running)
    jobs += [service.submit(spec("r1")), service.submit(spec("r2"))]
    with pytest.raises(EngineOverloadedError):
        service.submit(spec("r3"))
    service.cancel(jobs[1])
    engine.gate.release(1000)
    ends = [await last(job.channel) for job in jobs]
    reasons = [event.reason for event in ends if isinstance(event, FinishEvent)]
    assert reasons == [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH]
    assert "r1" not in engine.log
    service.close()


async def test_cancel_ends_a_running_request(engine: FakeEngine, service: EngineService) -> None:
    """A cancelled request takes no further step and its record is kept."""
    engine.gate = threading.Semaphore(1)
    job = service.submit(spec("r", new=500))
    await job.channel.get()
    service.cancel(job)
    engine.gate.release(1000)
    event = await last(job.channel)
    assert isinstance(event, FinishEvent)
    assert event.reason is FinishReason.CANCELLED
    record = service.records.get("r")
    assert record is not None
    assert record.finished
    service.cancel(job)


async def test_integrity_is_checked_when_idle(engine: FakeEngine, service: EngineService) -> None:
    """A failed check stops the service: what can't be trusted isn't served."""
    await last(service.submit(spec("r1")).channel)
    await until(lambda: engine.checks)
    engine.integrity_error = RuntimeError("slot owned twice")
    await last(service.submit(spec("r2")).channel)
    await until(lambda: service.failure)
    with pytest.raises(EngineStoppedError):
        service.submit(spec("r3"))


async def test_close_refuses_what_waits(engine: FakeEngine) -> None:
    """Waiting requests are refused at once; the running one may finish."""
    engine.gate = threading.Semaphore(0)
    service = make_service(engine, max_running=1)
    running = service.submit(spec("r0"))
    await until(lambda: engine.running)
    waiting = service.submit(spec("r1"))
    closing = asyncio.create_task(asyncio.to_thread(service.close, 20))
    refused = await last(waiting.channel)
    assert isinstance(refused, ErrorEvent)
    assert isinstance(refused.error, EngineStoppedError)
    engine.gate.release(1000)
    assert isinstance(await last(running.channel), FinishEvent)
    await closing
    with pytest.raises(EngineStoppedError):
        service.submit(spec("r2"))
    service.close()


def test_a_reader_whose_loop_is_gone_is_dropped(engine: FakeEngine, service: EngineService) -> None:
    """A request whose event loop was closed ends instead of generating for no client."""
    engine.gate = threading.Semaphore(0)

    async def submit() -> None:
        service.submit(spec("r", new=900))

    asyncio.run(submit())
    engine.gate.release(10)
    wait(lambda: (record := service.records.get("r")) and record.finished)
    assert len(engine.log) <= 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_queues_keep_every_item_once(actions: list[tuple[str, bool]]) -> None:
    """No item is lost or doubled, in any order of turns and removals."""
    queues: ScopedQueues[int] = ScopedQueues()
    expected: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for number, (scope, add) in enumerate(actions):
        if add or not expected[scope]:
            queues.push(scope, number)
            expected[scope].append(number)
        else:
            item = queues.take_turn(scope)
            assert item == expected[scope][0]
            queues.remove(scope, item)
            expected[scope].remove(item)
    assert sorted(queues) == sorted(chain.from_iterable(expected.values()))
    assert len(queues) == sum(map(len, expected.values()))
    assert [queues.count(scope) for scope in "abc"] == [len(expected[scope]) for scope in "abc"]


def test_record_book_forgets_the_oldest() -> None:
    """The book holds the last records only, and the newest version of each."""
    book = RecordBook(limit=2)
    for name in ("a", "b", "a", "c"):
        book.put(TurnRecord(receipt=Receipt(message_id=name), finished=name == "a"))
    assert book.get("b") is None
    assert book.get("a") is not None
    assert book.get("c") is not None
