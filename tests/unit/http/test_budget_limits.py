"""Budgets over HTTP: what is refused, what is charged, and in which words."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_engine import (
    MODEL,
    Answer,
    FakeEngine,
    chunk,
    proxy_before,
)
from support.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
RED, BLUE = {"authorization": "Bearer kr"}, {"authorization": "Bearer kb"}
KEYS = ["red:kr", "blue:kb"]
MESSAGE = {"role": "user", "content": "Hi."}
TURN = {"model": MODEL, "messages": [MESSAGE], "max_tokens": 8}
PRICES = {"default": {"currency": "USD", "prefilled": 100, "cached": 10, "generated": 1000}}


def daily(tokens: int, **members: Any) -> list[dict[str, Any]]:
    """A budget of tokens per day."""
    return [{"window": "day", "tokens": tokens, **members}]


async def used(client: httpx.AsyncClient, key: dict[str, str] = RED) -> Any:
    """Amounts that a tenant has used, and that it holds."""
    (found,) = (await client.get("/v1/leyline/budgets", headers=key)).json()["budgets"]
    return found["used"], found["reserved"]


async def holds(client: httpx.AsyncClient, something: bool) -> bool:
    """True if the tenant holds something, or nothing."""
    return bool((await used(client))[1]) is something


async def test_a_turn_is_charged_by_its_receipt(engine: FakeEngine) -> None:
    """Prompt and answer count, reused tokens too; nothing stays held."""
    async with proxy_before(engine, api_keys=KEYS, budgets=daily(1000)) as client:
        answer = await client.post(CHAT, json=TURN, headers=RED)
        assert answer.status_code == 200
        assert await used(client) == (12, 0)
        assert await used(client, BLUE) == (0, 0)
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000


async def test_money_prices_prefilled_reused_and_generated_apart(engine: FakeEngine) -> None:
    """6 tokens prefilled, 4 cached and 2 generated cost their own prices."""
    budgets = [{"window": "month", "money": 1.0}]
    async with proxy_before(engine, api_keys=KEYS, budgets=budgets, prices=PRICES) as client:
        await client.post(CHAT, json=TURN, headers=RED)
        found = (await client.get("/v1/leyline/budgets", headers=RED)).json()["budgets"][0]
    assert (found["unit"], found["currency"]) == ("money", "USD")
    assert found["used"] == pytest.approx((6 * 100 + 4 * 10 + 2 * 1000) / 1_000_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, TURN),
        (MESSAGES, TURN),
        (RESPONSES, {"model": MODEL, "input": "Hi.", "max_output_tokens": 8}),
        (COMPLETIONS, {"model": MODEL, "prompt": "Hi.", "max_tokens": 8}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_used_up_budget_refuses_in_the_apis_own_shape(
    engine: FakeEngine, path: str, body: dict[str, Any], stream: bool
) -> None:
    """429 with the budget's name, the headers of both APIs, and no second request at the engine."""
    limits = {"red": {"budgets": daily(30)}}
    async with proxy_before(engine, api_keys=KEYS, tenants=limits) as client:
        for _ in range(8):
            before = len(engine.bodies)
            answer = await client.post(path, json={**body, "stream": stream}, headers=RED)
        assert len(engine.bodies) == before
        other = await client.post(path, json={**body, "stream": stream}, headers=BLUE)
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    code = error if "code" in error else answer.json()["leyline"]
    assert code["code"] == "budget_exceeded"
    assert "30 tokens per day" in error["message"]
    assert code["budget"]["window"] == "day"
    assert answer.headers["x-ratelimit-limit-tokens"] == "30"
    assert answer.headers["anthropic-ratelimit-tokens-limit"] == "30"
    assert answer.headers["anthropic-ratelimit-tokens-reset"] == code["budget"]["resets_at"]
    assert 0 < int(answer.headers["retry-after"]) <= 86_400
    assert other.status_code == 200
    assert "x-ratelimit-limit-tokens" not in other.headers


async def test_a_stream_that_breaks_is_charged_for_what_came(engine: FakeEngine) -> None:
    """The prompt, and a token for each event that had some: two more for "abc" than for "a"."""
    opening = chunk({"role": "assistant", "content": ""})
    charges = []
    async with proxy_before(engine, api_keys=KEYS, budgets=daily(1000)) as client:
        for text in ("a", "abc"):
            parts = [opening, *(chunk({"content": letter}) for letter in text)]
            engine.answers = [Answer(parts, content_type="text/event-stream", breaks=True)]
            before, _ = await used(client)
            await client.post(CHAT, json={**TURN, "stream": True}, headers=RED)
            after, held = await used(client)
            assert held == 0
            charges.append(after - before)
        metrics = (await client.get("/metrics")).text
    assert charges[0] > 1
    assert charges[1] == charges[0] + 2
    assert 'leyline_budget_estimates_total{reason="broken"} 2.0' in metrics


async def test_a_used_up_budget_refuses_before_the_body_is_read(engine: FakeEngine) -> None:
    """A request that isn't even JSON gets 429, not 400."""
    async with proxy_before(engine, api_keys=KEYS, budgets=daily(12)) as client:
        await client.post(CHAT, json={**TURN, "max_tokens": 1}, headers=RED)
        refused = await client.post(CHAT, content=b"no JSON", headers=RED)
        other = await client.post(CHAT, content=b"no JSON", headers=BLUE)
    assert (refused.status_code, other.status_code) == (429, 400)


async def test_a_client_that_leaves_is_charged(engine: FakeEngine) -> None:
    """A whole answer whose client has gone costs the prompt and the held answer."""
    engine.answers = [Answer(hangs=True)]
    async with proxy_before(engine, api_keys=KEYS, budgets=daily(1000)) as client:
        with pytest.raises(httpx.TimeoutException):
            await client.post(CHAT, json=TURN, headers=RED, timeout=0.3)
        await until(lambda: holds(client, False))
        assert (await used(client))[0] > 8


async def test_an_engine_that_fails_charges_nobody(engine: FakeEngine) -> None:
    """A refusal and a failure before the first byte leave the budget as it was."""
    engine.answers = [Answer([b"{}"], status=500), Answer(breaks=True), Answer([b"{}"], status=400)]
    async with proxy_before(engine, api_keys=KEYS, budgets=daily(1000)) as client:
        for _ in range(3):
            answer = await client.post(CHAT, json=TURN, headers=RED)
            assert answer.status_code >= 400
        assert await used(client) == (0, 0)


async def test_requests_under_way_hold_room(engine: FakeEngine) -> None:
    """A second request that might not fit is told to wait for the first, not for tomorrow."""
    engine.answers = [Answer(hangs=True)]
    async with proxy_before(engine, api_keys=KEYS, budgets=daily(40)) as client:
        first = client.build_request("POST", CHAT, json={**TURN, "max_tokens": 30}, headers=RED)
        pending = asyncio.ensure_future(client.send(first))
        await until(lambda: holds(client, True))
        second = await client.post(CHAT, json=TURN, headers=RED)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    assert second.status_code == 429
    assert int(second.headers["retry-after"]) < 60
    assert "x-should-retry" not in second.headers
    assert "try again when one has ended" in second.json()["error"]["message"]
