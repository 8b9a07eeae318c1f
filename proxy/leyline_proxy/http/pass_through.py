"""Other paths below ``/v1``: to an engine and back as they are.

Bodies that are JSON objects lose what only the proxy may set (see :mod:`..core.wire`). Objects that
an upstream stores belong, as far as it can tell, to whoever has its key, and here that is the
proxy: passing those paths on would show each tenant what the others store.
"""

from __future__ import annotations

from contextlib import aclosing
from uuid import uuid4

import httpx
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.wire import WireError
from ..errors import ForbiddenError, NotFoundError
from ..pipeline.outgoing import without_reserved
from ..tenants import Tenant
from ..upstream.client import chunks, downstream_headers, read
from ..upstream.replica import Replica
from .exchange import Exchange
from .limits import until_disconnect
from .refusal import refusal_response

PATTERN = "/v1/{path:path}"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]

STORED = frozenset(
    {
        "assistants",
        "batches",
        "containers",
        "conversations",
        "evals",
        "files",
        "fine_tuning",
        "responses",
        "skills",
        "threads",
        "uploads",
        "vector_stores",
        "videos",
    }
)
"""First parts of paths to objects that outlive a request."""

_CONTROL = frozenset({"load_lora_adapter", "unload_lora_adapter"})
"""Paths by which a server itself is changed."""


class _Named(msgspec.Struct):
    model: str | None = None


class PassThroughExchange(Exchange):
    """One request of an API that the proxy doesn't know."""

    route = "/v1/*"

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Forward, if the path may pass."""
        path = self.request.path_params["path"]
        self._check(path, tenant)
        model = _model_of(path, raw)
        pool = self.services.pool
        self.model = pool.label(model)
        # No session: any engine of the model will do, each as often. Lists of models may leave
        # out those of other paths, so an unknown one is the engine's to refuse.
        replica = await pool.choose(uuid4().hex, model, allowed=tenant.upstreams)
        work = self._forward(tenant, replica, path, _cleaned(raw), send)
        answer = await until_disconnect(receive, work)
        if answer is not None:
            await self.answer(answer, scope, receive, send)

    def _check(self, path: str, tenant: Tenant) -> None:
        """Raises NotFoundError or ForbiddenError for a path that doesn't pass."""
        mode, first = self.services.settings.pass_through, path.partition("/")[0]
        if mode == "off" or first == "leyline" or ".." in path.split("/"):
            raise NotFoundError(f"There is no /v1/{path[:200]} here.", code="unknown_path")
        completions = path.startswith("chat/") and self.request.method != "POST"
        stored = first in STORED or first in _CONTROL or completions
        # With credentials of its own, a tenant sees its own objects.
        if mode == "stateless" and stored and not tenant.forward_credentials:
            raise ForbiddenError(
                f"/v1/{path[:200]} is about objects that all tenants of this proxy would share "
                "upstream. The operator can allow it with pass_through: all.",
                code="not_passed_through",
            )

    async def _forward(
        self, tenant: Tenant, replica: Replica, path: str, content: bytes, send: Send
    ) -> Response | None:
        query = self.request.url.query
        target = f"/v1/{path}?{query}" if query else f"/v1/{path}"
        async with replica.forward(
            self.request.method,
            target,
            headers=self.request.headers.raw,
            content=content,
            credentials=tenant.forward_credentials,
        ) as upstream:
            if httpx.codes.is_error(upstream.status_code):
                return refusal_response(upstream, await read(upstream), self.extra_headers)
            headers = downstream_headers(upstream.headers)
            await self.start_stream(send, headers, status=upstream.status_code)
            async with aclosing(chunks(upstream)) as received:
                async for chunk in received:
                    await self.send_chunk(send, chunk)
        self.complete = True
        await self.end_stream(send)
        return None


def _model_of(path: str, raw: bytes) -> str | None:
    """The model that a request names, in its path or its body."""
    first, _, rest = path.partition("/")
    if first == "models" and rest:
        return rest
    try:
        return msgspec.json.decode(raw, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # no JSON, or none that names a model


def _cleaned(raw: bytes) -> bytes:
    try:
        return without_reserved(raw)
    except (WireError, RecursionError):
        return raw
