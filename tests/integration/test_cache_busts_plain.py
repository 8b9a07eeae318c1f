"""Engines that report ``cached_tokens`` and nothing else are accounted for, too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_engine import MODEL, FakeEngine, chat_json, proxy_before, tool_session

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

CHAT = "/v1/chat/completions"
SESSION = {"x-leyline-session": "plain"}
PER_TURN = 400
LIST_TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


class CountingEngine(FakeEngine):
    """Reports of each request how long its prompt was and how much of it was cached."""

    def __init__(self) -> None:
        super().__init__(capability=None)

    def will_tell(self, prompt: int, cached: int) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7}
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        self.answers.append(chat_json(usage={**usage, **details}))


async def told(client: httpx.AsyncClient, name: str, label: str) -> dict[str, float]:
    """Values of a counter by one of its labels, where they aren't 0."""
    text = (await client.get("/metrics")).text
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.value
    }


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **members: Any) -> None:
    body = {"model": MODEL, "messages": messages, **members}
    answer = await client.post(CHAT, json=body, headers=SESSION)
    assert answer.status_code == 200, answer.text


@asynccontextmanager
async def after_turns(engine: CountingEngine, turns: int) -> AsyncIterator[httpx.AsyncClient]:
    """A proxy whose session has had so many turns, each cached but for what is new."""
    async with proxy_before(engine, edit_timing="now") as client:
        for turn in range(1, turns + 1):
            engine.will_tell(PER_TURN * turn, max(0, PER_TURN * (turn - 1)))
            await ask(client, tool_session(turn))
        yield client


async def test_a_session_that_grows_loses_nothing() -> None:
    """Nothing is lost while each turn finds the prompt before it, or all but a page of it."""
    engine = CountingEngine()
    async with after_turns(engine, 4) as client:
        engine.will_tell(2000, 1600 - 48)
        await ask(client, tool_session(5))
        assert await told(client, "leyline_cache_bust_tokens_total", "cause") == {}
        assert await told(client, "leyline_cache_discrepancy_tokens_total", "direction") == {}
        completed = await told(client, "leyline_completion_tokens_total", "model")
        assert completed == {MODEL: 35.0}
        sources = await told(client, "leyline_upstream_prompt_tokens_total", "source")
        assert sources.get("spliced", 0) == 0
        assert sources["cached"] + sources["prefilled"] == PER_TURN * (1 + 2 + 3 + 4) + 2000


async def test_what_was_evicted_is_counted_exactly() -> None:
    """The last prompt was there, and less of it is cached: lost to the engine, and missing."""
    engine = CountingEngine()
    async with after_turns(engine, 4) as client:
        engine.will_tell(2000, 100)
        await ask(client, tool_session(5))
        lost = await told(client, "leyline_cache_bust_tokens_total", "cause")
        assert lost == {"engine": 1500.0}
        missing = await told(client, "leyline_cache_discrepancy_tokens_total", "direction")
        assert missing == {"lost": 1500.0}


@pytest.mark.parametrize("cause", ["undeclared", "policy", "declared", "tools"])
async def test_edits_are_counted_under_their_cause(cause: str) -> None:
    """Text after an edit is lost to it, by the length of the messages."""
    engine = CountingEngine()
    messages = tool_session(9)
    options: dict[str, Any] = {
        "undeclared": {},
        "policy": {"leyline": {"policy": "truncate_older_than:n=7,max_chars=80"}},
        "declared": {"leyline": {"edits": [{"message": 2, "replacement": "gone"}]}},
        "tools": {"tools": [LIST_TOOL]},
    }[cause]
    if cause == "undeclared":
        messages[2] = {**messages[2], "content": "nothing there"}
    async with after_turns(engine, 8) as client:
        engine.will_tell(3500, 60)
        await ask(client, messages, **options)
        lost = await told(client, "leyline_cache_bust_tokens_total", "cause")
        missing = await told(client, "leyline_cache_discrepancy_tokens_total", "direction")
    assert set(lost) == {cause}
    assert 0.6 * 3200 < lost[cause] <= 3200
    assert missing == {}


async def test_another_model_in_the_same_session_loses_nothing() -> None:
    """One model's cache is out of another one's reach; the first continues where it was."""
    engine = CountingEngine()
    engine.models.append("small")
    async with after_turns(engine, 4) as client:
        engine.will_tell(1600, 0)
        body = {"model": "small", "messages": tool_session(4)}
        assert (await client.post(CHAT, json=body, headers=SESSION)).status_code == 200
        engine.will_tell(2000, 1600)
        await ask(client, tool_session(5))
        assert await told(client, "leyline_cache_bust_tokens_total", "cause") == {}


async def test_the_other_engine_is_to_blame_after_a_failover() -> None:
    """A session that another engine continues loses its whole prompt to the failover."""
    engines = {name: CountingEngine() for name in ("a", "b")}
    with serving(engines["a"]) as one, serving(engines["b"]) as other:
        app = create_app(Settings(upstreams={"a": one, "b": other}, log_level="error"))
        transport = ASGIStreamTransport(app)
        async with (
            lifespan_of(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            for engine in engines.values():
                engine.will_tell(900, 0)
            await ask(client, tool_session(2))
            served = next(name for name, engine in engines.items() if engine.bodies)
            app.state.services.pool.get(served).draining = True
            for engine in engines.values():
                engine.answers.clear()
                engine.will_tell(1300, 0)
            await ask(client, tool_session(3))
            lost = await told(client, "leyline_cache_bust_tokens_total", "cause")
            turns = await told(client, "leyline_upstream_turns_total", "upstream")
    assert lost == {"failover": 900.0}
    assert turns == {"a": 1.0, "b": 1.0}
