"""Headers that the proxy passes on, either way, and those that it withholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import httpx

RawHeaders = Sequence[tuple[bytes, bytes]]
"""Names and values as received; a name may occur more than once."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_UPSTREAM = HOP_BY_HOP | {
    "host",
    "content-length",
    "content-encoding",
    "accept-encoding",
    "expect",
    "cookie",
    "forwarded",
}
_ENGINES_OWN = (b"x-data-parallel-rank", b"x-override-")
"""Prefixes of headers that set members of SGLang's requests, including those that only the proxy
may set."""
_PROVIDERS: Mapping[str, tuple[bytes, ...]] = MappingProxyType(
    {"anthropic": (b"anthropic-",), "openai": (b"openai-", b"chatgpt-", b"x-codex-", b"x-openai-")}
)
"""Prefixes of headers for the servers of a provider."""
NATIVE, OTHER, MODELS = "native ", "other", "/v1/models"
TAKEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "/v1/chat/completions": frozenset({"openai"}),
        "/v1/completions": frozenset({"openai"}),
        # These become chat requests, which no provider has seen.
        "/v1/responses": frozenset(),
        "/v1/messages": frozenset(),
        # These go upstream as they came.
        NATIVE + "/v1/responses": frozenset({"openai"}),
        NATIVE + "/v1/messages": frozenset({"anthropic"}),
        OTHER: frozenset({"anthropic", "openai"}),
        # All engines are asked for the same list, or entry, which the proxy puts in other shapes.
        MODELS: frozenset(),
    }
)
"""Providers whose headers go upstream, by the route of a request."""
_CREDENTIALS = frozenset({"authorization", "api-key", "x-api-key"})
_NOT_DOWNSTREAM = HOP_BY_HOP | {
    "content-length",
    "content-encoding",
    "date",
    "server",
    "set-cookie",
}


def headers_of_route(client: RawHeaders, route: str) -> RawHeaders:
    """Return a client's headers without those for a provider that the request doesn't go to.

    Args:
        route: of ``TAKEN``.
    """
    taken = TAKEN[route]
    withheld = tuple(
        prefix for name, group in _PROVIDERS.items() if name not in taken for prefix in group
    )
    return [item for item in client if not item[0].lower().startswith(withheld)]


def upstream_headers(
    client: RawHeaders, api_key: str | None, *, credentials: bool = False
) -> list[tuple[bytes, bytes]]:
    """Return the upstream headers: the client's, less hop-by-hop ones and its credentials.

    Values are bytes of any encoding, and repeated headers stay repeated.

    Args:
        credentials: True if the client's own replace ``api_key``.
    """
    named = [(name.lower(), value) for name, value in client]
    connection = _connection(named)
    withheld = _NOT_UPSTREAM if credentials else _NOT_UPSTREAM | _CREDENTIALS
    headers = [
        (name, value)
        for name, value in named
        if name.decode("latin-1") not in withheld
        and name not in connection
        and not name.startswith((b"x-leyline-", b"x-forwarded-", *_ENGINES_OWN))
    ]
    # A member can't be appended to compressed bytes in passing.
    headers.append((b"accept-encoding", b"identity"))
    if api_key is not None and not credentials:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))
    return headers


def downstream_headers(upstream: httpx.Headers) -> dict[str, str]:
    """Return the upstream's response headers for a client, as Latin-1: any byte survives."""
    named = [(name.lower(), value) for name, value in upstream.raw]
    connection = _connection(named)
    headers: dict[str, str] = {}
    for raw_name, raw_value in named:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if (
            name not in _NOT_DOWNSTREAM
            and raw_name not in connection
            and not name.startswith("x-leyline-")
        ):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _connection(headers: RawHeaders) -> frozenset[bytes]:
    """Return the names that ``Connection`` headers declare to be for this hop only."""
    return frozenset(
        item.strip().lower()
        for name, value in headers
        if name == b"connection"
        for item in value.split(b",")
    )
