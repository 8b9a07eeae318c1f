"""Silent streams: their clients get signs of life, in each API's own form, and not too early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.fake_engine import (
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    proxy_before,
)
from support.sockets import socket_proxy, until

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.http.limits import until_disconnect
from leyline_proxy.http.signs import Signs
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import lifespan_of

SOON_S, NEVER_S = 0.02, 600
COMMENT, PING = b": ping\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "/v1/completions": {"prompt": "Hi."},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 50},
    "/v1/responses": {"input": "Hi.", "store": False},
}
BEGUN = ("response.created", "response.in_progress")
REFUSED = Answer([b'{"error": {"message": "Out of slots.", "code": "full"}}'], status=503)


class Slow(FakeEngine):
    """Stops in each answer to a completion until ``free`` is set.

    Args:
        before: parts of the answer that come before: its status, then its chunks.
    """

    def __init__(self, before: int = 0) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self._before = before

    async def send_answer(self, answer: Answer, send: Send) -> None:
        """An answer, with the pause."""
        sent = 0

        async def later(message: Message) -> None:
            nonlocal sent
            if sent == self._before:
                await self.free.wait()
            sent += 1
            await send(message)

        if not self._before:
            await self.free.wait()
        await super().send_answer(answer, later)


class Seen:
    """A proxy that sets its engine free once a client has got two signs of life."""

    def __init__(self, app: ASGIApp, engine: Slow) -> None:
        self._app = app
        self._engine = engine
        self.signs = 0
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def noted(message: Message) -> None:
            await send(message)
            body = message.get("body", b"")
            self.bodies.append(body)
            self.signs += body in (COMMENT, PING) or b"response.created" in body
            if self.signs >= 2:
                self._engine.free.set()

        await self._app(scope, receive, noted if scope["type"] == "http" else send)


@contextmanager
def pinging(engine: Slow, pause_s: float = SOON_S) -> Iterator[tuple[str, Seen]]:
    """The origin of a proxy that gives signs soon."""
    settings = Settings(stream_ping_interval_s=pause_s, log_level="error")
    seen = Seen(create_app(settings, engine_app=engine), engine)
    with serving(seen) as origin:
        yield origin, seen


def asked(origin: str, route: str, **members: Any) -> httpx.Response:
    """The answer to a request."""
    body = {"model": MODEL, "stream": True, **ROUTES[route], **members}
    return httpx.post(f"{origin}{route}", json=body, timeout=60)


def kinds(text: str) -> list[str]:
    """The types of a stream's events, pings left out, or their texts."""
    found = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    types = [json.loads(each).get("type", "chunk") if each[0] == "{" else each for each in found]
    return [each for each in types if each != "ping"]


@pytest.mark.parametrize("before", [0, 1, 3], ids=["nothing", "status", "half"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_silent_stream_gives_signs_of_life(route: str, before: int) -> None:
    """They come between whole events, wherever the engine falls silent; nothing else changes."""

    def given() -> Answer:
        whole = chat_stream("Hel", "lo.")
        first, second, *others = whole.chunks
        return replace(whole, chunks=[first, second[:20], second[20:], *others])

    engine = FakeEngine()
    engine.answers = [given()]
    with serving(create_app(Settings(log_level="error"), engine_app=engine)) as origin:
        usual = asked(origin, route)
    slow = Slow(before)
    slow.answers = [given()]
    with pinging(slow) as (origin, seen):
        answer = asked(origin, route)
    assert answer.status_code == 200
    assert seen.signs >= 2
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    for name in ("x-leyline-session", "x-leyline-plan"):
        assert (name in answer.headers) is (name in usual.headers)
    assert kinds(answer.text) == kinds(usual.text)
    assert (PING if route == "/v1/messages" else COMMENT) in answer.content
    assert (COMMENT in answer.content) is (route != "/v1/messages")


@pytest.mark.parametrize("pause_s", [NEVER_S, 0], ids=["soon", "off"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_error_that_comes_soon_has_a_status(route: str, pause_s: float) -> None:
    """Before the first sign, nothing is committed; without signs, nothing ever is."""
    engine = Slow(before=1)
    engine.free.set()
    engine.answers = [REFUSED]
    with pinging(engine, pause_s) as (origin, seen):
        answer = asked(origin, route)
        assert (answer.status_code, seen.signs) == (503, 0)
        assert "Out of slots." in answer.json()["error"]["message"]


@pytest.mark.parametrize("before", [0, 1], ids=["nothing", "status"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_error_after_a_sign_is_an_event(route: str, before: int) -> None:
    """It ends the stream, in the API's shape, whether the engine's status was known or not."""
    engine = Slow(before)
    engine.answers = [REFUSED]
    with pinging(engine) as (origin, _):
        answer = asked(origin, route)
    assert answer.status_code == 200
    assert "Out of slots." in answer.text
    last = {
        "/v1/messages": ["error"],
        "/v1/responses": [*BEGUN, "error", "response.failed"],
    }
    assert kinds(answer.text) == last.get(route, ["chunk"])
    if route not in last:
        assert json.loads(answer.text.splitlines()[-2][6:]).keys() == {"error"}


def test_an_answer_in_one_piece_gets_none() -> None:
    """Its status is the engine's, however long that takes."""
    engine = Slow()
    with pinging(engine, SOON_S / 10) as (origin, seen):
        for route in ROUTES:
            for answer, status in ((REFUSED, 503), (chat_json(), 200)):
                engine.answers = [replace(answer, pause_s=0.05)]
                engine.free.set()
                assert asked(origin, route, stream=False).status_code == status
    assert seen.signs == 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_sdks_read_on_after_signs(fails: bool) -> None:
    """They see the answer, or the API's error, and nothing of the signs."""
    engine = Slow(before=1)
    talk: Any = [{"role": "user", "content": "Hi."}]

    def again() -> None:
        assert seen.signs >= 2 or not seen.bodies
        seen.signs = 0
        engine.free.clear()
        engine.answers = [REFUSED] if fails else []

    with pinging(engine) as (origin, seen):
        o = openai.OpenAI(base_url=f"{origin}/v1", api_key="k", max_retries=0)
        a = anthropic.Anthropic(base_url=origin, api_key="k", max_retries=0)
        again()
        chat = o.chat.completions.create(model=MODEL, messages=talk, stream=True)
        if fails:
            with pytest.raises(openai.APIError, match="Out of slots"):
                list(chat)
        else:
            assert "".join(each.choices[0].delta.content or "" for each in chat) == "Hello."
        again()
        with o.responses.stream(model=MODEL, input="Hi.") as events:
            found = list(events)
        assert [each.type for each in found][:2] == [*BEGUN]
        if fails:
            assert found[-1].type == "response.failed"
        else:
            assert events.get_final_response().output_text == "Hello."
        again()
        with a.messages.stream(model=MODEL, messages=talk, max_tokens=9) as said:
            if fails:
                with pytest.raises(anthropic.APIStatusError, match="Out of slots"):
                    said.get_final_text()
            else:
                assert said.get_final_text() == "Hello."
        again()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_client_that_leaves_during_a_silence_ends_its_request(
    route: str, begun: bool
) -> None:
    """The engine's connection is closed, and no sign follows."""
    engine = FakeEngine()
    engine.answers = [Answer([b": hi\n\n"] if begun else [], hangs=True)]
    async with proxy_before(engine, stream_ping_interval_s=SOON_S) as http:
        body = {"model": MODEL, "stream": True, **ROUTES[route]}
        async with http.stream("POST", route, json=body) as answer:
            parts = answer.aiter_raw()
            for _ in range(3):
                await anext(parts)
        await until(lambda: engine.disconnects == 1)
        waiting = [task for task in asyncio.all_tasks() if "until_disconnect" in repr(task)]
        assert waiting == []


async def test_a_socket_gets_events_and_no_signs() -> None:
    """The response begins, and the protocol's own pings keep the connection alive."""
    engine = Slow(before=1)
    with socket_proxy(engine, stream_ping_interval_s=SOON_S) as proxy:
        async with proxy.socket() as ws:
            await ws.create()
            begun = [await ws.event() for _ in BEGUN]
            await asyncio.sleep(3 * SOON_S)
            engine.free.set()
            rest = await ws.events()
    assert [each["type"] for each in begun] == [*BEGUN]
    assert BEGUN[0] not in [each["type"] for each in rest]
    assert rest[-1]["type"] == "response.completed"


async def test_nothing_follows_the_end_of_a_stream_that_was_blocked() -> None:
    """While a client reads nothing, no signs pile up, and none comes after the last part."""
    engine = FakeEngine()
    engine.answers = [chat_stream("Hel", "lo.")]
    app = create_app(Settings(stream_ping_interval_s=SOON_S, log_level="error"), engine_app=engine)
    sent: list[Message] = []
    came = iter(
        [
            {
                "type": "http.request",
                "body": json.dumps(
                    {"model": MODEL, "stream": True, **ROUTES["/v1/chat/completions"]}
                ).encode(),
                "more_body": False,
            }
        ]
    )

    async def receive() -> Message:
        if (message := next(came, None)) is not None:
            return message
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        if message.get("body"):
            await asyncio.sleep(5 * SOON_S)
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "query_string": b"",
        "http_version": "1.1",
    }
    async with lifespan_of(app):
        await app(scope, receive, send)
    assert [each for each in sent if each.get("body") == COMMENT] == []
    assert sent[-1]["more_body"] is False


async def test_signs_end_with_the_work_and_with_its_errors() -> None:
    """Work that is done at once gives none; an error of a sign is the caller's and ends it."""
    given: list[str] = []
    ended: list[str] = []

    async def sign() -> None:
        given.append("sign")

    async def broken() -> None:
        raise ConnectionError

    async def here() -> Message:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append("work")

    assert await until_disconnect(here, work(0), Signs(sign, SOON_S)) == "done"
    assert given == []
    assert await until_disconnect(here, work(20 * SOON_S), Signs(sign, SOON_S)) == "done"
    assert given
    with pytest.raises(ConnectionError):
        await until_disconnect(here, work(60), Signs(broken, SOON_S))
    stopped = Signs(sign, 0)
    stopped.stop()
    given.clear()
    assert await until_disconnect(here, work(SOON_S), stopped) == "done"
    assert (given, ended) == ([], ["work"] * 4)
