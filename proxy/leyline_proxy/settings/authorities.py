"""Hosts in ``Host`` and ``Origin`` headers, and the choice of those that mean this proxy. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[^\s:/?#@\[\]\\%*,]{1,253})(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]{0,31})://(.{1,300})", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
ANYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - recognised, not listened on
"""Addresses that listen on all addresses of a machine."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A host and its port, if given."""

    name: str
    """Name in lower case, an IPv6 address without brackets, no dot at the end."""
    port: int | None = None

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The name as an address; None if it must be looked up."""
        try:
            found = ipaddress.ip_address(self.name)
        except ValueError:
            return None
        return getattr(found, "ipv4_mapped", None) or found

    @property
    def is_loopback(self) -> bool:
        """True if it can only mean this machine."""
        address = self.address
        return self.name == "localhost" if address is None else address.is_loopback


def parse_authority(text: str) -> Authority | None:
    """Return the authority in ``NAME`` or ``NAME:PORT``; None for other text."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        return None
    name, port = found.groups()
    return Authority(
        name.strip("[]").lower().removesuffix("."), None if port is None else int(port)
    )


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts by which a proxy without keys may be called, and whose pages may call it.

    A page whose own name points at this machine (DNS rebinding) calls the proxy by that name, so
    the browser's ``Host`` distinguishes it from other pages.
    """

    bound: Authority | None = None
    """Address or name that the proxy listens on, if there is only one."""
    listed: frozenset[Authority] = frozenset()
    """Hosts that the operator named."""

    def allows(self, host: Authority) -> bool:
        """Return True if requests may be for this host; a listed name without a port allows all."""
        if host.is_loopback or not self.listed.isdisjoint((host, Authority(host.name))):
            return True
        if self.bound is None:  # all addresses: no page can make one of them point elsewhere
            return host.address is not None
        return host.name == self.bound.name

    def trusts(self, origin: str, host: Authority | None) -> bool:
        """Return True if pages of an ``Origin`` may call the proxy under the name ``host``: its own
        pages, and those that the operator named. A name without a port means the scheme's port."""
        found = _ORIGIN.fullmatch(origin)
        page = None if found is None else parse_authority(found[2])
        if found is None or page is None:
            return False
        implied = _DEFAULT_PORTS.get(found[1].lower())
        page = Authority(page.name, page.port or implied)
        if page in self.listed or (page.port == implied and Authority(page.name) in self.listed):
            return True
        return host is not None and page == Authority(host.name, host.port or implied)


def allowed_hosts(bound: str, configured: Iterable[str]) -> AllowedHosts:
    """Return the hosts of a proxy that listens on ``bound``.

    Args:
        configured: further ones, in the form for :func:`parse_authority`.
    """
    own = parse_authority(f"[{bound}]" if ":" in bound else bound)
    listed = frozenset(each for each in map(parse_authority, configured) if each is not None)
    return AllowedHosts(None if bound in ANYWHERE else own or Authority(bound), listed)
