"""Forgets in lists without an answer and without a session's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
DECLARED = {"edits": [{"message": 1, "replacement": "Here it is.", "mode": "forget"}]}
DEMANDS = ("declared", "annotation", "policy")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A client of a proxy in front of a real engine."""
    engine = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 32_768})
    with serving(engine) as origin:
        app = create_app(Settings(upstream=origin, log_level="error"))
        with serving(app) as proxy, httpx.Client(base_url=proxy, timeout=60) as opened:
            yield opened


def opening(task: str) -> list[dict[str, Any]]:
    """A list that begins a conversation, with a secret in its second message."""
    return [
        {"role": "system", "content": f"You deploy {task}."},
        {"role": "user", "content": f"This is the key=7391 of {task}, and more of it follows."},
        {"role": "user", "content": "Go on."},
    ]


def ask(client: httpx.Client, messages: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
    """The account of a turn."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": messages, "max_tokens": 2, **members}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def demand(client: httpx.Client, task: str, how: str) -> dict[str, Any]:
    """The account of a turn that demands to forget the secret."""
    messages = opening(task)
    if how == "annotation":
        messages[1]["leyline"] = {"forget": True}
        return ask(client, messages)
    return ask(client, messages, leyline=DECLARED if how == "declared" else {"policy": REDACT})


def unreachable(client: httpx.Client) -> float:
    """The number of turns whose forget reached nothing."""
    lines = client.get("/metrics").text.splitlines()
    found = (each for each in lines if each.startswith("leyline_forgets_total"))
    return sum(float(each.split()[-1]) for each in found if "unreachable" in each)


@pytest.mark.parametrize("how", DEMANDS)
def test_a_list_that_was_sent_before_is_forgotten(client: httpx.Client, how: str) -> None:
    """The forget reaches the session that sent the very list, and its KV is found no more."""
    task = f"service {how}"
    first = ask(client, opening(task))
    control = ask(client, opening(f"control {how}"))
    forgot = demand(client, task, how)
    assert forgot["session"] == first["session"] != control["session"]
    assert forgot["forgot"]["result"] == "erased" and forgot["forgot"]["overwritten"] > 0
    cached = ask(client, opening(f"control {how}"))["tokens"]
    assert cached["prefix"] == cached["prompt"] - 1, "what nobody forgets stays cached"
    again = ask(client, opening(task))["tokens"]
    assert again["prefix"] < again["prompt"] // 2


def test_a_forget_that_finds_nobody_says_so(client: httpx.Client) -> None:
    """A demand about a list that nobody is known to have sent is unreachable, and counted so; a
    policy that redacts what is new has nothing to forget."""
    before = unreachable(client)
    for how in ("declared", "annotation"):
        assert demand(client, f"nothing known {how}", how)["forgot"] == {"result": "unreachable"}
    assert demand(client, "nothing known policy", "policy")["forgot"] is None
    assert unreachable(client) == before + 2


def test_equal_openings_stay_apart(client: httpx.Client) -> None:
    """A policy that forgets joins no conversations: the text was never sent unredacted."""
    accounts = [demand(client, "a common task", "policy") for _ in range(2)]
    assert accounts[0]["session"] != accounts[1]["session"]
    assert [each["forgot"] for each in accounts] == [None, None]


def test_who_knows_an_opening_takes_no_conversation_away(client: httpx.Client) -> None:
    """A longer list that makes a session forget leaves its history: the conversation goes on there,
    and what it demands itself is reached."""
    messages = opening("a shared task")
    first = ask(client, messages)
    noted = [dict(each) for each in messages]
    noted[1]["leyline"] = {"forget": True}
    stranger = ask(client, [*noted, {"role": "user", "content": "And something else."}])
    assert stranger["session"] == first["session"] and stranger["forgot"]["result"] == "erased"
    messages += [
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "What is left?"},
    ]
    assert ask(client, messages)["session"] == first["session"]
    forgot = ask(client, messages, leyline=DECLARED)
    assert forgot["session"] == first["session"] and forgot["forgot"]["result"] == "erased"
