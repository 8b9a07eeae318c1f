"""Other paths below ``/v1``: to an engine and back as they are.

Bodies that are JSON objects lose what only the proxy may set (see :mod:`..core.wire`). Objects that
an upstream stores belong, as far as it can tell, to whoever has its key, and here that is the
proxy: passing those paths on would show each tenant what the others store.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.wire import WireError
from ..errors import (
    BadRequestError,
    ForbiddenError,
    NotFoundError,
    UpstreamUnreachableError,
)
from ..pipeline.outgoing import PROXY_MEMBERS, without_reserved
from ..tenants import Tenant
from ..upstream.client import chunks, read
from ..upstream.headers import downstream_headers
from ..upstream.replica import Replica
from .exchange import Exchange
from .limits import until_disconnect
from .refusal import refusal_response
from .time_limit import within

PATTERN = "/v1/{path:path}"
_SAFE = "/:@!$&'()*+,;=-._~"
"""What needs no encoding in a path."""

_LONGEST_TARGET = 60_000
"""Of what an HTTP client takes for a URL, less room for the engine's address."""

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

_TALK = frozenset({"chat", "messages"})
"""Below these lie completions that were stored, and batches."""

_OWN = frozenset({"completions", "messages"})
"""Paths of the proxy, which it takes with POST alone and in lower case."""

_UNCLEAR = frozenset({"", ".", ".."})
"""Parts of a path."""

_ENCODED = frozenset("?#%\\")
"""Characters that a second decoding would make something else of."""

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
        limit_s = self.services.settings.total_timeout_s
        answer = await within(limit_s, until_disconnect(receive, work))
        if answer is not None:
            await self.answer(answer, scope, receive, send)

    def _check(self, path: str, tenant: Tenant) -> None:
        """Raises NotFoundError or ForbiddenError for a path that doesn't pass."""
        mode, parts = self.services.settings.pass_through, path.casefold().split("/")
        # Servers differ in how they read these: a doubled or a final slash may be one or none.
        unclear = not path.isprintable() or not _UNCLEAR.isdisjoint(parts)
        unclear = unclear or not _ENCODED.isdisjoint(path)
        if mode == "off" or parts[0] == "leyline" or unclear or "/".join(parts) in _OWN:
            raise NotFoundError(
                f"There is no {self.request.method} /v1/{ascii(path[:200])[1:-1]} here.",
                code="unknown_path",
            )
        stored = parts[0] in STORED or (len(parts) > 1 and parts[0] in _TALK)
        # With credentials of its own, a tenant sees its own objects.
        shared = stored and not tenant.forward_credentials
        if mode == "stateless" and (shared or parts[0] in _CONTROL):
            raise ForbiddenError(
                f"/v1/{path[:200]} is about objects that all tenants of this proxy would share "
                "upstream. The operator can allow it with pass_through: all.",
                code="not_passed_through",
            )

    async def _forward(
        self, tenant: Tenant, replica: Replica, path: str, content: bytes, send: Send
    ) -> Response | None:
        query = self.request.url.query
        # Decoded by now: written again, what was part of the path stays part of it.
        target = f"/v1/{quote(path, safe=_SAFE)}" + (f"?{query}" if query else "")
        if len(target) > _LONGEST_TARGET:
            raise BadRequestError("The path and its query are too long.", code="path_too_long")
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
            if headers.get("location", "").startswith(replica.client.address):
                raise UpstreamUnreachableError("The engine redirects to itself.")
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
    """The body without what only the proxy may set. Raises BadRequestError where JSON brings it
    in a form that only the upstream may be able to read: with NaN, or in another encoding."""
    try:
        return without_reserved(raw)
    except (WireError, RecursionError):
        pass
    try:
        document = json.loads(raw)
    except ValueError:
        return raw
    except RecursionError:
        document = dict.fromkeys(PROXY_MEMBERS)  # it may hold them
    if isinstance(document, dict) and not document.keys().isdisjoint(PROXY_MEMBERS):
        raise BadRequestError("The body is no valid JSON in UTF-8.", code="invalid_json")
    return raw
