"""Evicted texts that workers share: a space in the hub's memory. Workers seal what is in it."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence

import msgspec

from ..parts.memory import MemorySpace
from ..parts.names import Shelf
from ..parts.space import PartUsage
from .link import HubLink
from .server import Handlers, Part
from .wire import Method


class _Named(msgspec.Struct, array_like=True, frozen=True):
    shelf: Shelf
    names: tuple[str, ...]
    most: int | None = None


class _Write(msgspec.Struct, array_like=True, frozen=True):
    shelf: Shelf
    entries: dict[str, bytes]
    ttl_s: float


class _Trim(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    kind: str
    most: int
    before: int


NAMES = Method("spaces.names", tuple[str, str], tuple[str, ...])
READ = Method("spaces.read", _Named, dict[str, bytes])
WRITE = Method("spaces.write", _Write, type(None))
REMOVE = Method("spaces.remove", _Named, type(None))
TRIM = Method("spaces.trim", _Trim, int)
COUNT = Method("spaces.count", tuple[str, int], int)
TIDY = Method("spaces.tidy", dict[str, int], type(None))
USAGE = Method("spaces.usage", type(None), PartUsage)


class HubSpace(Part):
    """The texts of all workers."""

    def __init__(self, space: MemorySpace) -> None:
        self._space = space

    def handlers(self, handlers: Handlers) -> None:
        space = self._space
        handlers.add(NAMES, lambda _, shelf: _listed(space.names(shelf)))
        handlers.add(READ, lambda _, a: _dict(space.read(a.shelf, a.names, a.most)))
        handlers.add(WRITE, lambda _, a: space.write(a.shelf, a.entries, a.ttl_s))
        handlers.add(REMOVE, lambda _, a: space.remove(a.shelf, a.names))
        handlers.add(TRIM, lambda _, a: space.trim(a.tenant, a.kind, most=a.most, before=a.before))
        handlers.add(COUNT, lambda _, asked: space.count(*asked))
        handlers.add(TIDY, lambda _, before: space.tidy(before))
        handlers.add(USAGE, lambda _, __: space.usage)


async def _listed(found: Awaitable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(await found)


async def _dict(found: Awaitable[Mapping[str, bytes]]) -> dict[str, bytes]:
    return dict(await found)


class SharedSpace:
    """A :class:`~leyline_proxy.parts.space.Space` of one worker."""

    name = "memory"
    problem = None

    def __init__(self, link: HubLink) -> None:
        self._link = link
        self._usage = PartUsage()

    @property
    def usage(self) -> PartUsage:
        """The contents, as one worker reports them for all."""
        return self._usage

    async def check(self) -> None:
        if self._link.leads:
            self._usage = await self._link.ask(USAGE, None)

    async def names(self, shelf: Shelf) -> Sequence[str]:
        return await self._link.ask(NAMES, shelf)

    async def read(
        self, shelf: Shelf, names: Collection[str], most: int | None = None
    ) -> Mapping[str, bytes]:
        return await self._link.ask(READ, _Named(shelf, tuple(names), most))

    async def write(self, shelf: Shelf, entries: Mapping[str, bytes], ttl_s: float) -> None:
        await self._link.ask(WRITE, _Write(shelf, dict(entries), ttl_s))
        await self.check()

    async def remove(self, shelf: Shelf, names: Collection[str]) -> None:
        await self._link.ask(REMOVE, _Named(shelf, tuple(names)))

    async def trim(self, tenant: str, kind: str, *, most: int, before: int) -> int:
        return await self._link.ask(TRIM, _Trim(tenant, kind, most, before))

    async def count(self, tenant: str, since: int) -> int:
        return await self._link.ask(COUNT, (tenant, since))

    async def tidy(self, before: Mapping[str, int]) -> None:
        await self._link.ask(TIDY, dict(before))
        await self.check()

    async def aclose(self) -> None:
        """Do nothing: the link is closed by who opened it."""
