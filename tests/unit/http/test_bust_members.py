"""The account of lost tokens for an engine that only counts, and for sessions under new ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
from support.fake_engine import (
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    proxy_before,
)
from support.fake_engine import tool_session as session_of

CHAT = "/v1/chat/completions"
RED, BLUE = "key-of-the-red-tenant", "key-of-the-blue-tenant"


def counted(prompt: int, cached: int) -> Answer:
    """An answer with an engine's counts."""
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": 5, "prompt_tokens_details": details}
    return chat_json(usage=usage)


async def ask(
    client: httpx.AsyncClient, session: str, messages: Any, key: str = "", **members: Any
) -> dict[str, Any]:
    """The account of a turn."""
    headers = {"x-leyline-session": session} | ({"authorization": f"Bearer {key}"} if key else {})
    body = {"model": MODEL, "messages": messages, **members}
    answer = await client.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["leyline"]
    return found


def edited(turns: int) -> list[dict[str, Any]]:
    """The history with its first result rewritten."""
    messages = session_of(turns)
    return [*messages[:2], {**messages[2], "content": "nothing"}, *messages[3:]]


async def test_an_engine_that_only_counts_gets_an_estimate() -> None:
    """The edited message is to blame for what was kept after it, without places; a price is known
    all the same."""
    engine = FakeEngine(capability=None)
    engine.answers += [counted(2000, 0), counted(2300, 100)]
    prices = {MODEL: {"currency": "USD", "prefilled": 3.0, "cached": 1.0, "generated": 10.0}}
    async with proxy_before(engine, prices=prices) as client:
        first = await ask(client, "s", session_of(3))
        assert first["busts"]["compared_with"] is None
        assert first["busts"]["new_tokens"] == 2000
        busts = (await ask(client, "s", edited(4)))["busts"]
    (entry,) = busts["entries"]
    assert busts["estimated"] and busts["compared_with"] == first["turn"]
    named = (entry["cause"], entry["message"], entry["role"], entry["tool"], entry["why"])
    assert named == ("undeclared", 2, "tool", "ls", "not_spliced")
    assert (entry["at"], entry["messages"]) == (None, None)
    assert 1000 < entry["tokens"] == busts["lost_tokens"] < 2000
    assert busts["lost_tokens"] + busts["new_tokens"] == 2200
    turn = (2200 * 3.0 + 100 * 1.0 + 5 * 10.0) / 1e6
    assert busts["money"] == {
        "currency": "USD",
        "lost": busts["lost_tokens"] * 2.0 / 1e6,
        "turn": turn,
    }


async def test_counts_that_come_too_late_are_no_zeros() -> None:
    """In a stream of an engine without receipts, usage comes after the account: that says nothing,
    and the session's document has it."""
    engine = FakeEngine(capability=None)
    stream = chat_stream("Hello.")
    usage = {"prompt_tokens": 70, "completion_tokens": 5}
    late = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    *events, done = stream.chunks
    engine.answers.append(Answer([*events, late, done], content_type=stream.content_type))
    async with proxy_before(engine) as client:
        body = {"model": MODEL, "messages": session_of(1), "stream": True}
        answer = await client.post(CHAT, json=body, headers={"x-leyline-session": "s"})
        (line,) = [each for each in answer.text.splitlines() if '"leyline"' in each]
        assert json.loads(line.removeprefix("data: "))["leyline"]["busts"] is None
        (turn,) = (await client.get("/v1/leyline/sessions/s")).json()["history"]
    assert turn["busts"]["new_tokens"] == 70


async def test_another_model_is_a_cause_of_its_own() -> None:
    """A session that goes to another model loses what the first one had computed."""
    engine = FakeEngine(capability=None)
    engine.models.append("other-model")
    engine.answers += [counted(2000, 0), counted(2100, 0)]
    async with proxy_before(engine) as client:
        await ask(client, "s", session_of(3))
        busts = (await ask(client, "s", session_of(3), model="other-model"))["busts"]
    assert [(each["cause"], each["tokens"]) for each in busts["entries"]] == [("model", 2000)]


async def test_a_list_under_a_new_id_is_compared_with_the_old_one() -> None:
    """The tenant's other session with the same beginning is what the new id costs; another
    tenant's is never looked at, and neither is a list that began otherwise."""
    engine = FakeEngine(capability=None)
    keys = (f"red:{RED}", f"blue:{BLUE}")
    async with proxy_before(engine, api_keys=keys) as client:
        engine.answers += [counted(900, 0)]
        # An id that the other tenant has, too.
        await ask(client, "old", [{"role": "user", "content": "Another list."}], BLUE)
        engine.answers += [counted(2000, 0), counted(2200, 300), counted(2200, 0), counted(900, 0)]
        await ask(client, "old", session_of(3), RED)
        lost = (await ask(client, "new", session_of(4), RED))["busts"]
        others = (await ask(client, "new", session_of(4), BLUE))["busts"]
        apart = [{"role": "user", "content": "Another task."}, *session_of(2)[1:]]
        fresh = (await ask(client, "newer", apart, RED))["busts"]
    assert [(each["cause"], each["tokens"]) for each in lost["entries"]] == [("session", 1700)]
    for busts in (others, fresh):
        assert (busts["compared_with"], busts["lost_tokens"]) == (None, 0)


async def test_a_session_that_is_gone_is_no_predecessor() -> None:
    """Nothing of it is left to compare with."""
    engine = FakeEngine(capability=None)
    engine.answers += [counted(2000, 0), counted(900, 0), counted(2200, 0)]
    async with proxy_before(engine, max_sessions=1) as client:
        await ask(client, "old", session_of(3))
        await ask(client, "between", [{"role": "user", "content": "Another task."}])
        busts = (await ask(client, "new", session_of(4)))["busts"]
    assert busts["compared_with"] is None
