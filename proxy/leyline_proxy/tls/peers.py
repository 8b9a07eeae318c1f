"""Checks of a peer's certificate that are part of the handshake: nothing is sent before."""

from __future__ import annotations

import ssl
from collections.abc import Callable


def checked_peer(check: Callable[[ssl.SSLObject], str | None]) -> type[ssl.SSLObject]:
    """Return connections that end the handshake with a peer that a check refuses.

    Args:
        check: returns the reason, for the error; None for a good peer.
    """

    class CheckedPeer(ssl.SSLObject):
        """Such a connection."""

        def do_handshake(self) -> None:
            super().do_handshake()
            if (problem := check(self)) is not None:
                raise ssl.SSLCertVerificationError(problem)

    return CheckedPeer
