"""Records that don't come: answers don't wait for them, and engines serve on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from support.clock import Clock
from support.fake_engine import (
    CAPABILITY,
    DONE,
    MODEL,
    RECEIPTS,
    Answer,
    FakeEngine,
    chunk,
    proxy_before,
)
from support.metrics_page import samples

from leyline_engine.contract import Receipt, TurnRecord
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.errors import UpstreamUnreachableError
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.turns.accounting import NO_RECEIPT
from leyline_proxy.upstream.breaker import Breaker, BreakerState
from leyline_proxy.upstream.records import Came, RecordRoute
from leyline_proxy.upstream.tokens import tokenize
from leyline_proxy.wiring.upstreams import build_pool

CHAT = "/v1/chat/completions"
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "key=7391"}]}
HANGS = Answer(hangs=True)
BUDGET_S = 0.1
CROWD = 30
REDACT = "redact:pattern='key=[0-9]+',replacement='[gone]'"


async def came(client: httpx.AsyncClient) -> dict[str, float]:
    """Receipts by how they came."""
    found = await samples(client, "leyline_receipts_total")
    return {sample.labels["came"]: sample.value for sample in found}


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_answer_waits_for_its_record_beyond_the_budget(streamed: bool) -> None:
    """It ends without a receipt, says so, and is counted."""
    engine = FakeEngine()
    engine.scripted[RECEIPTS] = HANGS
    async with proxy_before(engine, receipt_timeout_s=BUDGET_S) as client:
        began = time.monotonic()
        answer = await client.post(CHAT, json={**REQUEST, "stream": streamed})
        took = time.monotonic() - began
        text = (await client.get("/metrics")).text
        counted = await came(client)
    assert answer.status_code == 200 and NO_RECEIPT in answer.text
    assert not streamed or answer.content.endswith(DONE)
    assert BUDGET_S <= took < BUDGET_S + 1
    assert f'leyline_receipts_missing_total{{model="{MODEL}"}} 1.0' in text
    assert counted == {"late": 1}


async def test_a_turn_without_a_record_is_a_loss_of_account() -> None:
    """Text that the engine read in it has no names here, so the next forget covers everything."""
    engine = FakeEngine()
    engine.scripted[RECEIPTS] = HANGS
    told: list[Any] = []
    later = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Go on."}]
    async with proxy_before(engine, receipt_timeout_s=BUDGET_S) as client:
        for body in (REQUEST, {**REQUEST, "leyline": {"policy": REDACT}}):
            messages = [*REQUEST["messages"], *(later if "leyline" in body else ())]
            headers = {"x-leyline-session": "s"}
            await client.post(CHAT, json={**body, "messages": messages}, headers=headers)
            (action,) = engine.sent["custom_params"]["kv_hints"]["actions"]
            told.append(action["payload"]["forget"])
    assert told == [[], ["*"]]


async def test_the_second_look_at_an_engine_has_what_is_left_of_the_budget() -> None:
    """An engine that knows no source may be another run; to find that out holds no answer long."""
    engine = FakeEngine()
    engine.receipt = lambda message: Receipt(
        message_id=message,
        outcome="reprefilled",
        reason="missing_source",  # type: ignore[arg-type]
    )
    async with proxy_before(engine, receipt_timeout_s=BUDGET_S) as client:
        engine.scripted["/v1/models"] = HANGS
        began = time.monotonic()
        answer = await client.post(CHAT, json=REQUEST)
    assert answer.json()["leyline"]["reason"] == "missing_source"
    assert time.monotonic() - began < BUDGET_S + 1


def test_an_engine_whose_records_hang_serves_on() -> None:
    """Of two crowds of requests the first waits for one budget and the second for none, and the
    engine is taken for neither dead nor busy."""
    engine = FakeEngine()
    engine.scripted[RECEIPTS] = HANGS
    with ExitStack() as stack:
        origin = stack.enter_context(serving(engine))
        app = create_app(Settings(upstream=origin, log_level="error", handshake_interval_s=0.1))
        proxy = stack.enter_context(serving(app))
        (replica,) = app.state.services.pool

        async def load() -> list[int]:
            async with httpx.AsyncClient(base_url=proxy, timeout=30) as client:
                answers = [
                    answer.status_code
                    for _ in range(2)
                    for answer in await asyncio.gather(
                        *(client.post(CHAT, json=REQUEST) for _ in range(CROWD))
                    )
                ]
                up = (await client.get("/readyz")).status_code
                return [*answers, up]

        began = time.monotonic()
        assert asyncio.run(load()) == [200] * (2 * CROWD + 1)
        assert time.monotonic() - began < 8, "a wait of ten seconds for each of two crowds is gone"
        assert replica.status.up and replica.breaker.state is BreakerState.CLOSED
        assert replica.records.given_up
        assert len(engine.asked) <= CROWD + 2, "the second crowd asks for next to nothing"


async def test_handshakes_have_connections_of_their_own() -> None:
    """Small questions that hang, however many, don't make an engine look dead; and a request that
    waits for a connection in vain isn't sent to a setting that has nothing to do with it."""
    engine = FakeEngine()
    engine.scripted["/tokenize"] = HANGS
    with serving(engine) as origin:
        pool = build_pool(Settings(upstream=origin), None, Metrics())
        client = pool.first.client
        hanging = [asyncio.create_task(tokenize(client, {})) for _ in range(80)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(2):
            status = await pool.first.handshake.refresh()
            asking = pool.first.records
            await asking.ask("m", (0.0,), asking.deadline(), due=False)
        client._small_timeout_s = 0.05
        with pytest.raises(UpstreamUnreachableError) as busy:
            await tokenize(client, {})
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        await pool.aclose()
    assert status.up and engine.asked == ["m"]
    assert busy.value.status == 503 and "max_upstream_connections" not in busy.value.message


class Scripted:
    """In a client's place: what records there are."""

    def __init__(self) -> None:
        self.found: list[TurnRecord | Exception | None] = []
        self.asked = 0

    async def record(self, _: str) -> TurnRecord | None:
        self.asked += 1
        found = self.found.pop(0) if self.found else None
        if isinstance(found, Exception):
            raise found
        return found


@asynccontextmanager
async def route() -> AsyncIterator[tuple[RecordRoute, Scripted, Clock, list[Came]]]:
    client, clock, counted = Scripted(), Clock(), list[Came]()
    breaker = Breaker(threshold=3, pause_s=2.0, clock=clock)
    yield (
        RecordRoute(client, breaker, budget_s=BUDGET_S, count=counted.append),  # type: ignore[arg-type]
        client,
        clock,
        counted,
    )


WHOLE = TurnRecord(receipt=Receipt(message_id="m"), finished=True)
PART = TurnRecord(receipt=Receipt(message_id="m"))


async def test_after_failures_records_are_asked_for_no_more_until_one_comes() -> None:
    """Three turns in a row open the circuit, a trial that succeeds closes it."""
    async with route() as (records, client, clock, counted):
        client.found = [UpstreamUnreachableError("gone")] * 2

        async def ask() -> TurnRecord | None:
            return await records.ask("m", (0.0, 0.0), records.deadline(), due=True)

        assert [await ask() for _ in range(4)] == [None] * 4
        assert client.asked == 4, "the third finds none twice, the fourth isn't put"
        clock.now += 2.0
        client.found = [PART, WHOLE]
        assert await ask() == WHOLE
        assert not records.given_up
    assert counted == [Came.LATE, Came.LATE, Came.ABSENT, Came.NOT_ASKED, Came.ASKED]


async def test_a_record_that_isnt_complete_in_time_is_better_than_none() -> None:
    """The engine answers, so nothing of it counts as a failure of its records."""
    async with route() as (records, client, _, counted):
        client.found = [PART] * 10
        for _ in range(4):
            found = await records.ask("m", (0.0, 2 * BUDGET_S), records.deadline(), due=True)
            assert found == PART
        assert client.asked == 4 and not records.given_up
    assert counted == [Came.ABSENT] * 4


async def test_an_engine_without_a_record_of_what_it_refused_isnt_given_up() -> None:
    """It refuses for many reasons, and claims are but one of them."""
    async with route() as (records, client, _, counted):
        for _ in range(5):
            assert await records.ask("m", (0.0,), records.deadline(), due=False) is None
        assert client.asked == 5 and not records.given_up
    assert counted == []


async def test_who_leaves_while_asking_says_nothing_of_the_engine() -> None:
    """A question that is given up leaves room for the next trial."""
    async with route() as (records, client, clock, _):
        client.found = [UpstreamUnreachableError("gone")] * 3
        for _ in range(3):
            await records.ask("m", (0.0,), records.deadline(), due=True)
        clock.now += 2.0
        trial = asyncio.create_task(records.ask("m", (60.0,), records.deadline() + 60, due=True))
        await asyncio.sleep(0)
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        client.found = [WHOLE]
        assert await records.ask("m", (0.0,), records.deadline(), due=True) == WHOLE


async def test_a_stream_of_errors_asks_for_one_record() -> None:
    """The turn has one budget, however many events report an error."""
    actions = ("leyline.edit@1.0", "leyline.claim@1.0")
    engine = FakeEngine(capability=msgspec.structs.replace(CAPABILITY, actions=actions))
    engine.scripted[RECEIPTS] = HANGS
    error = b'data: {"error": {"message": "no", "code": 500}}\n\n'
    opening = chunk({"role": "assistant", "content": "Hel"})
    engine.answers = [Answer([opening, *[error] * 5], content_type="text/event-stream")]
    async with proxy_before(engine, receipt_timeout_s=BUDGET_S) as client:
        began = time.monotonic()
        answer = await client.post(CHAT, json={**REQUEST, "stream": True})
        took = time.monotonic() - began
    assert answer.text.count('"error"') == 5
    assert len(engine.asked) == 1 and took < BUDGET_S + 1
