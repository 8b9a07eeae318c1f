"""The store of evicted texts in a running proxy: forgets, proofs, deletions, an outage."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from support.agent_history import agent_history

from leyline_proxy.doctor.recall import examine_recall
from leyline_proxy.http.admin import create_admin_app
from leyline_proxy.http.app import create_app
from leyline_proxy.model.parts import StoredPart
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, create_embedded_engine, lifespan_of

KEY = "a-key-of-tests-long-enough"
CHAT = "/v1/chat/completions"
SECRET = "key=7391"
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
OWNER = ("default", "s")


def part(text: str, **facts: Any) -> StoredPart:
    """A text that a policy evicted from the session."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    known = {"role": "tool", "tokens": 3, "policy": "p", "turn": "t0-x", "index": 0}
    known |= {"address": f"sha256:{digest}", "text": text, "created": time.time()}
    return StoredPart(**{**known, **facts})


@asynccontextmanager
async def proxy(**settings: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """A proxy with the embedded engine, and a client of it."""
    given = {"recall": "on", "recall_key": KEY, **settings}
    app = create_app(Settings(**given), engine_app=create_embedded_engine("replay", {}))
    transport = ASGIStreamTransport(app)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield app.state.services, client


async def turn(client: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    """One turn of the session."""
    messages = agent_history(2, "count", secret=SECRET)
    body = {"model": "leyline-recall", "messages": messages, "max_tokens": 1, "leyline": options}
    answer = await client.post(CHAT, json=body, headers={"x-leyline-session": OWNER[1]})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["leyline"])


async def test_forgets_and_proofs_reach_the_store(tmp_path: Path) -> None:
    """A turn that forgets removes its session's evicted texts before it is sent, as does a proof,
    which counts the place; another session's stay."""
    async with proxy(recall_store=f"file://{tmp_path}") as (services, client):
        parts, a, b = services.recall, part("a"), part("b")
        await turn(client)
        await parts.put(OWNER, [a])
        await parts.put(("default", "t"), [a])
        await turn(client)
        assert (await parts.get(OWNER, [a.address], demands=0)).parts
        await turn(client, policy=REDACT)
        session = await services.store.get(*OWNER)
        assert session.demands == 1
        found = await parts.get(OWNER, [a.address], demands=session.demands)
        assert (found.parts, found.forgotten) == ({}, {a.address})
        await parts.put(OWNER, [b])  # planned before the forget
        assert not (await parts.get(OWNER, [b.address], demands=0)).parts
        await parts.put(OWNER, [part("c", demands=1)])
        answer = await client.post(f"/v1/leyline/sessions/{OWNER[1]}/proof", json={})
        places = {each["place"]: each for each in answer.json()["places"]}
        assert (places["parts"]["scanned"], places["parts"]["survivors"]) == (1, 0)
        assert not await parts.listed(OWNER, demands=0)
        assert await parts.listed(("default", "t"), demands=0)


async def test_a_deleted_session_takes_its_texts_along(tmp_path: Path) -> None:
    """Deleting a session deletes what was evicted from it."""
    admin = {"admin_port": 0, "admin_key": KEY}
    async with proxy(recall_store=f"file://{tmp_path}", **admin) as (services, client):
        await turn(client)
        await services.recall.put(OWNER, [part("a")])
        transport = ASGIStreamTransport(create_admin_app(services))
        operator = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        headers = {"authorization": f"Bearer {KEY}"}
        path = f"/admin/sessions/{OWNER[0]}/{OWNER[1]}"
        assert (await operator.delete(path, headers=headers)).status_code == 200
        assert not await services.recall.listed(OWNER, demands=0)
        await operator.aclose()


async def test_an_outage_is_shown_and_stops_no_turn(tmp_path: Path) -> None:
    """With a store that is gone turns are answered, forgets are owed, and /readyz, /metrics and
    doctor say so, without a word of the text."""
    folder = tmp_path / "parts"
    async with proxy(recall_store=f"file://{folder}") as (services, client):
        ready = (await client.get("/readyz")).json()["recall"]
        assert ready == {"store": "files", "up": True, "problem": None}
        await turn(client)
        folder.rmdir()
        folder.write_text("no folder")
        await turn(client, policy=REDACT)
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        assert answer.json()["recall"]["up"] is False
        assert "the file system failed" in answer.json()["recall"]["problem"]
        metrics = (await client.get("/metrics")).text
        assert 'leyline_recall_store_errors_total{operation="forget"}' in metrics
        assert "leyline_recall_forgets_owed 1.0" in metrics
        assert "leyline_recall_store_up 0.0" in metrics
        (found,) = await examine_recall(services.settings)
        assert (found.name, found.status) == ("recall-store", "fail")
        folder.unlink()
    (found,) = await examine_recall(services.settings)
    assert found.status == "ok", found.detail


async def test_without_recall_there_is_no_store() -> None:
    """With recall off nothing is built, shown or tried."""
    async with proxy(recall="off") as (services, client):
        assert services.recall is None
        assert "recall" not in (await client.get("/readyz")).json()
        (found,) = await examine_recall(services.settings)
        assert found.status == "skip"
