"""The admin API: its own port and key, across tenants, without text."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.fake_engine import MODEL, FakeEngine
from support.provider import AUDIENCE, provider
from support.redis_server import redis_server

from leyline_proxy.http.admin import create_admin_app
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.settings.api_keys import key_digest
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

CHAT = "/v1/chat/completions"
ADMIN_KEY = "admin-key-0123456789"
AUTH = {"authorization": f"Bearer {ADMIN_KEY}"}
CANARY = "canary-91c2"


@asynccontextmanager
async def both(
    engine: FakeEngine, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of a proxy and of its admin API."""
    given = {"admin_port": 0, "admin_key": ADMIN_KEY, "handshake_retry_s": 0.05, **settings}
    app = create_app(Settings(**given), engine_app=engine)
    admin = create_admin_app(app.state.services)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=ASGIStreamTransport(app), base_url="http://localhost") as proxy,
        httpx.AsyncClient(
            transport=ASGIStreamTransport(admin), base_url="http://localhost"
        ) as operator,
    ):
        yield proxy, operator


async def talk(proxy: httpx.AsyncClient, who: str, session: str) -> None:
    """One turn."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"{CANARY} Hi."}]}
    headers = {"authorization": f"Bearer {who}", "x-leyline-session": session}
    assert (await proxy.post(CHAT, json=body, headers=headers)).status_code == 200


async def test_sessions_are_seen_across_tenants_and_can_be_let_go() -> None:
    """The same id is a session of each tenant; deleting one leaves the other."""
    keys = ["red:key-red", "blue:key-blue"]
    async with both(FakeEngine(), api_keys=keys) as (proxy, operator):
        await talk(proxy, "key-red", "s-1")
        await talk(proxy, "key-blue", "s-1")
        await talk(proxy, "key-blue", "t")
        found = (await operator.get("/admin/sessions", headers=AUTH)).json()
        blue = (await operator.get("/admin/sessions?tenant=blue&limit=1", headers=AUTH)).json()
        shown = await operator.get("/admin/sessions/blue/s-1", headers=AUTH)
        gone = await operator.delete("/admin/sessions/blue/s-1", headers=AUTH)
        twice = await operator.delete("/admin/sessions/blue/s-1", headers=AUTH)
        left = (await operator.get("/admin/sessions", headers=AUTH)).json()
        for limit in ("0", "x", "1" * 5000):
            refused = await operator.get(f"/admin/sessions?limit={limit}", headers=AUTH)
            assert refused.status_code == 400, limit[:9]
        tenants = await operator.get("/admin/tenants", headers=AUTH)
        upstreams = await operator.get("/admin/upstreams", headers=AUTH)
        await talk(proxy, "key-blue", "s-1")
    assert {(item["tenant"], item["id"]) for item in found["sessions"]} == {
        ("red", "s-1"),
        ("blue", "s-1"),
        ("blue", "t"),
    }
    assert (blue["total"], len(blue["sessions"])) == (2, 1)
    assert (shown.json()["tenant"], shown.json()["turns"]) == ("blue", 1)
    assert (gone.status_code, twice.status_code) == (200, 404)
    assert {(item["tenant"], item["id"]) for item in left["sessions"]} == {
        ("red", "s-1"),
        ("blue", "t"),
    }
    assert upstreams.json()["upstreams"][0]["up"] is True
    told = "".join(map(str, (found, blue, shown.text, tenants.text, upstreams.text)))
    for secret in (CANARY, "key-red", key_digest("key-red").hex(), ADMIN_KEY):
        assert secret not in told


async def test_tenants_show_limits_and_load() -> None:
    """They show each tenant's rights, its work under way, and its keys by id."""
    own = {"red": {"weight": 2, "requests_per_minute": 30, "upstreams": ["engine"]}}
    given = {"api_keys": ["red:key-red expires=2999-01-01"], "tenants": own}
    async with both(FakeEngine(), upstream="http://127.0.0.1:9", **given) as (_, operator):
        (red,) = (await operator.get("/admin/tenants", headers=AUTH)).json()["tenants"]
    assert red["keys"] == [
        {"id": key_digest("key-red").hex()[:12], "expires": "2999-01-01T00:00:00Z"}
    ]
    assert (red["running"], red["waiting"], red["upstreams"]) == (0, 0, ["engine"])
    assert red["limits"]["weight"] == 2
    assert red["limits"]["max_concurrent"] == 192


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer key-red"}, {"authorization": f"Basic {ADMIN_KEY}"}]
)
async def test_every_path_wants_the_admin_key(headers: dict[str, str]) -> None:
    """A tenant's key opens nothing here, nor does the admin key on the proxy's port."""
    paths = ["tenants", "sessions", "upstreams", "sessions/red/s"]
    async with both(FakeEngine(), api_keys=["red:key-red"]) as (proxy, operator):
        for path in paths:
            answer = await operator.get(f"/admin/{path}", headers=headers)
            assert answer.status_code == 401, path
        assert (await operator.post("/admin/reload", headers=headers)).status_code == 401
        assert (await operator.delete("/admin/sessions/red/s", headers=headers)).status_code == 401
        assert (await operator.get("/metrics", headers=headers)).status_code == 401
        assert (await operator.get("/healthz", headers=headers)).status_code == 200
        for path in (*(f"/admin/{path}" for path in paths), "/v1/admin/tenants"):
            answer = await proxy.get(path, headers=AUTH)
            assert answer.status_code in (401, 404), path
        assert (await proxy.get("/v1/models", headers=AUTH)).status_code == 401


async def test_an_identity_providers_keys_are_read_on_demand() -> None:
    """A token under a key that the provider has withdrawn stops with the request that reloads; a
    provider that fails is reported."""
    with provider() as issuer:
        given = {"oidc_issuer": issuer.origin, "oidc_audience": AUDIENCE, "api_keys": ["sub:key-1"]}
        async with both(FakeEngine(), **given, oidc_tenant_claim="sub") as (proxy, operator):
            old = {"authorization": f"Bearer {issuer.token(sub='sub')}"}
            assert (await proxy.get("/v1/models", headers=old)).status_code == 200
            del issuer.keys["k1"]
            issuer.add("k2")
            done = (await operator.post("/admin/reload", headers=AUTH)).json()
            assert done["identity_keys"] == {"loaded": True, "problem": None}
            assert (await proxy.get("/v1/models", headers=old)).status_code == 401
            issuer.status = 500
            broken = (await operator.post("/admin/reload", headers=AUTH)).json()
    assert not broken["identity_keys"]["loaded"] and "500" in broken["identity_keys"]["problem"]


async def test_files_are_read_again_on_demand(tmp_path: Path) -> None:
    """A revoked key stops with the request that reloads; a wrong file is reported as a problem."""
    keys, policies = tmp_path / "keys", tmp_path / "policies.yaml"
    keys.write_text("red:key-1\n")
    policies.write_text("policies: [keep_all]\n")
    given = {"api_keys_file": keys, "policies_file": policies}
    async with both(FakeEngine(), **given) as (proxy, operator):
        await talk(proxy, "key-1", "s")
        keys.write_text("red:key-2\n")
        done = (await operator.post("/admin/reload", headers=AUTH)).json()
        refused = await proxy.get("/v1/models", headers={"authorization": "Bearer key-1"})
        keys.write_text("red\n")
        broken = (await operator.post("/admin/reload", headers=AUTH)).json()
    assert done["api_keys"]["problem"] is None
    assert done["policies"] == {"loaded": False}
    assert refused.status_code == 401
    assert "line 1" in broken["api_keys"]["problem"]


async def test_metrics_can_be_the_operators_alone() -> None:
    """With the setting they are at the admin port, and no longer at the proxy's."""
    async with both(FakeEngine(), metrics_on_admin=True) as (proxy, operator):
        assert (await proxy.get("/metrics")).status_code == 404
        assert "leyline_build_info" in (await operator.get("/metrics", headers=AUTH)).text
    async with both(FakeEngine()) as (proxy, _):
        assert (await proxy.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    "given",
    [{"admin_port": 0}, {"admin_key": "short"}, {"metrics_on_admin": True}],
)
def test_half_a_configuration_is_refused(given: dict[str, Any]) -> None:
    """No port without a key, no key that could be guessed, no metrics that are nowhere."""
    with pytest.raises(ValidationError):
        Settings(**given)


def test_serve_runs_both_ports_and_stops_both() -> None:
    """The command announces the admin port, which is closed again when the command ends."""
    environment = {**os.environ, "LEYLINE_ADMIN_KEY": ADMIN_KEY, "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("leyline")), "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "--admin-port", "0", "--upstream", "http://127.0.0.1:9"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            told = ""
            while "admin" not in told:
                line = process.stdout.readline()
                assert line, told
                told += line
            admin = re.search(r"admin\s+(http://\S+)", told)
            origin = re.search(r"live page\s+(http://\S+)/", told)
            assert admin is not None
            assert origin is not None
            listed = httpx.get(f"{admin[1]}/tenants", headers=AUTH)
            assert [item["name"] for item in listed.json()["tenants"]] == ["default"]
            assert httpx.get(f"{origin[1]}/admin/tenants", headers=AUTH).status_code == 404
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{admin[1]}/tenants", headers=AUTH)


async def test_while_redis_is_away_nothing_counts_as_deleted(tmp_path: Path) -> None:
    """A 404 would mean that a text is gone which comes back with Redis."""
    away = "session_store_unavailable"
    with redis_server(tmp_path) as server:
        store = {"session_store": server.url, "session_secret": ["sixteen letters or more"]}
        async with both(FakeEngine(), **store) as (proxy, operator):
            body = {"model": MODEL, "input": CANARY}
            first = (await proxy.post("/v1/responses", json=body)).json()
            path = f"/v1/responses/{first['id']}"
            session = f"/admin/sessions/default/{first['leyline']['session']}"
            server.pause()
            refused = [
                await proxy.delete(path),
                await proxy.get(path),
                await operator.delete(session, headers=AUTH),
            ]
            server.resume()
    assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [
        (503, away)
    ] * 3


async def test_an_engine_can_be_drained_and_taken_back() -> None:
    """A drained engine says so, to operators and in readiness, and an unknown name is reported."""
    async with both(FakeEngine()) as (proxy, operator):
        drained = await operator.post("/admin/upstreams/engine/drain", headers=AUTH)
        ready = (await proxy.get("/readyz")).json()
        refused = await operator.post("/admin/upstreams/engine/drain")
        resumed = await operator.post("/admin/upstreams/engine/resume", headers=AUTH)
        unknown = await operator.post("/admin/upstreams/engin/drain", headers=AUTH)
    assert (drained.json()["name"], drained.json()["draining"]) == ("engine", True)
    assert ready["upstreams"][0]["draining"] is True
    assert refused.status_code == 401
    assert resumed.json()["draining"] is False
    assert unknown.status_code == 404
    assert "Did you mean 'engine'?" in unknown.json()["error"]["message"]
