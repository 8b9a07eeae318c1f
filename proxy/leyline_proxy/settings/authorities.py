"""Hosts as ``Host`` and ``Origin`` write them, and which of them mean this proxy. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[^\s:/?#@\[\]\\%*,]{1,253})(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]{0,31})://(.{1,300})", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
ANYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - recognised, not listened on
"""What listens on all addresses of a machine."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A host and its port, where one is given."""

    name: str
    """In lower case, an IPv6 address without brackets, no dot at the end."""
    port: int | None = None

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The address that the name is; None where it has to be looked up."""
        try:
            found = ipaddress.ip_address(self.name)
        except ValueError:
            return None
        return getattr(found, "ipv4_mapped", None) or found

    @property
    def is_loopback(self) -> bool:
        """Whether it can mean this machine alone."""
        address = self.address
        return self.name == "localhost" if address is None else address.is_loopback


def parse_authority(text: str) -> Authority | None:
    """``NAME`` or ``NAME:PORT``; None for what is neither."""
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

    A page that has its own name point at this machine (DNS rebinding) calls it by that name, so
    what a browser writes into ``Host`` tells such a page from others.
    """

    bound: Authority | None = None
    """Where the proxy listens, if that is one address or name."""
    listed: frozenset[Authority] = frozenset()
    """What the operator named."""

    def allows(self, host: Authority) -> bool:
        """Whether requests may be for this host: a name without a port stands for all ports."""
        if host.is_loopback or not self.listed.isdisjoint((host, Authority(host.name))):
            return True
        if self.bound is None:  # at all addresses: no page can have one of them point elsewhere
            return host.address is not None
        return host.name == self.bound.name

    def trusts(self, origin: str, host: Authority | None) -> bool:
        """Whether pages of an ``Origin`` may speak to the proxy that they call ``host``: its own,
        and those that the operator named. A name without a port stands for the scheme's."""
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
    """The hosts of a proxy that listens on ``bound``.

    Args:
        configured: further ones, as :func:`parse_authority` takes them.
    """
    own = parse_authority(f"[{bound}]" if ":" in bound else bound)
    listed = frozenset(each for each in map(parse_authority, configured) if each is not None)
    return AllowedHosts(None if bound in ANYWHERE else own or Authority(bound), listed)
