"""The replay engine over HTTP: many clients, clients that leave, full pools, shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from support.engine_http import MESSAGES, POOL, chat, client_of, complete, is_idle, served
from support.waiting import until

from leyline_lab.stand_ins.serving import check_clean
from leyline_replay.factory import create_engine_app, serve_model
from leyline_replay.models.loader import LoadedModel
from leyline_replay.service import ServiceLimits


async def test_stream_arrives_piece_by_piece(app: Starlette) -> None:
    """Over a real connection the first chunk comes long before the last."""
    body = {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with served(app) as client:
        started = time.monotonic()
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            arrivals = [time.monotonic() - started async for _ in response.aiter_lines()]
    assert arrivals[0] < arrivals[-1] / 3


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelled_when_the_client_goes(app: Starlette, stream: bool) -> None:
    """A closed connection ends its request and gives its slots back, and others continue."""
    body = {"messages": MESSAGES, "max_tokens": 10_000, "ignore_eos": True, "stream": stream}
    async with served(app) as client:
        if stream:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    break
        else:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=body, timeout=0.3)
        await until(lambda: is_idle(app))
        answer = await client.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2}
        )
        assert answer.status_code == 200


async def test_overload_is_a_503(loaded: LoadedModel) -> None:
    """Requests beyond the waiting queue are refused at once; the others are all served."""
    limits = ServiceLimits(max_running=1, max_waiting=2)
    app = serve_model(loaded, pool_tokens=POOL, limits=limits)
    body = {"messages": MESSAGES, "max_tokens": 40, "ignore_eos": True}
    async with client_of(app) as client:
        responses = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=body) for _ in range(8))
        )
    statuses = sorted(response.status_code for response in responses)
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 2
    refused = [response for response in responses if response.status_code == 503]
    assert {response.json()["error"]["code"] for response in refused} == {"engine_overloaded"}
    app.state.shutdown()
    check_clean(app)


async def test_parallel_answers_equal_single_ones(app: Starlette) -> None:
    """Requests that share the engine don't disturb each other."""
    prompts = [f"def function_{n}(x):\n    " * (n + 1) for n in range(6)]
    bodies = [{"prompt": prompt, "max_tokens": 10, "ignore_eos": True} for prompt in prompts]
    alone = [(await complete(app, **body))["choices"] for body in bodies]
    together = await asyncio.gather(*(complete(app, **body) for body in bodies))
    assert [answer["choices"] for answer in together] == alone


async def test_requests_wait_for_room_in_the_pool(loaded: LoadedModel) -> None:
    """A pool that holds one request at a time serves many, one after the other."""
    app = serve_model(loaded, pool_tokens=600)
    prompts = [[100 + n] * 500 for n in range(4)]
    answers = await asyncio.gather(
        *(complete(app, prompt=prompt, max_tokens=20, ignore_eos=True) for prompt in prompts)
    )
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * 4
    app.state.shutdown()
    check_clean(app)


async def test_starved_answers_end_with_length(loaded: LoadedModel) -> None:
    """When decoding fills the pool, some answer ends early; nothing hangs."""
    app = serve_model(loaded, pool_tokens=400)
    answers = await asyncio.gather(
        *(complete(app, prompt=[200 + n] * 100, max_tokens=250, ignore_eos=True) for n in range(3))
    )
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"length"}
    assert max(counts) == 250
    app.state.shutdown()
    check_clean(app)


async def test_shutdown_ends_what_runs(loaded: LoadedModel) -> None:
    """Shutting down ends running requests within the grace time and refuses new ones."""
    app = serve_model(loaded, pool_tokens=POOL)
    body = {"messages": MESSAGES, "max_tokens": 10_000, "ignore_eos": True}
    async with client_of(app) as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(lambda: app.state.service._running)
        await asyncio.to_thread(app.state.service.close, 0.1)
        response = await running
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stopped")
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503
    check_clean(app)


async def test_an_engine_error_is_a_500_without_details(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing forward ends its request only; neither client nor log sees the prompt."""
    engine = app.state.service._engine
    original = engine._forward

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("no forward today")

    monkeypatch.setattr(engine, "_forward", broken)
    with caplog.at_level(logging.ERROR):
        response = await chat(app, max_tokens=3)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "forward today" not in response.text
    assert "Count to three" not in caplog.text
    monkeypatch.setattr(engine, "_forward", original)
    assert (await chat(app, max_tokens=3)).status_code == 200


def test_create_engine_app_from_options() -> None:
    """The factory needs no arguments but takes plain ones."""
    app = create_engine_app(served_name="mine", device="cpu", pool_tokens=512, max_running=2)
    assert app.state.service.capability.model == "mine"
    assert app.state.service.max_context == 512
    app.state.shutdown()
