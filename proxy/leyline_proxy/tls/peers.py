"""Names in a peer's certificate, the tenants that they name, and checks within the handshake. Pure.

A certificate's names are the URIs and the DNS names among its subject alternative names (RFC 5280,
section 4.2.1.6). A workload's certificate by SPIFFE (SVID) has one URI, ``spiffe://DOMAIN/PATH``,
and no DNS name. Common names don't count.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

MAX_NAMES = 64
"""Names of one certificate that are looked at."""
_KINDS = ("URI", "DNS")
_ALL_BELOW = "/*"
_SPIFFE = "spiffe://"


def names_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names of a peer's certificate; empty for an SVID with several URIs.

    Args:
        certificate: as of :meth:`ssl.SSLObject.getpeercert`; empty or None without a certificate.
    """
    listed = (certificate or {}).get("subjectAltName", ())
    uris = [value for kind, value in listed if kind == "URI"]
    if len(uris) > 1 and any(each.startswith(_SPIFFE) for each in uris):
        return ()  # an SVID has one (X509-SVID, section 2)
    found = (value for kind, value in listed if kind in _KINDS)
    return tuple(islice(found, MAX_NAMES))


def matches(pattern: str, name: str) -> bool:
    """Return True if a name is the pattern's, letter by letter.

    A pattern that ends in ``/*`` means every path below it, and not for the path itself.
    """
    if pattern.endswith(_ALL_BELOW):
        above = pattern.removesuffix("*")
        return name.startswith(above) and len(name) > len(above)
    return name == pattern


def tenants_named(names: Iterable[str], tenants: Mapping[str, str]) -> frozenset[str]:
    """Return the tenants that a certificate's names mean.

    Args:
        tenants: tenants by pattern. The name itself decides, else its longest pattern.
    """
    found = set()
    for name in names:
        fitting = [pattern for pattern in tenants if matches(pattern, name)]
        if fitting:
            found.add(tenants[max(fitting, key=lambda each: (each == name, len(each)))])
    return frozenset(found)


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
