"""Checks of a peer's certificate that are part of the handshake: nothing is sent before."""

from __future__ import annotations

import ssl
from collections.abc import Callable


def checked_peer(check: Callable[[ssl.SSLObject], None]) -> type[ssl.SSLObject]:
    """Return connections that end the handshake with a peer that a check refuses.

    Args:
        check: raises ssl.SSLCertVerificationError for a peer that isn't good.
    """

    class CheckedPeer(ssl.SSLObject):
        """Such a connection."""

        def do_handshake(self) -> None:
            super().do_handshake()
            check(self)

    return CheckedPeer
