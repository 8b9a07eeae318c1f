"""The live page over HTTP: its files, its stream, and who may see what."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import orjson
from support.claims_engine import ClaimsEngine
from support.fake_engine import MODEL, FakeEngine
from support.page_links import Links

from leyline_proxy.http.app import create_app
from leyline_proxy.http.live import LIVE_PATH
from leyline_proxy.live.assets import SECURITY_HEADERS, read_assets
from leyline_proxy.live.feed import FeedLimits, Viewer
from leyline_proxy.live.stream import LiveStream, Pace, Sources
from leyline_proxy.sessions.memory import MemorySessionStore
from leyline_proxy.sessions.summary import SessionOverview
from leyline_proxy.settings import Settings
from leyline_proxy.settings.api_keys import ApiKey, parse_keys
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of
from leyline_proxy.wiring.services import Services

CHAT = "/v1/chat/completions"
KEYS = {"api_keys": ("red:r", "blue:b")}
RED, BLUE = {"authorization": "Bearer r"}, {"authorization": "Bearer b"}
ELSEWHERE = re.compile(r"""(?:src|href|import|from|url)[=\s(]*["']?(?:https?:)?//""")
SECRET = "an entirely private sentence"


class Viewing:
    """A stream under way."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.last_id = ""

    async def next(self, kind: str, seconds: float = 10) -> dict[str, Any]:
        """The next event of this kind; others are passed over."""
        async with asyncio.timeout(seconds):
            found = ""
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if name == "event":
                    found = value
                elif name == "id":
                    self.last_id = value
                elif name == "data" and found == kind:
                    document: dict[str, Any] = json.loads(value)
                    return document
        raise AssertionError(f"the stream ended before {kind!r}")


class Stack:
    """A proxy with its parts at hand."""

    def __init__(self, client: httpx.AsyncClient, services: Services) -> None:
        self.client = client
        self.services = services

    @asynccontextmanager
    async def view(self, **headers: str) -> AsyncIterator[Viewing]:
        """One viewer."""
        sent = self.client.stream("GET", LIVE_PATH, headers=headers, timeout=30)
        async with sent as response:
            assert response.status_code == 200, await response.aread()
            yield Viewing(response)

    async def turn(self, session: str = "s", **headers: str) -> None:
        """One turn of a session."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}
        named = {"x-leyline-session": session, **headers}
        assert (await self.client.post(CHAT, json=body, headers=named)).status_code == 200


@asynccontextmanager
async def stack(engine: Any = None, **settings: Any) -> AsyncIterator[Stack]:
    """A proxy before a scripted engine."""
    app = create_app(
        Settings(handshake_retry_s=0.05, **settings), engine_app=engine or FakeEngine()
    )
    async with (
        lifespan_of(app),
        httpx.AsyncClient(
            transport=ASGIStreamTransport(app), base_url="http://localhost"
        ) as client,
    ):
        yield Stack(client, app.state.services)


async def test_turns_appear_as_they_are_settled() -> None:
    """A viewer gets a snapshot, and then each turn, equal to what the API says of it."""
    async with stack() as proxy:
        await proxy.turn("before")
        async with proxy.view() as seen:
            snapshot = await seen.next("snapshot")
            state = await seen.next("state")
            await proxy.turn("now")
            told = await seen.next("turn")
        shown = (await proxy.client.get("/v1/leyline/sessions/now")).json()
    assert [each["id"] for each in snapshot["sessions"]] == ["before"]
    assert snapshot["trend"]["steps"][0]["turns"] == 1
    assert state["upstreams"][0]["splices"] is False
    assert told["turn"] == shown["history"][0]
    assert told["session"] == {name: shown[name] for name in told["session"]}


async def test_nothing_that_is_shown_holds_prompt_text() -> None:
    """Of a turn, a stream has numbers and names alone."""
    async with stack() as proxy, proxy.view() as seen:
        await seen.next("snapshot")
        await proxy.turn()
        told = [await seen.next("turn")]
    assert SECRET not in repr(told)


async def test_each_tenant_sees_its_own_and_nobody_sees_without_a_key() -> None:
    """Sessions, turns and sums of one tenant are in no other's stream, nor in one without a key."""
    async with stack(**KEYS) as proxy:
        await proxy.turn("mine", **RED)
        async with proxy.view(**BLUE) as blue, proxy.view(**RED) as red:
            first, own = await blue.next("snapshot"), await red.next("snapshot")
            await proxy.turn("mine", **RED)
            await proxy.turn("other", **BLUE)
            told = await blue.next("turn")
        refused = [
            await proxy.client.get(LIVE_PATH, headers=headers)
            for headers in ({}, {"authorization": "Bearer no"})
        ]
    assert (first["sessions"], first["total"], first["trend"]["steps"]) == ([], 0, [])
    assert (first["tenant"], first["keyed"]) == ("blue", True)
    assert [each["id"] for each in own["sessions"]] == ["mine"]
    assert told["session"]["id"] == "other"
    assert {answer.json()["error"]["code"] for answer in refused} == {"invalid_api_key"}


async def test_engines_of_others_are_not_shown() -> None:
    """A tenant with upstreams of its own is shown those alone."""
    engines = {"one": "http://127.0.0.1:9", "two": "http://127.0.0.1:9"}
    tenants = {"red": {"upstreams": ["one"], "api_keys": ["r"]}}
    app = create_app(Settings(upstreams=engines, tenants=tenants))
    async with (
        lifespan_of(app),
        httpx.AsyncClient(
            transport=ASGIStreamTransport(app), base_url="http://localhost"
        ) as client,
        Stack(client, app.state.services).view(**RED) as seen,
    ):
        state = await seen.next("state")
    assert [each["name"] for each in state["upstreams"]] == ["one"]


async def test_a_viewer_that_was_cut_off_resumes() -> None:
    """With the id of its last event a viewer gets what it missed, and no snapshot."""
    async with stack() as proxy:
        async with proxy.view() as seen:
            await seen.next("snapshot")
        await proxy.turn("missed")
        async with proxy.view(**{"last-event-id": seen.last_id}) as again:
            await again.next("resumed")
            told = await again.next("turn")
    assert told["session"]["id"] == "missed"


async def test_streams_end_when_the_proxy_is_told_to_stop() -> None:
    """Viewers are let go soon after the signal, and new ones are sent elsewhere."""
    async with stack() as proxy, proxy.view() as seen:
        await seen.next("snapshot")
        proxy.services.shutdown.begun = True
        assert await seen.next("bye", 3) == {"reason": "stopping"}
        refused = await proxy.client.get(LIVE_PATH)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
    assert refused.headers["retry-after"] == "1"


async def test_one_viewer_too_many_is_refused_and_a_place_is_given_back() -> None:
    """The bound is a 429 in the API's shape, and who leaves makes room."""
    async with stack() as proxy:
        async with proxy.view() as seen:
            await seen.next("snapshot")
            with ExitStack() as others:
                for _ in range(15):
                    others.enter_context(proxy.services.feed.viewing("default"))
                refused = await proxy.client.get(LIVE_PATH)
        async with proxy.view() as seen:
            await seen.next("snapshot")
    answer = refused.json()["error"]["code"]
    assert (refused.status_code, answer) == (429, "too_many_viewers")


async def test_claims_are_shown_to_their_tenant() -> None:
    """A live claim is in the state of its tenant's viewers and in no other's."""
    async with stack(ClaimsEngine(), **KEYS) as proxy:
        await proxy.turn("s", **RED)
        body = {"session": "s", "id": "plan", "predicate": {"messages": [0, 1]}}
        taken = await proxy.client.post("/v1/leyline/claims", json=body, headers=RED)
        assert taken.status_code == 201, taken.text
        for watch in proxy.services.claim_watches:
            await watch.look()
        async with proxy.view(**RED) as red, proxy.view(**BLUE) as blue:
            own, other = await red.next("state"), await blue.next("state")
    assert [(each["id"], each["session"]) for each in own["claims"]] == [("plan", "s")]
    assert other["claims"] == []


async def test_the_page_holds_no_data_and_loads_nothing_from_elsewhere() -> None:
    """Page and files come without a key, under a strict policy, and need nothing else."""
    async with stack(**KEYS) as proxy:
        await proxy.turn("mine", **RED)
        page = await proxy.client.get("/")
        links = Links()
        links.feed(page.text)
        files = {name: await proxy.client.get(f"/live/{name}") for name in read_assets()}
        same = await proxy.client.get("/", headers={"if-none-match": page.headers["etag"]})
        missing = await proxy.client.get("/live/..%2f..%2fsettings.py")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 's")
    assert "unsafe" not in SECURITY_HEADERS["content-security-policy"]
    assert "mine" not in page.text
    assert links.inline == []
    assert {name.removeprefix("live/") for name in links.loaded} <= set(files)
    for name, answer in files.items():
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        assert not ELSEWHERE.search(answer.text), name
    assert (same.status_code, same.content) == (304, b"")
    assert missing.status_code == 404


def stream_of(services: Services, viewer: Viewer, **pace: float) -> LiveStream:
    """The stream of a viewer of the tenant red, at another pace."""
    watches = zip(services.pool, services.claim_watches, strict=True)
    sources = Sources(
        feed=services.feed,
        store=services.store,
        pool=services.pool,
        gate=services.gate,
        watches={replica.name: watch for replica, watch in watches},
        shutdown=services.shutdown,
        keyed=True,
    )
    chosen = Pace(tick_s=0.02, gather_s=0, **pace)
    tenants = services.tenants
    red = tenants.authenticate(RED)
    return LiveStream(sources, viewer, red, lambda: tenants.identify(RED), chosen)


async def told_until_its_end(keys: tuple[ApiKey, ...]) -> bytes:
    """All that a stream of red's says, when these keys take the place of all others."""
    async with stack(**KEYS) as proxy:
        tenants = proxy.services.tenants
        with proxy.services.feed.viewing("red") as viewer:
            stream = stream_of(proxy.services, viewer, heartbeat_s=0.1)
            told = b""
            async with asyncio.timeout(5), aclosing(stream.events()) as events:
                async for part in events:
                    told += part
                    if b": still here" in told:
                        tenants._fixed = ()
                        tenants.replace(keys)
    return told


async def test_a_key_that_is_taken_away_ends_its_stream() -> None:
    """A stream looks at its key again and again, and ends with the key."""
    told = await told_until_its_end(())
    assert told.endswith(b'event: bye\ndata: {"reason":"key"}\n\n')
    assert told.count(b"event: state") == 1  # nothing has changed


async def test_a_key_that_becomes_anothers_ends_its_stream() -> None:
    """A key that is given to another tenant shows no more of the one before."""
    told = await told_until_its_end(parse_keys("blue:r\n"))
    assert told.endswith(b'event: bye\ndata: {"reason":"key"}\n\n')


class OutOfReach(MemorySessionStore):
    """A store that can be out of reach: it knows no sessions then."""

    out = False

    @property
    def problem(self) -> str | None:
        """Why."""
        return "out of reach" if self.out else None

    async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
        return () if self.out else await super().sessions(tenant)


async def test_sessions_stay_while_their_store_is_out_of_reach() -> None:
    """A store that knows nothing for a while takes no session from the page."""
    async with stack(**KEYS) as proxy:
        await proxy.turn("kept", **RED)
        store = OutOfReach(max_sessions=9, ttl_s=9)
        session = await proxy.services.store.get("red", "kept")
        await store.update("red", "kept", lambda _: session)  # type: ignore[arg-type,return-value]
        services, told = replace(proxy.services, store=store), b""
        with services.feed.viewing("red") as viewer:
            stream = stream_of(services, viewer, sessions_s=0.05, heartbeat_s=0.3)
            async with asyncio.timeout(5), aclosing(stream.events()) as events:
                async for part in events:
                    told += part
                    store.out = told.count(b": still here") == 0
                    if not store.out:
                        await store.delete("red", "kept")
                    if b"event: sessions" in told:
                        break
    assert told.index(b'"problem":"out of reach"') < told.index(b": still here")
    assert told.index(b": still here") < told.index(b"event: sessions")


async def test_sessions_that_others_store_are_shown_too() -> None:
    """A session that another proxy wrote, or that has expired, is reported with the next look."""
    async with stack(**KEYS) as proxy:
        store, told = proxy.services.store, b""
        await proxy.turn("own", **RED)
        written = replace(await store.get("red", "own"), id="foreign")  # type: ignore[type-var]
        with proxy.services.feed.viewing("red") as viewer:
            stream = stream_of(proxy.services, viewer, sessions_s=0.1)
            async with asyncio.timeout(5), aclosing(stream.events()) as events:
                async for part in events:
                    told += part
                    if told.count(b"event: sessions") == 0:
                        await store.update("red", "foreign", lambda _: written)
                    elif await store.delete("red", "foreign"):
                        told = b"event: sessions "
                    elif told.count(b"event: sessions") == 2:
                        break
    last = orjson.loads(told.rpartition(b"data: ")[2])
    assert ([each["id"] for each in last["sessions"]], last["total"]) == (["own"], 1)


async def test_a_turn_that_ends_during_a_snapshot_is_told() -> None:
    """Events during the reading of stored sessions are reported after the snapshot."""
    async with stack(**KEYS) as proxy:
        await proxy.turn("s", **RED)
        feed, session = proxy.services.feed, await proxy.services.store.get("red", "s")
        assert session is not None

        class Slow(MemorySessionStore):
            async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
                feed.settled(session)
                return ()

        services = replace(proxy.services, store=Slow(max_sessions=9, ttl_s=9))
        with feed.viewing("red") as viewer:
            async with asyncio.timeout(5), aclosing(stream_of(services, viewer).events()) as events:
                told = [await anext(events) for _ in range(3)]
    assert sum(b"event: turn" in part for part in told) == 1


async def test_a_viewer_that_reads_too_slowly_begins_anew() -> None:
    """Events it missed are not kept for it: it is sent a snapshot, and then what comes next."""
    async with stack(**KEYS) as proxy:
        feed, parts = proxy.services.feed, []
        await proxy.turn("s", **RED)
        session = await proxy.services.store.get("red", "s")
        assert session is not None
        with feed.viewing("red") as viewer:
            stream = stream_of(proxy.services, viewer)
            async with asyncio.timeout(5), aclosing(stream.events()) as events:
                async for part in events:
                    parts += [part] if part.startswith(b"id: ") else []
                    if len(parts) == 1:
                        for _ in range(FeedLimits().ring + 1):
                            feed.settled(session)
                    elif len(parts) == 2:
                        feed.settled(session)
                    else:
                        break
    assert [part.split(b"\n")[1] for part in parts] == [
        b"event: snapshot",
        b"event: snapshot",
        b"event: turn",
    ]


async def test_odd_session_ids_break_no_turn_and_no_stream() -> None:
    """A session id that is no proper Unicode, or looks like an event, is reported unchanged."""
    odd = "<b>\n\nevent: bye\n\ud800"
    async with stack(**KEYS) as proxy, proxy.view(**RED) as seen:
        await seen.next("snapshot")
        await proxy.turn("s", **RED)
        await seen.next("turn")
        session = await proxy.services.store.get("red", "s")
        assert session is not None
        proxy.services.feed.settled(replace(session, id=odd))
        told = await seen.next("turn")
    assert told["session"]["id"] == odd
