"""``leyline serve --workers 2`` over TLS on both sides, as a user runs it."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.certificates import Authority, Pair
from support.redis_server import free_port
from support.worker_fleet import LEYLINE, Fleet, fleet

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.upstream.embedded import create_embedded_engine

ADMIN_KEY = "admin-key-of-the-tests"
RED = "spiffe://td/agents/red"
MODEL = "leyline-recall"


@dataclass(frozen=True)
class Secured:
    """A proxy whose engine knows it by its certificate, and who may call it."""

    running: Fleet
    authority: Authority
    own: Pair
    admin: str
    environment: dict[str, str]

    def context(self, name: str = RED) -> ssl.SSLContext:
        """The context of a client with a certificate."""
        return self.authority.issue(name).context(self.authority.ca)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "ca")
    own = Pair(folder / "proxy.pem", folder / "proxy.key")
    first, engine = authority.issue("127.0.0.1"), authority.issue("spiffe://td/engines/a")
    own.put(first)
    shown = authority.issue("spiffe://td/proxy")
    admin = free_port()
    files = {
        "TLS_CERT": own.cert,
        "TLS_KEY": own.key,
        "TLS_CLIENT_CA": authority.ca,
        "UPSTREAM_TLS_CA": authority.ca,
        "UPSTREAM_TLS_CERT": shown.cert,
        "UPSTREAM_TLS_KEY": shown.key,
    }
    environment = {f"LEYLINE_{name}": str(path) for name, path in files.items()}
    environment["LEYLINE_TLS_TENANTS"] = json.dumps({RED: "red", "spiffe://td/ops": "ops"})
    environment["LEYLINE_UPSTREAM_TLS_NAMES"] = "spiffe://td/engines/*"
    environment["LEYLINE_ADMIN_KEY"] = ADMIN_KEY
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 16_384})
    options: dict[str, Any] = {
        "ssl_certfile": str(engine.cert),
        "ssl_keyfile": str(engine.key),
        "ssl_ca_certs": str(authority.ca),
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    }
    with serving(app, **options) as origin:
        flags = ["--upstream", origin, "--admin-port", str(admin), "--undeclared", "tool=amortize"]
        with fleet(folder, *flags, **environment) as running:
            running.origin = running.origin.replace("http", "https")
            place = f"https://127.0.0.1:{admin}"
            environment["LEYLINE_UPSTREAM"] = origin
            yield Secured(running, authority, own, place, environment)


def turn(client: httpx.Client, turns: int, *, cut: bool = False) -> dict[str, Any]:
    """One turn of a session; returns its account."""
    messages = agent_history(turns, "Begin.", secret="the long middle", lines=40)
    if cut:
        messages[3] = {**messages[3], "content": "cut"}
    answer = client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0},
        headers={"x-leyline-session": "secured"},
    )
    assert answer.status_code == httpx.codes.OK, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def serial(client: httpx.Client, origin: str) -> str:
    """The serial number of the certificate on a new connection."""
    with client.stream("GET", f"{origin}/healthz", headers={"connection": "close"}) as answer:
        secured = answer.extensions["network_stream"].get_extra_info("ssl_object")
        return str(secured.getpeercert()["serialNumber"])


def test_edits_are_spliced_over_tls_by_either_worker(secured: Secured) -> None:
    """The engine knows the proxy, the proxy the engine, and both workers the tenant."""
    assert "base_url     https://127.0.0.1" in secured.running.log.read_text()
    with secured.running.clients(verify=secured.context()) as (first, second):
        for number in range(1, 4):
            turn((first, second)[number % 2], number)
        edited = turn(first, 4, cut=True)
        assert edited["outcome"] == "spliced", edited
        (session,) = second.get("/v1/leyline/sessions").json()["sessions"]
        assert session["id"] == "secured"
    with secured.running.clients(verify=secured.context("spiffe://td/ops")) as (client, _):
        assert client.get("/v1/leyline/sessions").json()["sessions"] == []


def test_a_renewed_certificate_reaches_every_worker_and_the_admin_port(secured: Secured) -> None:
    """One call of the admin API reloads it everywhere."""
    with httpx.Client(verify=secured.context(), timeout=30) as client:
        before = serial(client, secured.running.origin)
        assert serial(client, secured.admin) == before
        secured.own.put(secured.authority.issue("127.0.0.1"))
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        done = client.post(f"{secured.admin}/admin/reload", headers=headers).json()
        # A worker may have looked by itself a moment ago.
        assert done["tls"]["problem"] is None, done
    found = set()
    for _ in range(6):
        with httpx.Client(verify=secured.context(), timeout=30) as client:
            found.add(serial(client, secured.running.origin))
            found.add(serial(client, secured.admin))
    assert len(found) == 1
    assert before not in found


def test_doctor_uses_the_same_files(secured: Secured, tmp_path: Path) -> None:
    """It reaches the engine, and names an authority that hasn't signed it."""

    def doctor(**more: str) -> dict[str, dict[str, Any]]:
        done = subprocess.run(
            [LEYLINE, "doctor", "--json"],
            env={**os.environ, **secured.environment, **more},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return {each["name"]: each for each in json.loads(done.stdout)["checks"]}

    well = doctor()
    assert well["upstream.engine.reachable"]["status"] == "ok", well
    assert well["tls"]["status"] == "ok", well
    stranger = Authority(tmp_path, "stranger")
    bad = doctor(LEYLINE_UPSTREAM_TLS_CA=str(stranger.ca))
    assert bad["upstream.engine.reachable"]["status"] == "fail"
    assert "certificate" in bad["upstream.engine.reachable"]["detail"]
