"""A guard that keeps other sites' web pages away from a proxy without API keys.

Any page open in a browser on this machine can send requests to the proxy. It can't read the
answers, but a chat or a claim takes effect anyway. A page that points its own name here (DNS
rebinding) reads the answers, too. API keys prevent all of this, because browsers don't add an
``Authorization`` by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ForbiddenError, MediaTypeError, ProxyError
from ..settings import Settings
from ..settings.authorities import AllowedHosts, Authority, allowed_hosts, parse_authority
from ..settings.other_paths import takes_form
from .errors import shaped_response
from .socket_calls import refuse_socket

FormPath = Callable[[str, str], bool]
"""Returns True if a request of a method and a path may have a form."""

Headers = Mapping[str, list[str]]

_LOOKED_AT = {
    name.encode(): name
    for name in (
        "host",
        "origin",
        "sec-fetch-site",
        "sec-fetch-mode",
        "content-type",
        "content-length",
        "transfer-encoding",
    )
}

_ALIVE = "/healthz"
_PROBES = frozenset({_ALIVE, "/readyz"})
_PAGE = "/"
_READS = frozenset({"GET", "HEAD"})
_JSON, _FORM = "application/json", "multipart/form-data"
_SHOWN = 100
_LONGEST_HOST = 300
"""Longest text that can be a host."""
_WHY = "While no API keys are configured, requests that a web page of another site may have sent"


def guard_against_pages(app: Starlette, settings: Settings, bound: str) -> None:
    """Put the guard in front of an application that listens on ``bound``."""
    hosts = allowed_hosts(bound, settings.allowed_hosts)
    app.add_middleware(
        PageGuard, hosts=hosts, takes_form=partial(takes_form, settings.pass_through)
    )


class PageGuard:
    """ASGI middleware that refuses requests that another site's page may have sent.

    Args:
        takes_form: returns True if ``multipart/form-data`` may come in place of JSON.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, takes_form: FormPath) -> None:
        self._app = app
        self._hosts = hosts
        self._takes_form = takes_form
        # Most requests name one of a few hosts; many different ones are parsed each time.
        self._judge = lru_cache(maxsize=64)(self._judged)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request or a WebSocket's handshake, and pass it to the application."""
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(scope)
            except ProxyError as error:
                if scope["type"] == "websocket":
                    await refuse_socket(error, scope, receive, send)
                else:
                    await shaped_response(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise ForbiddenError or MediaTypeError for a request that isn't allowed."""
        headers: Headers = {name: [] for name in _LOOKED_AT.values()}
        for name, value in scope["headers"]:
            if name in _LOOKED_AT:
                headers[_LOOKED_AT[name]].append(value.decode("latin-1").strip())
        # A page's handshake is no read: the connection sends whatever the page wants.
        method, path = (
            scope.get("method", "CONNECT"),
            scope["path"].removeprefix(scope.get("root_path", "")),
        )
        hosts = headers["host"]
        host, known = self._judge(hosts[0][:_LONGEST_HOST]) if len(hosts) == 1 else (None, False)
        reads = method in _READS
        if not known and not (reads and path in _PROBES and _probes(path, hosts, host)):
            raise _unknown_host(hosts)
        self._check_page(headers, host, opens=reads and path == _PAGE)
        if not reads and _has_body(headers):
            self._check_type(headers["content-type"], method, path)

    def _judged(self, text: str) -> tuple[Authority | None, bool]:
        """Return a host, and True if requests may name it."""
        host = parse_authority(text)
        return host, host is not None and self._hosts.allows(host)

    def _check_page(self, headers: Headers, host: Authority | None, *, opens: bool) -> None:
        """Refuse another site's page.

        Args:
            opens: the request is for the live page, which a link on any page may open: it holds
                no data, and no other page can frame it.
        """
        origins = headers["origin"]
        for origin in origins:
            if not self._hosts.trusts(origin, host):
                raise ForbiddenError(
                    f"The Origin {_shown(origin)} is not this proxy's own. {_WHY} are refused: "
                    "name the page's host in allowed_hosts, or configure API keys.",
                    param="origin",
                    code="origin_not_allowed",
                )
        if origins or "cross-site" not in headers["sec-fetch-site"]:
            return
        if opens and headers["sec-fetch-mode"] == ["navigate"]:
            return
        raise ForbiddenError(
            f"Sec-Fetch-Site says cross-site. {_WHY} are refused: configure API keys to take them.",
            param="sec-fetch-site",
            code="cross_site_request",
        )

    def _check_type(self, types: list[str], method: str, path: str) -> None:
        kinds = {each.partition(";")[0].strip().lower() for each in types}
        if kinds == {_JSON} or (kinds == {_FORM} and self._takes_form(method, path)):
            return
        given = _shown(types[0]) if types else "missing"
        raise MediaTypeError(
            f"The Content-Type is {given}, and must be application/json here: other types can be "
            f"sent by any web page. {_WHY} are refused; with API keys configured, any type is "
            "taken.",
            param="content-type",
        )


def _probes(path: str, hosts: list[str], host: Authority | None) -> bool:
    """Return True for a health probe of a pod or a target: by its address, or without a host.

    The liveness probe may use any name.
    """
    return path == _ALIVE or not hosts or (host is not None and host.address is not None)


def _has_body(headers: Headers) -> bool:
    return bool(headers["transfer-encoding"]) or any(
        length.strip("0") for length in headers["content-length"]
    )


def _unknown_host(hosts: list[str]) -> ForbiddenError:
    if len(hosts) == 1:
        told = f"The Host {_shown(hosts[0])} is not known here. {_WHY} are refused"
    else:
        told = f"There must be one Host header, not {len(hosts)}. {_WHY} are refused"
    return ForbiddenError(
        f"{told}: name the host in allowed_hosts (LEYLINE_ALLOWED_HOSTS), or configure API keys.",
        param="host",
        code="host_not_allowed",
    )


def _shown(value: str) -> str:
    return ascii(value[:_SHOWN])
