"""A server elsewhere: its cache emptied for each arm, its prompts readable in this process."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
from starlette.types import Message, Receive, Scope, Send

from ..errors import StackError

_PATHS = ("/flush_cache", "/reset_prefix_cache")
"""Routes that empty a cache: SGLang's, vLLM's."""
_HELD = '"success":false'
"""What vLLM answers, with status 200, while requests hold its cache."""
_NOT_FORWARDED = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection"})
_TIMEOUT = httpx.Timeout(900.0, connect=30.0)
_FIX = "vLLM has the route if it was started with VLLM_SERVER_DEV_MODE=1"


def empty_cache(url: str, headers: Mapping[str, str]) -> None:
    """Empty the cache of a server that is idle.

    Raises:
        StackError: it wasn't emptied.
    """
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            for path in _PATHS:
                answer = client.post(path, params={"timeout": 30})
                if answer.status_code != httpx.codes.NOT_FOUND:
                    break
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        missing = error.response.status_code == httpx.codes.NOT_FOUND
        raise _unflushed(url, f"{error}{f' ({_FIX})' if missing else ''}") from error
    except httpx.HTTPError as error:
        raise _unflushed(url, str(error)) from error
    if _HELD in answer.text.replace(" ", ""):
        raise _unflushed(url, "requests hold it")


def _unflushed(url: str, why: str) -> StackError:
    return StackError(f"the cache of the server at {url} was not flushed: {why}")


class Forwarder:
    """Forwards every request to the server at ``url``, and streams its answer back.

    The connections live as long as the application's lifespan.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._forward(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT) as client:
            self._client = client
            await send({"type": "lifespan.startup.complete"})
            await receive()
        self._client = None
        await send({"type": "lifespan.shutdown.complete"})

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._client is None:
            raise RuntimeError("the application's lifespan has not begun")
        url = httpx.URL(scope["path"], query=scope.get("query_string", b""))
        request = self._client.build_request(
            scope["method"], url, headers=_kept(scope["headers"]), content=await _body(receive)
        )
        response = await self._client.send(request, stream=True)
        try:
            headers = _kept(response.headers.raw)
            start = {"type": "http.response.start", "status": response.status_code}
            await send(start | {"headers": headers})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await response.aclose()
        await send({"type": "http.response.body", "body": b""})


def _kept(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    message: Message = {"more_body": True}
    while message.get("more_body", False):
        message = await receive()
        body.extend(message.get("body", b""))
    return bytes(body)
