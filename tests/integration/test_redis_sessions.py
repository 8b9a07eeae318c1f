"""Proxies over one Redis and one engine: restarts, turns that alternate, a Redis that is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from support.agent_history import agent_history
from support.engine_memory import holds_text, learn_words
from support.redis_server import RedisServer, redis_server

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

CHAT = "/v1/chat/completions"
SECRET = "a secret of sixteen characters or more"
WORD = "key=7391"
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
TRUNCATE = "truncate_older_than:n=2,max_chars=60"
PATIENCE_S = 20.0

Conversation = list[dict[str, Any]]


@contextmanager
def running_engine(**options: Any) -> Iterator[tuple[Starlette, str]]:
    """An engine that outlives proxies: the application and its origin."""
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536, **options})
    with serving(app) as origin:
        learn_words(app, origin)
        yield app, origin
    check_clean(app)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Starlette, str]]:
    """One for the module."""
    with running_engine() as running:
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that survives a kill by its append-only file."""
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as running:
        yield running


@contextmanager
def proxy(origin: str, server: RedisServer, **settings: Any) -> Iterator[httpx.Client]:
    """A proxy that remembers what lies in Redis."""
    given = {"session_secret": [SECRET], "redis_timeout_s": 1.0, "policy": TRUNCATE} | settings
    app = create_app(
        Settings(upstream=origin, session_store=server.url, log_level="error", **given)
    )
    with serving(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def history(count: int, task: str) -> Conversation:
    """An agent's history; the first tool result holds a word that is to be forgotten."""
    return agent_history(count, task, secret=WORD, lines=16)


def ask(
    client: httpx.Client, messages: Conversation, session: str | None = None, **options: Any
) -> dict[str, Any]:
    """An answer."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    request = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0}
    headers = {} if session is None else {"x-leyline-session": session}
    body = request | {"ignore_eos": True, "leyline": options}
    answer = client.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def text_of(answer: dict[str, Any]) -> str:
    """The text of the model's answer."""
    text: str = answer["choices"][0]["message"]["content"]
    return text


def spliced(answer: dict[str, Any]) -> int:
    """Tokens that were spliced."""
    tokens: int = answer["leyline"]["tokens"]["spliced"]
    return tokens


def sessions_of(client: httpx.Client) -> dict[str, Any]:
    """The sessions part of the readiness document."""
    found: dict[str, Any] = client.get("/readyz").json()["sessions"]
    return found


def until(client: httpx.Client, *, up: bool) -> None:
    """Wait until the proxy says that sessions are in reach, or out of it."""
    deadline = time.monotonic() + PATIENCE_S
    while sessions_of(client)["up"] != up:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def knows(app: Starlette, session: str) -> bool:
    """Return True if the engine holds the word for a session."""
    engine = app.state.service._engine
    deadline = time.monotonic() + PATIENCE_S
    while engine.stats().in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return holds_text(app, session, WORD)


@pytest.mark.parametrize("session", ["named", None])
def test_a_restarted_proxy_goes_on_splicing(
    engine: tuple[Starlette, str], server: RedisServer, session: str | None
) -> None:
    """A proxy that never saw a conversation splices its next edit, named or found by history."""
    _, origin = engine
    task = f"Restart {session}."
    with proxy(origin, server) as client:
        ask(client, history(2, task), session)
        first = ask(client, history(3, task), session)
        assert spliced(first) > 0
    with proxy(origin, server) as client:
        assert sessions_of(client) == {"store": "redis", "up": True, "problem": None}
        second = ask(client, history(4, task), session)
        assert spliced(second) > 0
        assert second["leyline"]["session"] == first["leyline"]["session"]
        assert second["leyline"]["turn_index"] == 2
        listed = client.get("/v1/leyline/sessions").json()["sessions"]
        assert [(each["id"], each["turns"]) for each in listed] == [
            (first["leyline"]["session"], 3)
        ]


def test_two_proxies_take_turns(engine: tuple[Starlette, str], server: RedisServer) -> None:
    """A turn at either of two proxies is spliced from the turn before."""
    _, origin = engine
    with proxy(origin, server) as left, proxy(origin, server) as right:
        ask(left, history(2, "Turns."), "turns")
        for count in range(3, 7):
            client = right if count % 2 else left
            answer = ask(client, history(count, "Turns."), "turns")
            assert spliced(answer) > 0
            assert answer["leyline"]["turn_index"] == count - 2


def test_two_proxies_serve_one_session_at_once(
    engine: tuple[Starlette, str], server: RedisServer
) -> None:
    """Turns of one session at the same time are all in its history, each under its own number."""
    _, origin = engine
    with proxy(origin, server) as left, proxy(origin, server) as right:
        ask(left, history(1, "Once."), "once")

        def one(number: int) -> dict[str, Any]:
            client = right if number % 2 else left
            return ask(
                client, [*history(1, "Once."), {"role": "user", "content": f"{number}?"}], "once"
            )

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, range(8)))
        document = left.get("/v1/leyline/sessions/once").json()
        assert [turn["index"] for turn in document["history"]] == list(range(9))
        turns = {turn["turn"] for turn in document["history"]}
        assert {answer["leyline"]["turn"] for answer in answers} < turns
        assert len(document["retained"]) == 4


@pytest.fixture
def signed_engine() -> Iterator[tuple[Starlette, str]]:
    """One that obeys signed envelopes only."""
    with running_engine(hints_secret="shared") as running:
        yield running


def test_without_a_key_a_restart_is_an_ordinary_prefill(
    signed_engine: tuple[Starlette, str], server: RedisServer
) -> None:
    """No text is at rest: the session is recognised, not spliced, and a forget reaches all."""
    app, origin = signed_engine
    keyed = {"session_secret": [], "hints_secret": "shared"}
    with proxy(origin, server, **keyed) as client:
        first = ask(client, history(2, "No key."))
    name = first["leyline"]["session"]
    with proxy(origin, server, **keyed) as client:
        second = ask(client, history(3, "No key."))
        assert second["leyline"]["session"] == name
        assert second["leyline"]["turn_index"] == 1
        assert spliced(second) == 0
        assert knows(app, name)
        assert spliced(ask(client, history(4, "No key."))) > 0, "its own turns it has"
        ask(client, history(5, "No key."), policy=REDACT)
        assert not knows(app, name)


def test_a_forget_on_another_proxy_reaches_everything(
    engine: tuple[Starlette, str], server: RedisServer
) -> None:
    """Text that one proxy sent, another has forgotten by name, and the exact prefix is spared."""
    app, origin = engine
    with proxy(origin, server) as client:
        ask(client, history(1, "Forget."), "forget")
        ask(client, history(2, "Forget."), "forget")
    assert knows(app, "forget")
    with proxy(origin, server) as client:
        answer = ask(client, history(3, "Forget."), "forget", policy=REDACT)
        assert answer["leyline"]["tokens"]["prefix"] > 0
    assert not knows(app, "forget")


def test_what_ran_while_redis_was_gone_is_forgotten_later(
    engine: tuple[Starlette, str], server: RedisServer
) -> None:
    """Turns that no stored session names are reached by the first forget after the outage, and by
    one in the midst of it."""
    app, origin = engine
    with proxy(origin, server, policy="keep_all") as client:
        for name in ("later", "midst"):
            ask(client, history(0, name), name)
        server.kill()
        for name in ("later", "midst"):
            ask(client, history(1, name), name)
            assert knows(app, name)
        until(client, up=False)
        ask(client, history(2, "midst"), "midst", policy=REDACT)
        assert not knows(app, "midst")
        server.start()
        until(client, up=True)
        ask(client, history(2, "later"), "later")
        assert knows(app, "later")
        ask(client, history(3, "later"), "later", policy=REDACT)
        assert not knows(app, "later")
        answer = ask(client, history(4, "later"), "later", policy=REDACT)
        assert answer["leyline"]["forgot"] is None, "what was made good is asked for once"


@pytest.mark.nightly
def test_redis_is_killed_under_load(engine: tuple[Starlette, str], server: RedisServer) -> None:
    """Every request is answered, and rightly, before, during and after; then sessions continue."""
    _, origin = engine
    names = [f"load-{number}" for number in range(6)]
    rounds = 9
    with httpx.Client(base_url=origin, timeout=60) as direct:
        right = {
            (name, count): text_of(ask(direct, history(count, name)))
            for name in names
            for count in range(1, rounds)
        }
    # A busy machine is no outage: a server that was killed refuses at once.
    with proxy(origin, server, policy="keep_all", redis_timeout_s=10) as client:
        at = threading.Barrier(len(names) + 1, timeout=60)
        took: list[float] = []

        def talk(name: str) -> list[str]:
            said = []
            for count in range(1, rounds):
                if count in (3, 6):
                    at.wait()
                started = time.monotonic()
                said.append(text_of(ask(client, history(count, name), name)))
                took.append(time.monotonic() - started)
            return said

        with ThreadPoolExecutor(len(names)) as pool:
            talks = [pool.submit(talk, name) for name in names]
            at.wait()
            time.sleep(0.05)
            server.kill()
            at.wait()
            assert sessions_of(client)["up"] is False
            assert client.get("/readyz").status_code == 200
            assert "leyline_session_store_up 0.0" in client.get("/metrics").text
            server.start()
            for name, done in zip(names, talks, strict=True):
                expected = [right[name, count] for count in range(1, rounds)]
                assert done.result() == expected
        assert max(took) < 30
        until(client, up=True)
        assert "leyline_session_store_up 1.0" in client.get("/metrics").text
        for name in names:
            ask(client, history(rounds, name), name)
            answer = ask(client, history(rounds + 1, name), name, policy=TRUNCATE)
            assert spliced(answer) > 0
