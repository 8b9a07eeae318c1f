"""No outsider can make series."""

from __future__ import annotations

import random
from typing import Any

import httpx
from support.fake_engine import CAPABILITY, MODEL, Answer, FakeEngine, proxy_before, tool_session

CHAT = "/v1/chat/completions"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "BREW"]
KEY = {"authorization": "Bearer red-key-0123456789abcdef"}
STATUSES = [400, 404, 409, 418, 422, 429, 500]


def strange(chance: random.Random) -> str:
    """A name that no metric has seen."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789._:@-"
    return "".join(chance.choices(alphabet, k=chance.randint(4, 24)))


def requests(name: str, method: str, chance: random.Random) -> dict[str, Any]:
    """A request with something of its own wherever a caller can name something."""
    messages = tool_session(1)
    chat = {"model": MODEL, "messages": messages}
    claim = {"session": name, "kind": "soft", "predicate": {"turn": name, "start": 0, "end": 4}}
    headers = {**KEY, "x-leyline-session": name}
    return chance.choice(
        [
            {"method": "POST", "url": CHAT, "json": {**chat, "model": name}, "headers": headers},
            {"method": "POST", "url": CHAT, "json": chat, "headers": headers},
            {"method": "POST", "url": CHAT, "json": {**chat, "user": name}, "headers": KEY},
            {
                "method": "POST",
                "url": CHAT,
                "json": {**chat, "leyline": {"policy": name}},
                "headers": headers,
            },
            {
                "method": "POST",
                "url": CHAT,
                "json": {**chat, "leyline": {"share": name, "edits": [{"message": 2}]}},
                "headers": headers,
            },
            {"method": "POST", "url": CHAT, "json": chat, "headers": {"authorization": name}},
            {"method": "POST", "url": f"/v1/{name}", "json": {"model": name}, "headers": KEY},
            {"method": "POST", "url": "/v1/leyline/claims", "json": claim, "headers": KEY},
            {"method": "GET", "url": f"/v1/leyline/claims/{name}", "headers": KEY},
            {"method": "GET", "url": f"/v1/leyline/sessions/{name}", "headers": KEY},
            {"method": "GET", "url": f"/{name}", "headers": KEY},
            {"method": chance.choice(METHODS), "url": f"/v1/{name}", "headers": KEY},
            {"method": method, "url": CHAT, "headers": KEY},
        ]
    )


async def series(client: httpx.AsyncClient) -> set[str]:
    """Every existing series, without its value."""
    lines = (await client.get("/metrics")).text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


async def test_strange_names_make_no_series() -> None:
    """After as much of everything as there is, hundreds of requests with new models, tenants,
    paths, methods, sessions, policies and claims add nothing."""
    engine, chance = FakeEngine(capability=CAPABILITY), random.Random(8)
    names: set[str] = set()
    async with proxy_before(
        engine, api_keys=["red:red-key-0123456789abcdef"], allow_request_policy=True
    ) as client:

        async def storm(count: int) -> None:
            for _ in range(count):
                engine.answers.clear()
                if chance.random() < 0.3:
                    engine.answers.append(Answer([b"{}"], status=chance.choice(STATUSES)))
                name, method = strange(chance), strange(chance).upper()
                names.update((name, method))
                await client.request(**requests(name, method, chance))

        await storm(250)
        before = await series(client)
        await storm(250)
        after = await series(client)
    # One of the few pairs of route and status may not have come up before.
    assert len(after) <= len(before) * 1.05, sorted(after - before)
    values = {part.split('"')[1] for line in after for part in line.split(",") if '="' in part}
    known = {MODEL, "unknown", "red", "engine", "fake", "none"}
    assert known <= values
    named = {value for value in values if any(name in value for name in names)}
    assert not named


async def test_an_engine_that_lists_models_without_end_is_bounded() -> None:
    """Its first models have series, the others share one, and the overflow is reported."""
    engine = FakeEngine(capability=None)
    engine.models += [f"model-{number}" for number in range(2000)]
    async with proxy_before(engine) as client:
        for number in range(300):
            body = {"model": f"model-{number}", "messages": tool_session(1)}
            assert (await client.post(CHAT, json=body)).status_code == 200
        text = (await client.get("/metrics")).text
    splices = [line for line in text.splitlines() if line.startswith("leyline_engine_splices{")]
    turns = [line for line in text.splitlines() if line.startswith("leyline_turns_total{")]
    assert len(splices) == 257
    counts = [float(line.rpartition(" ")[2]) for line in turns]
    assert sum(counts) == 300
    assert sum(count > 0 for count in counts) <= 257
    assert len(counts) < 257 * 7
    assert 'leyline_label_overflow_total{label="model"}' in text
