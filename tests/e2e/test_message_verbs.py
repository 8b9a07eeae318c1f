"""Verbs on messages against the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

CHAT = "/v1/chat/completions"
NOTE = "The build takes its settings from the file that the deployment names. " * 8


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a whole stack whose policy shortens."""
    options = {"pool_tokens": 32_768, "device": "cpu"}
    policy = "truncate_older_than:n=0,max_chars=40"
    with (
        embedded_stack(options, policy=policy, log_level="error") as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def model(client: httpx.Client) -> str:
    """The served model."""
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


def ask(client: httpx.Client, model: str, session: str, messages: list[Any]) -> dict[str, Any]:
    """One turn."""
    response = client.post(
        CHAT,
        json={"model": model, "messages": messages, "max_tokens": 1},
        headers={"x-leyline-session": session},
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def turns(said: dict[str, Any], count: int) -> list[Any]:
    """A note that a verb refers to, and so many exchanges after it."""
    messages: list[Any] = [
        {"role": "system", "content": "You keep notes, and you answer briefly. " * 4},
        {"role": "user", "content": NOTE, "leyline": said},
        {"role": "user", "content": "Begin with the first file."},
    ]
    for number in range(count):
        messages.append({"role": "assistant", "content": f"File {number} is done. " * 8})
        messages.append({"role": "user", "content": f"Go on with file {number + 1}."})
    return messages


@pytest.mark.parametrize(
    ("said", "verb"), [({"scratch": True}, "scratch"), ({"decay": {"turns": 1}}, "decay")]
)
def test_a_message_that_has_had_its_time_is_spliced_out(
    client: httpx.Client, model: str, said: dict[str, Any], verb: str
) -> None:
    """On the next turn it is gone from the prompt, and what follows it is moved."""
    ask(client, model, verb, turns(said, 0))
    first = ask(client, model, verb, turns(said, 1))
    plain = ask(client, model, f"plain {verb}", turns({"tags": ["x"]}, 1))
    account = first["leyline"]
    assert f"policy:verbs:{verb}" in {edit["cause"] for edit in account["edits"]}
    assert first["usage"]["prompt_tokens"] < plain["usage"]["prompt_tokens"] - 60
    assert account["policy_faults"] == []


def test_forgetting_a_message_overwrites_what_has_read_it(client: httpx.Client, model: str) -> None:
    """The engine's receipt says how much."""
    own = {"role": "system", "content": "Nobody else has this prompt, so nobody shares its KV."}
    ask(client, model, "forgets", [own, *turns({}, 1)])
    account = ask(client, model, "forgets", [own, *turns({"forget": True}, 2)])["leyline"]
    assert account["forgot"]["overwritten"] > 0


def test_a_pinned_message_is_not_edited(client: httpx.Client, model: str) -> None:
    """A policy that would shorten it can't, and the engine takes the claim."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for said, edited in (({"pin": True}, False), ({}, True)):
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": NOTE, "leyline": said},
            {"role": "user", "content": "Well?"},
        ]
        answer = ask(client, model, f"pinned {edited}", messages)
        assert (answer["usage"]["prompt_tokens"] < 100) is edited
        assert answer["leyline"]["refused_verbs"] == []


@pytest.mark.parametrize(
    ("said", "param", "words"),
    [
        (7, "messages[1].leyline", "object"),
        ({"evicted": True}, "messages[1].leyline", "may have evict, forget"),
        ({"decay": {"turns": 0}}, "messages[1].leyline.decay.turns", ">= 1"),
        ({"decay": {"days": 1}}, "messages[1].leyline.decay", "may have turns, seconds"),
        ({"decay": {}}, "messages[1].leyline.decay", "needs turns or seconds"),
        ({"share": "no spaces"}, "messages[1].leyline.share", "use only letters"),
        ({"verdict": "guilty"}, "messages[1].leyline.verdict", "guilty"),
        ({"tags": ["x"] * 17}, "messages[1].leyline.tags", "16"),
    ],
)
def test_mistakes_name_the_field(
    client: httpx.Client, model: str, said: Any, param: str, words: str
) -> None:
    """A 400 in OpenAI's shape, with what is known."""
    body = {"model": model, "messages": turns(said, 0)}
    response = client.post(CHAT, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert words in error["message"]
