"""TLS handshakes that fail: the reason, their number, and their time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.certificates import Authority
from support.fake_engine import MODEL, FakeEngine
from support.sockets import SocketProxy, socket_proxy
from support.tls_place import TlsPlace, client, serial
from support.waiting import until, wait

from leyline_proxy.http.handshakes import HANDSHAKE_S, Handshakes
from leyline_proxy.model.tls import TlsRefusal
from leyline_proxy.tls import refusing

REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
CHAT = "/v1/chat/completions"


def refused(proxy: SocketProxy) -> dict[str, float]:
    """Failed handshakes by reason."""
    found = proxy.services.metrics.tls_refused.collect()[0].samples
    return {
        sample.labels["refusal"]: sample.value
        for sample in found
        if sample.value and sample.name.endswith("_total")
    }


def counted(proxy: SocketProxy, reason: str) -> bool:
    """True if one handshake failed for a reason."""
    return refused(proxy).get(reason) == 1


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_refused_client_learns_the_reason(
    engine: FakeEngine, place: TlsPlace, tmp_path: Path, version: ssl.TLSVersion, loop: str
) -> None:
    """By TLS's alert, with both loops; the metric has it, too."""
    day, name = timedelta(days=1), "spiffe://td/agents/red"
    others = Authority(tmp_path / "others", "others")
    missing = {
        ssl.TLSVersion.TLSv1_2: "handshake failure",
        ssl.TLSVersion.TLSv1_3: "certificate required",
    }
    cases = {
        "no_certificate": (None, missing[version]),
        "untrusted": (others.issue(name), "unknown ca"),
        "expired": (
            place.authority.issue(name, begins=-2 * day, ends=-day),
            "certificate expired",
        ),
    }
    with socket_proxy(engine, loop=loop, **place.settings()) as proxy:
        for reason, (pair, alert) in cases.items():
            context = pair.context(place.authority.ca) if pair is not None else place.context()
            context.maximum_version = version
            with (
                socket.create_connection(proxy.address) as plain,
                pytest.raises(ssl.SSLError, match=alert),
                context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
            ):
                secured.recv(1)
            # It is counted after the client has learned of it.
            wait(partial(counted, proxy, reason))
        assert sum(refused(proxy).values()) == len(cases)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_resumed_session_ends_with_its_certificate(
    engine: FakeEngine, place: TlsPlace, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS 1.2 resumes by session ids, and by them an expired certificate doesn't get in."""
    context = place.context("spiffe://td/agents/red")
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def connect(session: ssl.SSLSession | None) -> ssl.SSLSocket:
        plain = socket.create_connection(proxy.address)
        return context.wrap_socket(plain, server_hostname="127.0.0.1", session=session)

    def answer(secured: ssl.SSLSocket) -> bytes:
        host = ":".join(map(str, proxy.address))
        try:
            secured.sendall(f"GET /healthz HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            return secured.recv(12)
        except OSError:
            return b""  # the proxy closed the connection first

    # OpenSSL keeps a session while its first connection is open.
    with socket_proxy(engine, loop=loop, **place.settings()) as proxy, connect(None) as first:
        assert answer(first) == b"HTTP/1.1 200"
        in_two_days = time.time() + timedelta(days=2).total_seconds()
        monkeypatch.setattr(refusing, "time", lambda: in_two_days)
        with connect(first.session) as second:
            assert second.session_reused
            assert answer(second) == b""
        wait(partial(counted, proxy, "expired"))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_plain_http_gets_the_fix(engine: FakeEngine, place: TlsPlace, loop: str) -> None:
    """An error in the API's own shape, in place of a closed connection."""
    with socket_proxy(engine, loop=loop, **place.settings()) as proxy:
        origin = proxy.origin.replace("https", "http")
        for method in ("POST", "DELETE"):
            answer = httpx.request(method, f"{origin}{CHAT}")
            assert answer.status_code == httpx.codes.BAD_REQUEST
            assert answer.json()["error"]["code"] == "tls_required"
        wait(lambda: refused(proxy) == {"plain_http": 2})


def test_a_silent_client_does_not_delay_the_end(engine: FakeEngine, place: TlsPlace) -> None:
    """Its handshake has a second once the proxy stops."""
    with ExitStack() as stack:
        with socket_proxy(engine, **place.settings()) as proxy:
            stack.enter_context(socket.create_connection(proxy.address))
            with client(proxy, place.context("x.example")) as asked:
                assert asked.get("/healthz").is_success
            began = time.monotonic()
        assert time.monotonic() - began < HANDSHAKE_S / 2
        assert refused(proxy) == {"timeout": 1}


async def test_a_handshake_that_begins_late_has_little_time(place: TlsPlace) -> None:
    """One whose connection was taken while the proxy stops has as long as those before it."""
    failed: list[TlsRefusal] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place.own.cert, place.own.key)
    handshakes = Handshakes(lambda: context, 1, failed.append)
    handshakes.hurry()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        async with asyncio.timeout(HANDSHAKE_S / 2):
            await handshakes.connect(asyncio.Protocol, ours)
    assert failed == [TlsRefusal.TIMEOUT]


async def test_the_end_meets_a_handshake_that_times_out(place: TlsPlace) -> None:
    """One that expires in the same turn of the loop is left to its end."""
    failed: list[TlsRefusal] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    handshakes = Handshakes(lambda: context, 1, failed.append)
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
    ours.setblocking(False)
    with theirs:
        waiting = asyncio.create_task(handshakes.connect(asyncio.Protocol, ours))
        await asyncio.sleep(0.01)
        (limit,) = handshakes._limits
        limit.reschedule(loop.time() + 0.01)
        loop.call_at(loop.time() + 0.01, time.sleep, 0.05)
        loop.call_at(loop.time() + 0.02, handshakes.hurry)
        await waiting
    assert limit.expired() and failed == [TlsRefusal.TIMEOUT]


async def test_handshakes_under_way_are_bounded(engine: FakeEngine, place: TlsPlace) -> None:
    """Connections that say nothing don't add up: beyond the limit they are closed at once."""
    red = place.context("spiffe://td/agents/red")
    with socket_proxy(engine, **place.settings(max_connections=3)) as proxy:
        assert refused(proxy) == {}
        silent = [await asyncio.open_connection(*proxy.address) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*proxy.address)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
            await until(lambda: refused(proxy) == {"busy": 1})
        for _, each in [*silent, (reader, writer)]:
            each.close()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await asyncio.to_thread(serial, proxy, red)
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
