"""``/v1/leyline/sessions/{id}/quarantine``, ``…/proof`` and ``…/ledger``: what a session holds, and
the ways to take it out."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import anyio.to_thread
from fastapi import Depends, FastAPI, Query, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..request.parse import decode_body
from ..request.side_bodies import ProofBody, checked_body, quarantine_body
from ..sessions.ledger import MAX_LISTED, session_ledger
from ..tenants import Tenant
from ..turns.engine_ledgers import EngineLedgers, with_engines
from ..turns.forgets import no_session
from ..wiring.services import Services
from .exchange import Exchange, ServedBy
from .side_routes import side_body, side_caller, stored_id

_SESSION = "/v1/leyline/sessions/{session_id}"
_MAX_BODY = 1 << 20
_DEFAULT_LISTED = 200

PROOF_PATH = "/v1/leyline/sessions/{session_id}/proof"
MAX_PROOF_BYTES = 1 << 20
FEWER_SPANS = "Name fewer spans."


def install_quarantine(app: FastAPI, services: Services) -> None:
    """Register the routes on ``app``."""
    secret = services.settings.hints_secret
    caller, named = Depends(side_caller(services)), Depends(stored_id(services))
    engines = EngineLedgers(
        services.pool, hints_secret=secret.get_secret_value() if secret is not None else None
    )

    @app.post(f"{_SESSION}/quarantine", tags=["leyline"])
    async def quarantine(
        request: Request, session_id: str = named, tenant: Tenant = caller
    ) -> JSONResponse:
        """Put messages of a session into quarantine: out of the cache now, out of each prompt from
        now on."""
        body = quarantine_body(
            await side_body(services, request, _MAX_BODY, "Name fewer messages.")
        )
        return JSONResponse(await services.quarantines.put(tenant.name, session_id, body))

    @app.post(PROOF_PATH, tags=["leyline"])
    async def proof(session_id: str, request: Request) -> Response:
        """Forget a session, or messages of it, on every engine, and prove that nothing is left."""
        return ServedBy(ProofExchange(services, request))

    @app.get(f"{_SESSION}/ledger", tags=["leyline"])
    async def ledger(
        session_id: str = named,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = _DEFAULT_LISTED,
        tenant: Tenant = caller,
    ) -> JSONResponse:
        """List the messages that a session held, their states, and the turns that read them; no
        text."""
        found = await services.store.get(tenant.name, session_id)
        if found is None or not found.answered:
            raise no_session()
        listed = partial(session_ledger, found, offset=offset, limit=limit)
        document = await anyio.to_thread.run_sync(listed)
        spans = [each["span"] for each in document["spans"]]
        answers = await engines.ask(found, spans)
        return JSONResponse(with_engines(document, answers))


class ProofExchange(Exchange):
    """Proves one forget. Every engine works for it, so the tenant's limits of requests apply."""

    max_bytes = MAX_PROOF_BYTES
    way_out = FEWER_SPANS

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request, PROOF_PATH)

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Forget, look for what is left, and answer with the proof, even if its client leaves."""
        session_id = stored_id(self.services)(self.request.path_params["session_id"])
        wanted = proof_demand(raw)
        document = await self.services.proofs.prove(tenant.name, session_id, wanted)
        await self.answer(JSONResponse(document), scope, receive, send)


def proof_demand(raw: bytes) -> ProofBody:
    """Return the demand in a body; an empty one demands a proof of everything.

    Raises:
        BadRequestError: names the field.
    """
    return checked_body(decode_body(raw) if raw.strip() else {}, ProofBody)
