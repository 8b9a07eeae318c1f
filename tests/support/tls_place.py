"""A proxy with certificates, and clients of it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support.certificates import Authority, Pair
from support.sockets import SocketProxy

TENANTS = {
    "spiffe://td/agents/red": "red",
    "spiffe://td/agents/blue/*": "blue",
    "red.example": "red",
}


class TlsPlace:
    """An authority, the proxy's certificate, and clients' ones."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca")
        self.own = Pair(folder / "proxy.pem", folder / "proxy.key")
        self.own.put(self.authority.issue("127.0.0.1"))

    def settings(self, **more: Any) -> dict[str, Any]:
        """Settings with clients' certificates."""
        return {
            "tls_cert": self.own.cert,
            "tls_key": self.own.key,
            "tls_client_ca": self.authority.ca,
            "tls_tenants": TENANTS,
            "tls_reload_s": 0.1,
            "log_level": "error",
            **more,
        }

    def context(self, *names: str) -> ssl.SSLContext:
        """The context of a client, with a certificate if names are given."""
        if not names:
            return ssl.create_default_context(cafile=self.authority.ca)
        return self.authority.issue(*names).context(self.authority.ca)


@contextmanager
def client(proxy: SocketProxy, context: ssl.SSLContext, key: str = "") -> Iterator[httpx.Client]:
    """A client with a connection of its own."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=proxy.origin, verify=context, headers=headers) as found:
        yield found


def serial(proxy: SocketProxy, context: ssl.SSLContext) -> int:
    """Serial number of the certificate that a new connection gets."""
    with (
        httpx.Client(verify=context) as asked,
        asked.stream("GET", f"{proxy.origin}/healthz") as answer,
    ):
        secured = answer.extensions["network_stream"].get_extra_info("ssl_object")
        return int(secured.getpeercert()["serialNumber"], 16)
