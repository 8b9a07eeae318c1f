"""Tenants with each other's names for things: sessions, claims and responses stay their owners'."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.claims_engine import ClaimsEngine
from support.fake_engine import MODEL, proxy_before

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.model.history import HARNESS_HEADERS
from leyline_proxy.settings import Settings, TenantSettings
from leyline_proxy.upstream.embedded import create_embedded_engine

REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}

CHAT, SESSIONS = "/v1/chat/completions", "/v1/leyline/sessions"
CLAIMS, RESPONSES = "/v1/leyline/claims", "/v1/responses"
RECALL = "leyline-recall"
KEYS = {"api_keys": ["red:kr", "blue:kb"]}
LISTING = "".join(f"{number:04d} build/module_{number}\n" for number in range(30))

Turn = dict[str, Any]


def key(name: str) -> dict[str, str]:
    """The header of a tenant's key."""
    return {"authorization": f"Bearer k{name[0]}"}


def talk(tool: str, turns: int) -> list[Turn]:
    """A conversation of so many turns, whose first tool result is ``tool``."""
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages: list[Turn] = [
        {"role": "system", "content": "You look into folders. " * 8},
        {"role": "user", "content": "What is in build?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": tool},
    ]
    for turn in range(1, turns):
        messages += [
            {"role": "assistant", "content": f"Answer {turn}."},
            {"role": "user", "content": f"Question {turn}? " * 4},
        ]
    return messages


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A proxy before the real engine, for two tenants."""
    engine = create_embedded_engine("replay", {"pool_tokens": 16_384, "device": "cpu"})
    async with proxy_before(engine, undeclared={"tool": "amortize"}, **KEYS) as http:
        yield http


async def ask(
    client: httpx.AsyncClient, who: str, messages: list[Turn], headers: dict[str, str]
) -> Turn:
    """One turn; its account."""
    body = {"model": RECALL, "messages": messages, "max_tokens": 4}
    answer = await client.post(CHAT, json=body, headers={**key(who), **headers})
    assert answer.status_code == 200, answer.text
    return {"session": answer.headers["x-leyline-session"], **answer.json()["leyline"]}


async def listed(client: httpx.AsyncClient, who: str) -> dict[str, int]:
    """A tenant's sessions and their turns."""
    answer = await client.get(SESSIONS, headers=key(who))
    return {item["id"]: item["turns"] for item in answer.json()["sessions"]}


@pytest.mark.parametrize("header", ["x-leyline-session", *HARNESS_HEADERS])
async def test_a_foreign_session_id_is_a_session_of_ones_own(
    client: httpx.AsyncClient, header: str
) -> None:
    """A tenant that gives another's name, by any harness header, and continues its conversation,
    edited, gets nothing spliced, and the owner's session is untouched."""
    name = {header: "shared-name"}
    first = await ask(client, "red", talk(LISTING, 4), name)
    forged = await ask(client, "blue", talk("[removed]", 5), name)
    assert (forged["tokens"]["spliced"], forged["edits"]) == (0, [])
    assert forged["turn"] != first["turn"]
    assert [list((await listed(client, who)).values()) for who in ("red", "blue")] == [[1], [1]]
    # Not the same edit: what anyone computed exactly is everyone's prefix, and needs no splice.
    owner = await ask(client, "red", talk("[elided]", 5), name)
    assert owner["tokens"]["spliced"] > 0, "as it is within a tenant"
    own = await ask(client, "blue", talk("[shorter]", 6), name)
    assert own["tokens"]["spliced"] > 0, "the session of one's own is one"
    assert [list((await listed(client, who)).values()) for who in ("red", "blue")] == [[2], [2]]


async def test_a_conversation_is_never_recognised_across_tenants(
    client: httpx.AsyncClient,
) -> None:
    """The same history without any name: the second sender begins again."""
    red = await ask(client, "red", talk(LISTING, 4), {})
    blue = await ask(client, "blue", talk("[removed]", 5), {})
    assert blue["tokens"]["spliced"] == 0
    assert red["session"] not in await listed(client, "blue")
    again = await ask(client, "red", talk("[elided]", 5), {})
    assert again["session"] == red["session"], "as it is within a tenant"
    assert (again["tokens"]["spliced"], again["reason"]) == (0, "unnamed_session")


async def test_documents_of_others_are_not_found(client: httpx.AsyncClient) -> None:
    """A session's document is its owner's; for others it is as if it never was."""
    await ask(client, "red", talk(LISTING, 1), {"x-leyline-session": "s"})
    own = await client.get(f"{SESSIONS}/s", headers=key("red"))
    foreign = await client.get(f"{SESSIONS}/s", headers=key("blue"))
    never = await client.get(f"{SESSIONS}/never", headers=key("blue"))
    assert (own.status_code, foreign.status_code) == (200, 404)
    assert foreign.json() == never.json()


async def test_claims_of_others_are_not_found() -> None:
    """Neither another's session can be claimed, nor another's claim seen, changed or released."""
    claim = {"session": "s", "kind": "hard", "predicate": {"messages": [0, 1]}, "id": "mine"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Keep this, please."}]}
    async with proxy_before(ClaimsEngine(), claims_interval_s=60, **KEYS) as client:
        await client.post(CHAT, json=body, headers={**key("red"), "x-leyline-session": "s"})
        made = await client.post(CLAIMS, json=claim, headers=key("red"))
        assert made.status_code == 201
        taken = await client.post(CLAIMS, json={**claim, "id": "other"}, headers=key("blue"))
        where = f"{CLAIMS}/mine"
        foreign = [
            await client.get(where, headers=key("blue")),
            await client.patch(where, json={"revision": 2, "kind": "soft"}, headers=key("blue")),
            await client.delete(where, headers=key("blue")),
            await client.get(f"{where}/events", headers=key("blue")),
        ]
        seen = await client.get(CLAIMS, headers=key("blue"))
        own = await client.get(where, headers=key("red"))
    assert taken.status_code == 404
    assert [answer.status_code for answer in foreign] == [404] * 4
    assert seen.json() == {"claims": []}
    assert own.json()["kind"] == "hard"


async def test_responses_of_others_are_not_found(client: httpx.AsyncClient) -> None:
    """A response that another tenant stored can't be gone on from, read or deleted."""
    body = {"model": RECALL, "input": "Remember the word heron.", "max_output_tokens": 16}
    made = (await client.post(RESPONSES, json=body, headers=key("red"))).json()
    follow = {**body, "input": "Which word?", "previous_response_id": made["id"]}
    foreign = await client.post(RESPONSES, json=follow, headers=key("blue"))
    read = await client.get(f"{RESPONSES}/{made['id']}", headers=key("blue"))
    deleted = await client.delete(f"{RESPONSES}/{made['id']}", headers=key("blue"))
    own = await client.post(RESPONSES, json=follow, headers=key("red"))
    error = foreign.json()["error"]
    assert (foreign.status_code, error["code"]) == (404, "previous_response_not_found")
    assert (read.status_code, deleted.status_code, own.status_code) == (404, 404, 200)


def test_claims_stay_with_the_engines_of_their_tenant() -> None:
    """No command about them reaches an engine that isn't the tenant's, not even to list them."""
    engines = {"a": ClaimsEngine(), "b": ClaimsEngine()}
    with ExitStack() as stack:
        origins = {name: stack.enter_context(serving(e)) for name, e in engines.items()}
        red = TenantSettings(api_keys=("r",), upstreams=("a",))  # type: ignore[arg-type]
        settings = Settings(upstreams=origins, tenants={"red": red}, log_level="error")
        proxy = stack.enter_context(serving(create_app(settings)))
        client = stack.enter_context(httpx.Client(base_url=proxy))
        client.headers["authorization"] = "Bearer r"
        for number in range(4):
            client.post(CHAT, json=REQUEST, headers={"x-leyline-session": f"s{number}"})
            claim = {"session": f"s{number}", "kind": "soft", "predicate": {"messages": [0, 1]}}
            assert client.post("/v1/leyline/claims", json=claim).status_code == 201
        assert len(client.get("/v1/leyline/claims").json()["claims"]) == 4
        assert client.get("/v1/leyline/claims/c-none").status_code == 404
    assert {getattr(each, "tenant", None) or None for each in engines["b"].commands} <= {None}
