"""Forgetting where the proxy's own account has a hole: a turn that was cut off, a proxy that was
restarted. The engine is asked what it holds, not the proxy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send
from support.agent_history import agent_history
from support.engine_memory import held, holds_text, learn_words
from support.stack import embedded_stack

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

CHAT = "/v1/chat/completions"
SECRET = "key=7391"
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
TRUNCATE = "truncate_older_than:n=1,max_chars=60"
LATE = "comes late"
PATIENCE_S = 20.0

Conversation = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Starlette, str]]:
    """An engine of its own process, as far as proxies can see: the application and its origin."""
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 32_768})
    with serving(app) as origin:
        learn_words(app, origin)
        yield app, origin
    check_clean(app)


@contextmanager
def proxy(origin: str, **settings: Any) -> Iterator[httpx.Client]:
    """A proxy in front of the engine that remembers nothing yet."""
    with proxy_and_app(origin, **settings) as (client, _):
        yield client


@contextmanager
def proxy_and_app(origin: str, **settings: Any) -> Iterator[tuple[httpx.Client, FastAPI]]:
    """The same, and the proxy's own application."""
    app = create_app(Settings(upstream=origin, log_level="error", **settings))
    with serving(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client, app


def knows(app: Starlette, session: str) -> bool:
    """Return True if the engine holds the secret for a session."""
    return holds_text(app, session, SECRET)


def history(count: int, task: str) -> Conversation:
    """An agent's history; the first tool result holds the secret."""
    return agent_history(count, task, secret=SECRET)


def body(client: httpx.Client, messages: Conversation, **members: Any) -> dict[str, Any]:
    """A request."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    options = members.pop("leyline", {})
    request = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
    return request | {"ignore_eos": True, "leyline": options} | members


def ask(
    client: httpx.Client, session: str, messages: Conversation, **options: Any
) -> dict[str, Any]:
    """The account of a turn."""
    return nameless(client, messages, {"x-leyline-session": session}, **options)


def nameless(
    client: httpx.Client,
    messages: Conversation,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The account of a turn of a conversation that is known by its history."""
    answer = client.post(CHAT, json=body(client, messages, leyline=options), headers=headers)
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def hang_up(client: httpx.Client, session: str, messages: Conversation, **options: Any) -> None:
    """Begin a turn, read a little of its answer, and leave."""

    def count() -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("leyline_requests_total") and 'status="disconnected"' in line
        )

    before = count()
    request = body(client, messages, stream=True, max_tokens=2000, leyline=options)
    headers = {"x-leyline-session": session}
    with client.stream("POST", CHAT, json=request, headers=headers) as answer:
        assert answer.status_code == 200
        next(answer.iter_bytes())
    deadline = time.monotonic() + PATIENCE_S
    while count() == before:
        assert time.monotonic() < deadline, "the proxy never noticed"
        time.sleep(0.05)


def settled(app: Starlette) -> None:
    """Wait until the engine runs nothing."""
    deadline = time.monotonic() + PATIENCE_S
    while app.state.service._engine.stats().in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("first", [True, False], ids=["first-turn", "later-turn"])
def test_a_turn_that_was_cut_off_is_forgotten_later(
    engine: tuple[Starlette, str], first: bool
) -> None:
    """The client of the only turn that read the secret left; redaction finds its KV."""
    app, origin = engine
    session = f"cut-{first}"
    with proxy(origin) as client:
        if not first:
            ask(client, session, history(0, session))
        hang_up(client, session, history(1, session))
        settled(app)
        assert knows(app, session)
        ask(client, session, history(2, session), policy=REDACT)
        settled(app)
        assert not knows(app, session)
        account = ask(client, session, history(3, session), policy=REDACT)
        assert account["forgot"] is None, "what was made good is asked for once"
        assert account["tokens"]["prefix"] > 0


def test_a_forget_whose_client_left_leaves_no_turn_that_holds_the_text(
    engine: tuple[Starlette, str],
) -> None:
    """The session is rewritten without them, though the turn itself is never settled."""
    app, origin = engine
    with proxy_and_app(origin) as (client, served):
        ask(client, "left", history(2, "Left."))
        store = served.state.services.store
        before = store._table.get(("default", "left")).session.turns
        assert any(SECRET in str(turn.prepared.client) for turn in before)
        hang_up(client, "left", history(2, "Left."), policy=REDACT)
        settled(app)
        assert not store._table.get(("default", "left")).session.turns
        account = ask(client, "left", history(3, "Left."), policy=REDACT)
        assert account["forgot"]["result"] in ("erased", "owed")
    settled(app)
    assert not knows(app, "left")


def test_a_cut_off_turn_that_hid_the_secret_is_forgotten(engine: tuple[Starlette, str]) -> None:
    """Its prompt showed no secret, but its KV was spliced from what had read it."""
    app, origin = engine
    with proxy(origin) as client:
        ask(client, "hidden", history(2, "Hidden."))
        hang_up(client, "hidden", history(3, "Hidden."), policy=TRUNCATE)
        settled(app)
        assert any(spliced for _, spliced in held(app, "hidden"))
        ask(client, "hidden", history(3, "Hidden."), policy=f"{REDACT} | {TRUNCATE}")
        settled(app)
        assert held(app, "hidden")
        assert not knows(app, "hidden")
        assert not any(spliced for _, spliced in held(app, "hidden"))


class _Held:
    """An engine that is given some requests late, as those of a queue that others overtake."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self.came = threading.Event()
        self.free = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            return await _lives(receive, send)  # the engine continues without it
        if scope["type"] == "http" and scope["path"] == CHAT:
            body = await Request(scope, receive).body()
            given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Message:
                return given.pop() if given else await receive()

            if LATE.encode() in body and not self.free.is_set():
                self.came.set()
                while not self.free.is_set():  # noqa: ASYNC110 - another thread's event
                    await asyncio.sleep(0.01)
            return await self._app(scope, again, send)
        return await self._app(scope, receive, send)


async def _lives(receive: Receive, send: Send) -> None:
    for stage in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{stage}.complete"})


def test_a_turn_that_a_forget_overtook_in_the_engines_queue_is_forgotten(
    engine: tuple[Starlette, str],
) -> None:
    """It began after the forget and ended before that was confirmed; nothing of it is left."""
    app, _ = engine
    held_back, accounts = _Held(app), []
    late = history(2, "Overtaken.")
    late[0] = {**late[0], "content": f"{late[0]['content']} {LATE}"}
    with serving(held_back) as origin, proxy(origin) as client:
        ask(client, "overtaken", history(1, "Overtaken."))
        request = body(client, history(2, "Overtaken."), leyline={"policy": REDACT}, max_tokens=400)
        headers = {"x-leyline-session": "overtaken"}

        def forget() -> None:
            answer = client.post(CHAT, json=request, headers=headers)
            accounts.append(answer.json()["leyline"])

        overtaken = threading.Thread(target=ask, args=(client, "overtaken", late))
        overtaken.start()
        assert held_back.came.wait(PATIENCE_S)
        forgetting = threading.Thread(target=forget)
        forgetting.start()
        deadline = time.monotonic() + PATIENCE_S
        while not app.state.service._engine.stats().in_flight:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        held_back.free.set()
        overtaken.join()
        forgetting.join()
        assert accounts[0]["forgot"]["result"] == "owed"
        deadline = time.monotonic() + PATIENCE_S  # the turns took their own time
        while knows(app, "overtaken"):
            assert time.monotonic() < deadline, "it outlived the forget"
            time.sleep(0.05)


def test_a_restarted_proxy_forgets_what_it_never_saw(engine: tuple[Starlette, str]) -> None:
    """A session that only an earlier proxy knew is forgotten but for its exact prefix."""
    app, origin = engine
    with proxy(origin) as client:
        ask(client, "restart", history(2, "Restart."))
        account = ask(client, "restart", history(3, "Restart."), policy=TRUNCATE)
        assert account["tokens"]["spliced"] > 0
    assert knows(app, "restart") and any(spliced for _, spliced in held(app, "restart"))
    with proxy(origin) as client:
        account = ask(client, "restart", history(4, "Restart."), policy=f"{REDACT} | {TRUNCATE}")
        assert account["tokens"]["prefix"] > 0, "the exact prefix is spared"
    settled(app)
    assert not knows(app, "restart")
    assert not any(spliced for _, spliced in held(app, "restart"))


def test_a_restarted_proxy_forgets_also_in_a_later_turn(engine: tuple[Starlette, str]) -> None:
    """The first turn after the restart demanded nothing; the hole is remembered until one does."""
    app, origin = engine
    with proxy(origin) as client:
        ask(client, "later", history(2, "Later."))
        ask(client, "later", history(3, "Later."), policy=TRUNCATE)
    with proxy(origin) as client:
        ask(client, "later", history(3, "Later."), policy="keep_all")
        assert knows(app, "later")
        ask(client, "later", history(4, "Later."), policy=REDACT)
    settled(app)
    assert not knows(app, "later")
    assert not any(spliced for _, spliced in held(app, "later"))


def test_a_forget_that_was_not_obeyed_is_demanded_again() -> None:
    """An engine that takes no orders from this proxy has forgotten nothing, and nothing says so."""
    options = {"device": "cpu", "hints_secret": "of the engine"}
    with (
        embedded_stack(options, hints_secret="another", log_level="error") as origin,
        httpx.Client(base_url=origin, timeout=60) as client,
    ):
        ask(client, "disobeyed", history(1, "Disobeyed."))
        for count in (2, 3):
            account = ask(client, "disobeyed", history(count, "Disobeyed."), policy=REDACT)
            assert account["forgot"] == {"result": "owed"}
            assert "forget" in {edit["mode"] for edit in account["edits"]}


def test_a_first_request_that_is_sent_again_is_forgotten(engine: tuple[Starlette, str]) -> None:
    """The proxy was restarted after the only request, before there was an answer in the list."""
    app, origin = engine
    first = history(1, "First.")[:2]
    first[1] = {**first[1], "content": f"Remember {SECRET}. {first[1]['content']}"}
    with proxy(origin) as client:
        ask(client, "first", first)
    assert knows(app, "first")
    with proxy(origin) as client:
        account = ask(client, "first", first, policy=REDACT)
        assert account["forgot"]["result"] == "erased"
        assert account["forgot"]["overwritten"] > 0
    settled(app)
    assert held(app, "first") and not knows(app, "first")


def test_a_conversation_without_a_name_that_was_lost_is_called_unreachable(
    engine: tuple[Starlette, str],
) -> None:
    """Its id is unknown now, and the receipt says so on each turn that demands a forget of lost
    text; a name would have helped."""
    _, origin = engine
    with proxy(origin) as client:
        nameless(client, history(2, "Nameless."))
    with proxy(origin) as client:
        account = nameless(client, history(3, "Nameless."), policy=REDACT)
        assert account["forgot"] == {"result": "unreachable"}
        account = nameless(client, history(4, "Nameless."), policy=REDACT)
        assert account["forgot"] is None, "it was told once"


def test_a_busy_tenant_pushes_out_no_other_tenants_sessions(engine: tuple[Starlette, str]) -> None:
    """Nameless, a session that was pushed out could never be forgotten."""
    app, origin = engine
    task, keys = "Push out.", "quiet:q-key,busy:b-key"
    with proxy(origin, max_sessions=4, api_keys=keys) as client:

        def as_tenant(name: str) -> httpx.Client:
            client.headers["authorization"] = f"Bearer {name[0]}-key"
            return client

        for count in (0, 2):
            nameless(as_tenant("quiet"), history(count, task))
        for number in range(8):
            nameless(as_tenant("busy"), [{"role": "user", "content": f"Task {number}."}])
        account = nameless(as_tenant("quiet"), history(3, task), policy=REDACT)
    assert account["forgot"]["result"] == "erased"
    assert account["forgot"]["overwritten"] > 0
    settled(app)
    assert not holds_text(app, account["session"], SECRET, "quiet")
