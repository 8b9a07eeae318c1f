"""Requests that come together are begun one after the other, so that nothing else waits for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.requests import Request
from starlette.types import Receive, Send
from support.fake_engine import MODEL, FakeEngine, proxy_before

from leyline_proxy.admission.gate import Pace

CROWD = 30
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}


class Heart:
    """Counts the turns of the loop."""

    beats = 0

    def beat(self) -> None:
        """One more turn."""
        self.beats += 1
        self._next = asyncio.get_running_loop().call_soon(self.beat)

    def stop(self) -> None:
        """Count no more."""
        self._next.cancel()


@asynccontextmanager
async def heart() -> AsyncIterator[Heart]:
    """One that beats."""
    beating = Heart()
    beating.beat()
    try:
        yield beating
    finally:
        beating.stop()


class Noting(FakeEngine):
    """Notes in which turn of the loop each request came."""

    def __init__(self, beating: Heart) -> None:
        super().__init__()
        self._heart = beating
        self.turns: list[int] = []

    async def complete(self, request: Request, receive: Receive, send: Send) -> None:
        self.turns.append(self._heart.beats)
        await super().complete(request, receive, send)


async def test_a_crowd_of_requests_leaves_the_loop_its_turns() -> None:
    """Between any two requests that are planned the loop turns: a connection or a question after
    health waits for one of them."""
    async with heart() as beating:
        engine = Noting(beating)
        async with proxy_before(engine, log_level="error") as client:
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json=BODY) for _ in range(CROWD))
            )
    assert [answer.status_code for answer in answers] == [200] * CROWD
    assert len(set(engine.turns)) == CROWD


@pytest.mark.parametrize("leaving", [(), (1,), (1, 2, 3), (8, 9)])
async def test_who_waits_goes_in_the_order_of_coming(leaving: tuple[int, ...]) -> None:
    """The first begins at once, the others a turn each; who has left is passed over, and afterwards
    work begins at once again."""
    pace, begun, turns = Pace(), [], []

    async def work(number: int) -> None:
        if (turn := pace.enter("red")) is not None:
            await turn
        begun.append(number)
        turns.append(beating.beats)

    async with heart() as beating:
        tasks = [asyncio.create_task(work(number)) for number in range(10)]
        await asyncio.sleep(0)
        for number in leaving:
            tasks[number].cancel()
        await asyncio.wait(tasks)
        assert begun == [number for number in range(10) if number not in leaving]
        assert len(set(turns)) == len(turns)
        for _ in range(3):
            await asyncio.sleep(0)
        assert pace.enter("red") is None


async def test_a_crowd_of_one_tenant_is_not_before_another() -> None:
    """A request that comes after many of another tenant waits for one of them."""
    pace, begun = Pace(), []

    async def work(tenant: str) -> None:
        if (turn := pace.enter(tenant)) is not None:
            await turn
        begun.append(tenant)

    await asyncio.gather(*(work(tenant) for tenant in ["red"] * 6 + ["blue"] * 2))
    assert begun == ["red", "red", "blue", "red", "blue", "red", "red", "red"]
