"""Quarantine over the whole stack: out of the prompt and out of the cache, by each way and API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from support.agent_history import agent_history
from support.engine_http import check_clean
from support.engine_memory import held, holds_text, learn_words
from support.redis_server import RedisServer, redis_server
from support.stack import serving

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

WORD = "key=7391"
RESULT = 3
"""Index of the result that holds the word."""
POLICY = r"quarantine:rules=[],patterns=['key=\d+']"
STUBS = {"annotation": "[quarantined: verdict]", "policy": "[quarantined: pattern]"}
TENANTS: dict[str, dict[str, Any]] = {
    "red": {"api_keys": ["key-red"], "reuse": "live"},
    "blue": {"api_keys": ["key-blue"], "reuse": "live"},
}
PATIENCE_S = 20.0

Talk = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Starlette, str]]:
    """An engine that outlives proxies: the application and its origin."""
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536})
    with serving(app) as origin:
        learn_words(app, origin)
        yield app, origin
    check_clean(app)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The store of all proxies."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@contextmanager
def proxy(origin: str, redis: RedisServer, **settings: Any) -> Iterator[httpx.Client]:
    """A client of tenant red, of a proxy that remembers what lies in Redis."""
    given = {"session_secret": ["a secret of sixteen characters or more"], **settings}
    app = create_app(
        Settings(
            upstream=origin, session_store=redis.url, tenants=TENANTS, log_level="error", **given
        )
    )
    headers = {"authorization": "Bearer key-red"}
    with (
        serving(app) as address,
        httpx.Client(base_url=address, timeout=60, headers=headers) as client,
    ):
        yield client


def talk(count: int, task: str, said: dict[str, Any] | None = None) -> Talk:
    """An agent's history, whose first result holds the word and may have a verdict."""
    messages = agent_history(count, task, secret=WORD)
    if said is not None:
        messages[RESULT]["leyline"] = said
    return messages


def as_chat(messages: Talk) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 2}


def as_messages(messages: Talk) -> tuple[str, dict[str, Any]]:
    turns: Talk = []
    for message in messages[1:]:
        note = {"leyline": message["leyline"]} if "leyline" in message else {}
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            block |= {"content": message["content"], **note}
            turns.append({"role": "user", "content": [block]})
        elif message["role"] == "assistant":
            (call,) = message["tool_calls"]
            given = json.loads(call["function"]["arguments"])
            block = {"type": "tool_use", "id": call["id"], "name": "shell", "input": given}
            turns.append({"role": "assistant", "content": [block]})
        else:
            turns.append(message)
    body = {"system": messages[0]["content"], "messages": turns, "max_tokens": 2}
    return "/v1/messages", body


def as_responses(messages: Talk) -> tuple[str, dict[str, Any]]:
    items: Talk = []
    for message in messages[1:]:
        note = {"leyline": message["leyline"]} if "leyline" in message else {}
        if message["role"] == "tool":
            item = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            items.append({**item, "output": message["content"], **note})
        elif message["role"] == "assistant":
            (call,) = message["tool_calls"]
            item = {"type": "function_call", "call_id": call["id"]}
            items.append({**item, **call["function"]})
        else:
            items.append(message)
    body = {"instructions": messages[0]["content"], "input": items, "max_output_tokens": 2}
    return "/v1/responses", body


APIS = {"chat": as_chat, "messages": as_messages, "responses": as_responses}


def ask(
    client: httpx.Client, api: str, session: str, messages: Talk, **options: Any
) -> dict[str, Any]:
    """The account of a turn."""
    path, body = APIS[api](messages)
    body |= {"model": "leyline-recall", "temperature": 0, "leyline": options}
    answer = client.post(path, json=body, headers={"x-leyline-session": session})
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def knows(app: Starlette, session: str, text: str = WORD) -> bool:
    """Return True if the engine holds KV of the text for a session, once it rests."""
    service = app.state.service
    deadline = time.monotonic() + PATIENCE_S
    while service._engine.stats().in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return holds_text(app, session, text, "red")


def quarantine(client: httpx.Client, session: str, **body: Any) -> dict[str, Any]:
    """The account of a quarantine on demand."""
    answer = client.post(f"/v1/leyline/sessions/{session}/quarantine", json=body)
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()
    return account


@pytest.mark.parametrize("way", ["annotation", "policy", "api"])
@pytest.mark.parametrize("api", list(APIS))
def test_a_result_in_quarantine_is_nowhere(
    engine: tuple[Starlette, str], redis: RedisServer, api: str, way: str
) -> None:
    """It is out of the prompt and the cache, also when it comes again without a verdict, to a
    proxy that was restarted, and when its client has shortened it."""
    app, origin = engine
    session, task = f"{api}-{way}", f"Look into {api} {way}."
    stub = STUBS.get(way, STUBS["annotation"])
    said = {"verdict": "quarantine"} if way == "annotation" else None
    options = {"policy": POLICY} if way == "policy" else {}
    with proxy(origin, redis) as client:
        ask(client, api, session, talk(2, task))
        assert knows(app, session)
        if way == "api":
            account = quarantine(client, session, messages=[RESULT], reason="injection")
            assert account["forgot"] == {"result": "erased", "owed": 0}
            assert not knows(app, session)
        told = ask(client, api, session, talk(3, task, said), **options)
        assert told["forgot"]["result"] == "erased"
        assert any(edit["cause"].startswith("policy:") for edit in told["edits"])
        assert not knows(app, session)
        assert knows(app, session, stub)
    with proxy(origin, redis) as client:
        again = ask(client, api, session, talk(4, task))
        assert again["tokens"]["prefix"] > again["tokens"]["prompt"] // 2
        shortened = talk(5, task)
        shortened[RESULT]["content"] = f"Only this: {WORD}"
        ask(client, api, session, shortened)
        assert not knows(app, session)
        path = f"/v1/leyline/sessions/{session}/ledger"
        spans = client.get(path).json()["spans"]
        (found,) = [each for each in spans if each["message"] == RESULT]
        assert (found["state"], found["role"], found["read_by"]) == ("quarantined", "tool", [])
        other = {"authorization": "Bearer key-blue"}
        assert client.get(path, headers=other).status_code == 404
