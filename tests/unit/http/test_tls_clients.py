"""HTTPS with clients' certificates, on the proxy's own server: who is let in, and as whom."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs
from support.certificates import Authority
from support.fake_engine import MODEL, FakeEngine, chat_json, chat_stream
from support.responses_route import scripted
from support.sockets import SocketProxy, socket_proxy
from support.tls_place import TlsPlace, client, serial
from support.waiting import wait
from websockets.exceptions import InvalidStatus

DAY = timedelta(days=1)
RED_KEY = "key-of-the-red-tenant"
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
CHAT = "/v1/chat/completions"


def answer_of(
    proxy: SocketProxy, context: ssl.SSLContext, key: str = "", **headers: str
) -> tuple[int, str]:
    """Status of a chat request, and its tenant or its error's code."""
    with client(proxy, context, key) as asked:
        answer = asked.post(CHAT, json=REQUEST, headers=headers)
        if answer.status_code != httpx.codes.OK:
            return answer.status_code, answer.json()["error"]["code"]
        sessions = asked.get("/v1/leyline/sessions").json()["sessions"]
        return answer.status_code, str(len(sessions))


def test_a_certificate_is_a_tenants(engine: FakeEngine, place: TlsPlace) -> None:
    """Whole and streamed; tenants see their own sessions alone, and nobody gets in without one."""
    red, blue = place.context("spiffe://td/agents/red"), place.context("spiffe://td/agents/blue/7")
    engine.answers += [chat_json(), chat_stream("Hello"), chat_json()]
    with socket_proxy(engine, **place.settings()) as proxy:
        with client(proxy, red) as asked:
            assert asked.post(CHAT, json=REQUEST).status_code == httpx.codes.OK
            answer = asked.post(CHAT, json={**REQUEST, "stream": True})
            assert answer.text.rstrip().endswith("[DONE]")
            assert len(asked.get("/v1/leyline/sessions").json()["sessions"]) == 2
        with client(proxy, blue) as asked:
            assert asked.get("/v1/leyline/sessions").json()["sessions"] == []
        assert answer_of(proxy, place.context("spiffe://td/agents/green")) == (
            403,
            "unknown_tenant",
        )
        both = place.context("spiffe://td/agents/blue/7", "red.example")
        assert answer_of(proxy, both) == (403, "unknown_tenant")
        with pytest.raises(httpx.TransportError), client(proxy, place.context()) as asked:
            asked.get("/healthz")
        assert len(engine.bodies) == 2


@pytest.mark.parametrize("names", [("10.0.0.1",), ("spiffe://td/a", "spiffe://td/b")])
def test_a_certificate_without_a_name_is_named_in_the_refusal(
    engine: FakeEngine, place: TlsPlace, names: tuple[str, ...]
) -> None:
    """An answer about keys alone would hide that a certificate came; beside it, a key serves."""
    engine.answers.append(chat_json())
    shown = place.context(*names)
    with socket_proxy(engine, **place.settings(api_keys=(f"red:{RED_KEY}",))) as proxy:
        with client(proxy, shown) as asked:
            answer = asked.post(CHAT, json=REQUEST)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_tenant")
        assert "no URI and no DNS name, or several SPIFFE IDs" in answer.text
        assert answer_of(proxy, shown, RED_KEY) == (200, "1")


def test_a_session_cannot_be_resumed(engine: FakeEngine, place: TlsPlace) -> None:
    """Each connection's certificate is checked: one may have expired since the last."""
    red = place.context("spiffe://td/agents/red")
    request = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    session, reused = None, []
    with socket_proxy(engine, **place.settings()) as proxy:
        for _ in range(2):
            with (
                socket.create_connection(proxy.address) as plain,
                red.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secured,
            ):
                secured.sendall(request)
                assert b"200 OK" in secured.recv(4096)
                session = secured.session
                reused.append(secured.session_reused)
    assert reused == [False, False]


@pytest.mark.parametrize("kind", ["of another authority", "expired", "not valid yet"])
def test_certificates_that_are_no_good_are_refused(
    engine: FakeEngine, place: TlsPlace, tmp_path: Path, kind: str
) -> None:
    """The handshake fails, also where certificates are optional."""
    name = "spiffe://td/agents/red"
    others = Authority(tmp_path / "others", "others")
    pair = {
        "of another authority": lambda: others.issue(name),
        "expired": lambda: place.authority.issue(name, begins=-2 * DAY, ends=-DAY),
        "not valid yet": lambda: place.authority.issue(name, begins=DAY, ends=2 * DAY),
    }[kind]()
    for mode in ("required", "optional"):
        with (
            socket_proxy(engine, **place.settings(tls_clients=mode)) as proxy,
            client(proxy, pair.context(place.authority.ca)) as asked,
            pytest.raises(httpx.TransportError),
        ):
            asked.post(CHAT, json=REQUEST)
    assert not engine.bodies


def test_keys_serve_beside_certificates(engine: FakeEngine, place: TlsPlace) -> None:
    """Without a certificate a key decides. Beside one it may be anything but another tenant's."""
    settings = place.settings(tls_clients="optional", api_keys=(f"red:{RED_KEY}",))
    red, blue = place.context("spiffe://td/agents/red"), place.context("spiffe://td/agents/blue/7")
    engine.answers += [chat_json() for _ in range(4)]
    with socket_proxy(engine, **settings) as proxy:
        assert answer_of(proxy, place.context()) == (401, "invalid_api_key")
        assert answer_of(proxy, place.context(), "wrong") == (401, "invalid_api_key")
        assert answer_of(proxy, place.context(), RED_KEY) == (200, "1")
        assert answer_of(proxy, red, RED_KEY) == (200, "2")
        assert answer_of(proxy, red, "anything") == (200, "3")
        assert answer_of(proxy, blue, RED_KEY) == (403, "certificate_mismatch")
        assert answer_of(proxy, place.context("spiffe://td/other"), RED_KEY) == (200, "4")
        with client(proxy, place.context()) as asked:
            assert asked.get("/healthz").status_code == httpx.codes.OK


def test_certificates_alone_open_a_proxy_without_tenants(
    engine: FakeEngine, place: TlsPlace
) -> None:
    """Without a mapping, every certificate of the authority is the default tenant's."""
    engine.answers.append(chat_json())
    with socket_proxy(engine, **place.settings(tls_tenants={})) as proxy:
        assert answer_of(proxy, place.context("any.example")) == (200, "1")


@pytest.mark.parametrize(
    "headers",
    [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}],
)
def test_another_sites_page_has_no_use_of_a_browsers_certificate(
    engine: FakeEngine, place: TlsPlace, headers: dict[str, str]
) -> None:
    """It is sent with every request of the browser; the proxy's own page may use it."""
    engine.answers.append(chat_json())
    red = place.context("spiffe://td/agents/red")
    with socket_proxy(engine, **place.settings()) as proxy:
        assert answer_of(proxy, red, **headers)[0] == httpx.codes.UNAUTHORIZED
        own = {"origin": proxy.origin, "sec-fetch-site": "same-origin"}
        assert answer_of(proxy, red, **own) == (200, "1")


async def test_websockets_know_the_certificate(engine: FakeEngine, place: TlsPlace) -> None:
    """A connection's requests are its certificate's tenant's."""
    engine.answers.append(scripted())
    red = place.context("spiffe://td/agents/red")
    with socket_proxy(engine, **place.settings()) as proxy:
        async with proxy.socket(ssl=red) as ws:
            assert (await ws.ask())["status"] == "completed"
        with pytest.raises(InvalidStatus) as refused:
            async with proxy.socket(ssl=place.context("spiffe://td/other")):
                pass
        assert refused.value.response.status_code == httpx.codes.FORBIDDEN
        async with httpx.AsyncClient(base_url=proxy.origin, verify=red) as asked:
            found = (await asked.get("/v1/leyline/sessions")).json()["sessions"]
    assert len(found) == 1


async def test_a_new_certificate_serves_new_connections(
    engine: FakeEngine, place: TlsPlace
) -> None:
    """A stream under way ends on the old one; halves and strangers' keys change nothing."""
    engine.answers.append(chat_stream(*["Hello"] * 30, pause_s=0.1))
    red = place.context("spiffe://td/agents/red")
    with socket_proxy(engine, **place.settings()) as proxy:
        first = await asyncio.to_thread(serial, proxy, red)
        async with (
            httpx.AsyncClient(base_url=proxy.origin, verify=red, timeout=30) as asked,
            asked.stream("POST", CHAT, json={**REQUEST, "stream": True}) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            context, new = proxy.services.tls.clients, place.authority.issue("127.0.0.1")
            shutil.copyfile(new.cert, place.own.cert)
            assert not await context.refresh()
            assert "is not the key of tls_cert" in context.problem
            assert await asyncio.to_thread(serial, proxy, red) == first
            shutil.copyfile(new.key, place.own.key)
            async with asyncio.timeout(20):
                while await asyncio.to_thread(serial, proxy, red) == first:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert context.problem is None
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_turned_link_is_a_new_version(
    engine: FakeEngine, place: TlsPlace, tmp_path: Path
) -> None:
    """Kubernetes replaces a mounted secret so, all files at once. Clients of an authority that was
    removed are refused from then on."""
    red = place.context("spiffe://td/agents/red")
    fresh = Authority(tmp_path / "fresh", "fresh")
    versions = []
    for number, (authority, pair) in enumerate(
        [(place.authority, place.own), (fresh, fresh.issue("127.0.0.1"))]
    ):
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        shutil.copyfile(pair.cert, folder / "tls.crt")
        shutil.copyfile(pair.key, folder / "tls.key")
        shutil.copyfile(authority.ca, folder / "ca.crt")
        versions.append(folder)
    data = tmp_path / "data"
    data.symlink_to(versions[0])
    files = {"tls_cert": data / "tls.crt", "tls_key": data / "tls.key"}
    settings = place.settings(**files, tls_client_ca=data / "ca.crt", tls_reload_s=3600)
    with socket_proxy(engine, **settings) as proxy:
        context = proxy.services.tls.clients
        assert await asyncio.to_thread(serial, proxy, red)
        assert not await context.refresh()
        turned = tmp_path / "turned"
        turned.symlink_to(versions[1])
        turned.rename(data)
        assert await context.refresh()
        theirs = fresh.issue("spiffe://td/agents/red")
        assert await asyncio.to_thread(serial, proxy, theirs.context(fresh.ca))
        old = ssl.create_default_context(cafile=fresh.ca)
        stale = place.authority.issue("spiffe://td/agents/red")
        old.load_cert_chain(stale.cert, stale.key)
        with pytest.raises(httpx.TransportError):
            await asyncio.to_thread(serial, proxy, old)


async def test_an_expired_certificate_replaces_no_good_one(
    engine: FakeEngine, place: TlsPlace
) -> None:
    """The one before it serves on; the metrics have its end, and the refusal."""
    red = place.context("spiffe://td/agents/red")
    with socket_proxy(engine, **place.settings(tls_reload_s=3600)) as proxy:
        context = proxy.services.tls.clients
        ends = context.validity.ends
        place.own.put(
            place.authority.issue("127.0.0.1", begins=-timedelta(hours=3), ends=-timedelta(hours=2))
        )
        assert not await context.refresh()
        assert "has expired" in context.problem
        async with httpx.AsyncClient(base_url=proxy.origin, verify=red) as asked:
            page = (await asked.get("/metrics")).text
            ready = (await asked.get("/readyz")).json()
    assert context.validity.ends == ends
    name = "leyline_tls_certificate_not_after_timestamp_seconds"
    shown = [line for line in page.splitlines() if line.startswith(name)]
    assert [float(line.split()[-1]) for line in shown] == [pytest.approx(ends)]
    assert 'leyline_tls_reloads_total{result="refused",side="clients"} 1.0' in page
    assert "has expired" in ready["tls"]["problem"]


def test_a_certificate_out_of_its_time_is_reported_from_the_start(
    engine: FakeEngine, place: TlsPlace
) -> None:
    """In the log, once, and on the page for load balancers; one that is renewed ends it."""
    place.own.put(place.authority.issue("127.0.0.1", begins=-2 * DAY, ends=-DAY))
    unchecked = httpx.create_ssl_context(verify=False)
    with (
        capture_logs() as logged,
        socket_proxy(engine, **place.settings(tls_tenants={}, tls_client_ca=None)) as proxy,
        httpx.Client(verify=unchecked, base_url=proxy.origin) as asked,
    ):
        problem = asked.get("/readyz").json()["tls"]["problem"]
        place.own.put(place.authority.issue("127.0.0.1"))
        wait(lambda: asked.get("/readyz").json()["tls"]["problem"] is None)
    assert problem.startswith(f"tls_cert {place.own.cert} has expired: peers refuse it.")
    assert [each["problem"] for each in logged if each["event"] == "tls_not_valid"] == [problem]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("missing", r"tls_cert .* can't be read: No such file"),
        ("stranger", "is not the key of tls_cert"),
        ("encrypted", "is encrypted"),
        ("no PEM", "isn't in PEM"),
        ("no authority", "tls_client_ca .* holds no certificates in PEM"),
    ],
)
def test_files_that_cannot_serve_are_named_at_the_start(
    engine: FakeEngine, place: TlsPlace, broken: str, told: str
) -> None:
    """The setting, the file and the fix."""
    settings = place.settings()
    if broken == "missing":
        place.own.cert.unlink()
    elif broken == "stranger":
        shutil.copyfile(place.authority.issue("127.0.0.1").key, place.own.key)
    elif broken == "encrypted":
        place.own.put(place.authority.issue("127.0.0.1", passphrase=b"secret"))
    elif broken == "no PEM":
        place.own.cert.write_text("no certificate")
    else:
        settings["tls_client_ca"] = place.own.key
    with pytest.raises(ValueError, match=told), socket_proxy(engine, **settings):
        pass
