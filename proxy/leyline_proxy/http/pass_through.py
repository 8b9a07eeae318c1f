"""Other paths below ``/v1``, forwarded to an engine and back unchanged.

:mod:`..settings.other_paths` lists the paths that pass. Bodies that are JSON objects lose the
members that only the proxy may set (see :mod:`..request.wire`), and get a salt if the tenant's KV
is its own.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..apis.anthropic.errors import ANTHROPIC_VERSION
from ..errors import (
    BadRequestError,
    ClientDisconnected,
    ForbiddenError,
    NotFoundError,
    UpstreamUnreachableError,
)
from ..plan.outgoing import PROXY_MEMBERS, salted, without_reserved
from ..request.values import most_values
from ..request.wire import WireError, split_body
from ..settings.other_paths import MODEL_PATH, PREFIX, Passage, is_unknown, passage_of
from ..tenants import Tenant
from ..turns.cache_scope import check_other_path, unsalted_path
from ..turns.prompt_size import BYTES_PER_TOKEN, bytes_size
from ..upstream.client import chunks, read
from ..upstream.headers import MODELS, OTHER, downstream_headers, headers_of_route
from ..upstream.replica import Replica
from ..wiring.services import Services
from .bare_charges import BareCharge
from .errors import method_error
from .exchange import Exchange
from .limits import checked_json, until_disconnect, within
from .messages import model_as_asked
from .models import listed_model
from .path_hints import hint, is_mistaken, shown_path
from .refusal import answer_of, refusal_response

PATTERN = "/v1/{path:path}"
_SAFE = "/:@!$&'()*+,;=-._~"
"""Characters that need no encoding in a path."""

_BEFORE_JSON = b" \t\n\r\x00\xef\xbb\xbf\xfe\xff"
"""Bytes in front of a document's first character: white space, and marks of encodings."""

_LONGEST_TARGET = 60_000
"""Longest URL that an HTTP client takes, less room for the engine's address."""

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


class _Named(msgspec.Struct):
    model: str | None = None


class PassThroughExchange(Exchange):
    """One request of an API that the proxy doesn't know."""

    decodes = False

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request, "/v1/*")
        self.spends = request.method == "POST"

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Forward the request if its path may pass."""
        path = self.request.path_params["path"]
        passage = self._passage(path, tenant)
        if _looks_like_json(raw):
            raw = await checked_json(raw, tenant.limits.max_body_values)
        model = _model_of(path, raw)
        pool = self.services.pool
        if passage.path == MODEL_PATH:
            # Not all engines have this path, and their lists name every model.
            headers = self.request.headers
            entry = await listed_model(pool, tenant.upstreams, headers.raw, path.partition("/")[2])
            if entry is not None:
                await self.answer(model_as_asked(headers, entry), scope, receive, send)
                return
        self.model = pool.label(model)
        # No session: any engine of the model will do, and a random key spreads the load. Lists of
        # models may leave out those of other paths, so the engine refuses unknown ones.
        replica = await pool.choose(uuid4().hex, model, allowed=tenant.upstreams)
        content = _cleaned(raw, tenant.limits.max_body_values)
        if passage.reads and tenant.cache_salt is not None:
            check_other_path(tenant, replica.status, path)
            content = _salted(content, tenant.cache_salt, passage)
        tokens = bytes_size(raw) if self.spends else 0
        charge = BareCharge(self.services, tenant, model or "", prompt=tokens, answer=0)
        self.extra_headers.update(await charge.reserve())
        limit_s = self.services.settings.total_timeout_s
        try:
            work = self._forward(
                tenant, replica, path, content, send, charge=charge, passage=passage
            )
            answer = await within(limit_s, until_disconnect(receive, work))
            charge.reason = "other_path" if answer is None else None
        except ClientDisconnected:
            charge.reason = "left"
            raise
        except BaseException:
            if self.started:  # the engine has read it
                charge.reason = "broken"
            raise
        finally:
            await charge.settle()
        if answer is not None:
            await self.answer(answer, scope, receive, send)

    def _passage(self, path: str, tenant: Tenant) -> Passage:
        """Return the rule for a path.

        Raises:
            NotFoundError, ForbiddenError: the request doesn't pass.
        """
        mode, method = self.services.settings.pass_through, self.request.method
        asked, known = PREFIX + path, self.request.app.state.known_paths()
        shown = f"{method} {shown_path(asked)}"
        unknown = mode == "off" or is_unknown(method, path)
        if unknown and known.allowed(asked):
            raise method_error(self.request, known)
        if unknown or (mode != "all" and is_mistaken(asked)):
            told = hint(asked, known, method)
            raise NotFoundError(f"There is no {shown} here. {told}", code="unknown_path")
        passage = passage_of(mode, method, path, own_key=tenant.forward_credentials)
        if passage is None:
            near = known.nearest(method, asked)
            raise ForbiddenError(
                f"{shown} isn't among the requests that store nothing upstream, and all callers "
                "of this proxy would share what it stores. The operator can allow it with "
                "pass_through: all." + (f" Did you mean {near}?" if near is not None else ""),
                code="not_passed_through",
            )
        return passage

    async def _forward(
        self,
        tenant: Tenant,
        replica: Replica,
        path: str,
        content: bytes,
        send: Send,
        *,
        charge: BareCharge,
        passage: Passage,
    ) -> Response | None:
        query = self.request.scope["query_string"].decode("latin-1")
        # The path is decoded by now. Encoding it again keeps all of it part of the path.
        target = f"/v1/{quote(path, safe=_SAFE)}" + (f"?{query}" if query else "")
        if len(target) > _LONGEST_TARGET:
            raise BadRequestError("The path and its query are too long.", code="path_too_long")
        listed = passage.path == MODEL_PATH
        async with replica.forward(
            self.request.method,
            target,
            headers=headers_of_route(self.request.headers.raw, MODELS if listed else OTHER),
            content=content,
            credentials=tenant.forward_credentials,
        ) as upstream:
            if httpx.codes.is_error(upstream.status_code):
                return refusal_response(upstream, await read(upstream), self.extra_headers)
            if listed and ANTHROPIC_VERSION in self.request.headers:
                entry = answer_of(await read(upstream))
                return model_as_asked(self.request.headers, entry, self.extra_headers)
            headers = downstream_headers(upstream.headers)
            if headers.get("location", "").startswith(replica.client.address):
                raise UpstreamUnreachableError("The engine redirects to itself.")
            await self.start_stream(send, headers, status=upstream.status_code)
            written = 0
            async with aclosing(chunks(upstream)) as received:
                async for chunk in received:
                    written += len(chunk) if passage.writes else 0
                    charge.came = -(-written // BYTES_PER_TOKEN)
                    await self.send_chunk(send, chunk)
        self.complete = True
        await self.end_stream(send)
        return None


def _model_of(path: str, raw: bytes) -> str | None:
    """Return the model that a request names in its path or its body."""
    first, _, rest = path.partition("/")
    if first == "models" and rest:
        return rest
    try:
        return msgspec.json.decode(raw, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # no JSON, or none that names a model


def _looks_like_json(raw: bytes) -> bool:
    """Return True if a body begins like a JSON object or list, in any encoding of JSON."""
    return raw.lstrip(_BEFORE_JSON)[:1] in (b"{", b"[")


def _cleaned(raw: bytes, most: int) -> bytes:
    """Return the body without members that only the proxy may set.

    Args:
        most: values that are decoded, at most.

    Raises:
        BadRequestError: JSON has them in a form that only the upstream may be able to read: with
            NaN, or in another encoding.
    """
    try:
        return without_reserved(raw)
    except (WireError, RecursionError):
        pass
    may_hold_them = dict.fromkeys(PROXY_MEMBERS)
    try:
        # In another encoding, texts don't show in the bytes, so the cheap bound has to do.
        fits = not _looks_like_json(raw) or most_values(raw) <= most
        document = json.loads(raw) if fits else may_hold_them
    except ValueError:
        return raw
    except RecursionError:
        document = may_hold_them
    if isinstance(document, dict) and not document.keys().isdisjoint(PROXY_MEMBERS):
        raise BadRequestError("The body is no valid JSON in UTF-8.", code="invalid_json")
    return raw


def _salted(content: bytes, salt: str, passage: Passage) -> bytes:
    """Return the body with the tenant's salt. Raise a ProxyError if it can't hold one."""
    try:
        split_body(content)
        return salted(content, salt)
    except WireError as error:
        if passage.form:
            raise unsalted_path("A form", passage.path) from error
        raise BadRequestError(
            "The body must be a JSON object in UTF-8, because cache_scope: tenant adds a salt.",
            code="invalid_json",
        ) from error
