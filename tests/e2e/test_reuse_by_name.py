"""Content that the proxy names: two agents of a tenant, and an engine that searches for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from support.stack import embedded_stack

from leyline_engine.contract import REUSE_ACTION, sealed_digest
from leyline_proxy.http.admin import create_admin_app
from leyline_proxy.http.app import create_app
from leyline_proxy.model.session import Session
from leyline_proxy.sessions.contents import ContentIndex
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, create_embedded_engine, lifespan_of

CHAT = "/v1/chat/completions"
FILE = "".join(
    f"def handler_{n}(request):\n    return answer({n * 7919 % 1000})\n" for n in range(20)
)
NOTE = "Handlers live in app/handlers, and each has one test beside it."
TENANTS: dict[str, dict[str, Any]] = {
    "reusing": {"reuse": "live"},
    "watching": {"reuse": "observe"},
    "other": {"reuse": "live"},
}


ENGINE = {"pool_tokens": 65_536, "device": "cpu", "matcher": "off"}
"""It finds no content by itself."""
SETTINGS: dict[str, Any] = {
    "log_level": "error",
    "tenants": {name: {"api_keys": [f"key-{name}"], **own} for name, own in TENANTS.items()},
}


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a stack whose engine finds no content by itself."""
    with (
        embedded_stack(ENGINE, **SETTINGS) as origin,
        httpx.Client(base_url=origin, timeout=120) as http,
    ):
        yield http


def messages(session: str, text: str) -> list[dict[str, Any]]:
    """An agent's list after it has read a text, by a call whose id nobody else has."""
    name = f"call-{session}"
    calls = [{"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}}]
    return [
        {"role": "system", "content": f"You are agent {session}. You read code. " * 3},
        {"role": "user", "content": f"Task {session}: " + "look at it. " * len(session)},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": name, "content": text},
    ]


def post(
    session: str,
    text: str = FILE,
    tenant: str = "reusing",
    more: tuple[dict[str, Any], ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """The request of an agent's turn."""
    body = {
        "model": "leyline-recall",
        "messages": [*messages(session, text), *more],
        "max_tokens": 2,
        "leyline": options,
    }
    return {
        "json": body,
        "headers": {"authorization": f"Bearer key-{tenant}", "x-leyline-session": session},
    }


def account(
    client: httpx.Client,
    session: str,
    text: str = FILE,
    tenant: str = "reusing",
    more: tuple[dict[str, Any], ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """The account of an answered turn, whose tokens add up."""
    answer = client.post(CHAT, **post(session, text, tenant, more, **options))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["leyline"]
    tokens = found["tokens"]
    served = tokens["prefix"] + tokens["spliced"] + tokens["reused"]
    assert served + tokens["prefilled"] == tokens["prompt"]
    return found


def test_a_second_agent_gets_the_file_by_name(client: httpx.Client) -> None:
    """Its own call has another id, yet the text is the same: it is copied, and continued."""
    account(client, "one")
    second = account(client, "second")
    assert second["outcome"] == "unedited"
    assert second["reuse"]["tenant"] == second["tokens"]["reused"] > 200
    again = account(client, "second", more=({"role": "user", "content": "Go on."},))
    assert again["tokens"]["prefix"] > 200
    third = account(client, "third", text=NOTE)
    assert third["tokens"]["reused"] == 0
    fourth = account(client, "fourth", text=NOTE)
    assert fourth["reuse"]["tenant"] == fourth["tokens"]["reused"] >= 16


def test_observing_names_and_copies_nothing(client: httpx.Client) -> None:
    """A tenant sees what it would get."""
    account(client, "one", tenant="watching")
    second = account(client, "second", tenant="watching")
    assert second["tokens"]["reused"] == 0
    assert second["reuse"]["tenant"] > 200


def test_tenants_and_silent_requests_get_nothing(client: httpx.Client) -> None:
    """Another tenant's text has no name here, nor has any for a request without reuse."""
    account(client, "one")
    assert account(client, "second", tenant="other")["tokens"]["reused"] == 0
    assert account(client, "third", reuse="off")["reuse"] is None


def test_a_forgotten_text_has_no_name(client: httpx.Client) -> None:
    """A session that forgets its file offers it to nobody; what it still shows, it offers."""
    account(client, "one")
    reader = account(client, "second")
    assert reader["tokens"]["reused"] > 200
    gone = [*messages("one", FILE)]
    gone[3] = {**gone[3], "leyline": {"forget": True}}
    headers = {"authorization": "Bearer key-reusing", "x-leyline-session": "one"}
    body = {"model": "leyline-recall", "messages": gone, "max_tokens": 2}
    answer = client.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["leyline"]["forgot"]["overwritten"] > 200
    again = account(client, "second", more=({"role": "user", "content": "Go on."},))
    assert again["tokens"]["prefix"] < 200, "the copy had read what is forgotten"
    assert again["tokens"]["reused"] == 0


async def test_a_deleted_session_has_no_names() -> None:
    """Its engine still has the text, but the proxy says nothing of it."""
    engine = create_embedded_engine("replay", ENGINE)
    settings = Settings(**SETTINGS, admin_port=0, admin_key="admin-key-0123456789")
    app = create_app(settings, engine_app=engine)
    operator = create_admin_app(app.state.services)
    key = {"authorization": "Bearer admin-key-0123456789"}
    async with lifespan_of(app), served(app) as proxy, served(operator) as admin:

        async def reused(session: str) -> int:
            answer = await proxy.post(CHAT, **post(session))
            found: int = answer.json()["leyline"]["tokens"]["reused"]
            return found

        assert await reused("one") == 0
        assert await reused("second") > 200
        for session in ("one", "second"):
            gone = await admin.delete(f"/admin/sessions/reusing/{session}", headers=key)
            assert gone.status_code == 200, gone.text
        assert await reused("third") == 0


class Tap:
    """An engine that keeps the requests for reuse that it gets."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine
        self.asked: list[dict[str, Any]] = []
        self.look: Callable[[], int] = int
        self.seen = 0
        """Result of the last look, which comes before the engine gets a request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] != CHAT:
            await self._engine(scope, receive, send)
            return
        self.seen = self.look()
        body = await Request(scope, receive).body()
        actions = json.loads(body)["custom_params"]["kv_hints"]["actions"]
        self.asked += [each["payload"] for each in actions if each["action_type"] == REUSE_ACTION]
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Any:
            part = next(parts, None)
            return part if part is not None else await receive()

        await self._engine(scope, again, send)


async def test_an_envelope_names_what_the_session_lacks() -> None:
    """Sources are sealed and of other sessions; what a turn continues from needs no name."""
    secret = "of both"
    tap = Tap(create_embedded_engine("replay", {**ENGINE, "hints_secret": secret}))
    app = create_app(Settings(**SETTINGS, hints_secret=secret), engine_app=tap)
    more = ({"role": "user", "content": "And now write a test for each of the handlers, please."},)
    async with lifespan_of(app), served(app) as proxy:
        await proxy.post(CHAT, **post("one"))
        answer = await proxy.post(CHAT, **post("second"))
        await proxy.post(CHAT, **post("second", more=more))
        await proxy.post(CHAT, **post("third", more=more))
        sessions = await app.state.services.store.get("reusing", "one")
    assert answer.json()["leyline"]["tokens"]["reused"] > 200
    first, second, continued, third = tap.asked
    assert (first["sources"], first["copies"]) == ([], [])
    (source,) = second["sources"]
    (turn,) = sessions.turns
    assert (source["session"], source["turn"]) == ("one", turn.turn)
    assert (source["length"], source["digest"]) == (
        len(turn.tokens),
        sealed_digest(turn.digest, secret),
    )
    assert second["copies"] != []
    assert (continued["sources"], continued["copies"]) == ([], [])
    assert {each["session"] for each in third["sources"]} == {"second"}
    assert len(third["copies"]) == 1, "the file and the question follow each other there, too"


async def test_a_demand_to_forget_takes_names_before_it_is_met() -> None:
    """The session's places are gone when its engine gets the demand, which names nothing itself."""
    tap = Tap(create_embedded_engine("replay", ENGINE))
    app = create_app(Settings(**SETTINGS), engine_app=tap)
    index = app.state.services.named._index
    tap.look = lambda: len(index)
    async with lifespan_of(app), served(app) as proxy:
        await proxy.post(CHAT, **post("one"))
        await proxy.post(CHAT, **post("second", text=NOTE))
        held = tap.look()
        demand = post("one")
        demand["json"]["messages"][3]["leyline"] = {"forget": True}
        answer = await proxy.post(CHAT, **demand)
        assert answer.status_code == 200, answer.text
    (*_, last) = tap.asked
    assert 0 < tap.seen < held
    assert (last["sources"], last["copies"]) == ([], [])


class Broken(ContentIndex):
    """An index in which nothing works."""

    def note(self, tenant: str) -> None:
        """Raise an error."""
        raise RuntimeError("injected")

    def put(self, session: Session) -> None:
        """Raise an error."""
        raise RuntimeError("injected")


async def test_a_fault_in_the_index_costs_names_alone() -> None:
    """Turns are answered and settled as without it."""
    app = create_app(Settings(**SETTINGS), engine_app=create_embedded_engine("replay", ENGINE))
    app.state.services.named._index = Broken()
    async with lifespan_of(app), served(app) as proxy:
        for session in ("one", "second"):
            answer = await proxy.post(CHAT, **post(session))
            assert answer.status_code == 200, answer.text
            assert answer.json()["leyline"]["tokens"]["reused"] == 0
            settled = await app.state.services.store.get("reusing", session)
            assert len(settled.turns) == 1


def served(app: ASGIApp) -> httpx.AsyncClient:
    """A client of an application in this process."""
    return httpx.AsyncClient(transport=ASGIStreamTransport(app), base_url="http://localhost")
