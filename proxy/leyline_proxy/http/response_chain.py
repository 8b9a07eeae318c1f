"""Stored responses: the chain that a request continues, and their own routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from ..apis.fields import FieldError
from ..apis.responses.ids import owner_of
from ..apis.responses.request import PREVIOUS, Items, references, resolved
from ..apis.responses.stored import joined, list_items
from ..errors import (
    BadRequestError,
    BodyTooLargeError,
    NotFoundError,
    ProxyError,
    SessionStoreGoneError,
)
from ..model.stored_response import StoredResponse
from ..sessions.stored_responses import ResponseSource
from ..tenants import Tenant
from ..wiring.services import Services
from .caller import caller_of
from .side_routes import side_caller

LONGEST_CHAIN = 2000
"""Most responses in one conversation."""


async def read_chain(
    store: ResponseSource, tenant: str, last: str | None, max_bytes: int
) -> list[StoredResponse]:
    """Return the responses of a conversation, oldest first; none if ``last`` is None.

    Args:
        max_bytes: bytes of all their items together.

    Raises:
        NotFoundError: one of them isn't stored (for this tenant).
        BodyTooLargeError: they are longer than one request may be.
    """
    chain: list[StoredResponse] = []
    size, wanted = 0, last
    while wanted is not None:
        stored = await store.get(tenant, wanted)
        if stored is None:
            raise NotFoundError(
                "The previous response, or one before it, isn't stored here; it may have expired. "
                "Send the whole conversation as input instead.",
                param=PREVIOUS,
                code="previous_response_not_found",
            )
        chain.append(stored)
        size += len(msgspec.json.encode((stored.input, stored.output)))
        if size > max_bytes or len(chain) > LONGEST_CHAIN:
            raise BodyTooLargeError(
                "The conversation before this request is longer than one request may be "
                f"({max_bytes} bytes, {LONGEST_CHAIN} responses). Begin a new one.",
                param=PREVIOUS,
            )
        wanted = stored.previous
    return chain[::-1]


async def resolve_references(
    store: ResponseSource, tenant: str, items: Items, max_bytes: int
) -> Sequence[Mapping[str, Any]]:
    """Return the items with references replaced by the stored items.

    Args:
        max_bytes: bytes of all stored items, each counted as often as it is referred to.

    Raises:
        FieldError: an item isn't stored (for this tenant).
        BodyTooLargeError: the stored items are longer than one request may be.
    """
    wanted = references(items)
    known: dict[str, Mapping[str, Any]] = {}
    owners: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    sizes: dict[str, int] = {}
    size = 0
    for identifier in wanted:
        owner = owner_of(identifier)
        if owner is None:
            continue
        if identifier not in known:
            if owner not in owners:
                stored = await store.get(tenant, owner)
                owners[owner] = stored.items if stored is not None else {}
            item = owners[owner].get(identifier)
            if item is None:
                continue
            known[identifier] = item
            sizes[identifier] = len(msgspec.json.encode(item))
        size += sizes[identifier]
        if size > max_bytes:
            raise BodyTooLargeError(
                f"The items that input refers to are longer than one request may be ({max_bytes} "
                "bytes).",
                param="input",
            )
    return resolved(items, known)


class NoHandshakeError(ProxyError):
    """A request without the headers that open a WebSocket."""

    status = 426
    kind = "invalid_request_error"
    code = "no_handshake"

    def __init__(self) -> None:
        super().__init__(
            "GET /v1/responses opens a WebSocket (Upgrade: websocket). Over HTTP, POST the request."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"upgrade": "websocket"}


def install_stored_responses(app: FastAPI, services: Services) -> None:
    """Register the routes of stored responses."""
    caller = Depends(side_caller(services))

    @app.get("/v1/responses", include_in_schema=False)
    async def no_handshake(request: Request) -> Response:
        """Refuse what a WebSocket's handshake should have been."""
        await caller_of(services, request)
        raise NoHandshakeError

    @app.get("/v1/responses/{response_id}", tags=["openai"])
    async def response(response_id: str, request: Request, tenant: Tenant = caller) -> Response:
        """Return a stored response."""
        stored = await _found(services, tenant, response_id)
        if request.query_params.get("stream", "false").lower() == "true":
            raise BadRequestError("Stored responses aren't streamed again.", param="stream")
        return _json(stored.response)

    @app.delete("/v1/responses/{response_id}", tags=["openai"])
    async def delete_response(response_id: str, tenant: Tenant = caller) -> Response:
        """Delete a stored response; no conversation can continue from it any more."""
        if not await services.responses.delete(tenant.name, response_id):
            raise await _missing(services, tenant)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items", tags=["openai"])
    async def response_input_items(
        response_id: str, request: Request, tenant: Tenant = caller
    ) -> Response:
        """List the input items of a stored response, page by page."""
        stored = await _found(services, tenant, response_id)
        limit = tenant.limits.max_body_bytes
        chain = await read_chain(services.responses, tenant.name, stored.previous, limit)
        items = [*joined(chain), *stored.input]
        try:
            return _json(list_items(items, request.query_params))
        except FieldError as error:
            raise BadRequestError(str(error), param=error.param) from error


async def _found(services: Services, tenant: Tenant, response_id: str) -> StoredResponse:
    stored = await services.responses.get(tenant.name, response_id)
    if stored is None:
        raise await _missing(services, tenant)
    return stored


async def _missing(services: Services, tenant: Tenant) -> ProxyError:
    if await services.responses.count_in(tenant.name, "") is None:
        return SessionStoreGoneError()  # it may be there, and be found again later
    return NotFoundError(
        "No such response is stored here; it may have expired, or was not to be stored.",
        param="response_id",
        code="response_not_found",
    )


def _json(document: object) -> Response:
    # The standard encoder, because numbers in a client's JSON may be of any size.
    return Response(msgspec.json.encode(document), media_type="application/json")
