"""Reasons for an unreachable server, from the client's error."""

from __future__ import annotations

import json
import socket
import ssl
from typing import Any

import httpx

from ..bounded_body import BodyTooLongError, bounded_body
from ..errors import causes_of

_CERTIFICATE = "certificate"
_MOST_BYTES = 16 * 1024 * 1024


def why_unreachable(error: BaseException, what: str) -> tuple[str, str]:
    """Return the problem and its fix.

    Args:
        error: as raised, with its causes.
        what: ``Redis``, ``the engine``.
    """
    chain = list(causes_of(error))
    if any(isinstance(each, socket.gaierror) for each in chain):
        return "its host name is unknown", "Correct the host in the URL, or the DNS entry."
    if any(
        isinstance(each, ssl.SSLCertVerificationError) or _CERTIFICATE in str(each).lower()
        for each in chain
    ):
        return (
            "its TLS certificate isn't trusted",
            f"Give {what} a certificate for this host name from an authority that this machine "
            "trusts (SSL_CERT_FILE adds one).",
        )
    if any(isinstance(each, ssl.SSLError) for each in chain):
        return (
            "this port has no TLS, or another version of it",
            "Use the right port and scheme: http:// or redis:// without TLS.",
        )
    if any(isinstance(each, ConnectionRefusedError) or "refused" in str(each) for each in chain):
        return (
            "nothing is listening there",
            f"Start {what}, or correct the host and port in the URL.",
        )
    if any("timeout" in type(each).__name__.lower() for each in chain):
        return (
            "it doesn't answer in time",
            f"Check whether {what} is overloaded, or a firewall drops packets on the way.",
        )
    kind = type(chain[-1]).__name__
    return (
        f"it can't be reached ({kind})",
        f"Check whether {what} runs there, and look into its log.",
    )


async def document(client: httpx.AsyncClient, path: str, **query: str) -> Any:
    """Return the JSON at ``path``.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: there is no answer.
        ValueError: it isn't JSON, or is longer than any expected answer.
    """
    async with client.stream("GET", path, params=query) as response:
        try:
            found = await bounded_body(response, _MOST_BYTES)
        except BodyTooLongError as error:
            raise ValueError("too long") from error
    try:
        return json.loads(found)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
