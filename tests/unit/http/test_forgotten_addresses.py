"""Texts that a session has forgotten, asked for by their address through every door."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.fake_engine import CAPABILITY, LONG, MODEL, FakeEngine, proxy_before

from leyline_policies.stubs import address_of

CHAT = "/v1/chat/completions"
ADDRESS = address_of(LONG)
NAME = {"x-leyline-session": "s"}
POLICIES = {
    "whole": "truncate_older_than:n=1,max_chars=80,recallable=true",
    "pieces": "offload:max_chars=1000,preview_chars=100,part_chars=1000",
    "run": "sliding_window:max_messages=5,keep_messages=3,recallable=true",
}


def called(number: int) -> dict[str, Any]:
    function = {"name": "shell", "arguments": "{}"}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(number: int, text: str, **leyline: Any) -> dict[str, Any]:
    found = {"role": "tool", "tool_call_id": f"c{number}", "content": text}
    return {**found, "leyline": leyline} if leyline else found


def talk(*texts: str | dict[str, Any]) -> list[dict[str, Any]]:
    """A list with these results, each after its call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "List the modules."}]
    for number, text in enumerate(texts):
        told = text if isinstance(text, dict) else result(number, text)
        messages += [called(number), {**told, "tool_call_id": f"c{number}"}]
    return messages


def holds(messages: list[dict[str, Any]]) -> bool:
    """True if the text is in one of them."""
    return any(LONG in str(each.get("content")) for each in messages)


async def ask(
    client: httpx.AsyncClient, messages: list[dict[str, Any]], **members: Any
) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, **members}
    answer = await client.post(CHAT, json=body, headers=NAME)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def recalled(client: httpx.AsyncClient, address: str = ADDRESS) -> tuple[str, str | None]:
    """Verdict and text of an address."""
    url = "/v1/leyline/sessions/s/recall"
    answer = await client.post(url, json={"addresses": [address]})
    (piece,) = answer.json()["pieces"]
    return piece.get("cause") or piece["verdict"], piece.get("text")


def proxy(engine: FakeEngine, policy: str = "whole") -> Any:
    return proxy_before(engine, recall="on", policy=POLICIES[policy], log_level="error")


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("by", ["verb", "declared", "quarantine"])
async def test_an_equal_text_does_not_bring_back_what_was_forgotten(by: str, forgets: bool) -> None:
    """Of two equal evicted results one is forgotten: neither an address, a reference, nor a working
    set restores the text from then on, also if the other one stays, or comes later; without the
    forget, each does."""
    engine = FakeEngine(capability=CAPABILITY)
    async with proxy(engine) as client:
        await ask(client, talk(LONG, LONG, "built"))
        assert await recalled(client) == ("fault", LONG)
        messages, options = talk(LONG, LONG, "built"), {}
        if forgets and by == "verb":
            messages = talk(result(0, LONG, forget=True), LONG, "built")
        elif forgets and by == "declared":
            options = {"edits": [{"message": 2, "replacement": "[removed]", "mode": "forget"}]}
        elif forgets and by == "quarantine":
            messages = talk(result(0, LONG, verdict="quarantine"), LONG, "built")
        await ask(client, messages, leyline=options)
        # The forgotten message is no longer in the list; its twin is, and another one comes.
        later = talk("[removed]", LONG, "built", LONG, "done")
        await ask(client, later)
        found = await recalled(client)
        reference = {"role": "user", "content": f"leyline://sha256/{ADDRESS[7:]}"}
        await ask(client, [*later, reference])
        referred = holds(engine.sent["messages"][-1:])
        sets = []
        for need in (ADDRESS, "tool:shell"):
            await ask(client, later, leyline={"context": {"need": [need]}})
            sets.append(holds(engine.sent["messages"]))
    if forgets:
        assert (found, referred, sets) == (("forgotten", None), False, [False, False])
    else:
        assert (found, referred, sets) == (("fault", LONG), True, [True, True])


@pytest.mark.parametrize("policy", ["pieces", "run"])
async def test_pieces_and_runs_of_a_forgotten_text_stay_away(policy: str) -> None:
    """A part that holds a forgotten text of another message, or a piece of it, is refused, too."""
    async with proxy(FakeEngine(capability=CAPABILITY), policy) as client:
        url = "/v1/leyline/sessions/s/parts"
        messages = talk(LONG, LONG, "built", "tested", "shipped")
        await ask(client, messages)
        before = (await client.get(url)).json()["parts"]
        assert before
        messages[2]["leyline"] = {"forget": True}
        await ask(client, messages)
        after = (await client.get(url)).json()["parts"]
        for each in [*before, *after]:
            text = (await recalled(client, each["address"]))[1] or ""
            assert LONG[:200] not in text and LONG[1000:1200] not in text


async def test_other_texts_of_the_session_come_back(engine: FakeEngine) -> None:
    """A forget refuses its own text, and no other evicted one."""
    async with proxy(engine) as client:
        other = "x" + LONG
        await ask(client, talk(LONG, other, "built"))
        await ask(client, talk(result(0, LONG, forget=True), other, "built"))
        assert (await recalled(client, address_of(other)))[1] == other
        assert (await recalled(client))[1] is None
