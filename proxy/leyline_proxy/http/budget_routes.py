"""``/v1/leyline/budgets``: a tenant's own budgets; and all tenants' budgets for operators."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI
from starlette.responses import JSONResponse

from ..budgets.errors import standing_document
from ..tenants import Tenant
from ..wiring.services import Services
from .side_routes import side_caller


def install_budgets(app: FastAPI, services: Services) -> None:
    """Register the route on ``app``."""
    caller = Depends(side_caller(services))

    @app.get("/v1/leyline/budgets", tags=["leyline"])
    async def budgets(tenant: Tenant = caller) -> JSONResponse:
        """Show the tenant's budgets: used, reserved and left in their present windows."""
        found = await _budgets_of(services, tenant)
        state = await services.budgets.state()  # its worker has just looked
        return JSONResponse({"budgets": found, "complete": state.problem is None})


async def all_budgets(services: Services) -> dict[str, Any]:
    """Return the budgets of all tenants that have some, and the state of the store."""
    directory, tenants = services.tenants, []
    for name in sorted(directory.names):
        tenant = directory.get(name)
        if tenant is not None and tenant.limits.budgets:
            tenants.append({"name": name, "budgets": await _budgets_of(services, tenant)})
    state = await services.budget_reports.state()
    return {
        "store": services.settings.budget_store,
        "problem": state.problem,
        "owed": state.owed,
        "tenants": tenants,
    }


async def _budgets_of(services: Services, tenant: Tenant) -> list[dict[str, Any]]:
    found = await services.budget_reports.standings(tenant)
    return [standing_document(each, services.budgets.currency) for each in found]
