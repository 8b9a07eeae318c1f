"""``POST /v1/leyline/sessions/{id}/proof``: a forget with a proof."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ..request.parse import decode_body
from ..request.proof import ProofBody, proof_body
from ..tenants import Tenant
from ..wiring.services import Services
from .exchange import Exchange
from .session_paths import stored_id

PROOF_PATH = "/v1/leyline/sessions/{session_id}/proof"
MAX_PROOF_BYTES = 1 << 20
FEWER_SPANS = "Name fewer spans."


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
    return proof_body(decode_body(raw) if raw.strip() else {})
