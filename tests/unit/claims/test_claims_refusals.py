"""Requests that don't fit beside hard claims, and the answers that their callers get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.claims_engine import ClaimsEngine
from support.fake_engine import MODEL, proxy_before
from support.metrics_page import metric
from support.sse import sse

CLAIMS = "/v1/leyline/claims"
KEYS = {"api_keys": ("red:r", "blue:b")}
RED, BLUE = {"authorization": "Bearer r"}, {"authorization": "Bearer b"}
CODE = "refused_by_claim"


@asynccontextmanager
async def claimed(pool: int = 400, **terms: Any) -> AsyncIterator[Any]:
    """A proxy with a tenant red whose hard claim takes a part of the pool, and its engine."""
    engine = ClaimsEngine(pool=pool, share=1.0, engine_share=1.0)
    async with proxy_before(engine, claims_interval_s=60, **KEYS) as client:
        assert (await chat(client, RED, "x" * 200)).status_code == 200
        body = {"session": "s", "id": "plan", "kind": "hard", "predicate": {}, **terms}
        made = await client.post(CLAIMS, json=body, headers=RED)
        assert made.status_code == 201, made.text
        yield client, engine


async def chat(
    client: httpx.AsyncClient, who: dict[str, str], text: str, **members: Any
) -> httpx.Response:
    """One request of a tenant."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **members}
    headers = {"x-leyline-session": "s", **who}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize(
    ("stream", "by_event"), [(False, False), (True, False), (True, True)], ids=str
)
async def test_the_owner_is_told_which_claim_is_in_the_way(stream: bool, by_event: bool) -> None:
    """A 503 by its own code, with the ids, when to retry, and the headers of every answer, also
    where the engine opens a stream to say so."""
    async with claimed(ttl_s=90) as (client, engine):
        engine.breaks_off = 0 if by_event else None
        engine.pass_time(0.5)
        answer = await chat(client, RED, "y" * 300, stream=stream)
        counted = await metric(client, "leyline_turns_total", CODE, 'tenant="red"')
        refusals = await metric(client, "leyline_claim_refusals_total", 'tenant="red"')
        status = await metric(client, "leyline_requests_total", 'status="503"')
    error = answer.json()["error"]
    assert answer.status_code == 503
    assert (error["code"], error["type"], error["param"]) == (CODE, "server_error", None)
    assert (error["claims"], error["other_claims"]) == (["plan"], 0)
    assert "plan" in error["message"]
    assert answer.headers["retry-after"] == "90"
    assert answer.headers["x-leyline-session"] == "s"
    assert "x-leyline-outcome" in answer.headers
    assert (counted, refusals, status) == (1, 1, 1)


async def test_others_are_told_a_number() -> None:
    """They learn neither the id nor the size of another tenant's claim."""
    async with claimed(id="secret-plan") as (client, _):
        answer = await chat(client, BLUE, "y" * 300)
    error = answer.json()["error"]
    assert (error["claims"], error["other_claims"]) == ([], 1)
    assert "secret-plan" not in answer.text
    assert "retry-after" not in answer.headers, "only a release helps"


async def test_a_refused_turn_is_no_source_and_a_retry_goes_through() -> None:
    """Once the claim has expired, the same request runs as if it had never been refused."""
    async with claimed(ttl_s=5) as (client, engine):
        refused = await chat(client, RED, "y" * 300)
        during = (await client.get("/v1/leyline/sessions/s", headers=RED)).json()
        engine.pass_time(5)
        served = await chat(client, RED, "y" * 300)
        after = (await client.get("/v1/leyline/sessions/s", headers=RED)).json()
    assert (refused.status_code, served.status_code) == (503, 200)
    assert len(during["retained"]) == len(during["history"]) == 1
    assert len(after["retained"]) == 2


async def test_a_claim_can_be_released_while_refused_requests_retry() -> None:
    """The next retry runs; the one before said that it can't."""
    async with claimed() as (client, _):
        refused = [(await chat(client, BLUE, "y" * 300)).status_code for _ in range(3)]
        await client.delete(f"{CLAIMS}/plan", headers=RED)
        served = await chat(client, BLUE, "y" * 300)
    assert (refused, served.status_code) == ([503] * 3, 200)


async def test_a_stream_that_outgrows_its_room_ends_with_the_named_error() -> None:
    """The text so far stays; the error has the same code, and the turn isn't retained."""
    async with claimed(ttl_s=90) as (client, engine):
        engine.breaks_off = 1
        answer = await chat(client, RED, "y" * 300, stream=True)
        status = await metric(client, "leyline_requests_total", 'status="503"')
        counted = await metric(client, "leyline_turns_total", CODE)
        session = (await client.get("/v1/leyline/sessions/s", headers=RED)).json()
    first, last = sse(answer.text)
    assert answer.status_code == 200
    assert first["choices"][0]["delta"]["content"] == "A"
    assert (last["error"]["code"], last["error"]["claims"]) == (CODE, ["plan"])
    assert (status, counted, len(session["retained"])) == (1, 1, 1)


async def test_other_errors_of_the_engine_keep_their_words() -> None:
    """A 503 without a refusal in the record is passed on as it is."""
    async with claimed() as (client, engine):
        engine.forgets_records = True
        answer = await chat(client, RED, "y" * 300)
    assert (answer.status_code, answer.json()) == (
        503,
        {"error": {"message": "no room", "code": 503}},
    )
