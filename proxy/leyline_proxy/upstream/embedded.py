"""An engine within the proxy's process: found by entry point and never by import, with its lifespan
and an httpx transport to it.

httpx's own ``ASGITransport`` collects the whole body before it returns; this one streams, with back
pressure, and informs the application when the client closes its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import httpx
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message

from ..errors import ProxyError, closest
from ..installing import REPLAY_ENGINE, pip_install
from .client import read
from .pool import ReplicaPool

ENGINE_GROUP = "leyline.engines"
EMBEDDED_BASE_URL = "http://engine.embedded"

_STOP_S = 30.0
_QUEUED_CHUNKS = 16
_CLOSE_GRACE_S = 5.0


class EngineUnavailable(Exception):  # noqa: N818 - an operator's mistake, reported at start-up
    """The embedded engine can't be created; the message gives the fix."""


def create_embedded_engine(name: str, options: Mapping[str, Any]) -> Starlette:
    """Return the engine application that entry point ``name`` creates from ``options``.

    Raises:
        EngineUnavailable: an unknown name, missing packages or a wrong option.
    """
    known: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=ENGINE_GROUP)}
    if name not in known:
        if name == "replay":
            raise EngineUnavailable(
                "The embedded engine isn't installed: it is a distribution of its own, "
                f"{REPLAY_ENGINE}. {_how_to_install()}"
            )
        raise EngineUnavailable(f"There is no engine {name!r}. {closest(name, known)}")
    try:
        factory = cast("Callable[..., Starlette]", known[name].load())
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            f"The engine {name!r} needs the package {error.name!r}. {_how_to_install()}"
        ) from error
    try:
        return factory(**options)
    except TypeError as error:
        raise EngineUnavailable(f"The engine {name!r} refuses its options: {error}") from error
    except Exception as error:  # an engine's own errors can't be imported here
        kind = type(error).__name__
        raise EngineUnavailable(f"The engine {name!r} can't start ({kind}): {error}") from error


def _how_to_install() -> str:
    return (
        f"Install it with: {pip_install('proxy', 'engine')} (PyTorch for CPUs; without that "
        "index 5.7 GB of CUDA come along), or give --upstream URL."
    )


async def embedded_metrics(pool: ReplicaPool, accept: str) -> bytes:
    """Return the embedded engine's ``/metrics``; empty without such an engine, or if it fails.

    Args:
        accept: the header that asks for a format.
    """
    client = pool.first.client
    if client.address != EMBEDDED_BASE_URL:
        return b""
    own = [(b"accept", accept.encode("latin-1"))]
    try:
        async with client.open(
            "GET", "/metrics", headers=(), own=own, timeout_s=client.small_timeout_s
        ) as response:
            text = await read(response)
    except ProxyError:
        return b""
    return text if response.status_code == httpx.codes.OK else b""


@asynccontextmanager
async def lifespan_of(app: ASGIApp) -> AsyncIterator[None]:
    """Start ``app``, and stop it on exit.

    An application without a lifespan is left alone.

    Raises:
        RuntimeError: the application reports that it can't start.
    """
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    from_app: asyncio.Queue[Message] = asyncio.Queue()

    async def run() -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        try:
            await app(scope, to_app.get, from_app.put)
        except Exception as error:
            await from_app.put({"type": "failed", "message": type(error).__name__})
        else:
            await from_app.put({"type": "ended"})

    task = asyncio.create_task(run())
    await to_app.put({"type": "lifespan.startup"})
    answer = await from_app.get()
    if answer["type"] == "lifespan.startup.failed":
        await task
        raise RuntimeError(f"the embedded engine can't start: {answer.get('message', '')}")
    started = answer["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        if started:
            await to_app.put({"type": "lifespan.shutdown"})
        _, running = await asyncio.wait((task,), timeout=_STOP_S)
        for late in running:
            late.cancel()
            await asyncio.wait((late,))


class ASGIStreamTransport(httpx.AsyncBaseTransport):
    """Runs ``app`` once per request. The owner manages its lifespan.

    Of httpx's timeouts only ``read`` applies to this call within the process: it bounds the wait
    for the response's start and for each chunk.
    """

    def __init__(self, app: ASGIApp, *, client: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._app: ASGIApp | None = app
        self._client = client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Start the application and return once it has sent its status line.

        Raises:
            httpx.RemoteProtocolError: the application ends or fails before that.
            httpx.ReadTimeout: it takes longer than the request's read timeout.
            httpx.ConnectError: the transport was closed.
        """
        body = b"".join([chunk async for chunk in _stream(request)])
        timeout = request.extensions.get("timeout", {}).get("read")
        if self._app is None:
            raise httpx.ConnectError("the application is closed", request=request)
        exchange = _Exchange(self._app, self._scope(request), body, timeout)
        try:
            start = await exchange.next_message()
        except BaseException:
            await exchange.close()
            raise
        if start is None or start["type"] != "http.response.start":
            await exchange.close()
            raise httpx.RemoteProtocolError("the application sent no response", request=request)
        return httpx.Response(
            start["status"], headers=start.get("headers", []), stream=_Body(exchange, request)
        )

    async def aclose(self) -> None:
        """Let go of the application: FastAPI remembers the proxy's handlers, and they this."""
        self._app = None

    def _scope(self, request: httpx.Request) -> dict[str, Any]:
        return {
            "type": "http",
            # With 2.4 or later, frameworks don't watch for a disconnect while they stream.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port or 80),
            "client": self._client,
            "state": {},
        }


class _Exchange:
    """One run of the application: its task, its messages, and the disconnect signal."""

    def __init__(
        self, app: ASGIApp, scope: dict[str, Any], body: bytes, timeout: float | None
    ) -> None:
        self._body: bytes | None = body
        self._timeout = timeout
        self._disconnect = asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUED_CHUNKS)
        self._failure: BaseException | None = None
        self._task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: MutableMapping[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            self._failure = error
        finally:
            # Unblock the reader; a cancelled run has none.
            if not self._disconnect.is_set():
                await self._messages.put(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnect.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._disconnect.is_set():
            raise OSError("the client has closed the response")
        put = asyncio.ensure_future(self._messages.put(message))
        gone = asyncio.ensure_future(self._disconnect.wait())
        try:
            await asyncio.wait((put, gone), return_when=asyncio.FIRST_COMPLETED)
            if not put.done():
                raise OSError("the client has closed the response")
        finally:
            put.cancel()
            gone.cancel()

    async def next_message(self) -> Message | None:
        """Return the next message, or None when the application has ended.

        Raises:
            httpx.ReadTimeout: nothing came within the read timeout.
            httpx.RemoteProtocolError: the application failed.
        """
        try:
            async with asyncio.timeout(self._timeout):
                message = await self._messages.get()
        except TimeoutError as error:
            raise httpx.ReadTimeout("the application sent nothing in time") from error
        if message is None and self._failure is not None:
            kind = type(self._failure).__name__
            raise httpx.RemoteProtocolError(f"the application failed with {kind}")
        return message

    async def close(self) -> None:
        """Report the disconnect to the application and wait for it to end."""
        self._disconnect.set()
        _, running = await asyncio.wait((self._task,), timeout=_CLOSE_GRACE_S)
        for task in running:
            task.cancel()
            await asyncio.wait((task,))


class _Body(httpx.AsyncByteStream):
    def __init__(self, exchange: _Exchange, request: httpx.Request) -> None:
        self._exchange = exchange
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._exchange.next_message()
            if message is None:
                raise httpx.RemoteProtocolError(
                    "the application ended inside its response", request=self._request
                )
            if message["type"] != "http.response.body":
                continue
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body", False):
                return

    async def aclose(self) -> None:
        await self._exchange.close()


async def _stream(request: httpx.Request) -> AsyncIterator[bytes]:
    stream = request.stream
    assert isinstance(stream, httpx.AsyncByteStream)  # noqa: S101 - httpx's own invariant
    async for chunk in stream:
        yield chunk
