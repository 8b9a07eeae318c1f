"""Headers by which routers keep a session with its engine. Pure.

SGLang's router hashes or pins ``x-smg-routing-key`` (policies ``manual`` and
``consistent_hashing``). The scorers of llm-d and of the Gateway API inference extension pin
``x-session-id``, or return ``x-session-token``, the name of the engine that has answered, and
prefer this engine when a request brings it back. The proxy sends all of them; routers ignore those
that they don't know.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

KEY_HEADERS = ("x-smg-routing-key", "x-session-id")
"""Headers with the session's key."""

TOKEN_HEADERS = ("x-session-token",)
"""Headers with a name that the router has given to the engine."""

_STEERING = frozenset({*KEY_HEADERS, *TOKEN_HEADERS, "x-smg-target-worker"})

MAX_TOKEN = 512
"""Longest name of an engine that is kept."""


def routing_key(tenant: str, session_id: str) -> str:
    """Return the key of a session: the same at every proxy, and of one tenant alone."""
    return blake2b(f"{tenant}\0{session_id}".encode(), digest_size=16).hexdigest()


def steering(
    tenant: str, session_id: str, known: Mapping[str, str] | None, header: str | None
) -> list[tuple[bytes, bytes]]:
    """Return the proxy's own headers of a turn.

    Args:
        known: values of headers by which the router names the engine; None without a router.
        header: a further one for the session's id.
    """
    headers: dict[str, bytes] = {}
    if known is not None:
        headers = dict.fromkeys(KEY_HEADERS, routing_key(tenant, session_id).encode())
        headers |= {name: value.encode("latin-1") for name, value in known.items()}
    if header:
        headers[header.lower()] = session_id.encode()
    return [(name.encode("latin-1"), value) for name, value in headers.items()]


def tokens_in(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the values by which an answer's headers name its engine."""
    found = {name: headers.get(name, "") for name in TOKEN_HEADERS}
    return {name: value for name, value in found.items() if 0 < len(value) <= MAX_TOKEN}


def reserved_headers(header: str | None, *, routed: bool) -> frozenset[bytes]:
    """Return the names of headers that clients can't send, in lower case.

    Args:
        header: as for :func:`steering`.
        routed: True if requests go through a router: only the proxy chooses engines there.
    """
    names = {header.lower()} if header else set[str]()
    return frozenset(name.encode("latin-1") for name in (names | _STEERING if routed else names))
