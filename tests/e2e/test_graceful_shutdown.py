"""``leyline serve`` is asked to stop while it streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chat_stream
from support.redis_server import free_port

from leyline_lab.stand_ins.serving import serving

CHAT = "/v1/chat/completions"
REQUEST = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "Hi."}]}
STREAM_S = 2.0


class Serving:
    """The command before a scripted engine whose streams take a while."""

    def __init__(self, origin: str, **settings: float) -> None:
        port = free_port()
        self.origin = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).with_name("leyline")), "serve", "--upstream", origin]
        named = {f"LEYLINE_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--log-level", "error"],
            env={**os.environ, **named},
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while self.ready() != httpx.codes.OK:
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def ready(self) -> int:
        """Status of ``/readyz``; 0 where the port is closed."""
        try:
            return httpx.get(f"{self.origin}/readyz", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def stream(self) -> tuple[threading.Thread, list[bytes]]:
        """A stream under way, and what it brings."""
        received: list[bytes] = []
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{self.origin}{CHAT}", json=REQUEST, timeout=30) as answer:
                try:
                    for part in answer.iter_raw():
                        received.append(part)
                        begun.set()
                except httpx.TransportError:
                    received.append(b"torn")

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(30)
        return thread, received


@contextmanager
def slow_engine() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    engine.answers = [chat_stream(*["x"] * 20, pause_s=STREAM_S / 20)]
    with serving(engine) as origin:
        yield engine, origin


def test_streams_under_way_are_finished_and_the_port_is_closed_meanwhile() -> None:
    """A proxy that is asked to stop takes no connections, ends its streams, and exits with 0."""
    with slow_engine() as (_, origin):
        proxy = Serving(origin, shutdown_delay_s=0, shutdown_grace_s=20)
        thread, received = proxy.stream()
        proxy.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STREAM_S
        while proxy.ready() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert proxy.ready() == 0
        assert thread.is_alive(), "the stream outlives the port"
        thread.join(30)
        assert b"".join(received).endswith(DONE)
        assert proxy.process.wait(30) == 0


def test_load_balancers_are_told_before_the_port_is_closed() -> None:
    """During the delay readiness says 503 and requests are served as ever."""
    with slow_engine() as (engine, origin):
        engine.answers = []
        proxy = Serving(origin, shutdown_delay_s=1.5)
        proxy.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 1.0
        while proxy.ready() != httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < deadline:
            time.sleep(0.02)
        document = httpx.get(f"{proxy.origin}/readyz").json()
        answer = httpx.post(f"{proxy.origin}{CHAT}", json=REQUEST)
        assert (document["ready"], document["stopping"]) == (False, True)
        assert answer.status_code == 200 and answer.content.endswith(DONE)
        assert answer.headers["connection"] == "close"
        assert proxy.process.wait(30) == 0


async def one_request(origin: str, at: float, began: float, *, kept: bool) -> str:
    """Return the end of a request that is sent at a time: its status, ``refused`` before it was
    sent, or torn.

    Args:
        kept: on a connection that was used before.
    """
    host, _, port = origin.removeprefix("http://").partition(":")
    body = json.dumps({**REQUEST, "stream": False}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    writer = None
    try:
        if kept:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET /healthz HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            await reader.readuntil(b'"ok"}')
        await asyncio.sleep(began + at - time.monotonic())
        if writer is None:
            reader, writer = await asyncio.open_connection(host, int(port))
        elif reader.at_eof():
            return "refused"  # a client looks before it sends
        writer.write(request)
        return (await reader.readuntil(b"\r\n"))[9:12].decode()
    except ConnectionRefusedError:
        return "refused"
    except (OSError, asyncio.IncompleteReadError) as error:
        return f"torn by {type(error).__name__} {at:.2f} s after it began"
    finally:
        if writer is not None:
            writer.close()


@pytest.mark.parametrize(
    "settings",
    [{"shutdown_delay_s": 0}, pytest.param({}, marks=pytest.mark.nightly)],
    ids=["no-delay", "default"],
)
def test_no_request_is_reset(settings: dict[str, float]) -> None:
    """Around the signal, whatever was accepted or waits to be is answered; later ones are refused
    before they are sent."""
    signal_at = 1.0

    async def crowd(proxy: Serving) -> list[str]:
        began = time.monotonic()
        asyncio.get_running_loop().call_later(signal_at, proxy.process.send_signal, signal.SIGTERM)
        times = [signal_at - 0.2 + 0.6 * number / 200 for number in range(200)]
        return await asyncio.gather(
            *(
                one_request(proxy.origin, at, began, kept=number % 4 == 0)
                for number, at in enumerate(times)
            )
        )

    with slow_engine() as (engine, origin):
        engine.answers = []
        proxy = Serving(origin, **settings)
        ends = Counter(asyncio.run(crowd(proxy)))
        assert proxy.process.wait(30) == 0
    assert ends.keys() <= {"200", "503", "refused"}, ends
    assert ends["200"] > 50


@pytest.mark.parametrize(
    "signals", [1, pytest.param(2, marks=pytest.mark.nightly)], ids=["grace-over", "second-signal"]
)
def test_a_stream_that_doesnt_end_is_cut_off(signals: int) -> None:
    """After the grace time, or at once on a second signal, running requests are given up; at the
    first, their clients learn why. A signal from a keyboard waits for no load balancer."""
    with slow_engine() as (engine, origin):
        first, *_ = chat_stream("x").chunks
        engine.answers = [Answer([first], content_type="text/event-stream", hangs=True)]
        grace_s = 1 if signals == 1 else 60
        proxy = Serving(origin, shutdown_delay_s=60, shutdown_grace_s=grace_s)
        thread, received = proxy.stream()
        for _ in range(signals):
            proxy.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert proxy.process.wait(15) is not None
        thread.join(30)
        whole = b"".join(received)
        assert DONE not in whole
        assert (b'"code":"stopping"' in whole) == (signals == 1), whole
