"""An engine that is slow in each of its phases, and the client's answer."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import httpx
import pytest
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chat_stream, chunk, proxy_before
from support.sse import sse

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.rendezvous import ranked

REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
CHAT = "/v1/chat/completions"
LIMIT_S = 0.15


def stalled(*chunks: bytes) -> Answer:
    return Answer(chunks, content_type="text/event-stream", hangs=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_never_begins_is_given_up_after_the_first_token_timeout(
    stream: bool,
) -> None:
    """Its first byte is waited for no longer than this, however long it may be silent later."""
    engine = FakeEngine()
    engine.answers = [Answer(hangs=True)]
    async with proxy_before(engine, first_token_timeout_s=LIMIT_S, idle_timeout_s=60) as client:
        answer = await client.post(CHAT, json={**REQUEST, "stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "upstream_timeout"
    assert engine.disconnects == 1


async def test_an_engine_that_falls_silent_in_a_stream_ends_it_with_an_error_event() -> None:
    """The idle timeout is its own: a slow first token is no silence in between."""
    engine = FakeEngine()
    engine.answers = [stalled(chunk({"role": "assistant", "content": "Hel"}))]
    async with proxy_before(engine, first_token_timeout_s=60, idle_timeout_s=LIMIT_S) as client:
        answer = await client.post(CHAT, json={**REQUEST, "stream": True})
    error = sse(answer.text)[-1]["error"]
    assert error["code"] == "upstream_idle"
    assert f"{LIMIT_S:g} s" in error["message"]
    assert "[DONE]" not in answer.text
    assert engine.disconnects == 1


async def test_a_slow_client_isnt_taken_for_a_silent_engine() -> None:
    """The idle timeout runs while the engine is waited for, not while the client reads."""
    engine = FakeEngine()
    parts = [chunk({"content": "x" * 60_000}) for _ in range(40)]
    engine.answers = [Answer([*parts, chunk({}, "stop"), DONE], content_type="text/event-stream")]
    received = b""
    async with (
        proxy_before(engine, idle_timeout_s=LIMIT_S) as client,
        client.stream("POST", CHAT, json={**REQUEST, "stream": True}) as answer,
    ):
        async for part in answer.aiter_raw():
            received += part
            if len(received) < 200_000:
                await asyncio.sleep(2 * LIMIT_S)
    assert received.endswith(DONE)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_in_all_is_cut_off(stream: bool) -> None:
    """Steady progress doesn't help against the total timeout."""
    engine = FakeEngine()
    engine.answers = [chat_stream(*["x"] * 100, pause_s=0.02)]
    async with proxy_before(engine, total_timeout_s=4 * LIMIT_S) as client:
        answer = await client.post(CHAT, json={**REQUEST, "stream": stream})
    assert "upstream_total" in answer.text
    assert "[DONE]" not in answer.text
    assert answer.status_code == (200 if stream else 504)
    assert engine.disconnects == 1


def test_a_request_that_timed_out_is_not_put_to_another_engine() -> None:
    """The engine may be at work on it still; asking another would double the load."""
    engines = [FakeEngine(), FakeEngine()]
    with ExitStack() as stack:
        for engine in engines:
            engine.answers = [Answer(hangs=True)]
        origins = {str(n): stack.enter_context(serving(e)) for n, e in enumerate(engines)}
        settings = Settings(upstreams=origins, first_token_timeout_s=LIMIT_S, log_level="error")
        origin = stack.enter_context(serving(create_app(settings)))
        answer = httpx.post(f"{origin}{CHAT}", json=REQUEST)
    assert answer.status_code == 504
    assert sum(len(engine.bodies) for engine in engines) == 1


def test_a_busy_engine_is_passed_over_for_one_request_and_an_engine_that_refuses_isnt() -> None:
    """503 sends the request on to the other engine; a refusal of its own is the answer."""
    engines = [FakeEngine(), FakeEngine()]
    with ExitStack() as stack:
        origins = {str(n): stack.enter_context(serving(e)) for n, e in enumerate(engines)}
        settings = Settings(upstreams=origins, log_level="error")
        origin = stack.enter_context(serving(create_app(settings)))
        for status, wanted, tries in ((503, 200, 2), (400, 400, 1)):
            for engine in engines:
                engine.bodies.clear()
                engine.answers = []
            session = "s"
            first = engines[int(ranked(session, {"0": 1.0, "1": 1.0})[0])]
            first.answers = [Answer([b'{"error": {"message": "no"}}'], status=status)]
            answer = httpx.post(
                f"{origin}{CHAT}", json=REQUEST, headers={"x-leyline-session": session}
            )
            assert answer.status_code == wanted
            assert sum(len(engine.bodies) for engine in engines) == tries
