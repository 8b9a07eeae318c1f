"""Commands about claims on their way to the schedulers: numbered without a gap, in order, and the
time with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import DumperControlReqOutput
from starlette.applications import Starlette

from leyline_engine.contract import CLAIMS_PATH, ClaimReply, GetClaim
from leyline_engine.server import claim_clock
from leyline_engine.server.channel import ReceiptChannel
from leyline_engine.server.claim_clock import (
    ClaimAnswer,
    ClaimClock,
    ClaimMessage,
    SchedulerSilentError,
)
from leyline_engine.sglang.server.http import sglang_endpoints

Answer = Callable[[ClaimMessage], Awaitable[ClaimAnswer]]


@dataclass
class Scheduler:
    """Takes messages as a scheduler does: the next number or none, and time never goes back."""

    messages: list[ClaimMessage] = field(default_factory=list)
    deadline_ms: int | None = None
    answer: Answer | None = None
    """Its action instead of answering."""
    busy: int = 0

    async def send(self, message: ClaimMessage) -> ClaimAnswer:
        assert message.order == len(self.messages) + 1, "a number was left out or used twice"
        assert not self.messages or message.now_ms >= self.messages[-1].now_ms
        self.messages.append(message)
        self.busy += 1
        assert self.busy == 1, "two messages at once"
        try:
            if self.answer is not None:
                return await self.answer(message)
            if self.deadline_ms is not None and message.now_ms >= self.deadline_ms:
                self.deadline_ms = None
            return ClaimAnswer(message.order, ClaimReply(seq=message.order), self.deadline_ms)
        finally:
            self.busy -= 1

    @property
    def commands(self) -> list[str]:
        return [message.command for message in self.messages]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it didn't happen"
            await asyncio.sleep(0.005)


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    """A scheduler; tasks that tests leave running end with the loop."""
    yield Scheduler()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_commands_go_one_after_the_other(scheduler: Scheduler) -> None:
    """Many callers at once: each has its own answer, and none overtakes another."""

    async def slow(message: ClaimMessage) -> ClaimAnswer:
        await asyncio.sleep(0.002)
        return ClaimAnswer(message.order, ClaimReply(seq=message.order))

    scheduler.answer = slow
    clock = ClaimClock(scheduler.send)
    replies = await asyncio.gather(*(clock.command(f"c{i}") for i in range(20)))
    assert scheduler.commands == [f"c{i}" for i in range(20)]
    assert [reply.seq for reply in replies] == list(range(1, 21))


async def test_time_passes_only_while_a_claim_has_a_deadline(scheduler: Scheduler) -> None:
    """Without one, nothing wakes the scheduler; with one, the message comes when the time is up."""
    clock = ClaimClock(scheduler.send)
    await clock.command("no deadline")
    await asyncio.sleep(0.05)
    assert len(scheduler.messages) == 1
    scheduler.deadline_ms = scheduler.messages[0].now_ms + 250
    due = scheduler.deadline_ms
    await clock.command("with one")
    await scheduler.until(lambda: scheduler.deadline_ms is None)
    last = scheduler.messages[-1]
    assert last.command == ""
    assert due <= last.now_ms < due + 1000
    ticks = len(scheduler.messages)
    await asyncio.sleep(0.05)
    assert len(scheduler.messages) == ticks
    scheduler.deadline_ms = last.now_ms + 100
    await clock.command("again")
    await scheduler.until(lambda: scheduler.deadline_ms is None)


async def test_an_earlier_deadline_is_kept(scheduler: Scheduler) -> None:
    """A claim that ends sooner than the one before it is not held back by the longer sleep."""
    clock = ClaimClock(scheduler.send)
    scheduler.deadline_ms = 3_600_000
    await clock.command("an hour")
    await asyncio.sleep(0.02)
    scheduler.deadline_ms = 50
    await clock.command("soon")
    began = time.monotonic()
    await scheduler.until(lambda: scheduler.deadline_ms is None)
    assert time.monotonic() - began < 2


async def test_the_clock_never_goes_back() -> None:
    """The messages' times are taken from a monotonic clock, in milliseconds since the start."""
    scheduler, readings = Scheduler(), iter([10**9, 10**9, 10**9 + 2_500_000, 10**9 + 2_999_999])
    clock = ClaimClock(scheduler.send, now_ns=lambda: next(readings))
    for _ in range(3):
        await clock.command("x")
    assert [message.now_ms for message in scheduler.messages] == [0, 2, 2]


async def test_a_caller_that_leaves_takes_nothing_along(scheduler: Scheduler) -> None:
    """Its command is carried out all the same, and the next one has its own answer."""
    gate = asyncio.Event()

    async def waits(message: ClaimMessage) -> ClaimAnswer:
        await gate.wait()
        return ClaimAnswer(message.order, ClaimReply(seq=message.order))

    scheduler.answer = waits
    clock = ClaimClock(scheduler.send)
    leaves = asyncio.create_task(clock.command("leaves"))
    queued = asyncio.create_task(clock.command("leaves while queued"))
    stays = asyncio.create_task(clock.command("stays"))
    await scheduler.until(lambda: bool(scheduler.messages))
    for task in (leaves, queued):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.set()
    assert (await stays).seq == 3
    assert scheduler.commands == ["leaves", "leaves while queued", "stays"]


async def test_a_silent_scheduler_is_an_error_and_not_a_wait(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while the caller gets an error; later calls continue with the next number."""
    monkeypatch.setattr(claim_clock, "_PATIENCE_S", 0.05)

    async def never(_: ClaimMessage) -> ClaimAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    scheduler.answer = never
    clock = ClaimClock(scheduler.send)
    with pytest.raises(SchedulerSilentError, match="in time"):
        await clock.command("unheard")
    scheduler.answer = None
    assert (await clock.command("heard")).seq == 2


@pytest.mark.parametrize(
    "error", [SchedulerSilentError("failed"), RuntimeError("broken"), ValueError("too many")]
)
async def test_time_goes_on_after_a_failure(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A tick that fails, however it fails, is followed by the next: a claim that can't be ended any
    more would refuse requests for ever."""
    monkeypatch.setattr(claim_clock, "_TICK_S", 0.05)
    failures = 0

    async def fails(message: ClaimMessage) -> ClaimAnswer:
        nonlocal failures
        if message.command or failures == 2:
            scheduler.answer = None if failures == 2 else scheduler.answer
            return ClaimAnswer(message.order, ClaimReply(), None if failures == 2 else 20)
        failures += 1
        raise error

    scheduler.answer = fails
    clock = ClaimClock(scheduler.send)
    await clock.command("claim")
    await scheduler.until(lambda: scheduler.answer is None)
    assert failures == 2
    assert scheduler.commands == ["claim", "", "", ""]


@pytest.mark.parametrize("error", [RuntimeError("broken"), ValueError("too many values")])
async def test_what_fails_on_the_way_has_one_name(scheduler: Scheduler, error: Exception) -> None:
    """The caller learns that the scheduler couldn't answer, and the next command is carried out."""

    async def fails(_: ClaimMessage) -> ClaimAnswer:
        raise error

    scheduler.answer = fails
    clock = ClaimClock(scheduler.send)
    with pytest.raises(SchedulerSilentError):
        await clock.command("fails")
    scheduler.answer = None
    assert (await clock.command("works")).seq == 2


async def test_failing_ticks_come_no_faster_than_others(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that fails at once is not asked a hundred times a second."""
    monkeypatch.setattr(claim_clock, "_TICK_S", 0.2)

    async def fails(message: ClaimMessage) -> ClaimAnswer:
        if message.command:
            return ClaimAnswer(message.order, ClaimReply(), 0)
        raise SchedulerSilentError("failed")

    scheduler.answer = fails
    clock = ClaimClock(scheduler.send)
    await clock.command("claim")
    await asyncio.sleep(0.5)
    assert 1 < len(scheduler.messages) <= 4


async def test_a_late_answer_is_nobody_elses(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy scheduler's answer to a caller that was turned away goes to no later caller, who may
    be of another tenant."""
    monkeypatch.setattr(claim_clock, "_PATIENCE_S", 0.2)
    sent: list[Any] = []
    wire: FanOutCommunicator[Any] = FanOutCommunicator(sent.append, 1)
    manager = SimpleNamespace(dumper_control=wire)
    channel = ReceiptChannel()
    endpoints = sglang_endpoints(channel, manager, None, template_kwargs={})
    transport = httpx.ASGITransport(Starlette(routes=endpoints.routes()))

    def answer(message: Any) -> None:
        order = message.body["order"]
        written = msgspec.json.encode(ClaimAnswer(order, ClaimReply(seq=order))).decode()
        wire.handle_recv(DumperControlReqOutput(success=True, response=[{"answer": written}]))

    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:

        async def ask(tenant: str) -> httpx.Response:
            body = msgspec.json.encode(GetClaim(tenant, "c"))
            return await client.post(CLAIMS_PATH, content=body)

        late = await ask("a")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
        asks = asyncio.create_task(ask("b"))
        await scheduler.until(lambda: len(sent) == 2)
        answer(sent[0])
        await asyncio.sleep(0.02)
        assert not asks.done()
        answer(sent[1])
        assert (await asks).json()["seq"] == 2
    assert len(sent) == 2
    channel.close()
