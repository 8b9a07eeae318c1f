"""An engine's own tokens of a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import TOKENIZE_PATH

from .client import UpstreamClient, read

_NO_ROUTE = frozenset({404, 405, 501})


class TokensRefusedError(Exception):
    """The engine refuses to tokenise a request, with the answer that it gives to the same turn.

    Args:
        body: of the answer.
    """

    def __init__(self, answer: httpx.Response, body: bytes) -> None:
        super().__init__(f"status {answer.status_code}")
        self.answer = answer
        self.body = body


async def tokenize(
    client: UpstreamClient, body: Mapping[str, Any], path: str = TOKENIZE_PATH
) -> list[int] | None:
    """Return the engine's token ids of ``body`` (messages and tools); None if it refuses, or
    doesn't report them.

    Args:
        path: see :attr:`RendererDocument.tokens_path`.

    Raises:
        leyline_proxy.errors.ProxyError: the engine can't be reached.
    """
    try:
        return await tokens_of(client, body, path)
    except TokensRefusedError:
        return None


async def tokens_of(client: UpstreamClient, body: Mapping[str, Any], path: str) -> list[int] | None:
    """Return the engine's token ids as :func:`tokenize`; None if it doesn't report them.

    Raises:
        TokensRefusedError: it refuses the request.
        leyline_proxy.errors.ProxyError: the engine can't be reached.
    """
    async with client.open(
        "POST",
        path,
        headers=[(b"content-type", b"application/json")],
        content=msgspec.json.encode(body),
        timeout_s=client.small_timeout_s,
    ) as response:
        answer = await read(response)
    if response.status_code in _NO_ROUTE:
        return None
    if response.status_code != httpx.codes.OK:
        raise TokensRefusedError(response, answer)
    try:
        return msgspec.convert(response.json()["tokens"], list[int])
    except (ValueError, KeyError, TypeError):
        return None
