"""The live page and its stream."""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import ClientDisconnected, NotFoundError
from ..live.assets import INDEX, SECURITY_HEADERS, Asset, read_assets
from ..live.stream import LiveStream, Pace, Sources
from ..tenants import Tenant
from ..wiring.services import Services
from .caller import caller_of
from .errors import StoppingError
from .limits import until_disconnect

LIVE_PATH: Final = "/v1/leyline/live"
_MAX_ID = 64
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


def install_live(app: FastAPI, services: Services, pace: Pace = Pace()) -> None:  # noqa: B008
    """Register the page, its files and its stream on ``app``."""
    assets = read_assets()
    sources = Sources(
        feed=services.feed,
        store=services.store,
        pool=services.pool,
        gate=services.gate,
        watches={
            replica.name: watch
            for replica, watch in zip(services.pool, services.claim_watches, strict=True)
        },
        shutdown=services.shutdown,
        keyed=not services.tenants.open,
    )

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        """Return the live page."""
        return _file(request, assets[INDEX])

    @app.get("/live/{name}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Response:
        """Return one of the page's files."""
        found = assets.get(name)
        if found is None:
            raise NotFoundError("The live page has no such file.")
        return _file(request, found)

    # Not in the schema, which describes no endless streams.
    @app.get(LIVE_PATH, include_in_schema=False)
    async def live(request: Request) -> Response:
        """Stream current events as server-sent events."""
        if services.shutdown.begun:
            raise StoppingError
        return LiveResponse(services, sources, request, pace)


class LiveResponse(Response):
    """Sends one viewer its events until it leaves."""

    def __init__(self, services: Services, sources: Sources, request: Request, pace: Pace) -> None:
        # Not Response.__init__: the body is never whole.
        self.background = None
        self._services = services
        self._sources = sources
        self._request = request
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        last_event = self._request.headers.get("last-event-id", "")[:_MAX_ID]
        tenant = await self._tenant()
        with self._sources.feed.viewing(tenant.name, last_event) as viewer:
            stream = LiveStream(self._sources, viewer, tenant, self._tenant, self._pace)
            raw = Response(headers=_STREAM_HEADERS).raw_headers
            headers = [item for item in raw if item[0] != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await until_disconnect(receive, _pump(stream, send))
            except ClientDisconnected:
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tenant(self) -> Tenant:
        return await caller_of(self._services, self._request)


async def _pump(stream: LiveStream, send: Send) -> None:
    async with aclosing(stream.events()) as events:
        async for part in events:
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})


def _file(request: Request, asset: Asset) -> Response:
    headers = {
        **SECURITY_HEADERS,
        "content-type": asset.media_type,
        "cache-control": "no-cache",
        "etag": asset.etag,
    }
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers)
