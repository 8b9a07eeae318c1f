"""A tiny model served by the replay engine's HTTP side, for tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from msgspec import to_builtins
from starlette.applications import Starlette
from support.waiting import until

from leyline_engine.contract import EditPayload, edit_envelope
from leyline_lab.stand_ins.serving import engine_tokenizer

POOL = 16_384
MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Count to three."},
]


def client_of(app: Starlette) -> httpx.AsyncClient:
    """A client that calls the application in process; it sees answers only when they're whole."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine")


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """The application on a loopback port, for what needs a real connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_level="warning", loop="asyncio")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        port = listener.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            await until(lambda: server.started)
            yield client
    finally:
        server.should_exit = True
        await task
        listener.close()


async def chat(app: Starlette, **body: Any) -> httpx.Response:
    """One chat request, greedy unless said otherwise."""
    async with client_of(app) as client:
        defaults = {"messages": MESSAGES, "temperature": 0}
        return await client.post("/v1/chat/completions", json=defaults | body)


async def complete(app: Starlette, **body: Any) -> dict[str, Any]:
    """One completion, greedy unless said otherwise."""
    async with client_of(app) as client:
        response = await client.post("/v1/completions", json={"temperature": 0} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def is_idle(app: Starlette) -> bool:
    """Return True when no request runs or waits."""
    service = app.state.service
    return not service._running and not service._waiting


def hints(message_id: str, *, receipt_in_answer: bool = False, **payload: Any) -> dict[str, Any]:
    """``custom_params`` with an edit envelope."""
    edit = EditPayload(**{"session": "s", "scope": "tenant", **payload})
    envelope = edit_envelope(message_id, edit, receipt_in_answer=receipt_in_answer)
    return {"kv_hints": to_builtins(envelope)}


async def record_of(app: Starlette, message_id: str) -> dict[str, Any]:
    """The turn record that the engine keeps for a message."""
    async with client_of(app) as client:
        response = await client.get(f"/leyline/receipts/{message_id}")
    assert response.status_code == 200
    record: dict[str, Any] = response.json()
    return record


def script_answer(app: Starlette, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make the engine's logits spell ``text`` and then the end token, for every request."""
    engine = app.state.service._engine
    tokenizer = engine_tokenizer(app)
    script = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    original = engine.admit

    def admit(request: Any) -> Any:
        sequence = original(request)
        steps = iter(script)

        def spelled(logits: torch.Tensor | None) -> torch.Tensor | None:
            if logits is None:
                return None
            wanted = torch.zeros_like(logits)
            wanted[next(steps)] = 50.0
            return wanted

        forward = sequence.forward

        def scripted(tokens: list[int], start: int, cache: Any) -> torch.Tensor | None:
            return spelled(forward(tokens, start, cache))

        sequence.forward = scripted
        return sequence

    monkeypatch.setattr(engine, "admit", admit)
