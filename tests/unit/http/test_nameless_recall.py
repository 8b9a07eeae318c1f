"""Evicted texts of sessions without a name, asked for by other callers of the tenant."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.fake_engine import LONG, MODEL, FakeEngine, proxy_before
from test_forgotten_addresses import ADDRESS, CHAT, POLICIES, holds, talk

OTHER = [{"role": "user", "content": "Something else."}]


async def sent(
    client: httpx.AsyncClient, messages: list[dict[str, Any]], name: str = "", **members: Any
) -> str:
    """Send a request, and return its session."""
    headers = {"x-leyline-session": name} if name else {}
    body = {"model": MODEL, "messages": messages, **members}
    answer = await client.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-leyline-session"])


def proxy(engine: FakeEngine) -> Any:
    return proxy_before(engine, recall="on", policy=POLICIES["whole"], log_level="error")


@pytest.mark.parametrize("named", [False, True])
async def test_an_id_alone_gives_no_text_of_a_session_without_a_name(
    engine: FakeEngine, named: bool
) -> None:
    """Neither the routes, nor the id as a name, nor a working set or a reference under it show what
    another caller's session evicted; a session with a name shows it."""
    async with proxy(engine) as client:
        session = await sent(client, talk(LONG, "built"), "mine" if named else "")
        url = f"/v1/leyline/sessions/{session}"
        seen = []
        for taken in (False, True):
            if taken:
                await sent(client, OTHER, session)
            listed = await client.get(f"{url}/parts")
            found = await client.post(f"{url}/recall", json={"addresses": [ADDRESS]})
            short = await client.post(f"{url}/recall", json={"addresses": [ADDRESS[:24]]})
            seen += [ADDRESS in listed.text, LONG[:9] in found.text, LONG[:9] in short.text]
            assert "shell" not in listed.text + found.text or named
            if not taken and not named:
                assert found.status_code == listed.status_code == 403
                assert found.json()["error"]["code"] == "session_without_name"
        for need in (ADDRESS, ADDRESS[:24], "tool:shell"):
            await sent(client, OTHER, session, leyline={"context": {"need": [need]}})
            seen.append(holds(engine.sent["messages"]))
        reference = {"role": "user", "content": f"leyline://sha256/{ADDRESS[7:]}"}
        await sent(client, [*OTHER, reference], session)
        seen.append(holds(engine.sent["messages"]))
    assert seen == [named] * len(seen)


async def test_a_request_gets_back_what_its_own_messages_show(engine: FakeEngine) -> None:
    """Without a name, a conversation still has its own texts back; and with one from then on, they
    are its own."""
    messages = talk(LONG, "built")
    need = {"context": {"need": [ADDRESS]}}
    async with proxy(engine) as client:
        session = await sent(client, messages)
        await sent(client, messages, leyline=need)
        assert holds(engine.sent["messages"])
        await sent(client, messages, session)
        await sent(client, messages, session)
        url = f"/v1/leyline/sessions/{session}/recall"
        found = await client.post(url, json={"addresses": [ADDRESS]})
        assert found.json()["pieces"][0]["text"] == LONG
