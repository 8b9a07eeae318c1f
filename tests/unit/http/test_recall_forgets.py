"""Forgets reach what a model wrote in hidden turns of a recall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from support.fake_engine import (
    DONE,
    LONG,
    MODEL,
    Answer,
    FakeEngine,
    chat_stream,
    chunk,
    forgotten,
    proxy_before,
)
from support.waiting import until

from leyline_policies.stubs import address_of
from leyline_proxy.model.asides import RECALL_TOOL
from leyline_proxy.model.spans import ANYTHING

SETTINGS: dict[str, Any] = {
    "recall": "on",
    "policy": "truncate_older_than:n=1,max_chars=80,recallable=true",
    "log_level": "error",
}
HEADERS = {"x-leyline-session": "s"}
SECRET = "key=7391"
READ_IT = ("seven-three-nine-one", "4200-less-than-11591")
"""What the model makes of the secret: in its reasoning, and in its call."""


def called(turn: int) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    function = {"name": "shell", "arguments": "{}"}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def history() -> list[dict[str, Any]]:
    """Two tool calls, whose first result is evicted; the second has a secret."""
    return [
        {"role": "user", "content": "List the modules, then build them."},
        called(0),
        {"role": "tool", "tool_call_id": "call_0", "content": LONG},
        called(1),
        {"role": "tool", "tool_call_id": "call_1", "content": f"built with {SECRET}"},
    ]


def later() -> list[dict[str, Any]]:
    """The client's next list."""
    return [
        *history(),
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "And now?"},
    ]


def recalls() -> Answer:
    """An answer that recalls, and says what it read."""
    # JSON's last member of a name counts, and the call stays as the model wrote it.
    arguments = f'{{"address":"{READ_IT[1]}","address":"{address_of(LONG)}"}}'
    function = {"name": RECALL_TOOL, "arguments": arguments}
    call = {"index": 0, "id": "r0", "type": "function", "function": function}
    delta = {"role": "assistant", "content": "", "reasoning_content": READ_IT[0]}
    events = [chunk(delta), chunk({"tool_calls": [call]}), chunk({}, "tool_calls"), DONE]
    return Answer(events, content_type="text/event-stream")


Client = httpx.AsyncClient


async def ask(client: Client, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The account of a turn of the session."""
    body = {"model": MODEL, "messages": messages, "stream": True, "leyline": options}
    answer = await client.post("/v1/chat/completions", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    last = [line for line in answer.text.splitlines() if '"leyline"' in line][-1]
    return dict(json.loads(last.removeprefix("data: "))["leyline"])


async def declared(client: Client) -> None:
    edit = {"message": 4, "replacement": "built", "mode": "forget"}
    await ask(client, later(), edits=[edit])


async def by_a_policy(client: Client) -> None:
    await ask(client, later(), policy=f"redact:pattern='{SECRET}',replacement='[gone]'")


async def with_a_proof(client: Client) -> None:
    body = {"wait_s": 0.01}
    answer = await client.post("/v1/leyline/sessions/s/proof", json=body)
    places = {each["place"]: each for each in answer.json()["places"]}
    assert places["session"]["survivors"] == 0, places


FORGETS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "declared": declared,
    "policy": by_a_policy,
    "proof": with_a_proof,
}


def sent(engine: FakeEngine, since: int) -> str:
    """All that an engine received since so many bodies."""
    return b"\n".join(engine.bodies[since:]).decode()


async def talk(forget: Callable[[Client], Awaitable[None]] | None) -> tuple[str, str, FakeEngine]:
    """The bodies that the engine received in front of a forget, and from it on."""
    engine = FakeEngine()
    async with proxy_before(engine, **SETTINGS) as client:
        engine.answers = [recalls(), chat_stream("Done.")]
        await ask(client, history())
        await ask(client, later())  # without a forget, the aside is sent again
        before, since = sent(engine, 2), len(engine.bodies)
        engine.receipt = forgotten
        if forget is not None:
            await forget(client)
        await ask(client, [*later(), {"role": "user", "content": "Go on."}])
    return before, sent(engine, since), engine


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)
async def test_no_forget_leaves_what_a_hidden_turn_wrote(
    forget: Callable[[Client], Awaitable[None]],
) -> None:
    """Neither the turn that forgets nor a later one sends a hidden turn's reasoning or call again,
    which went along with each turn until then."""
    before, after, _ = await talk(forget)
    for text in READ_IT:
        assert text in before
        assert text not in after


async def test_an_aside_without_a_forget_stays() -> None:
    """The control: a session that forgets nothing keeps its asides."""
    _, after, _ = await talk(None)
    assert all(text in after for text in READ_IT)


async def test_a_hidden_turn_that_a_forget_overtakes_leaves_nothing() -> None:
    """A hidden turn that was sent before a forget and ends after it adds no aside."""
    engine = FakeEngine()
    async with proxy_before(engine, **SETTINGS) as client:
        await ask(client, history()[:3])
        hidden = recalls()
        engine.answers = [
            Answer(hidden.chunks, content_type=hidden.content_type, pause_s=0.05),
            chat_stream("Done."),
        ]
        turn = asyncio.create_task(ask(client, history()))
        await until(lambda: len(engine.bodies) == 2)
        answer = await client.post("/v1/leyline/sessions/s/proof", json={"wait_s": 0})
        assert answer.status_code == 200
        since = len(engine.bodies)
        await turn
        await ask(client, later())
        assert not any(text in sent(engine, since) for text in READ_IT)


async def test_a_forget_of_a_recalled_text_still_reaches_the_engine() -> None:
    """A policy that forgets text of a recalled result demands it from the engine, although the
    turn is planned again without the text, which no message of the client's has any more."""
    engine = FakeEngine()
    async with proxy_before(engine, **SETTINGS) as client:
        engine.answers = [recalls(), chat_stream("Done.")]
        await ask(client, history())
        engine.receipt = forgotten
        messages = later()
        messages[2] = {**messages[2], "content": "cut by the client"}
        account = await ask(client, messages, policy="redact:pattern='line 7 of'")
        assert account["forgot"] is not None, account
        assert "line 7 of" not in engine.bodies[-1].decode()
        (edit,) = engine.sent["custom_params"]["kv_hints"]["actions"]
        assert edit["payload"]["forget"] == [ANYTHING]
