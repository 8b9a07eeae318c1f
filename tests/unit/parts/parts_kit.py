"""Stores of evicted texts over each kind of space, for the tests of this folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from support.clock import Clock
from support.redis_server import redis_server

from leyline_proxy.model.parts import StoredPart
from leyline_proxy.parts.limits import PartLimits
from leyline_proxy.parts.memory import MemorySpace
from leyline_proxy.parts.names import Shelf
from leyline_proxy.parts.redis import RedisSpace
from leyline_proxy.parts.sealing import PartSeal
from leyline_proxy.parts.space import PartUsage, Space, SpaceError
from leyline_proxy.parts.store import PartStore
from leyline_proxy.sessions.redis import RedisOptions
from leyline_proxy.wiring.recall import file_space

KINDS = ("memory", "redis", "folder", "object_store")
OLD, NEW = "the old key, long enough", "the new key, long enough"
RED, BLUE = ("red", "s"), ("blue", "s")
START = 1_700_000_000.0
LIMITS = PartLimits(ttl_s=100.0, tenant_bytes=1 << 20, part_bytes=1 << 18)


def address_of(text: str) -> str:
    """The address of a text."""
    return "sha256:" + sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def part(text: str, **facts: Any) -> StoredPart:
    """An evicted text, with the facts that matter to a test."""
    known = {"role": "tool", "tool": "bash", "tokens": 7, "policy": "p", "turn": "t-0", "index": 0}
    known |= {"tags": ("old",), "created": START}
    return StoredPart(address=address_of(text), text=text, **{**known, **facts})


@dataclass(frozen=True)
class Place:
    """A place that spaces of one kind keep entries in."""

    kind: str
    open: Callable[[], Space]
    """Another proxy's view of it."""
    dump: Callable[[], bytes]
    """Everything that a thief would find: names and contents."""


@contextmanager
def places(folder: Path) -> Iterator[Callable[[str], Place]]:
    """A function that makes a fresh place of a kind; Redis runs for all of them."""
    home = folder / "redis"
    home.mkdir()
    with redis_server(home) as server:
        yield lambda kind: _place(kind, folder, server)


def _place(kind: str, folder: Path, server: Any) -> Place:
    label = f"x{token_hex(8)}"
    if kind == "memory":
        memory = MemorySpace(1 << 30)
        return Place(kind, lambda: memory, lambda: b"")
    if kind == "redis":
        return Place(
            kind,
            lambda: RedisSpace(RedisOptions(server.url, timeout_s=5), label),
            lambda: _redis_dump(server, label),
        )
    url = f"memory://{label}" if kind == "object_store" else f"file://{folder / label}"
    return Place(kind, lambda: file_space(url, timeout_s=10), lambda: _files_dump(url))


def _redis_dump(server: Any, label: str) -> bytes:
    with server.client() as client:
        keys = list(client.scan_iter(f"{label}:*"))
        readers = {b"hash": client.hgetall, b"zset": lambda key: client.zrange(key, 0, -1)}
        return repr([(key, readers[client.type(key)](key)) for key in keys]).encode()


def _files_dump(url: str) -> bytes:
    system = file_space(url, timeout_s=10)
    try:
        found = system._system.find(system._root)
        return b"".join(name.encode() + system._system.cat_file(name) for name in found)
    finally:
        system._threads.shutdown()


def store_over(
    space: Space,
    clock: Clock,
    *keys: str,
    limits: PartLimits = LIMITS,
    failed: Callable[[str], object] = lambda _: None,
) -> PartStore:
    """A store over a space."""
    return PartStore(space, PartSeal(keys or (OLD,)), limits, clock=clock, failed=failed)


class Between:
    """A space whose operations begin and end at odd times, with a hook between them."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    async def _pause(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def names(self, shelf: Shelf) -> Sequence[str]:
        await self._pause()
        found = await self._space.names(shelf)
        await self._pause()
        return found

    async def read(
        self, shelf: Shelf, names: Collection[str], most: int | None = None
    ) -> Mapping[str, bytes]:
        await self._pause()
        return await self._space.read(shelf, names, most)

    async def write(self, shelf: Shelf, entries: Mapping[str, bytes], ttl_s: float) -> None:
        await self._pause()
        await self._space.write(shelf, entries, ttl_s)
        await self._pause()

    async def remove(self, shelf: Shelf, names: Collection[str]) -> None:
        await self._pause()
        await self._space.remove(shelf, names)


class Broken:
    """A space that fails from some operation on."""

    name = "broken"
    usage = PartUsage()

    def __init__(self, space: Space) -> None:
        self._space = space
        self.left: int | None = None
        """Operations that still succeed; None for all."""

    @property
    def problem(self) -> str | None:
        return "broken" if self.left == 0 else None

    async def check(self) -> None:
        """Change nothing."""

    def __getattr__(self, name: str) -> Any:

        async def call(*arguments: Any, **named: Any) -> Any:
            if self.left is not None:
                if self.left == 0:
                    raise SpaceError("broken")
                self.left -= 1
            return await getattr(self._space, name)(*arguments, **named)

        return call
