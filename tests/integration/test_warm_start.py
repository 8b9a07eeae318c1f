"""Warm starts with the real engine: what a new one has cached, and what no forget leaves there."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send
from support.agent_history import agent_history
from support.engine_http import client_of
from support.engine_memory import holds_text
from support.redis_server import redis_server
from support.waiting import until
from tokenizers import Tokenizer

from leyline_engine.contract import RENDERER_PATH
from leyline_lab.stand_ins.serving import check_clean
from leyline_proxy.http.admin import create_admin_app
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, create_embedded_engine
from leyline_proxy.upstream.link import Link
from leyline_proxy.upstream.rendezvous import ranked
from leyline_proxy.upstream.replica import Replica
from leyline_proxy.warm_start.folder import ManifestFolder
from leyline_proxy.warm_start.manifests import Manifests, max_manifest
from leyline_proxy.warm_start.runs import EngineIdentity, FileResult, Outcome, Run
from leyline_proxy.warm_start.sealing import ManifestSeal

KEY = "a key of tests, long enough"
CHAT = "/v1/chat/completions"
SECRET = "key=7391"
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
TOKENS = 200_000
Gate = Callable[[Scope], Awaitable[None]]


class Switch:
    """An engine's address, behind which one engine after another runs.

    Args:
        gate: called before each request reaches the engine.
    """

    def __init__(self, engine: Starlette | None, gate: Gate | None = None) -> None:
        self.engine = engine
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if self.gate is not None and scope["type"] == "http":
            await self.gate(scope)
        if self.engine is None:
            raise httpx.ConnectError("nothing runs here")
        await self.engine(scope, receive, send)


@dataclass(frozen=True)
class Proxy:
    """A running proxy and a client of it."""

    app: FastAPI
    client: httpx.AsyncClient

    @property
    def services(self) -> Any:
        """The proxy's parts."""
        return self.app.state.services

    async def ready(self) -> bool:
        """Return True if the proxy reports that it can serve."""
        return (await self.client.get("/readyz")).status_code == 200

    def counted(self, outcome: Outcome) -> float:
        """The number of runs with this outcome."""
        name = "leyline_warm_start_runs_total"
        labels = {"outcome": outcome.value}
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0

    async def turn(
        self, session: str | None, messages: list[dict[str, Any]], key: str = "", **options: Any
    ) -> dict[str, Any]:
        """The account of a turn."""
        headers = {"x-leyline-session": session} if session is not None else {}
        if key:
            headers["authorization"] = f"Bearer {key}"
        body = {"model": "leyline-recall", "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = await self.client.post(CHAT, json=body | {"leyline": options}, headers=headers)
        assert answer.status_code == 200, answer.text
        account: dict[str, Any] = answer.json()["leyline"]
        return account


def history(count: int, task: str, text: str = "nothing") -> list[dict[str, Any]]:
    """An agent's history, with a secret in its first tool result."""
    return agent_history(count, task, secret=text)


def engine(**options: Any) -> Starlette:
    """A new engine with an empty cache."""
    return create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 16_384, **options})


@asynccontextmanager
async def proxy(
    engines: dict[str, ASGIApp], folder: Path | None, **settings: Any
) -> AsyncIterator[Proxy]:
    """A proxy in front of engines by name, without sockets."""
    warm = {"warm_start_path": folder, "warm_start_key": KEY} if folder is not None else {}
    upstreams = {name: f"http://{name}" for name in engines}
    given = {"log_level": "error", "handshake_interval_s": 0.05, "handshake_retry_s": 0.05}
    app = create_app(Settings(upstreams=upstreams, **{**given, **warm, **settings}))
    for replica in app.state.services.pool:
        transport = ASGIStreamTransport(engines[replica.name])
        for client in (replica.client, replica.handshake._client, replica.records._client):
            client._link = client._side = Link(f"http://{replica.name}", transport)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app=app)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8790")
        yield Proxy(app, await stack.enter_async_context(client))


def replica_of(running: Proxy, name: str) -> Replica:
    """An engine as the proxy knows it."""
    found = running.services.pool.get(name)
    assert isinstance(found, Replica)
    return found


async def learn_words(app: Starlette) -> None:
    """Give an engine the tokenizer that ``holds_text`` reads tokens with."""
    async with client_of(app) as client:
        document = (await client.get(RENDERER_PATH)).json()["tokenizer_json"]
    app.state.words = Tokenizer.from_str(document)


def kept_texts(running: Proxy, app: Starlette) -> list[str]:
    """The prompts that a proxy keeps, in an engine's words."""
    book = running.services.warm_start.keeper._book
    return [app.state.words.decode(list(run.tokens)) for run in book]


def manifests(folder: Path) -> list[Path]:
    """The files on the disk."""
    return list(folder.glob("*.warm"))


def sessions_in(folder: Path) -> set[str]:
    """The sessions of all manifests on the disk, read in a copy of the folder."""
    copy = folder.with_name("copy")
    copy.mkdir(exist_ok=True)
    for path in manifests(folder):
        with suppress(FileNotFoundError):
            shutil.copy(path, copy)
    reader = Manifests(ManifestFolder(copy, max_manifest(TOKENS)), ManifestSeal(KEY), TOKENS)
    found = [loaded.found for loaded in reader.load(60)]
    reader.folder.release()
    shutil.rmtree(copy)
    assert not any(isinstance(each, Outcome) for each in found), found
    return {run.session for each in found for run in each[1]}  # type: ignore[index]


async def warmed(running: Proxy, name: str, old: str) -> None:
    """Wait until another run of an engine is known and its warm start is over."""
    replica = replica_of(running, name)
    await until(lambda: replica.status.up and replica.status.retains_as not in ("", old))
    await until(lambda: replica.ready)


async def test_a_session_finds_its_prompt_after_everything_was_restarted(tmp_path: Path) -> None:
    """Proxy and engine are new: the session's next turn has its history as a cached prefix, and a
    control without the manifest has nothing."""
    messages = history(4, "restart")
    async with proxy({"e": engine()}, tmp_path) as first:
        await until(first.ready)
        await first.turn("s", messages)
    assert sessions_in(tmp_path) == {"s"}
    for folder, cached in ((tmp_path, True), (None, False)):
        fresh = engine()
        async with proxy({"e": fresh}, folder) as second:
            await until(second.ready)
            more = [*messages, {"role": "user", "content": "And now?"}]
            tokens = (await second.turn("s", more))["tokens"]
            assert tokens["spliced"] == tokens["reused"] == 0
            assert (tokens["prefilled"] < 40) == cached
            assert (tokens["prefix"] > tokens["prompt"] - 40) == cached
            assert second.counted(Outcome.REPLAYED) == cached
        check_clean(fresh)


async def test_a_proxy_before_the_same_engine_replays_nothing(tmp_path: Path) -> None:
    """A restart of the proxy alone costs the engine nothing: it has computed the runs itself."""
    running = Switch(engine())
    async with proxy({"e": running}, tmp_path) as first:
        await first.turn("s", history(2, "same"))
    seen: list[str] = []

    async def gate(scope: Scope) -> None:
        seen.append(scope["path"])

    running.gate = gate
    async with proxy({"e": running}, tmp_path) as second:
        await until(second.ready)
        assert second.counted(Outcome.PRESENT) == 1
    assert "/v1/completions" not in seen
    assert "/leyline/capability" in seen


@pytest.mark.parametrize("secret", [None, "between proxy and engine"], ids=["unsigned", "signed"])
async def test_a_forget_reaches_the_warmed_cache_and_the_disk(
    tmp_path: Path, secret: str | None
) -> None:
    """A new engine holds the secret for its session; the redaction removes it there, and from the
    disk before the engine even gets the turn."""
    options = {"hints_secret": secret} if secret else {}
    on_disk: list[set[str]] = []

    async def look(scope: Scope) -> None:
        if scope["path"] == CHAT:
            on_disk.append(await asyncio.to_thread(sessions_in, tmp_path))

    running = Switch(engine(**options))
    messages = history(3, "forget", text=SECRET)
    async with proxy(
        {"e": running}, tmp_path, hints_secret=secret, warm_start_interval_s=0.1
    ) as both:
        await both.turn("s", messages)
        await both.turn("other", history(2, "other"))
        await until(lambda: sessions_in(tmp_path) == {"s", "other"})
        old, fresh = replica_of(both, "e").status.retains_as, engine(**options)
        await learn_words(fresh)
        running.engine = fresh
        await warmed(both, "e", old)
        assert holds_text(fresh, "s", SECRET)
        running.gate = look
        account = await both.turn("s", messages, policy=REDACT)
        assert account["forgot"]["overwritten"] > 0
        assert not holds_text(fresh, "s", SECRET)
        assert holds_text(fresh, "other", "other")
        assert on_disk == [{"other"}]
        running.gate = None
        # Without the secret, the session is kept again.
        await until(lambda: sessions_in(tmp_path) == {"s", "other"})
        running.engine, old = engine(**options), replica_of(both, "e").status.retains_as
        await learn_words(running.engine)
        await warmed(both, "e", old)
        assert holds_text(running.engine, "s", "[gone]")
        assert not holds_text(running.engine, "s", SECRET)


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "under-way"])
async def test_a_forget_during_a_warm_start_reaches_what_comes_after_it(
    tmp_path: Path, answered: bool
) -> None:
    """The run was on its way when its session forgot: the engine forgets again when it has it, also
    if the turn that forgets isn't answered yet."""
    messages = history(3, "overtaken", text=SECRET)
    async with proxy({"e": engine()}, tmp_path) as first:
        await first.turn("s", messages)
    go, begun, reply, sent = asyncio.Event(), asyncio.Event(), asyncio.Event(), []
    fresh = engine()
    await learn_words(fresh)

    async def gate(scope: Scope) -> None:
        sent.append(scope["path"])
        if scope["path"] == "/v1/completions":
            begun.set()
            await go.wait()
        if scope["path"] == CHAT and sent.count(CHAT) == 1 and not answered:
            await reply.wait()

    async with proxy({"e": Switch(fresh, gate)}, tmp_path) as second:
        await begun.wait()
        turn = asyncio.create_task(second.turn("s", messages, policy=REDACT))
        await until(lambda: turn.done() if answered else CHAT in sent)
        assert sent.count(CHAT) == 1
        go.set()
        await until(second.ready)
        assert second.counted(Outcome.FORGOTTEN) == 1
        await until(lambda: sent.count(CHAT) == 2 and not second.services.erasures.waiting)
        reply.set()
        await turn
        assert not holds_text(fresh, "s", SECRET)
        assert not any(SECRET in text for text in kept_texts(second, fresh))


async def test_a_turn_beside_a_forget_is_not_kept(tmp_path: Path) -> None:
    """The turn that ends last had the secret: neither memory nor disk takes its prompt."""
    go, begun = asyncio.Event(), asyncio.Event()
    slow = [True]

    async def gate(scope: Scope) -> None:
        if scope["path"] == CHAT and slow:
            slow.clear()
            begun.set()
            await go.wait()

    app = engine()
    await learn_words(app)
    async with proxy({"e": Switch(app, gate)}, tmp_path) as running:
        messages = history(2, "beside", text=SECRET)
        late = asyncio.create_task(running.turn("s", messages))
        await begun.wait()
        await running.turn("s", messages, policy=REDACT)
        await running.turn("s", [*messages, {"role": "user", "content": "Go on"}], policy=REDACT)
        go.set()
        await late
        (kept,) = kept_texts(running, app)
        assert "[gone]" in kept
        assert SECRET not in kept


async def test_a_forget_at_another_proxy_is_known(tmp_path: Path) -> None:
    """Two proxies share their sessions: one doesn't replay what the other one has forgotten, and
    keeps the session again from its next turn on."""
    messages = history(2, "shared", text=SECRET)
    running, fresh = Switch(engine()), engine()
    await learn_words(fresh)
    with redis_server(tmp_path) as server:
        shared = {
            "session_store": f"redis://127.0.0.1:{server.port}",
            "session_secret": ("a secret of tests, long enough",),
        }
        async with (
            proxy({"e": running}, tmp_path / "one", **shared) as one,
            proxy({"e": running}, tmp_path / "two", **shared) as two,
        ):
            await one.turn("s", messages)
            await one.turn("t", messages)
            await two.turn("s", messages, policy=REDACT)
            old, running.engine = replica_of(one, "e").status.retains_as, fresh
            for each in (one, two):
                await warmed(each, "e", old)
            assert (one.counted(Outcome.FORGOTTEN), one.counted(Outcome.REPLAYED)) == (1, 1)
            assert two.counted(Outcome.REPLAYED) == 1
            assert holds_text(fresh, "t", SECRET)
            assert holds_text(fresh, "s", "[gone]")
            assert not holds_text(fresh, "s", SECRET)
            more = [*messages, {"role": "user", "content": "Go on"}]
            await one.turn("s", more, policy=REDACT)
            kept = [text for text in kept_texts(one, fresh) if "[gone]" in text]
            assert len(kept) == 1
            assert SECRET not in kept[0]


async def test_a_forget_after_a_restart_reaches_the_warmed_cache(tmp_path: Path) -> None:
    """The new proxy knows nothing of the session but its name, and forgets it whole."""
    messages = history(3, "restart", text=SECRET)
    async with proxy({"e": engine()}, tmp_path) as first:
        await first.turn("s", messages)
    fresh = engine()
    await learn_words(fresh)
    async with proxy({"e": fresh}, tmp_path) as second:
        await until(second.ready)
        assert holds_text(fresh, "s", SECRET)
        await second.turn("s", messages, policy=REDACT)
        assert not holds_text(fresh, "s", SECRET)


async def test_a_forget_reaches_an_engine_that_only_the_warm_start_filled(tmp_path: Path) -> None:
    """The session never had a turn there, but the engine owes the forget like any other."""
    home = next(name for name in map(str, range(99)) if ranked(name, {"a": 1, "b": 1})[0] == "b")
    away, other = Switch(None), engine()
    messages = history(3, "away", text=SECRET)
    async with proxy({"a": engine(), "b": away}, tmp_path) as both:
        await both.turn(home, messages)
        await learn_words(other)
        away.engine = other
        await warmed(both, "b", "")
        assert holds_text(other, home, SECRET)
        replica_of(both, "b").draining = True
        await both.turn(home, messages, policy=REDACT)
        await until(lambda: not holds_text(other, home, SECRET))


async def test_an_engine_gets_only_its_own_sessions(tmp_path: Path) -> None:
    """Of two engines, each gets the sessions that it will serve, and none of a tenant that may not
    use it, that is switched off, or that is gone."""
    names = [f"s{number}" for number in range(8)]
    tenants = {
        "both": {"api_keys": ["key-both"]},
        "one": {"api_keys": ["key-one"], "upstreams": ["a"]},
        "off": {"api_keys": ["key-off"], "warm_start": False},
        "gone": {"api_keys": ["key-gone"]},
    }
    async with proxy({"a": engine(), "b": engine()}, tmp_path, tenants=tenants) as first:
        for name in names:
            for tenant in tenants:
                messages = history(1, f"{tenant} {name}")
                await first.turn(name, messages, f"key-{tenant}")
    del tenants["gone"]
    fresh = {"a": engine(), "b": engine()}
    for each in fresh.values():
        await learn_words(each)
    async with proxy(dict(fresh), tmp_path, tenants=tenants) as second:
        for name in fresh:
            await until(lambda name=name: replica_of(second, name).ready)  # type: ignore[misc]
        homes = {name: ranked(name, {"a": 1.0, "b": 1.0})[0] for name in names}
        assert set(homes.values()) == {"a", "b"}
        for where, app in fresh.items():
            held = {
                (tenant, name)
                for tenant in ("both", "one", "off", "gone")
                for name in names
                if holds_text(app, name, f"{tenant} {name}", tenant)
            }
            wanted = {("both", name) for name in names if homes[name] == where}
            assert held == wanted | ({("one", name) for name in names} if where == "a" else set())
        assert second.counted(Outcome.OTHER_TENANT) == 1
        assert second.counted(Outcome.ELSEWHERE) == 16


async def test_requests_are_served_while_an_engine_warms(tmp_path: Path) -> None:
    """The only engine isn't ready until its warm start is over, but turns are answered; another
    engine takes them if there is one."""
    async with proxy({"e": engine()}, tmp_path) as first:
        await first.turn("s", history(2, "warm"))
    go, begun = asyncio.Event(), asyncio.Event()

    async def gate(scope: Scope) -> None:
        if scope["path"] == "/v1/completions":
            begun.set()
            await go.wait()

    async with proxy({"e": Switch(engine(), gate)}, tmp_path) as second:
        await begun.wait()
        document = (await second.client.get("/readyz")).json()
        assert document["ready"] is False
        assert document["upstreams"][0]["warming"] is True
        assert (await second.turn("else", history(1, "meanwhile")))["tokens"]["prompt"] > 0
        assert not await second.ready()
        go.set()
        await until(second.ready)
    begun.clear()
    go.clear()
    mine = next(n for n in map(str, range(99)) if ranked(n, {"e": 1, "f": 1})[0] == "e")
    async with proxy({"e": engine()}, tmp_path) as third:
        await third.turn(mine, history(2, "warm"))
    async with proxy({"e": Switch(engine(), gate), "f": engine()}, tmp_path) as fourth:
        await begun.wait()
        await until(fourth.ready)
        chosen = [await fourth.services.pool.choose(mine, "leyline-recall") for _ in range(2)]
        assert {each.name for each in chosen} == {"f"}
        go.set()
        await until(lambda: replica_of(fourth, "e").ready)
        assert (await fourth.services.pool.choose(mine, "leyline-recall")).name == "e"


@pytest.mark.parametrize("fault", ["hangs", "fails"])
async def test_a_warm_start_ends_in_time(tmp_path: Path, fault: str) -> None:
    """An engine that hangs or refuses is ready all the same, and the outcome has a name."""
    async with proxy({"e": engine()}, tmp_path) as first:
        for number in range(6):
            await first.turn(f"s{number}", history(1, f"task {number}"))

    over = asyncio.Event()

    async def gate(scope: Scope) -> None:
        if scope["path"] == "/v1/completions":
            if fault == "hangs":
                await over.wait()
            raise httpx.ReadError("broken")

    outcome = Outcome.OVER_TIME if fault == "hangs" else Outcome.ENGINE_FAILED
    async with proxy({"e": Switch(engine(), gate)}, tmp_path, warm_start_s=1) as second:
        await until(second.ready, 5)
        over.set()
        assert second.counted(outcome) == 6
        assert (await second.turn("s1", history(1, "task 1")))["tokens"]["prefix"] == 0


async def test_bad_manifests_leave_a_plain_start(tmp_path: Path) -> None:
    """Damaged and foreign manifests have named outcomes and are deleted, since no forget could
    reach what they hold; the proxy serves."""
    async with proxy({"e": engine()}, tmp_path) as first:
        await first.turn("s", history(1, "task"))
        status = replica_of(first, "e").status
    (good,) = manifests(tmp_path)
    data = good.read_bytes()
    assert status.capability is not None
    here = (status.capability.model, status.capability.model_fingerprint)

    def manifest(key: str, identity: EngineIdentity, session: str) -> None:
        run = first.services.warm_start.keeper._book.get(("default", "s"))
        assert isinstance(run, Run)
        folder = ManifestFolder(tmp_path, max_manifest(TOKENS))
        moved = replace(run, identity=identity, session=session)
        Manifests(folder, ManifestSeal(key), TOKENS).change([moved], {})

    good.unlink()
    manifest(KEY, EngineIdentity(*here, "another tokenizer"), "one")
    async with proxy({"e": engine()}, tmp_path) as second:
        await until(second.ready)
        assert second.counted(Outcome.OTHER_TOKENIZER) == 1
    manifest(KEY, EngineIdentity(here[0], "other weights", status.rendering.fingerprint), "two")
    manifest("another key, long enough", EngineIdentity(*here, status.rendering.fingerprint), "s")
    good.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    good.with_name("0" * 16 + good.name[16:]).write_bytes(data)
    good.with_name("1" * 16 + good.name[16:]).write_bytes(b"nonsense")
    async with proxy({"e": engine()}, tmp_path) as third:
        await until(third.ready)
        wanted = {
            Outcome.OTHER_MODEL: 1,
            Outcome.WRONG_KEY: 1,
            Outcome.CORRUPT: 2,
            Outcome.OTHER_TENANT: 1,
            Outcome.REPLAYED: 0,
        }
        assert {outcome: third.counted(outcome) for outcome in wanted} == wanted
        assert len(manifests(tmp_path)) == 2
        assert (await third.turn("s", history(1, "task")))["tokens"]["prefix"] == 0


async def test_a_conversation_without_a_name_is_replayed_only_while_it_is_known(
    tmp_path: Path,
) -> None:
    """A new proxy gives the conversation a new id, and no forget would find its earlier one."""
    messages = history(3, "nameless")
    running = Switch(engine())
    async with proxy({"e": running}, tmp_path) as first:
        await first.turn(None, messages)
        old, running.engine = replica_of(first, "e").status.retains_as, engine()
        await warmed(first, "e", old)
        assert first.counted(Outcome.REPLAYED) == 1
        running.engine = engine()
    async with proxy({"e": running}, tmp_path) as second:
        await until(second.ready)
        assert second.counted(Outcome.UNKNOWN_SESSION) == 1
        assert second.counted(Outcome.REPLAYED) == 0


async def test_warmed_content_can_be_reused(tmp_path: Path) -> None:
    """A new engine has indexed a reusing tenant's runs, so another session gets their content at
    another place; without the warm start there is nothing to find."""
    text = "".join(f"def handler_{n}(request):\n    return answer({n})\n" for n in range(20))

    def reading(task: str) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": f"{task}. " * 9},
            {"role": "user", "content": text},
        ]

    async with proxy({"e": engine()}, tmp_path, reuse="live") as first:
        await first.turn("one", reading("Read"))
    for folder, found in ((tmp_path, True), (None, False)):
        async with proxy({"e": engine()}, folder, reuse="live") as second:
            await until(second.ready)
            reused = (await second.turn("two", reading("Look at it well")))["tokens"]["reused"]
            assert (reused > 200) == found


async def test_a_deleted_session_is_not_replayed(tmp_path: Path) -> None:
    """The admin API's deletion reaches the manifest at once."""
    settings = {"warm_start_interval_s": 0.1, "admin_port": 0, "admin_key": KEY}
    async with proxy({"e": engine()}, tmp_path, **settings) as running:
        await running.turn("s", history(1, "task"))
        await until(lambda: sessions_in(tmp_path) == {"s"})
        admin = httpx.ASGITransport(app=create_admin_app(running.services))
        async with httpx.AsyncClient(transport=admin, base_url="http://localhost") as operator:
            key = {"authorization": f"Bearer {KEY}"}
            path = "/admin/sessions/default/s"
            assert (await operator.delete(path, headers=key)).status_code == 200
        assert not manifests(tmp_path)


async def test_a_turn_beside_a_deletion_leaves_no_prompt_of_a_session_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk takes its time to delete a manifest, a turn of the session ends: its prompt is
    a session's that a forget finds, or isn't kept."""
    settings = {"warm_start_interval_s": 0.1, "admin_port": 0, "admin_key": KEY}
    async with proxy({"e": engine()}, tmp_path, **settings) as running:
        await running.turn("s", history(1, "task"))
        await until(lambda: sessions_in(tmp_path) == {"s"})
        begun, go, remove = threading.Event(), threading.Event(), ManifestFolder.remove

        def slow(folder: ManifestFolder, name: str) -> FileResult:
            begun.set()
            assert go.wait(10)
            return remove(folder, name)

        monkeypatch.setattr(ManifestFolder, "remove", slow)
        admin = httpx.ASGITransport(app=create_admin_app(running.services))
        async with httpx.AsyncClient(transport=admin, base_url="http://localhost") as operator:
            key = {"authorization": f"Bearer {KEY}"}
            path = "/admin/sessions/default/s"
            deleting = asyncio.create_task(operator.delete(path, headers=key))
            assert await asyncio.to_thread(begun.wait, 10)
            await running.turn("s", history(2, "task"))
            go.set()
            assert (await deleting).status_code == 200
        assert running.services.warm_start is not None
        await running.services.warm_start.keeper.write()
        if await running.services.store.get("default", "s") is None:
            assert not manifests(tmp_path)


async def test_a_quarantine_reaches_the_manifest(tmp_path: Path) -> None:
    """A message that is put into quarantine leaves memory and disk with the answer, for good."""
    app = engine()
    await learn_words(app)
    messages = history(2, "task", text=SECRET)
    async with proxy({"e": app}, tmp_path, warm_start_interval_s=0.1) as running:
        await running.turn("s", messages)
        await until(lambda: sessions_in(tmp_path) == {"s"})
        assert SECRET in kept_texts(running, app)[0]
        place = next(i for i, each in enumerate(messages) if SECRET in str(each.get("content")))
        path = "/v1/leyline/sessions/s/quarantine"
        answer = await running.client.post(path, json={"messages": [place]})
        assert answer.status_code == 200, answer.text
        assert (kept_texts(running, app), manifests(tmp_path)) == ([], [])
        await running.turn("s", messages)
        await until(lambda: sessions_in(tmp_path) == {"s"})
        assert SECRET not in kept_texts(running, app)[0]
