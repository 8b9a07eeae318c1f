"""All paths of the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request
from starlette.responses import JSONResponse, Response

from leyline_engine.contract import CAPABILITY_PATH

from ..errors import NotFoundError
from ..parts.recallable_parts import RecallableParts
from ..sessions.summary import session_document, session_overview
from ..tenants import Tenant
from ..turns.forgets import no_session
from ..upstream.replica import replica_document
from ..wiring.services import Services
from .api import Api
from .budget_routes import install_budgets
from .chat import CHAT
from .claim_routes import install_claims
from .completions import COMPLETIONS_PATH, CompletionExchange
from .counting import CountExchange
from .exchange import ServedBy
from .live import install_live
from .messages import MESSAGES, models_as_asked
from .metrics import metrics_response
from .models import model_list
from .pass_through import METHODS, PATTERN, PassThroughExchange
from .quarantine_routes import install_quarantine
from .recall_routes import install_recall
from .response_chain import install_stored_responses
from .responses import COMPACT_PATH, RESPONSES, CompactExchange
from .side_routes import side_caller, stored_id
from .turn import TurnExchange

APIS: Mapping[str, Api] = {api.path: api for api in (CHAT, RESPONSES, MESSAGES)}
"""APIs over chat turns, by the path that agents ask turn after turn."""


def install_routes(app: FastAPI, services: Services) -> None:
    """Register every route on ``app``."""
    _install_openai(app, services)
    _install_responses(app, services)
    _install_anthropic(app, services)
    _install_sessions(app, services)
    install_quarantine(app, services)
    install_recall(app, services)
    install_budgets(app, services)
    install_claims(app, services)
    _install_operations(app, services)
    install_live(app, services)
    if services.settings.pass_through != "off":  # noqa: S105
        _install_pass_through(app, services)


def _install_openai(app: FastAPI, services: Services) -> None:
    caller = Depends(side_caller(services))

    @app.post(CHAT.path, tags=["openai"])
    async def chat_completions(request: Request) -> Response:
        """Create a chat completion, with edits of the history spliced if the engine can."""
        return ServedBy(TurnExchange(services, request, CHAT))

    @app.post(COMPLETIONS_PATH, tags=["openai"])
    async def completions(request: Request) -> Response:
        """Forward a bare completion."""
        return ServedBy(CompletionExchange(services, request))

    @app.get("/v1/models", tags=["openai"])
    async def models(request: Request, tenant: Tenant = caller) -> Response:
        """List the models that the engines serve."""
        listed = await model_list(services.pool, tenant.upstreams, request.headers.raw)
        return models_as_asked(request.headers, listed)


def _install_responses(app: FastAPI, services: Services) -> None:
    @app.post(RESPONSES.path, tags=["openai"])
    async def responses(request: Request) -> Response:
        """Create a response of OpenAI's Responses API: the same turn as a chat completion's."""
        return ServedBy(TurnExchange(services, request, RESPONSES))

    @app.post(COMPACT_PATH, tags=["openai"])
    async def compact_response(request: Request) -> Response:
        """Replace a conversation by a summary of it, to continue it with."""
        return ServedBy(CompactExchange(services, request))

    @app.post(RESPONSES.count_path, tags=["openai"])
    async def count_input_tokens(request: Request) -> Response:
        """Count a response request's prompt tokens after all edits, without running it."""
        return ServedBy(CountExchange(services, request, RESPONSES))

    install_stored_responses(app, services)


def _install_anthropic(app: FastAPI, services: Services) -> None:
    @app.post(MESSAGES.path, tags=["anthropic"])
    async def messages(request: Request) -> Response:
        """Create a message of Anthropic's API: the same turn as a chat completion's."""
        return ServedBy(TurnExchange(services, request, MESSAGES))

    @app.post(MESSAGES.count_path, tags=["anthropic"])
    async def count_message_tokens(request: Request) -> Response:
        """Count a message request's prompt tokens after all edits, without running it."""
        return ServedBy(CountExchange(services, request, MESSAGES))


def _install_sessions(app: FastAPI, services: Services) -> None:
    caller, named = Depends(side_caller(services)), Depends(stored_id(services))

    @app.get("/v1/leyline/sessions", tags=["leyline"])
    async def sessions(tenant: Tenant = caller) -> JSONResponse:
        """List the tenant's sessions, latest first."""
        found = await services.store.sessions(tenant.name)
        return JSONResponse({"sessions": [session_overview(s) for s in found if s.answered]})

    @app.post(CHAT.count_path, tags=["leyline"])
    async def count_tokens(request: Request) -> Response:
        """Count a chat request's prompt tokens after all edits, without running it."""
        return ServedBy(CountExchange(services, request, CHAT))

    @app.get("/v1/leyline/sessions/{session_id}", tags=["leyline"])
    async def session(session_id: str = named, tenant: Tenant = caller) -> JSONResponse:
        """Show one session: its turns, edits and receipts, without prompt text."""
        found = await services.store.get(tenant.name, session_id)
        if found is None or not found.answered:
            raise no_session()
        return JSONResponse(session_document(found))


def _install_pass_through(app: FastAPI, services: Services) -> None:
    @app.api_route(PATTERN, methods=METHODS, include_in_schema=False)
    async def pass_through(request: Request) -> Response:
        """Forward any other path below /v1."""
        return ServedBy(PassThroughExchange(services, request))


def _install_operations(app: FastAPI, services: Services) -> None:
    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """Report that the process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["operations"])
    async def readyz() -> JSONResponse:
        """Answer 200 if an engine answers and its warm start is over, 503 if there is none or the
        proxy is about to stop. The body reports whether engines splice, or why not."""
        document = readiness(services)
        return JSONResponse(document, status_code=200 if document["ready"] else 503)

    if not services.settings.metrics_on_admin:

        @app.get("/metrics", tags=["operations"], response_class=Response)
        async def metrics(request: Request) -> Response:
            """Return Prometheus metrics, as OpenMetrics if ``Accept`` asks for it."""
            return await metrics_response(services, request.headers)

    @app.get(CAPABILITY_PATH, tags=["operations"])
    async def capability() -> JSONResponse:
        """Return the engine's capability document; parts that the proxy can't use are missing."""
        status = services.pool.first.status
        if status.capability is None:
            raise NotFoundError(f"No capability document: {status.obstacle}.", code="no_capability")
        document = msgspec.to_builtins(status.capability)
        document |= {"splices": status.splices, "unsupported_reason": status.obstacle}
        if status.recurrent:
            document["recurrent_edits"] = services.settings.recurrent_edits
        return JSONResponse(document)


def _recall_document(recall: RecallableParts) -> dict[str, Any]:
    return {"store": recall.name, "up": recall.problem is None, "problem": recall.problem}


def readiness(services: Services) -> dict[str, Any]:
    """Return the document of ``/readyz``."""
    replicas = tuple(services.pool)
    keys, stopping, recall = services.key_file, services.shutdown.begun, services.recall
    return {
        "ready": any(each.status.up and not each.warming for each in replicas)
        and not stopping
        and not services.audit.closed
        and not services.tenants.locked_out,
        "stopping": stopping,
        "upstreams": [replica_document(replica) for replica in replicas],
        "sessions": {
            "store": services.store.name,
            "up": services.store.problem is None,
            "problem": services.store.problem,
        },
        "forgets": {
            "store": services.erasures.debts.name,
            "up": services.erasures.debts.problem is None,
            "problem": services.erasures.debts.problem,
        },
        **({} if recall is None else {"recall": _recall_document(recall)}),
        **({} if keys is None else {"api_keys": {"problem": keys.problem}}),
        **_identity_document(services),
        **({"audit": {"problem": services.audit.problem}} if services.audit.on else {}),
        **({"tls": {"problem": services.tls.problem}} if any(services.tls) else {}),
        **({} if services.fleet is None else {"worker": services.fleet.index}),
    }


def _identity_document(services: Services) -> dict[str, Any]:
    tokens = services.tenants.tokens
    if tokens is None:
        return {}
    keys = tokens.keys
    return {"identity": {"usable": keys.usable, "problem": keys.problem}}
