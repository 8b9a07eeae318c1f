"""``POST /v1/completions``: forwarded unchanged, except for members that clients may not send and
text that policies take out of the prompt to be forgotten.

A bare prompt is no conversation. The proxy has nothing to compare it with and keeps no session, so
it sends no envelope.
"""

from __future__ import annotations

from functools import partial
from uuid import uuid4

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..apis.prewarm import emptied
from ..errors import ClientDisconnected
from ..plan.outgoing import salted, without_reserved
from ..request.parse import decode_body, model_of, stream_of
from ..request.prewarm import for_one_token, prewarms
from ..tenants import Tenant
from ..turns.cache_scope import check_scope
from ..upstream.client import read
from ..upstream.headers import downstream_headers, headers_of_route
from ..upstream.replica import Replica
from ..wiring.services import Services
from .bare_charges import BareCharge, ChargedRelay, prompt_tokens_of, usage_in
from .exchange import Exchange
from .limits import beside, until_disconnect, within
from .refusal import answer_of, refusal_of_answer, refusal_response

COMPLETIONS_PATH = "/v1/completions"


class CompletionExchange(Exchange):
    """One bare completion."""

    spends = True

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request, COMPLETIONS_PATH)
        self._prewarms = False
        """True if the prompt is prefilled and nothing is generated."""

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Forward the request to any engine that serves its model."""
        body = await beside(raw, partial(decode_body, raw))
        model = model_of(body)
        stream = stream_of(body)
        pool = self.services.pool
        await pool.check_model(model, tenant.upstreams)
        self.model = pool.label(model)
        # No session: any engine will do, and a random key spreads the load.
        replica = await pool.choose(uuid4().hex, model, allowed=tenant.upstreams)
        check_scope(tenant, replica.status)
        searched = await self.services.prompts.searched(tenant, raw, body, replica.status)
        content = salted(without_reserved(searched, body), tenant.cache_salt)
        self._prewarms = prewarms(body)
        if self._prewarms:
            content = for_one_token(content, body)
        room = self.services.charges.completion_room(body)
        charge = BareCharge(
            self.services, tenant, model, prompt=prompt_tokens_of(body), answer=room
        )
        if stream:
            self.keep_alive(send)
        self.extra_headers.update(await charge.reserve())
        limit_s = self.services.settings.total_timeout_s
        try:
            work = self._forward(tenant, replica, content, send, charge if stream else None)
            answer = await within(limit_s, until_disconnect(receive, work, self.signs))
            if answer is not None and answer.status_code == httpx.codes.OK:
                charge.usage = usage_in(bytes(answer.body))
                charge.reason, charge.whole = "no_usage", True
        except ClientDisconnected:
            charge.reason, charge.whole = "left", not stream
            raise
        finally:
            await charge.settle()
        if answer is not None:
            await self.answer(answer, scope, receive, send)

    async def _forward(
        self,
        tenant: Tenant,
        replica: Replica,
        content: bytes,
        send: Send,
        streamed: BareCharge | None,
    ) -> Response | None:
        """Return the whole answer or the refusal; None after a stream.

        Args:
            streamed: the request's charge, if its answer is a stream.
        """
        async with replica.forward(
            "POST",
            COMPLETIONS_PATH,
            headers=headers_of_route(self.request.headers.raw, COMPLETIONS_PATH),
            content=content,
            credentials=tenant.forward_credentials,
        ) as upstream:
            if upstream.status_code != httpx.codes.OK:
                refused = await read(upstream)
                if self.started:
                    raise refusal_of_answer(upstream.status_code, refused, param="prompt")
                self.settle_status()
                return refusal_response(upstream, refused, self.extra_headers, param="prompt")
            if streamed is None:
                body = await read(upstream)
                if self._prewarms:
                    body = msgspec.json.encode(emptied(answer_of(body)))
                headers = {**downstream_headers(upstream.headers), **self.extra_headers}
                return Response(body, headers=headers)
            relay = ChargedRelay(streamed, prewarms=self._prewarms)
            await self.send_relayed(relay, upstream, send)
        self.complete = True
        if relay.broken:
            self.status = "502"
        await self.end_stream(send)
        return None
