"""A client's surroundings: proxy and engine on loopback, an empty folder and an empty home."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

from ..stand_ins.scripted_model import Script, ScriptedModel, scripted_model
from ..stand_ins.serving import serving

KEY = "sk-not-a-secret"
"""Clients insist on a key; the proxy asks for none."""
_REFUSED = 400


@dataclass(frozen=True, slots=True)
class Seen:
    """One request of the client's and how it was answered, or one WebSocket connection."""

    method: str
    path: str
    status: int
    headers: Mapping[str, str]


class Tap:
    """Passes requests on and remembers them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[Seen] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, noted)
        if scope["type"] == "websocket":
            self.seen.append(Seen("WEBSOCKET", scope["path"], status, {}))
        if scope["type"] == "http":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.seen.append(Seen(scope["method"], scope["path"], status, headers))


@dataclass(slots=True)
class Tripwire:
    """A forward proxy that lets no one through, and notes whom a client wants to reach beyond
    loopback."""

    address: str
    wanted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """The settings that a client is given, and the folders that it can touch."""

    origin: str
    """Of the proxy, or of the engine itself."""
    work: Path
    home: Path
    trip: Tripwire

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Nothing of the caller's but the search path; every way out ends at the tripwire."""
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), self.trip.address)
        proxies |= {name.lower(): value for name, value in proxies.items()}
        exempt = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        own = {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        return {**own, "TERM": "dumb", "CI": "1", **proxies, **exempt, **extra}


@dataclass(frozen=True, slots=True)
class Stack:
    """Proxy and engine, and what they were asked."""

    place: Place
    model: ScriptedModel
    tap: Tap
    proxied: bool

    def sessions(self) -> list[dict[str, Any]]:
        """The proxy's document of its sessions, their turns included."""
        base = f"{self.place.origin}/v1/leyline/sessions"
        with httpx.Client(timeout=10) as http:
            listed = http.get(base).json()["sessions"]
            return [http.get(f"{base}/{session['id']}").json() for session in listed]

    def refused(self) -> list[Seen]:
        """Requests that were answered with an error."""
        return [seen for seen in self.tap.seen if seen.status >= _REFUSED]


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a client's process."""

    code: int | None
    """None: it didn't end in time."""
    output: str


@contextmanager
def client_stack(
    files: Path, folder: Path, script: Script, *, proxied: bool = True
) -> Iterator[Stack]:
    """A fresh engine, with the proxy before it or without.

    Args:
        files: of the scripted model.
        folder: emptied; takes the client's working folder and its home.
    """
    work, home = folder / "work", folder / "home"
    for path in (work, home):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    with ExitStack() as stack:
        model = stack.enter_context(scripted_model(files, script))
        trip = stack.enter_context(tripwire())
        app: ASGIApp = model.app
        if proxied:
            upstream = stack.enter_context(serving(model.app))
            app = create_app(Settings(upstream=upstream, log_level="error"))
        tap = Tap(app)
        origin = stack.enter_context(serving(tap))
        yield Stack(Place(origin, work, home, trip), model, tap, proxied)


def run_client(
    command: Sequence[str], place: Place, extra: Mapping[str, str], *, timeout_s: float
) -> Ran:
    """Run a client to its end, in a process group of its own so that nothing of it stays."""
    process = subprocess.Popen(
        command,
        cwd=place.work,
        env=place.environment(extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return Ran(process.returncode, output)
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        return Ran(None, output)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


@contextmanager
def tripwire() -> Iterator[Tripwire]:
    """Listen on loopback as a forward proxy that refuses, and note what was asked for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        trip = Tripwire(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=_refuse_all, args=(listener, trip.wanted))
        thread.start()
        try:
            yield trip
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def _refuse_all(listener: socket.socket, wanted: list[str]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.settimeout(5)
            line = connection.recv(4096).split(b"\r\n")[0].decode(errors="replace")
            wanted.append(" ".join(line.split()[:2]))
            connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
