"""Forgets that a killed process owed: another worker, or the next proxy, sends them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_engine import CAPABILITY, MODEL, Answer, FakeEngine, forgotten
from support.redis_server import redis_server
from support.waiting import wait
from support.worker_fleet import Fleet, alive, fleet

from leyline_lab.stand_ins.serving import serving

CHAT = "/v1/chat/completions"
SESSION = {"x-leyline-session": "s"}
LIST = [
    {"role": "user", "content": "Deploy it."},
    {"role": "assistant", "content": "The key is 7391."},
    {"role": "user", "content": "Go on."},
]
DOWN = {"/": Answer(status=503)}
OFTEN = {"LEYLINE_HANDSHAKE_INTERVAL_S": "0.5", "LEYLINE_HANDSHAKE_RETRY_S": "0.2"}
PATIENCE_S = 60.0

Kept = Callable[[Path], AbstractContextManager[dict[str, str]]]


@contextmanager
def scripted() -> Iterator[tuple[FakeEngine, str]]:
    """An engine that confirms forgets, and its origin."""
    engine = FakeEngine(capability=msgspec.structs.replace(CAPABILITY, instance="one"))
    engine.receipt = forgotten
    with serving(engine) as origin:
        yield engine, origin


def turn(client: httpx.Client, **members: Any) -> httpx.Response:
    """A turn of the session."""
    body = {"model": MODEL, "messages": LIST, **members}
    return client.post(CHAT, json=body, headers=SESSION)


def demand(client: httpx.Client) -> httpx.Response:
    """A turn that demands to forget a message."""
    edit = {"message": 1, "replacement": "[removed]", "mode": "forget"}
    return turn(client, leyline={"edits": [edit]})


def forgets(engine: FakeEngine) -> list[str]:
    """The sessions of the separate forgets that an engine has received."""
    found = []
    for body in engine.bodies:
        document = json.loads(body)
        for action in (document.get("custom_params") or {}).get("kv_hints", {}).get("actions", ()):
            payload = action.get("payload", action)
            if payload.get("forget") == ["*"] and len(document["messages"]) == 1:
                found.append(payload["session"])
    return found


def test_another_worker_sends_the_forgets_of_one_that_was_killed(tmp_path: Path) -> None:
    """An engine that was down meanwhile is asked once it is back: about a forget that it owed, and
    about one whose turn was under way."""
    with scripted() as (engine, origin), fleet(tmp_path, "--upstream", origin, **OFTEN) as running:
        with running.clients() as (first, second):
            assert turn(first).status_code == 200
            engine.scripted = DOWN
            assert demand(first).status_code >= 500
            os.kill(running.pids()[0], signal.SIGKILL)
            assert second.get("/healthz").status_code == 200
            assert not forgets(engine)
            engine.scripted = {}
            wait(lambda: forgets(engine) == ["s"], PATIENCE_S)
        wait(lambda: len(running.pids()) == 2 and alive(running.pids()[0]), PATIENCE_S)
        with running.clients() as (first, _):
            engine.answers, begun = [Answer(hangs=True)], len(engine.bodies)

            def post() -> None:
                with suppress(httpx.TransportError):
                    demand(first)

            thread = threading.Thread(target=post)
            thread.start()
            wait(lambda: len(engine.bodies) > begun)
            os.kill(running.pids()[0], signal.SIGKILL)
            thread.join(30)
            wait(lambda: forgets(engine) == ["s", "s"], PATIENCE_S)
        wait(lambda: len(running.pids()) == 2 and alive(running.pids()[0]), PATIENCE_S)


@contextmanager
def redis_store(folder: Path) -> Iterator[dict[str, str]]:
    """Variables of proxies that share a Redis."""
    with redis_server(folder) as server:
        yield {
            "LEYLINE_SESSION_STORE": server.url,
            "LEYLINE_SESSION_SECRET": "a secret of sixteen characters or more",
            "LEYLINE_REDIS_TIMEOUT_S": "5",
        }


@contextmanager
def folder_store(folder: Path) -> Iterator[dict[str, str]]:
    """Variables of proxies that share a folder."""
    yield {"LEYLINE_OWED_FORGETS_PATH": str(folder / "owed")}


@pytest.mark.parametrize(
    "kept", [redis_store, pytest.param(folder_store, marks=pytest.mark.nightly)]
)
def test_the_next_proxy_finds_the_forgets_of_a_killed_one(tmp_path: Path, kept: Kept) -> None:
    """With Redis, or a folder, a proxy that starts later sends what another owed when it was
    killed."""
    folders = [tmp_path / name for name in ("kept", "first", "second")]
    for each in folders:
        each.mkdir()
    with scripted() as (engine, origin), kept(folders[0]) as settings:
        shared = {**OFTEN, **settings}
        first = Fleet(folders[1], "--upstream", origin, workers=1, **shared)
        first.wait_ready()
        with httpx.Client(base_url=first.origin, timeout=60) as client:
            assert turn(client).status_code == 200
            engine.scripted = DOWN
            assert demand(client).status_code >= 500
        first.end(signal.SIGKILL)
        engine.scripted = {}
        second = Fleet(folders[2], "--upstream", origin, workers=1, **shared)
        try:
            second.wait_ready()
            wait(lambda: forgets(engine) == ["s"], PATIENCE_S)
            assert second.lines("forgets_inherited")
        finally:
            second.close()
