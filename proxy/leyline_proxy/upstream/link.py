"""A link to a server: its address and transport.

``httpx.AsyncClient`` would also keep cookies, which callers must not share, and build each request
from defaults again: a third of a millisecond for features that an engine never needs.
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
        address: may have a path, which precedes those of all requests, and credentials, which are
            sent as ``Authorization: Basic``.
        timeout: for requests without their own.
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
        """The URL without credentials."""
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
        """Return a response whose body has not been read; the caller must close it.

        Args:
            path: from the root, optionally with a query.
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
