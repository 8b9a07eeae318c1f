"""One way to a server: its address and the transport that goes there.

``httpx.AsyncClient`` would also keep cookies, which no two callers may share, and put each request
together anew from defaults: a third of a millisecond for what an engine never needs.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import httpx

from .headers import RawHeaders

_PATHS = 32


class Link:
    """Requests to one server, in httpx's terms.

    Args:
        address: with a path before all requests' own, perhaps, and credentials, which then go
            along as ``Authorization: Basic``.
        timeout: of requests that have none of their own.
    """

    def __init__(
        self,
        address: str,
        transport: httpx.AsyncBaseTransport,
        timeout: httpx.Timeout | None = None,
    ) -> None:
        url = httpx.URL(address)
        plain = url.copy_with(userinfo=b"")
        self.address = str(plain).rstrip("/")
        """Without credentials."""
        self._transport = transport
        self._timeout = (timeout or httpx.Timeout(5.0)).as_dict()
        login = f"{url.username}:{url.password}".encode()
        self._login = b"Basic " + b64encode(login) if url.userinfo else None
        # Most requests are to the same few paths.
        self._url = lru_cache(_PATHS)(self._merged)

    async def send(
        self,
        method: str,
        path: str,
        *,
        headers: RawHeaders,
        content: bytes,
        timeout_s: float | None = None,
        extensions: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """A response whose body has not been read; to be closed.

        Args:
            path: from the root, perhaps with a query.
            timeout_s: for every phase, in place of the link's own timeouts.

        Raises:
            httpx.TransportError: the server can't be reached or broke off.
        """
        if self._login is not None:
            kept = [item for item in headers if item[0].lower() != b"authorization"]
            headers = [*kept, (b"authorization", self._login)]
        timeout = self._timeout if timeout_s is None else httpx.Timeout(timeout_s).as_dict()
        request = httpx.Request(
            method,
            self._url(path),
            headers=list(headers),
            content=content,
            extensions={**(extensions or {}), "timeout": timeout},
        )
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    def _merged(self, path: str) -> httpx.URL:
        if not path.startswith("/"):
            raise httpx.UnsupportedProtocol("a path begins with a slash")
        return httpx.URL(self.address + path)
