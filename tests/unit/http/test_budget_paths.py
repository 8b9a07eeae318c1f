"""Budgets on every path that an engine computes for: completions, other APIs, hidden turns."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.fake_engine import (
    DONE,
    LONG,
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chunk,
    proxy_before,
    tool_session,
)
from support.sockets import socket_proxy
from support.waiting import until

from leyline_engine.contract import Receipt, TokenCounts
from leyline_policies.stubs import address_of
from leyline_proxy.http.admin import create_admin_app
from leyline_proxy.http.app import create_app
from leyline_proxy.model.asides import RECALL_TOOL
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RED, BLUE = {"authorization": "Bearer kr"}, {"authorization": "Bearer kb"}
KEYS = ["red:kr", "blue:kb"]
MESSAGE = {"role": "user", "content": "Hi."}
TURN = {"model": MODEL, "messages": [MESSAGE], "max_tokens": 8}
BARE = {"model": MODEL, "prompt": "x" * 40, "max_tokens": 8}
PRICE = {"currency": "USD", "prefilled": 100, "cached": 10, "generated": 1000}
MONEY = [{"window": "month", "money": 1.0}]
SSE = "text/event-stream"
HERE = "http://localhost"


def red(tokens: int, **settings: Any) -> dict[str, Any]:
    """Settings with a budget of tokens for one of two tenants."""
    own = {"red": {"budgets": [{"window": "day", "tokens": tokens}]}}
    return {"api_keys": KEYS, "tenants": own, "log_level": "error", **settings}


async def used(client: httpx.AsyncClient) -> tuple[float, float]:
    """Amounts that red has used, and that it holds."""
    (found,) = (await client.get("/v1/leyline/budgets", headers=RED)).json()["budgets"]
    return found["used"], found["reserved"]


def recalling() -> Answer:
    """An answer that only asks for an evicted text."""
    arguments = json.dumps({"address": address_of(LONG)})
    call = {"id": "r0", "type": "function"}
    call["function"] = {"name": RECALL_TOOL, "arguments": arguments}  # type: ignore[assignment]
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return chat_json(choices=[choice])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bare_completion_is_charged_by_its_usage(engine: FakeEngine, stream: bool) -> None:
    """Prompt and answer as the engine counts them, cached tokens included."""
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    if stream:
        parts = [chunk({"content": "a"}), chunk({}, "stop"), chunk({}, usage=usage), DONE]
        engine.answers = [Answer(parts, content_type=SSE)]
    async with proxy_before(engine, **red(1000)) as client:
        answer = await client.post(COMPLETIONS, json={**BARE, "stream": stream}, headers=RED)
        assert answer.status_code == 200
        assert await used(client) == (12, 0)
        assert 'reason="no_usage"} 0.0' in (await client.get("/metrics")).text


async def test_a_bare_completions_cached_tokens_have_their_price(engine: FakeEngine) -> None:
    """Of 10 prompt tokens 4 were cached."""
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    usage["prompt_tokens_details"] = {"cached_tokens": 4}  # type: ignore[assignment]
    engine.answers = [chat_json(usage=usage)]
    own = {"red": {"budgets": MONEY}}
    prices = {"default": PRICE}
    async with proxy_before(engine, api_keys=KEYS, tenants=own, prices=prices) as client:
        await client.post(COMPLETIONS, json=BARE, headers=RED)
        assert await used(client) == pytest.approx(((6 * 100 + 4 * 10 + 2 * 1000) / 10**6, 0))


async def test_a_bare_completion_without_usage_is_charged_an_estimate(engine: FakeEngine) -> None:
    """Four characters are a token, and an event with text is one, too."""
    parts = [chunk({"content": "a"}), chunk({"content": "b"}), DONE]
    engine.answers = [Answer(parts, content_type=SSE), chat_json(usage=None), Answer(status=500)]
    async with proxy_before(engine, **red(1000)) as client:
        await client.post(COMPLETIONS, json={**BARE, "stream": True}, headers=RED)
        assert await used(client) == (10 + 2, 0)
        await client.post(COMPLETIONS, json=BARE, headers=RED)
        assert await used(client) == (12 + 10 + 8, 0)
        await client.post(COMPLETIONS, json=BARE, headers=RED)
        assert await used(client) == (30, 0)


async def test_a_bare_completion_whose_client_leaves_is_charged(engine: FakeEngine) -> None:
    """A whole answer costs what was held, a stream what came."""
    streamed = Answer([chunk({"content": "a"})], content_type=SSE, hangs=True)
    engine.answers = [Answer(hangs=True), streamed]
    async with proxy_before(engine, **red(1000)) as client:
        for stream, expected in ((False, 18), (True, 18 + 11)):
            with pytest.raises(httpx.TimeoutException):
                body = {**BARE, "stream": stream}
                await client.post(COMPLETIONS, json=body, headers=RED, timeout=0.3)

            async def charged(expected: int = expected) -> bool:
                return await used(client) == (expected, 0)

            await until(charged)


async def test_several_answers_are_held_each(engine: FakeEngine) -> None:
    """``n`` answers reserve n times the limit of one."""
    async with proxy_before(engine, **red(60)) as client:
        assert (await client.post(COMPLETIONS, json={**BARE, "n": 6}, headers=RED)).is_success
        many = await client.post(COMPLETIONS, json={**BARE, "n": 5}, headers=RED)
        answers = await client.post(CHAT, json={**TURN, "n": 7}, headers=RED)
    assert many.status_code == answers.status_code == 429
    async with proxy_before(engine, **red(10**15)) as client:
        beyond = await client.post(CHAT, json={**TURN, "n": 10**30}, headers=RED)
        state = await client.get("/v1/leyline/budgets", headers=RED)
    assert beyond.is_success
    assert state.json()["budgets"][0]["reserved"] == 0


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 200}),
        (CHAT, {"max_tokens": 200, "max_completion_tokens": 1}),
        (COMPLETIONS, {"max_tokens": 200, "max_completion_tokens": 1}),
        (COMPLETIONS, {"max_tokens": 2, "prompt": ["a"] * 100}),
        (COMPLETIONS, {"max_tokens": 2, "prompt": [[1], [2]] * 50}),
        (COMPLETIONS, {"max_tokens": 2, "best_of": 100}),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 200.0}),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": "200"}),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": ["odd"]}),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": -1}),
        (CHAT, {"max_tokens": 8, "n": "50"}),
        (COMPLETIONS, {"max_tokens": 8, "best_of": 50.0}),
    ],
)
async def test_no_limit_hides_what_an_engine_may_generate(
    engine: FakeEngine, path: str, members: dict[str, object]
) -> None:
    """The largest reading of a request is held, so it is refused where that doesn't fit."""
    base = {**TURN} if path == CHAT else {**BARE}
    async with proxy_before(engine, **red(150)) as client:
        base.pop("max_tokens", None)
        refused = await client.post(path, json={**base, **members}, headers=RED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
    assert not engine.bodies


async def test_an_answer_without_a_limit_holds_the_setting(engine: FakeEngine) -> None:
    """``budget_answer_tokens`` is held, and also bounds a limit that is larger."""
    async with proxy_before(engine, **red(100, budget_answer_tokens=50)) as client:
        for body in ({**TURN, "max_tokens": None}, {**TURN, "max_tokens": 10**6}):
            assert (await client.post(CHAT, json=body, headers=RED)).is_success
    async with proxy_before(engine, **red(100, budget_answer_tokens=101)) as client:
        refused = await client.post(CHAT, json={**TURN, "max_tokens": None}, headers=RED)
    assert refused.status_code == 429
    assert "is smaller than this request" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"


async def test_other_paths_are_charged_by_the_size_of_their_bodies(engine: FakeEngine) -> None:
    """Four bytes of JSON are a token; lists and refusals cost nothing."""
    engine.scripted = {EMBEDDINGS: Answer([b"{}"])}
    body = json.dumps({"model": MODEL, "input": "y" * 100}).encode()
    tokens = -(-len(body) // 4)
    async with proxy_before(engine, **red(tokens + 5)) as client:
        assert (await client.post(EMBEDDINGS, content=body, headers=RED)).is_success
        assert await used(client) == (tokens, 0)
        refused = await client.post(EMBEDDINGS, content=body, headers=RED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        assert (await client.get(f"/v1/models/{MODEL}", headers=RED)).status_code != 429
        engine.scripted = {EMBEDDINGS: Answer([b"{}"], status=400)}
        await client.post(EMBEDDINGS, content=b'{"model": "x"}', headers=RED)
        assert await used(client) == (tokens, 0)


async def test_counting_tokens_costs_nothing(engine: FakeEngine) -> None:
    """A tenant without room may still count, and look at its budgets."""
    async with proxy_before(engine, **red(12)) as client:
        await client.post(CHAT, json={**TURN, "max_tokens": 1}, headers=RED)
        assert (await client.post(CHAT, json=TURN, headers=RED)).status_code == 429
        counted = await client.post("/v1/leyline/count_tokens", json=TURN, headers=RED)
    assert counted.status_code != 429


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
async def test_a_model_without_a_price_is_refused_by_name(engine: FakeEngine, path: str) -> None:
    """Only for tenants with money, and before anything is sent; ``default`` prices all."""
    engine.scripted = {EMBEDDINGS: Answer([b"{}"])}
    settings = {"api_keys": KEYS, "tenants": {"red": {"budgets": MONEY}}, "log_level": "error"}
    body = {**TURN, **BARE, "input": "Hi."}
    async with proxy_before(engine, prices={"other": PRICE}, **settings) as client:
        refused = await client.post(path, json=body, headers=RED)
        assert not engine.bodies
        assert (await client.post(path, json=body, headers=BLUE)).is_success
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, "model_without_price")
    assert error["param"] == "model"
    async with proxy_before(engine, prices={"default": PRICE}, **settings) as client:
        assert (await client.post(path, json=body, headers=RED)).is_success
        assert (await used(client))[0] > 0


async def test_the_turns_of_a_recall_belong_to_a_request_that_has_begun(
    engine: FakeEngine,
) -> None:
    """The second turn is sent though the budget has no room for it, and both are charged."""
    engine.answers = [recalling(), chat_json()]
    policy = "truncate_older_than:n=1,max_chars=80,recallable=true"
    body = {**TURN, "messages": tool_session(2), "max_tokens": 4}
    async with proxy_before(engine, **red(10**6), recall="on", policy=policy) as client:
        await client.post(CHAT, json=body, headers=RED)
        whole, sent = await used(client), len(engine.bodies)
    assert (sent, whole) == (2, (24, 0))
    engine.answers, engine.bodies = [recalling(), chat_json()], []
    async with proxy_before(engine, **red(1500), recall="on", policy=policy) as client:
        engine.receipt = lambda message_id: Receipt(
            message_id=message_id, tokens=TokenCounts(prompt=10_000, prefilled=10_000)
        )
        answer = await client.post(CHAT, json=body, headers=RED)
        assert answer.status_code == 200, answer.text
        assert len(engine.bodies) == 2
        assert (await used(client))[1] == 0
        assert (await client.post(CHAT, json=body, headers=RED)).status_code == 429


async def test_a_compaction_reserves_room_of_its_own(engine: FakeEngine) -> None:
    """Without room, the summary isn't asked for, and the error is the client's."""
    body = {"model": MODEL, "input": [{"role": "user", "content": "List it. " * 30}]}
    async with proxy_before(engine, **red(10)) as client:
        refused = await client.post("/v1/responses/compact", json=body, headers=RED)
        assert not engine.bodies
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
    async with proxy_before(engine, **red(10_000)) as client:
        assert (await client.post("/v1/responses/compact", json=body, headers=RED)).is_success
        assert await used(client) == (12, 0)


async def test_a_socket_gets_the_refusal_as_an_event(engine: FakeEngine) -> None:
    """The connection stays open, and other tenants' connections are served."""
    with socket_proxy(engine, **red(20)) as proxy:
        async with proxy.socket("kr") as socket, proxy.socket("kb") as other:
            await socket.create("Hi.", max_output_tokens=1)
            await socket.events()
            await socket.create("Hi.", max_output_tokens=8)
            (event,) = await socket.events()
            await other.create("Hi.", max_output_tokens=8)
            served = await other.events()
    assert (event["type"], event["status"]) == ("error", 429)
    assert event["error"]["code"] == "budget_exceeded"
    assert served[-1]["type"] == "response.completed"


async def test_operators_see_all_budgets_and_tenants_their_own(engine: FakeEngine) -> None:
    """No tenant's figures are in another one's answers."""
    key = "admin-key-0123456789"
    own = {name: {"budgets": [{"window": "day", "tokens": 500}]} for name in ("red", "blue")}
    given = Settings(admin_port=0, admin_key=key, api_keys=KEYS, tenants=own, log_level="error")
    app = create_app(given, engine_app=engine)
    admin = create_admin_app(app.state.services)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(
            transport=ASGIStreamTransport(app), base_url="http://localhost"
        ) as client,
        httpx.AsyncClient(
            transport=ASGIStreamTransport(admin), base_url="http://localhost"
        ) as operator,
    ):
        await client.post(CHAT, json=TURN, headers=RED)
        theirs = await client.get("/v1/leyline/budgets", headers=BLUE)
        barred = await operator.get("/admin/budgets", headers=RED)
        seen = await operator.get("/admin/budgets", headers={"authorization": f"Bearer {key}"})
        nobody = await client.get("/v1/leyline/budgets")
    assert theirs.json()["budgets"][0]["used"] == 0
    assert (barred.status_code, nobody.status_code) == (401, 401)
    document = seen.json()
    counts = {each["name"]: each["budgets"][0]["used"] for each in document["tenants"]}
    assert counts == {"red": 12, "blue": 0}
    assert (document["store"], document["problem"], document["owed"]) == ("memory", None, 0)


async def test_the_gauge_shows_the_used_share(engine: FakeEngine) -> None:
    """By tenant, window and unit; refusals are counted with the tenant's other limits."""
    async with proxy_before(engine, **red(24)) as client:
        for _ in range(3):
            await client.post(CHAT, json={**TURN, "max_tokens": 2}, headers=RED)
        metrics = (await client.get("/metrics")).text
    share = next(line for line in metrics.splitlines() if line.startswith("leyline_budget_used"))
    assert share.startswith('leyline_budget_used_ratio{tenant="red",unit="tokens",window="day"}')
    assert 0.5 <= float(share.split()[-1]) <= 1
    assert 'leyline_limited_requests_total{limit="budget_exceeded",tenant="red"}' in metrics
