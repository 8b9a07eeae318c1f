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
from fastapi import FastAPI
from starlette.applications import Starlette
from support.agent_history import agent_history
from support.engine_memory import holds_text, learn_words
from support.redis_server import RedisServer, redis_server
from typer.testing import CliRunner

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.cli.main import build_app
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


@contextmanager
def running_engine() -> Iterator[tuple[Starlette, str]]:
    """An engine that outlives proxies: the application and its origin."""
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536})
    with serving(app) as origin:
        learn_words(app, origin)
        yield app, origin
    check_clean(app)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Starlette, str]]:
    """One for the module."""
    with running_engine() as running:
        yield running


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The store of all proxies."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@contextmanager
def proxy(
    origin: str, redis: RedisServer, apps: list[FastAPI] | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """A client of tenant red, of a proxy that remembers what lies in Redis, and is put into
    ``apps``."""
    given = {"upstream": origin, "log_level": "error", **settings}
    secret = ["a secret of sixteen characters or more"]
    app = create_app(
        Settings(session_store=redis.url, session_secret=secret, tenants=TENANTS, **given)
    )
    if apps is not None:
        apps.append(app)
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


def test_copies_in_other_sessions_forget_what_they_have_read(
    engine: tuple[Starlette, str], redis: RedisServer
) -> None:
    """A session that reused what stood after the word loses that copy, and nothing else."""
    app, origin = engine
    file = " ".join(f"handler {n} answers {n * 7919 % 1000}" for n in range(40))
    source = [*talk(1, "Read, then look."), {"role": "user", "content": file}]
    reader: Talk = [
        {"role": "system", "content": "You are another agent with words of its own. " * 3},
        {"role": "user", "content": file},
    ]
    apps: list[FastAPI] = []
    with proxy(origin, redis, apps) as client:
        ask(client, "chat", "source", source)
        copied = ask(client, "chat", "reader", reader)
        assert copied["reuse"]["tenant"] > 200
        assert knows(app, "reader", "handler 39")
        index = apps[0].state.services.named._index
        assert len(index) > 1
        assert quarantine(client, "source", messages=[RESULT])["forgot"]["result"] == "erased"
        assert "source" not in index._tenants["red"].by_session
        assert not knows(app, "reader", "handler 39")
        assert knows(app, "reader", "words of its own")
        again = ask(client, "chat", "reader", [*reader, {"role": "user", "content": "Go on."}])
        assert (again["tokens"]["reused"], again["lineage"]) == (0, None)
        assert ask(client, "chat", "third", reader)["tokens"]["reused"] == 0


def test_stored_responses_go_if_the_caller_says_so(
    engine: tuple[Starlette, str], redis: RedisServer
) -> None:
    """Those that hold the message, or were made after it, are gone for good; earlier ones stay."""
    _, origin = engine
    with proxy(origin, redis) as client:

        def respond(given: Any, previous: str | None = None) -> dict[str, Any]:
            body = {"model": "leyline-recall", "input": given, "max_output_tokens": 2}
            answer = client.post("/v1/responses", json=body | {"previous_response_id": previous})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        def there(response: dict[str, Any]) -> bool:
            return client.get(f"/v1/responses/{response['id']}").status_code == 200

        first = respond("Find the settings.")
        session = first["leyline"]["session"]
        second = respond(f"I found {WORD}.", first["id"])
        third = respond("Go on.", second["id"])
        unrelated = respond("Something else.")
        spans = client.get(f"/v1/leyline/sessions/{session}/ledger").json()["spans"]
        (second_text,) = [each for each in spans if each["message"] == 2]
        span = second_text["span"]
        assert (spans[0]["since"], second_text["since"]) == (0, 1)
        assert quarantine(client, session, spans=[span])["responses_deleted"] == 0
        assert there(third)
        assert quarantine(client, session, spans=[span], responses=True)["responses_deleted"] == 2
        assert [there(each) for each in (first, second, third, unrelated)] == [1, 0, 0, 1]


def test_an_answer_goes_by_its_name_in_the_ledger(
    engine: tuple[Starlette, str], redis: RedisServer
) -> None:
    """A caller may condemn what the model wrote before any list holds it."""
    app, origin = engine
    with proxy(origin, redis) as client:
        ask(client, "chat", "answers", talk(1, "Answer me."))
        spans = client.get("/v1/leyline/sessions/answers/ledger").json()["spans"]
        (span,) = [each for each in spans if each["span"].endswith(".out")]
        assert (span["role"], span["state"], span["tokens"]) == ("assistant", "held", 2)
        quarantine(client, "answers", spans=[span["span"]])
        said = {"role": "assistant", "content": "an answer of poison"}
        messages = [*talk(1, "Answer me."), said, {"role": "user", "content": "Why?"}]
        for more in ([], [{"role": "user", "content": "And?"}]):
            ask(client, "chat", "answers", [*messages, *more])
            assert not knows(app, "answers", "poison")
            assert knows(app, "answers", "Why?")


def test_a_demand_that_is_wrong_names_its_field(
    engine: tuple[Starlette, str], redis: RedisServer
) -> None:
    """Nothing is done then, and another tenant's session is as unknown as none."""
    app, origin = engine
    with proxy(origin, redis) as client:
        ask(client, "chat", "strict", talk(1, "Be strict."))
        path = "/v1/leyline/sessions/strict/quarantine"
        for body, param in (
            ({"messages": [RESULT, 99]}, "messages[1]"),
            ({"messages": [0]}, "messages[0]"),
            ({"messages": [-1]}, "messages[0]"),
            ({"spans": ["t0-else.1"]}, "spans[0]"),
            ({"messages": [RESULT], "reason": "because"}, "reason"),
            ({"messages": [RESULT], "note": "x"}, None),
            ({}, "messages"),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"] == param, answer.text
        blue = {"authorization": "Bearer key-blue"}
        there = client.post(path, json={"messages": [RESULT]}, headers=blue)
        nowhere = client.post(path.replace("strict", "none"), json={"messages": [RESULT]})
        assert there.status_code == nowhere.status_code == 404
        assert there.json() == nowhere.json()
        assert knows(app, "strict")
        system = talk(1, "Be strict.")
        system[0]["leyline"] = {"verdict": "quarantine"}
        refused = client.post(
            "/v1/chat/completions", json={"model": "leyline-recall", "messages": system}
        )
        assert refused.json()["error"]["param"] == "messages[0].leyline.verdict"


def test_the_log_has_a_record_of_each_verdict(
    engine: tuple[Starlette, str], redis: RedisServer, tmp_path: Path
) -> None:
    """It says who, which message and what the engines answered, in a good chain, without text."""
    _, origin = engine
    file, key = tmp_path / "audit.jsonl", "the auditor's own"
    with proxy(origin, redis, audit_file=file, audit_key=key) as client:
        ask(client, "chat", "logged", talk(2, "Log it."))
        for _ in range(2):
            quarantine(client, "logged", messages=[RESULT], reason="malware")
        ask(client, "chat", "logged", talk(3, "Log it."))
        said = talk(3, "Log it, too.", {"verdict": "quarantine"})
        ask(client, "chat", "said", said[:5])
        ask(client, "chat", "said", said)
        ask(client, "chat", "found", talk(1, "Find it."), policy=POLICY)
    log = file.read_text()
    records = [json.loads(line) for line in log.splitlines()]
    told = [each for each in records if each["kind"] == "quarantine"]
    shape = [(each["session"], each["by"], each["cause"], each["reason"]) for each in told]
    assert shape == [
        ("logged", "api", "policy:verbs:verdict", "malware"),
        ("said", "annotation", "policy:verbs:verdict", None),
        ("found", "policy", "policy:quarantine:pattern", None),
    ]
    assert all((each["message"], each["role"]) == (RESULT, "tool") for each in told)
    turns = {each["turn"]: each for each in records if each["kind"] == "turn"}
    names = [name for each in turns.values() for edit in each["edits"] for name in edit["names"]]
    assert all(each["span"] in names for each in told)
    (carried,) = [each for each in records if each["kind"] == "erasure"]
    assert (carried["result"], [carried["engine"]]) == ("erased", told[0]["owed"])
    assert told[1]["turn"] in turns
    assert WORD not in log
    checked = CliRunner().invoke(
        build_app(), ["audit", "verify", str(file)], env={"LEYLINE_AUDIT_KEY": key}
    )
    assert checked.exit_code == 0, checked.output


def test_a_turn_under_way_is_forgotten_when_it_ends(
    engine: tuple[Starlette, str], redis: RedisServer
) -> None:
    """Its engine owes the forget meanwhile, and nothing of it is left."""
    app, origin = engine
    path, body = as_chat(talk(2, "Take your time."))
    body |= {"model": "leyline-recall", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with proxy(origin, redis) as client:
        ask(client, "chat", "long", talk(1, "Take your time."))
        with client.stream(
            "POST", path, json=body, headers={"x-leyline-session": "long"}
        ) as answer:
            events = answer.iter_lines()
            next(events)
            quarantine(client, "long", messages=[RESULT])
            assert "data: [DONE]" in list(events)
        deadline = time.monotonic() + PATIENCE_S
        while knows(app, "long"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ask(client, "chat", "long", talk(3, "Take your time."))
        assert not knows(app, "long")


def test_only_a_policys_verdict_is_lifted(
    engine: tuple[Starlette, str], redis: RedisServer
) -> None:
    """The caller's ``allow`` says that a policy is wrong; its own earlier word stands."""
    app, origin = engine
    allow = {"verdict": "allow"}
    with proxy(origin, redis) as client:
        ask(client, "chat", "lifted", talk(1, "Lift it."), policy=POLICY)
        ask(client, "chat", "lifted", talk(1, "Lift it."))
        assert not knows(app, "lifted")
        ask(client, "chat", "lifted", talk(1, "Lift it.", allow), policy=POLICY)
        assert knows(app, "lifted")
        quarantine(client, "lifted", messages=[RESULT])
        ask(client, "chat", "lifted", talk(2, "Lift it.", allow))
        assert not knows(app, "lifted")


def test_a_verdict_holds_beside_declared_edits(
    engine: tuple[Starlette, str], redis: RedisServer
) -> None:
    """An edit that shows the message, or cuts it amortized, doesn't bring it back."""
    app, origin = engine
    with proxy(origin, redis) as client:
        for session, declared in (
            ("shows", [{"message": RESULT, "replacement": f"Again: {WORD}"}]),
            ("cuts", [{"message": RESULT, "chars": [0, 5], "replacement": ""}]),
            ("drops", [{"message": RESULT - 1, "drop": True}, {"message": RESULT, "drop": True}]),
        ):
            ask(client, "chat", session, talk(2, session))
            quarantine(client, session, messages=[RESULT])
            told = ask(client, "chat", session, talk(3, session), edits=declared)
            assert told["forgot"]["result"] == "erased"
            assert not knows(app, session)


def test_a_session_has_room_for_so_many(
    engine: tuple[Starlette, str], redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict that could not be remembered is refused, and names the message."""
    _, origin = engine
    for module in ("plan.planner", "turns.quarantine", "model.verdicts"):
        monkeypatch.setattr(f"leyline_proxy.{module}.MAX_VERDICTS", 1)
    with proxy(origin, redis) as client:
        ask(client, "chat", "full", talk(3, "Fill it.", {"verdict": "quarantine"}))
        more = talk(3, "Fill it.")
        more[5]["leyline"] = {"verdict": "quarantine"}
        path, body = as_chat(more)
        headers = {"x-leyline-session": "full"}
        refused = client.post(path, json=body | {"model": "leyline-recall"}, headers=headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "quarantine_limit")
        assert error["param"] == "messages[5].leyline.verdict"
        path = "/v1/leyline/sessions/full/quarantine"
        for index, status in ((5, 400), (RESULT, 200)):
            assert client.post(path, json={"messages": [index]}).status_code == status


def test_no_verdict_is_lost_with_the_store(engine: tuple[Starlette, str], tmp_path: Path) -> None:
    """While the store is away a demand is refused, and the verdicts that are known hold."""
    app, origin = engine
    with redis_server(tmp_path) as own, proxy(origin, own, redis_timeout_s=0.5) as client:
        ask(client, "chat", "away", talk(1, "Be away."))
        quarantine(client, "away", messages=[RESULT])
        own.kill()
        answer = client.post("/v1/leyline/sessions/away/quarantine", json={"messages": [RESULT]})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "session_store_unavailable"
        ask(client, "chat", "away", talk(2, "Be away."))
        assert not knows(app, "away")


def test_every_engine_that_had_the_session_forgets(redis: RedisServer) -> None:
    """A session that has moved leaves nothing behind where it was."""
    with running_engine() as (first, one), running_engine() as (second, two):
        for app, origin in ((first, one), (second, two)):
            with proxy(origin, redis) as client:
                ask(client, "chat", "moves", talk(2, "Move."))
            assert knows(app, "moves")
        with proxy("", redis, upstream=None, upstreams={"one": one, "two": two}) as client:
            account = quarantine(client, "moves", messages=[RESULT])
        assert account["forgot"] == {"result": "erased", "owed": 0}
        assert not knows(first, "moves")
        assert not knows(second, "moves")
