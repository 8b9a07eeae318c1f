"""One of several engines: its connections, its status, and its readiness."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import structlog

from ..errors import (
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from ..telemetry.tracing import current_trace
from .breaker import Breaker
from .client import GATEWAY_FAILURES, UpstreamClient
from .handshake import Handshake, UpstreamStatus
from .headers import RawHeaders
from .records import RecordRoute

log = structlog.get_logger("leyline.upstream")


class Replica:
    """An engine under its name.

    Args:
        weight: its share of sessions, relative to the others'.
        apis: paths besides chat completions that it serves itself, such as ``/v1/messages``.
        records: source of its records; None uses ``client``.
        router: connections to the router in front of it; None for an engine without one.
    """

    def __init__(
        self,
        name: str,
        client: UpstreamClient,
        handshake: Handshake,
        breaker: Breaker,
        *,
        weight: float = 1.0,
        apis: frozenset[str] = frozenset(),
        records: RecordRoute | None = None,
        router: UpstreamClient | None = None,
    ) -> None:
        self.name = name
        self.client = client
        self.router = router
        self.affinity: dict[str, str] = {}
        """Values of headers by which its router names this engine, as answers have shown them."""
        self.handshake = handshake
        self.breaker = breaker
        self.records = records or RecordRoute(client, Breaker())
        self.weight = weight
        self.apis = apis
        self.draining = False
        """True if it gets no session that another replica can take."""
        self.router_problem: str | None = None
        """The reason that the last request didn't reach the router; None if it did."""
        self.running = 0
        """Number of requests under way."""
        self.warms = False
        """True if each of its runs gets a warm start."""
        self.warmed = ""
        """The run whose warm start is over."""

    @property
    def status(self) -> UpstreamStatus:
        """The engine's known status."""
        return self.handshake.status

    @property
    def warming(self) -> bool:
        """True from the moment a run of it is known until its warm start is over."""
        return self.warms and self.status.up and self.status.retains_as not in ("", self.warmed)

    @property
    def ready(self) -> bool:
        """True if it takes sessions."""
        status = self.status
        return status.up and not self.draining and not self.warming and self.breaker.admits

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()
        if self.router is not None:
            await self.router.aclose()
        await self.handshake.aclose()
        await self.records.aclose()

    @asynccontextmanager
    async def forward(
        self,
        method: str,
        path: str,
        *,
        headers: RawHeaders,
        content: bytes = b"",
        own: RawHeaders = (),
        credentials: bool = False,
        routed: bool = False,
    ) -> AsyncIterator[httpx.Response]:
        """Send a caller's request like :meth:`UpstreamClient.open`; the breaker counts the result.

        The request succeeds when the whole answer was read, or as much as the caller wanted.

        Args:
            routed: go through the router, if there is one, which may choose another engine.
        """
        self.running += 1
        self.breaker.begin()
        told = False
        try:
            async with self._opened(
                method,
                path,
                headers=headers,
                content=content,
                own=own,
                credentials=credentials,
                router=self.router if routed else None,
            ) as response:
                if response.status_code in GATEWAY_FAILURES:
                    self.breaker.failed()
                    told = True
                else:
                    self.breaker.began()
                yield response
            if not told:
                self.breaker.succeeded()
                told = True
        except UpstreamBusyError as error:
            error.blame(self.name)
            raise
        except (UpstreamUnreachableError, UpstreamTimeoutError) as error:
            error.blame(self.name)
            if not told:
                self.breaker.failed()
                told = True
            self.handshake.report_failure()
            raise
        except UpstreamFailedError as error:
            error.blame(self.name)
            raise
        finally:
            self.running -= 1
            if not told:
                self.breaker.given_up()

    def _note_router(self, router: UpstreamClient | None, problem: str | None = None) -> None:
        """Note that a request reached the router, or why not, and log a change."""
        if router is None:
            return
        if (problem is None) != (self.router_problem is None):
            event = "router_reached" if problem is None else "router_unreachable"
            emit = log.info if problem is None else log.warning
            emit(event, upstream=self.name, router=router.address, problem=problem)
        self.router_problem = problem

    @asynccontextmanager
    async def _opened(
        self,
        method: str,
        path: str,
        *,
        headers: RawHeaders,
        content: bytes,
        own: RawHeaders,
        credentials: bool,
        router: UpstreamClient | None,
    ) -> AsyncIterator[httpx.Response]:
        """Open a response within a span that covers both its request and its body."""
        client = router or self.client
        async with AsyncExitStack() as stack:
            hop = stack.enter_context(current_trace().upstream(self.name, client.address))
            opening = client.open(
                method,
                path,
                headers=hop.theirs(headers),
                content=content,
                own=[*own, *hop.headers],
                credentials=credentials,
            )
            try:
                response = await stack.enter_async_context(opening)
            except UpstreamBusyError:
                raise  # it may be healthy
            except UpstreamUnreachableError as error:
                self._note_router(router, error.message)
                raise
            self._note_router(router)
            hop.answered(response.status_code)
            yield response


def replica_document(replica: Replica) -> dict[str, Any]:
    """Return one engine's address, its availability, and whether it splices, or why not."""
    status = replica.status
    return {
        "name": replica.name,
        "upstream": replica.client.address,
        "up": status.up,
        "problem": status.problem,
        "draining": replica.draining,
        "warming": replica.warming,
        "circuit": replica.breaker.state.value,
        "running": replica.running,
        "engine": status.engine if status.up else None,
        "models": list(status.models or ()),
        "splices": status.splices,
        "obstacle": status.obstacle,
        "mismatch": status.mismatch.reason.value if status.mismatch is not None else "",
        "fix": status.fix,
        "rendering": status.rendering.source,
        "rendering_problem": status.rendering.problem,
        **(
            {"router": {"address": replica.router.address, "problem": replica.router_problem}}
            if replica.router is not None
            else {}
        ),
    }
