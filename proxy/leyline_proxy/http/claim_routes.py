"""``/v1/leyline/claims``: claims of KV that must stay."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from starlette.responses import JSONResponse

from leyline_engine.contract import MAX_COMMAND_BYTES, MAX_LISTED

from ..tenants import Tenant
from ..wiring.services import Services
from .side_routes import side_body, side_caller

CLAIMS = "/v1/leyline/claims"

_DEFAULT_EVENTS = 100


def install_claims(app: FastAPI, services: Services) -> None:
    """Register the routes on ``app``."""
    claims, caller = services.claims, Depends(side_caller(services))

    async def body_of(request: Request) -> dict[str, Any]:
        return await side_body(services, request, MAX_COMMAND_BYTES, "A claim takes less.")

    @app.post(CLAIMS, tags=["claims"])
    async def submit(request: Request, tenant: Tenant = caller) -> JSONResponse:
        """Claim tokens of one of the tenant's sessions."""
        document = await claims.submit(tenant.name, await body_of(request))
        where = {"location": f"{CLAIMS}/{document['id']}"}
        return JSONResponse(document, status_code=201, headers=where)

    @app.get(CLAIMS, tags=["claims"])
    async def all_live(session: str | None = None, tenant: Tenant = caller) -> JSONResponse:
        """List the tenant's live claims, oldest first."""
        return JSONResponse({"claims": await claims.all_live(tenant.name, session)})

    @app.get(f"{CLAIMS}/{{claim_id}}", tags=["claims"])
    async def show(claim_id: str, tenant: Tenant = caller) -> JSONResponse:
        """Show one claim, also for a while after its end."""
        return JSONResponse(await claims.show(tenant.name, claim_id))

    @app.patch(f"{CLAIMS}/{{claim_id}}", tags=["claims"])
    async def revise(claim_id: str, request: Request, tenant: Tenant = caller) -> JSONResponse:
        """Revise a claim; members that aren't given keep their values."""
        body = await body_of(request)
        return JSONResponse(await claims.revise(tenant.name, claim_id, body))

    @app.delete(f"{CLAIMS}/{{claim_id}}", tags=["claims"])
    async def release(claim_id: str, tenant: Tenant = caller) -> JSONResponse:
        """Release a claim, and return its end."""
        return JSONResponse(await claims.release(tenant.name, claim_id))

    @app.get(f"{CLAIMS}/{{claim_id}}/events", tags=["claims"])
    async def events(
        claim_id: str,
        after: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = _DEFAULT_EVENTS,
        tenant: Tenant = caller,
    ) -> JSONResponse:
        """List the events of a claim, in order."""
        return JSONResponse(await claims.events(tenant.name, claim_id, after, limit))
