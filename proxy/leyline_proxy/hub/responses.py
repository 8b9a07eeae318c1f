"""Stored responses that workers share."""

from __future__ import annotations

import msgspec

from ..model.stored_response import StoredResponse, decode, encode
from ..sessions.stored_responses import ResponseShelf
from .link import HubLink
from .server import Handlers, Part
from .wire import Method


class _Put(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    id: str
    raw: bytes
    session: str
    turn: int


class _Found(msgspec.Struct, array_like=True, frozen=True):
    raw: bytes | None


PUT = Method("responses.put", _Put, type(None))
GET = Method("responses.get", tuple[str, str], _Found)
DELETE = Method("responses.delete", tuple[str, str], bool)
COUNT_IN = Method("responses.count_in", tuple[str, str], int)
DELETE_FROM = Method("responses.delete_from", tuple[str, str, int], int)


class HubResponses(Part):
    """The responses of all workers."""

    def __init__(self, shelf: ResponseShelf) -> None:
        self._shelf = shelf

    def handlers(self, handlers: Handlers) -> None:
        shelf = self._shelf
        handlers.add(PUT, lambda _, a: shelf.put(a.tenant, a.id, a.raw, a.session, a.turn))
        handlers.add(GET, lambda _, asked: _Found(shelf.get(*asked)))
        handlers.add(DELETE, lambda _, asked: shelf.delete(*asked))
        handlers.add(COUNT_IN, lambda _, asked: shelf.count_in(*asked))
        handlers.add(DELETE_FROM, lambda _, asked: shelf.delete_from(*asked))


class SharedResponses:
    """A :class:`~leyline_proxy.sessions.stored_responses.ResponseStore` of one worker."""

    def __init__(self, link: HubLink) -> None:
        self._link = link

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        raw = encode(stored)
        await self._link.ask(PUT, _Put(tenant, response_id, raw, stored.session, stored.turn))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        raw = (await self._link.ask(GET, (tenant, response_id))).raw
        return decode(raw) if raw is not None else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        return await self._link.ask(DELETE, (tenant, response_id))

    async def count_in(self, tenant: str, session: str) -> int | None:
        return await self._link.ask(COUNT_IN, (tenant, session))

    async def delete_from(self, tenant: str, session: str, turn: int) -> int:
        return await self._link.ask(DELETE_FROM, (tenant, session, turn))
