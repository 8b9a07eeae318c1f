"""``/v1/leyline/sessions/{id}/recall`` and ``…/parts``: evicted texts of a session."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Query, Request
from starlette.responses import JSONResponse

from ..errors import ForbiddenError, PartsUnavailableError
from ..model.parts import PartFacts
from ..parts.limits import PartStoreError
from ..request.identify import NAMED
from ..request.side_bodies import recall_body
from ..tenants import Tenant
from ..turns.forgets import no_session
from ..turns.recalling import Holder
from ..wiring.services import Services
from .side_routes import side_body, side_caller, stored_id

_SESSION = "/v1/leyline/sessions/{session_id}"
_MAX_BODY = 1 << 16
_MAX_LISTED = 1000
_DEFAULT_LISTED = 200


def install_recall(app: FastAPI, services: Services) -> None:
    """Register the routes on ``app``."""
    caller, named = Depends(side_caller(services)), Depends(stored_id(services))

    @app.post(f"{_SESSION}/recall", tags=["leyline"])
    async def recall(
        request: Request, session_id: str = named, tenant: Tenant = caller
    ) -> JSONResponse:
        """Return evicted texts by address, each with a verdict."""
        holder = await _holder(services, tenant, session_id)
        body = recall_body(await side_body(services, request, _MAX_BODY, "Name fewer addresses."))
        found = await services.recalls.recall(holder, body)
        services.recall_metrics.asked(holder.owner, [report for report, _ in found])
        pieces = []
        for report, part in found:
            facts = _facts(part) if part is not None else {}
            text = {"text": part.text} if part is not None and report.cause is None else {}
            pieces.append({**facts, **report.document(), **text})
        return JSONResponse({"session": session_id, "pieces": pieces})

    @app.get(f"{_SESSION}/parts", tags=["leyline"])
    async def parts(
        session_id: str = named,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = _DEFAULT_LISTED,
        tenant: Tenant = caller,
    ) -> JSONResponse:
        """List a session's evicted texts, newest first, without the texts."""
        holder = await _holder(services, tenant, session_id)
        try:
            listed = await services.recalls.listed(holder)
        except PartStoreError as error:
            raise PartsUnavailableError from error
        newest = list(reversed(listed))[offset : offset + limit]
        return JSONResponse(
            {"session": session_id, "count": len(listed), "parts": [*map(_facts, newest)]}
        )


async def _holder(services: Services, tenant: Tenant, session_id: str) -> Holder:
    """Return a tenant's session for its evicted texts.

    Raises:
        ForbiddenError: the tenant has no recall, or the session no certain name.
        NotFoundError: it has no such session.
    """
    if not tenant.recall:
        raise ForbiddenError("This tenant has no recall; its operator can switch it on (recall).")
    found = await services.store.get(tenant.name, session_id)
    if found is None or not found.answered:
        raise no_session()
    if found.key != NAMED:
        raise ForbiddenError(
            "This session has no name that only its caller knows, so its texts come back only in "
            "requests whose own messages show them. Name it with the header x-leyline-session.",
            code="session_without_name",
        )
    return Holder((tenant.name, session_id), found.demands)


def _facts(part: PartFacts) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(part)
    return {name: facts[name] for name in _SHOWN}


_SHOWN = ("address", "role", "tool", "tokens", "tags", "policy", "turn", "index", "created")
