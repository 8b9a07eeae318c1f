"""TLS to engines: whom the proxy trusts, what it shows them, and what it says if that fails."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.certificates import Authority, Pair
from support.fake_engine import MODEL, FakeEngine, chat_json, chat_stream

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.tls.contexts import ReloadedContext

ENGINE = "spiffe://td/engines/a"
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
CHAT = "/v1/chat/completions"


class Place:
    """An authority, and the proxy's certificate."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca")
        self.others = Authority(folder / "others", "others")
        self.own = Pair(folder / "proxy.pem", folder / "proxy.key")
        self.own.put(self.authority.issue("spiffe://td/proxy"))

    @contextmanager
    def engine(self, fake: FakeEngine, pair: Pair, *, asks: bool = False) -> Iterator[str]:
        """The address of an engine with a certificate.

        Args:
            asks: True if it demands the proxy's.
        """
        options: dict[str, Any] = {"ssl_certfile": str(pair.cert), "ssl_keyfile": str(pair.key)}
        if asks:
            options |= {"ssl_ca_certs": str(self.authority.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        with serving(fake, **options) as origin:
            yield origin

    @property
    def shown(self) -> dict[str, Any]:
        """Settings with the proxy's certificate."""
        return {"upstream_tls_cert": self.own.cert, "upstream_tls_key": self.own.key}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Asking(httpx.Client):
    """A client, and the proxy's context of connections to the engine."""

    tls: ReloadedContext


@contextmanager
def asking(origin: str, place: Place, **settings: Any) -> Iterator[Asking]:
    """A client of a proxy in front of an engine."""
    trusted = {"upstream_tls_ca": place.authority.ca, "tls_reload_s": 3600, "log_level": "error"}
    given = Settings(upstream=origin, **{**trusted, **settings})
    app = create_app(given)
    with serving(app) as proxy, Asking(base_url=proxy, timeout=30) as client:
        client.tls = app.state.services.tls.engines
        yield client


def test_engines_are_reached_by_tls_on_every_way(place: Place) -> None:
    """Chats, streams, headers that aiohttp doesn't write, the handshake and a small document; the
    engine demands the proxy's certificate."""
    fake = FakeEngine()
    fake.answers += [chat_json(), chat_stream("Hello"), chat_json()]
    pair = place.authority.issue("127.0.0.1")
    with (
        place.engine(fake, pair, asks=True) as origin,
        asking(origin, place, **place.shown) as client,
    ):
        ready = client.get("/readyz").json()
        assert ready["upstreams"][0]["up"], ready
        assert client.post(CHAT, json=REQUEST).status_code == httpx.codes.OK
        streamed = client.post(CHAT, json={**REQUEST, "stream": True})
        assert streamed.text.rstrip().endswith("[DONE]")
        odd = client.post(CHAT, json=REQUEST, headers=[(b"x-odd", "é".encode())])
        assert odd.status_code == httpx.codes.OK
        assert client.get("/v1/models").json()["data"]


@pytest.mark.parametrize(
    ("names", "theirs", "reached"),
    [
        ("", "127.0.0.1", True),
        ("", ENGINE, False),
        (ENGINE, ENGINE, True),
        ("spiffe://td/engines/*", ENGINE, True),
        (f"spiffe://td/other,{ENGINE}", ENGINE, True),
        ("spiffe://td/engines", ENGINE, False),
        ("spiffe://td/other", "127.0.0.1", False),
    ],
)
def test_an_engine_must_have_its_name(place: Place, names: str, theirs: str, reached: bool) -> None:
    """Its host name, or one of the names in the settings; no request goes to another."""
    fake = FakeEngine()
    fake.answers.append(chat_json())
    with (
        place.engine(fake, place.authority.issue(theirs)) as origin,
        asking(origin, place, upstream_tls_names=names) as client,
    ):
        answer = client.post(CHAT, json=REQUEST)
    if reached:
        assert answer.status_code == httpx.codes.OK, answer.text
    else:
        assert answer.status_code == httpx.codes.BAD_GATEWAY
        assert "the proxy refuses its certificate" in answer.json()["error"]["message"]
        assert not fake.bodies


@pytest.mark.parametrize("kind", ["another authority", "no certificate", "a stranger's"])
def test_a_failed_handshake_is_named(place: Place, kind: str) -> None:
    """The engine's authority isn't trusted, or the engine refuses what the proxy shows."""
    fake = FakeEngine()
    signs = place.others if kind == "another authority" else place.authority
    shown: dict[str, Any] = {}
    if kind == "a stranger's":
        place.own.put(place.others.issue("spiffe://td/proxy"))
        shown = place.shown
    pair = signs.issue("127.0.0.1")
    with (
        place.engine(fake, pair, asks=kind != "another authority") as origin,
        asking(origin, place, **shown) as client,
    ):
        answer = client.post(CHAT, json=REQUEST)
        problem = client.get("/readyz").json()["upstreams"][0]["problem"]
    message = answer.json()["error"]["message"]
    assert answer.status_code == httpx.codes.BAD_GATEWAY
    who = "the proxy refuses its" if kind == "another authority" else "it may refuse the proxy's"
    assert f"{who} certificate" in message, message
    assert f"{who} certificate" in problem, problem
    assert "td/proxy" not in message + problem
    assert not fake.bodies


def test_a_renewed_certificate_is_shown_from_then_on(place: Place) -> None:
    """The connection that is open continues; the next one shows the new certificate."""
    fake, pair = FakeEngine(), place.authority.issue("127.0.0.1")
    fake.answers += [chat_json(), chat_json()]
    place.own.put(place.others.issue("spiffe://td/proxy"))
    with (
        place.engine(fake, pair, asks=True) as origin,
        asking(origin, place, **place.shown) as client,
    ):
        assert client.post(CHAT, json=REQUEST).status_code == httpx.codes.BAD_GATEWAY
        place.own.put(place.authority.issue("spiffe://td/proxy"))
        assert asyncio.run(client.tls.refresh())
        assert client.post(CHAT, json=REQUEST).status_code == httpx.codes.OK
        place.own.key.write_text("half a k")
        assert not asyncio.run(client.tls.refresh())
        assert client.post(CHAT, json=REQUEST).status_code == httpx.codes.OK
        ready = client.get("/readyz").json()
    assert "is not the key of upstream_tls_cert" in ready["tls"]["problem"]
