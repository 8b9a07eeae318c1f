"""The admin API for operators, on its own port, with its own key.

It crosses tenants, so the proxy's port serves none of it. It shows names, numbers and settings,
never prompt text, token ids or keys.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import (
    BadRequestError,
    NotFoundError,
    SessionStoreGoneError,
    UnauthorizedError,
    closest,
)
from ..sessions.summary import session_document, session_overview
from ..settings.api_keys import ApiKey, digest_of, expiry_text, key_digest
from ..tenants import Tenant
from ..tenants.directory import offered_key
from ..turns.forgets import no_session
from ..upstream.replica import replica_document
from ..wiring.services import Services
from .budget_routes import all_budgets
from .caller import READS
from .early_answers import EarlyAnswers
from .errors import install_error_handlers
from .guard import guard_against_pages
from .limits import read_body
from .metrics import metrics_response
from .quarantine_routes import FEWER_SPANS, MAX_PROOF_BYTES, proof_demand
from .side_routes import stored_id

log = structlog.get_logger("leyline.admin")

ADMIN = "/admin"

_LISTED = 100
_MAX_LISTED = 1000

Endpoint = Callable[[Request], Awaitable[Response]]


def create_admin_app(services: Services) -> Starlette:
    """Return the admin API as an ASGI application on the proxy's ``services``.

    Raises:
        ValueError: ``admin_key`` isn't set.
    """
    key = services.settings.admin_key
    if key is None:
        raise ValueError("the admin API needs an admin_key")
    handlers = _Handlers(services, digest_of(key.get_secret_value()))
    app = Starlette(
        routes=[
            Route("/healthz", _healthz, methods=["GET"]),
            *(
                Route(path, handlers.guarded(endpoint), methods=[method])
                for method, path, endpoint in handlers.table()
            ),
        ]
    )
    install_error_handlers(app)
    if services.tenants.open:
        guard_against_pages(app, services.settings, services.settings.admin_host)
    app.add_middleware(EarlyAnswers)
    return app


async def _healthz(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


class _Handlers:
    """The endpoints. Each is a method and a line in :meth:`table`."""

    def __init__(self, services: Services, digest: bytes) -> None:
        self._services = services
        self._digest = digest

    def table(self) -> list[tuple[str, str, Endpoint]]:
        """Return the method, path and handler of each endpoint."""
        session = f"{ADMIN}/sessions/{{tenant}}/{{session:path}}"
        return [
            ("GET", f"{ADMIN}/tenants", self.tenants),
            ("GET", f"{ADMIN}/budgets", self.budgets),
            ("GET", f"{ADMIN}/sessions", self.sessions),
            ("GET", session, self.session),
            ("DELETE", session, self.delete_session),
            ("POST", f"{ADMIN}/proofs/{{tenant}}/{{session:path}}", self.proof),
            ("POST", f"{ADMIN}/reload", self.reload),
            ("GET", f"{ADMIN}/upstreams", self.upstreams),
            ("POST", f"{ADMIN}/upstreams/{{name}}/drain", self.drain),
            ("POST", f"{ADMIN}/upstreams/{{name}}/resume", self.resume),
            ("GET", "/metrics", self.metrics),
        ]

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """Return ``endpoint`` with a check of the key."""

        async def checked(request: Request) -> Response:
            offered = offered_key(request.headers)
            if not hmac.compare_digest(key_digest(offered), self._digest):
                raise UnauthorizedError("The admin API needs its key: 'Authorization: Bearer KEY'.")
            if request.method not in READS and request.url.path != f"{ADMIN}/reload":
                self._services.audit.check()
            return await endpoint(request)

        return checked

    async def tenants(self, _: Request) -> Response:
        """List tenants with their limits, running and waiting requests, and key ids."""
        directory, gate = self._services.tenants, self._services.gate
        found = [directory.get(name) for name in sorted(directory.names)]
        documents = []
        for tenant in found:
            if tenant is not None:
                counts = await gate.counts(tenant.name)
                documents.append(
                    {
                        **_tenant_document(tenant, directory.keys),
                        "running": counts.running,
                        "waiting": counts.waiting,
                    }
                )
        return JSONResponse({"open": directory.open, "tenants": documents})

    async def budgets(self, _: Request) -> Response:
        """Show what tenants have used of their budgets, and the state of the store."""
        return JSONResponse(await all_budgets(self._services))

    async def sessions(self, request: Request) -> Response:
        """List the sessions of all tenants, or of one, latest first."""
        wanted = request.query_params.get("tenant")
        limit = _limit(request.query_params.get("limit"))
        names = self._services.tenants.names if wanted is None else (wanted,)
        store = self._services.store
        found = [(name, item) for name in names for item in await store.sessions(name)]
        found.sort(key=lambda entry: entry[1].updated, reverse=True)
        listed = [{"tenant": name, **session_overview(item)} for name, item in found[:limit]]
        return JSONResponse({"sessions": listed, "total": len(found)})

    async def session(self, request: Request) -> Response:
        """Show one session: its turns, edits and receipts, without prompt text."""
        tenant, session_id = self._identity(request)
        found = await self._services.store.get(tenant, session_id)
        if found is None:
            raise no_session()
        return JSONResponse({"tenant": tenant, **session_document(found)})

    async def delete_session(self, request: Request) -> Response:
        """Delete a session, as if it had expired."""
        tenant, session_id = self._identity(request)
        # The session first: a turn that ends meanwhile leaves its prompt to a new session.
        known = await self._services.store.delete(tenant, session_id)
        gone = not known and self._services.store.problem is not None
        await self._services.kept.everywhere.delete(tenant, session_id)
        self._services.named.drop(tenant, session_id)
        if gone:
            raise SessionStoreGoneError
        if not known:
            raise no_session()
        return JSONResponse({"deleted": True})

    async def proof(self, request: Request) -> Response:
        """Forget a session of a tenant, or messages of it, and prove that nothing is left."""
        tenant, session_id = self._identity(request)
        settings = self._services.settings
        limit, timeout_s = min(settings.max_body_bytes, MAX_PROOF_BYTES), settings.body_timeout_s
        raw = await read_body(request, limit, FEWER_SPANS, timeout_s=timeout_s)
        wanted = proof_demand(raw)
        return JSONResponse(await self._services.proofs.prove(tenant, session_id, wanted))

    def _identity(self, request: Request) -> tuple[str, str]:
        found = stored_id(self._services)
        return request.path_params["tenant"], found(request.path_params["session"])

    async def reload(self, _: Request) -> Response:
        """Reload the files of keys, policies and certificates now, if they have changed, and the
        keys of an identity provider."""
        services = self._services
        done = await services.files.reload()
        document: dict[str, Any] = {"api_keys": None, "policies": None}
        if done.keys is not None:
            document["api_keys"] = {"loaded": done.keys, "problem": done.problem}
        if done.policies is not None:
            document["policies"] = {"loaded": done.policies}
        if done.tls is not None:
            document["tls"] = {"loaded": done.tls, "problem": done.tls_problem}
        if done.identity is not None:
            document["identity_keys"] = {"loaded": done.identity, "problem": done.identity_problem}
        return JSONResponse(document)

    async def upstreams(self, _: Request) -> Response:
        """List the engines and their states."""
        return JSONResponse({"upstreams": [replica_document(each) for each in self._services.pool]})

    async def drain(self, request: Request) -> Response:
        """Give an engine no session that another can take. ``running`` counts its requests."""
        return await self._draining(request, True)

    async def resume(self, request: Request) -> Response:
        """Give an engine sessions again."""
        return await self._draining(request, False)

    async def _draining(self, request: Request, draining: bool) -> Response:
        replica = self._services.pool.get(request.path_params["name"])
        if replica is None:
            known = (each.name for each in self._services.pool)
            hint = closest(request.path_params["name"][:64], known)
            raise NotFoundError(f"No such upstream. {hint}", code="upstream_not_found")
        replica.draining = draining
        if self._services.fleet is not None:
            await self._services.fleet.drain(replica.name, draining)
        log.info("upstream_draining", upstream=replica.name, draining=draining)
        return JSONResponse(replica_document(replica))

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics."""
        return await metrics_response(self._services, request.headers)


def _tenant_document(tenant: Tenant, keys: tuple[ApiKey, ...]) -> dict[str, Any]:
    limits = tenant.limits
    return {
        "name": tenant.name,
        "keys": [
            {"id": key.id, "expires": None if key.expires is None else expiry_text(key.expires)}
            for key in keys
            if key.tenant == tenant.name
        ],
        "policies": [policy.name for policy in tenant.policies],
        "share": bool(tenant.share),
        "upstreams": None if tenant.upstreams is None else sorted(tenant.upstreams),
        "forward_credentials": tenant.forward_credentials,
        "limits": {
            "max_concurrent": limits.max_concurrent,
            "max_queued": limits.max_queued,
            "queue_timeout_s": limits.queue_timeout_s,
            "weight": limits.weight,
            "requests_per_minute": limits.requests_per_minute,
            "max_body_bytes": limits.max_body_bytes,
            "max_messages": limits.max_messages,
            "max_body_values": limits.max_body_values,
        },
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _LISTED
    if not text.isdecimal() or not 1 <= int(text[:9]) <= _MAX_LISTED:
        raise BadRequestError(f"limit must be 1 to {_MAX_LISTED}.", param="limit")
    return int(text)
