"""TLS handshakes with clients: bounded in number and time, and counted when they fail."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

import structlog

from ..model.tls import TlsRefusal
from ..tls.refusing import ACCEPTED, refusal_of

log = structlog.get_logger("leyline.tls")

HANDSHAKE_S = 10.0
"""Longest handshake."""
_LAST_S = 1.0
"""Time that is left to handshakes once the server stops."""

TlsOf = Callable[[], ssl.SSLContext]


class Handshakes:
    """The handshakes of a port that are under way.

    Args:
        tls: returns the context for a new connection.
        most: maximum number; others are closed.
        failed: called with the reason of each that fails.
    """

    def __init__(self, tls: TlsOf, most: int, failed: Callable[[TlsRefusal], None]) -> None:
        self._tls = tls
        self._most = most
        self._failed = failed
        self._limits: set[asyncio.Timeout] = set()
        self._last: float | None = None

    async def connect(self, protocol: Callable[[], asyncio.Protocol], sock: socket.socket) -> None:
        """Give a connection to a protocol once its handshake succeeds."""
        if len(self._limits) >= self._most:
            sock.close()
            self._refuse(TlsRefusal.BUSY, "too many handshakes are under way")
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + HANDSHAKE_S
        limit = asyncio.timeout_at(end if self._last is None else min(end, self._last))
        self._limits.add(limit)
        ACCEPTED.set(sock)
        try:
            async with limit:
                await loop.connect_accepted_socket(protocol, sock, ssl=self._tls())
        except OSError as error:  # TimeoutError too
            self._refuse(refusal_of(error), str(error))
        finally:
            self._limits.discard(limit)

    def hurry(self) -> None:
        """Leave a short time to those under way, and to later ones."""
        self._last = asyncio.get_running_loop().time() + _LAST_S
        # One that has just expired ends in this turn of the loop, and can't be changed.
        for limit in (each for each in self._limits if not each.expired()):
            limit.reschedule(min(self._last, limit.when() or self._last))

    def _refuse(self, refusal: TlsRefusal, detail: str) -> None:
        self._failed(refusal)
        log.debug("tls_handshake_failed", refusal=refusal.value, detail=detail[:300])
