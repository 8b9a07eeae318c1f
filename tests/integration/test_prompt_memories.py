"""Forgets reach all that the process remembers of prompts: its live objects are searched."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.process_search import Marker

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, create_embedded_engine, lifespan_of
from leyline_proxy.wiring.services import Services

pytestmark = pytest.mark.nightly

KEY = "a-key-of-tests-long-enough"
MODEL = "leyline-recall"
HEADERS = {"x-leyline-session": "s", "anthropic-version": "2023-06-01"}
REDACT = "redact:pattern='mk-[0-9a-f]+',replacement='[gone]'"
LONG = "".join(f"line {number} of the listing\n" for number in range(60))

Talk = Callable[[str | None, int], dict[str, Any]]


@asynccontextmanager
async def proxy(folder: Path, **settings: Any) -> AsyncIterator[tuple[Services, httpx.AsyncClient]]:
    """A proxy with all that keeps text switched on, and a client of it."""
    given = {
        "recall": "on",
        "recall_key": KEY,
        "recall_store": f"file://{folder}",
        "log_level": "error",
        "policy": "truncate_older_than:n=1,max_chars=80,recallable=true",
        **settings,
    }
    app = create_app(Settings(**given), engine_app=create_embedded_engine("replay", {}))
    async with (
        lifespan_of(app),
        httpx.AsyncClient(
            transport=ASGIStreamTransport(app), base_url="http://localhost", timeout=60
        ) as client,
    ):
        yield app.state.services, client


def chat(secret: str | None, turns: int) -> dict[str, Any]:
    """A chat request of so many turns, the first of which has the secret, if any."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. " * 40}]
    for turn in range(turns):
        said = f"The key is {secret}. {LONG}" if secret and not turn else f"Turn {turn}. {LONG}"
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]
    messages[-1] = {"role": "user", "content": "Go on."}
    return {"model": MODEL, "messages": messages, "max_tokens": 2}


def anthropic(secret: str | None, turns: int) -> dict[str, Any]:
    """The same as a Messages request."""
    body = chat(secret, turns)
    (system, *messages) = body["messages"]
    messages = [each for at, each in enumerate(messages) if at < len(messages) - 1 or at % 2 == 0]
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "Go on."})
    return {**body, "system": system["content"], "messages": messages}


def responses(secret: str | None, turns: int) -> dict[str, Any]:
    """The same as a Responses request, which is stored."""
    messages = chat(secret, turns)["messages"]
    return {"model": MODEL, "input": messages, "max_output_tokens": 16}


APIS: dict[str, tuple[str, Talk]] = {
    "chat": ("/v1/chat/completions", chat),
    "messages": ("/v1/messages", anthropic),
    "responses": ("/v1/responses", responses),
}


async def turn(client: httpx.AsyncClient, path: str, body: dict[str, Any], **options: Any) -> None:
    """One turn of the session."""
    sent = {**body, **({"leyline": options} if options else {})}
    answer = await client.post(path, json=sent, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    await answer.aclose()


def tokenise(marker: Marker, services: Services) -> None:
    """Have a search look for the marker's tokens, too."""
    (replica,) = services.pool
    renderer = replica.status.rendering.renderer
    assert renderer is not None
    marker.tokenised(renderer._tokenizer._tokenizer)


def texts(services: Services, session: str) -> set[tuple[int, str]]:
    """The texts whose tokens are remembered, and that a session has used."""
    (replica,) = services.pool
    renderer = replica.status.rendering.renderer
    assert renderer is not None
    memories = (renderer._tokenizer._pieces, renderer._tokenizer._segments)
    return {
        (number, text)
        for number, memory in enumerate(memories)
        for text in memory._of.get(("default", session), {})
    }


async def prove(client: httpx.AsyncClient) -> dict[str, Any]:
    """Forget the session with a proof."""
    answer = await client.post(
        "/v1/leyline/sessions/s/proof", json={"responses": True, "wait_s": 60}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize(("path", "talk"), APIS.values(), ids=APIS)
async def test_after_a_clean_proof_nothing_but_the_newest_list_holds_the_text(
    path: str, talk: Talk, tmp_path: Path
) -> None:
    """Three turns leave a secret in many objects of the process; after a proof that is clean only
    the session's newest list has it, and after a turn without it no object has."""
    marker = Marker()
    async with proxy(tmp_path) as (services, client):
        for turns in (1, 2, 3):
            await turn(client, path, talk(str(marker), turns))
        tokenise(marker, services)
        before = marker.holders()
        for holder in ("ReadBody", "MessageEntry", "Fragment", "array"):
            assert any(holder in way for way in before), before
        proof = await prove(client)
        assert proof["verdict"] == "clean", proof
        places = {each["place"]: each for each in proof["places"]}
        assert {"session", "bodies", "rendered", "policies", "quotes"} <= places.keys()
        assert all(each["survivors"] == 0 for each in places.values())
        assert marker.holders(below=[services.store]) == set()
        await turn(client, path, talk(None, 4))
        assert marker.holders() == set()


async def redacted(client: httpx.AsyncClient, marker: Marker) -> None:
    for turns in (1, 2, 3):
        await turn(client, APIS["chat"][0], chat(str(marker), turns), policy=REDACT)


async def declared(client: httpx.AsyncClient, marker: Marker) -> None:
    for turns in (1, 2):
        await turn(client, APIS["chat"][0], chat(str(marker), turns))
    edit = {"message": 1, "replacement": "[gone]", "mode": "forget"}
    await turn(client, APIS["chat"][0], chat(str(marker), 3), edits=[edit])


async def quarantined(client: httpx.AsyncClient, marker: Marker) -> None:
    for turns in (1, 2, 3):
        await turn(client, APIS["chat"][0], chat(str(marker), turns))
    answer = await client.post("/v1/leyline/sessions/s/quarantine", json={"messages": [1]})
    assert answer.status_code == 200, answer.text
    await turn(client, APIS["chat"][0], chat(str(marker), 4))


@pytest.mark.parametrize("forget", [redacted, declared, quarantined])
async def test_text_that_left_the_list_is_nowhere(forget: Any, tmp_path: Path) -> None:
    """A client may send a text that is forgotten again and again; with its first list without the
    text, no object of the process holds it any more."""
    marker = Marker()
    async with proxy(tmp_path) as (services, client):
        await forget(client, marker)
        tokenise(marker, services)
        assert marker.holders()
        await turn(client, APIS["chat"][0], chat(None, 5))
        assert marker.holders() == set()


async def test_another_session_of_the_tenant_keeps_its_memories(tmp_path: Path) -> None:
    """A forget drops what its own session has used, and of another only what both have."""
    async with proxy(tmp_path) as (services, client):
        await turn(client, APIS["chat"][0], chat("one", 2))
        body = chat("two", 2)
        for message in body["messages"]:
            message["content"] = f"Another agent. {message['content']} It is another text."
        answer = await client.post(
            APIS["chat"][0], json=body, headers={**HEADERS, "x-leyline-session": "t"}
        )
        assert answer.status_code == 200
        memories = services.kept.memories.memories
        held = {name: memory.left("default", "t", 9).before for name, memory in memories.items()}
        own, both = texts(services, "t"), texts(services, "t") & texts(services, "s")
        await prove(client)
        assert texts(services, "t") == own - both
        assert len(both) < len(own) / 2  # only what the template writes between messages
        held["rendered"] -= len(both)
        for name, memory in memories.items():
            assert sum(memory.left("default", "s", 9)) == 0
            assert memory.left("default", "t", 9).before == held[name] > 0


def registered(services: Services) -> list[object]:
    """Everything that may hold prompt text: what is registered, and the stores."""
    (replica,) = services.pool
    memories = services.kept.memories.memories
    return [
        *memories.values(),
        replica.status.rendering.renderer,
        replica.client,  # leads to the engine, which is in this process
        services.store,
        services.responses,
        services.connected,
        services.recall,
    ]


async def test_no_memory_of_prompts_is_missing_from_the_registry(tmp_path: Path) -> None:
    """Beside the stores, only memories that forgets reach hold text; a new one that isn't
    registered would be found."""
    marker = Marker()
    async with proxy(tmp_path) as (services, client):
        for turns in (1, 2, 3):
            await turn(client, APIS["responses"][0], responses(str(marker), turns))
        tokenise(marker, services)
        stop = registered(services)
        assert marker.holders(roots=[services])
        left = marker.holders(stop, [services])
        assert left == set(), left
        planted = {"a text": f"of {marker}"}
        services.prompts.__dict__["planted"] = planted
        (way,) = marker.holders(stop, [services])
        assert re.search("PromptSearch", way)
