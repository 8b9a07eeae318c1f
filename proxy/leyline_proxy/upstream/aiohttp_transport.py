"""An httpx transport on top of aiohttp.

httpx's own transport parses in Python and waits through several layers, which costs some hundred
microseconds a request, and again for each chunk of a stream. This one has aiohttp's parser in C,
with httpx's interface and errors.

The package ``httpx-aiohttp`` (0.2) can't take its place: it reports a connection that broke after
the request as ``ConnectTimeout``, so that a forget would miss the turn. It also joins repeated
headers, and rewrites escapes in URLs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import httpx
from multidict import CIMultiDict
from yarl import URL

from .tls_faults import BROKE_OFF

_NO_DEFAULTS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add."""

_KEEP_ALIVE_S = 60.0
_FAREWELL_S = 0.1
"""Time for TLS's close_notify and its answer."""


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Connections to one server, kept alive.

    Args:
        max_connections: further requests wait for at most their pool timeout.
        socket: the server's Unix socket; None for TCP.
        tls: returns the context for a new connection; None for httpx's default.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        socket: Path | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._tls = tls
        self._socket = str(socket) if socket is not None else None
        self._places = asyncio.Semaphore(max_connections)
        self._max_connections = max_connections
        # Both are created on first use: reading certificates takes tens of milliseconds.
        self._session: aiohttp.ClientSession | None = None
        self._secure = False
        self._exact: httpx.AsyncHTTPTransport | None = None
        self._exact_tls: ssl.SSLContext | None = None
        self._exact_before: httpx.AsyncHTTPTransport | None = None
        """The transport of the context before the last one; requests may still be under way."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return when its response has begun.

        Raises:
            httpx.PoolTimeout, httpx.ConnectTimeout, httpx.ConnectError: nothing was sent.
            httpx.TransportError: other failures; something may have been sent.
        """
        headers = _headers(request)
        if headers is None:
            return await (await self._exactly()).handle_async_request(request)
        timeouts = request.extensions.get("timeout", {})
        await self._take_place(timeouts.get("pool"), request)
        try:
            with _mapped(request):
                response = await self._opened(request.url.scheme == "https").request(
                    request.method,
                    URL(str(request.url), encoded=True),
                    data=await request.aread() or None,
                    headers=headers,
                    skip_auto_headers=_NO_DEFAULTS,
                    allow_redirects=False,
                    ssl=self._tls() if self._tls is not None else True,
                    timeout=aiohttp.ClientTimeout(
                        total=None,
                        sock_connect=timeouts.get("connect"),
                        sock_read=timeouts.get("read"),
                    ),
                )
        except BaseException:
            self._places.release()
            raise
        return httpx.Response(
            response.status,
            headers=list(response.raw_headers),
            stream=_Body(response, request, self._places),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for exact in (self._exact, self._exact_before):
            if exact is not None:
                await exact.aclose()
        if self._session is not None:
            await self._session.close()
            if self._secure:
                # Connections of requests that were cancelled just now say farewell, and aiohttp
                # waits for none of them.
                await asyncio.sleep(_FAREWELL_S)

    async def _exactly(self) -> httpx.AsyncHTTPTransport:
        """Return a transport for header values that aiohttp would write differently."""
        tls = self._tls() if self._tls is not None else None
        if self._exact is not None and self._exact_tls is not tls:
            if self._exact_before is not None:
                await self._exact_before.aclose()
            self._exact_before, self._exact = self._exact, None
        if self._exact is None:
            limits = httpx.Limits(
                max_connections=self._max_connections, max_keepalive_connections=1
            )
            self._exact_tls = tls
            self._exact = httpx.AsyncHTTPTransport(
                verify=tls if tls is not None else True, limits=limits, uds=self._socket
            )
        return self._exact

    def _opened(self, secure: bool) -> aiohttp.ClientSession:
        """Return the session, created within its loop. All requests go to one server, so the first
        decides whether certificates are needed."""
        if self._session is None:
            self._secure = secure
            self._session = aiohttp.ClientSession(
                connector=self._connector(secure),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _connector(self, secure: bool) -> aiohttp.BaseConnector:
        if self._socket is not None:
            return aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        return aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_KEEP_ALIVE_S,
            ssl=httpx.create_ssl_context() if secure else True,
        )

    async def _take_place(self, wait_s: float | None, request: httpx.Request) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise httpx.PoolTimeout("no connection became free", request=request) from error


class _Body(httpx.AsyncByteStream):
    """A response's body as it arrives."""

    def __init__(
        self, response: aiohttp.ClientResponse, request: httpx.Request, places: asyncio.Semaphore
    ) -> None:
        self._response = response
        self._request = request
        self._places: asyncio.Semaphore | None = places

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = self._response.content
        with _mapped(self._request):
            while chunk := await received.readany():
                yield chunk

    async def aclose(self) -> None:
        """Return the connection to the pool, or close it if the body wasn't read to its end."""
        if self._places is None:
            return
        self._places.release()
        self._places = None
        # Close it unless the body is at its end.
        self._response.close()


def _headers(request: httpx.Request) -> CIMultiDict[str] | None:
    """Return the request's headers; None if aiohttp would write other bytes."""
    found: CIMultiDict[str] = CIMultiDict()
    for name, value in request.headers.raw:
        try:
            found.add(name.decode("ascii"), value.decode("ascii"))
        except UnicodeDecodeError:
            return None
    return found


@contextmanager
def _mapped(request: httpx.Request) -> Iterator[None]:
    """Raise aiohttp's errors as httpx's."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(str(error), request=request) from error
    except (aiohttp.SocketTimeoutError, TimeoutError) as error:
        raise httpx.ReadTimeout(str(error), request=request) from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error), request=request) from error
    except aiohttp.ServerDisconnectedError as error:
        raise httpx.RemoteProtocolError(str(error), request=request) from error
    except aiohttp.ClientPayloadError as error:
        raise httpx.RemoteProtocolError(BROKE_OFF, request=request) from error
    except aiohttp.InvalidURL as error:
        raise httpx.UnsupportedProtocol(str(error), request=request) from error
    except (aiohttp.ClientError, OSError) as error:
        raise httpx.ReadError(str(error), request=request) from error
