"""Entries as files of any file system that fsspec knows: a local folder, S3, memory.

A file is ``TENANT/SESSION/NAME`` below the root, with keyed hashes for all three. It appears whole:
where a write isn't atomic by itself, it goes to a draft that is then renamed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar

from .names import MARK, NAME, TEXT, Shelf, kind_of, millis_of
from .space import PartUsage, SpaceError

T = TypeVar("T")

_THREADS = 8
_REFRESH_S = 60.0
"""Age at which sizes are asked again, which other proxies change, too."""

_TENANTS = 256
"""Tenants whose sizes are remembered."""

_DRAFT = ".draft"
_DRAFTED = re.compile(rf"({NAME.pattern})-[0-9a-f]{{16}}{re.escape(_DRAFT)}")

_WHOLE = frozenset({"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""File systems whose files appear whole, and have no real folders."""

_Entry = tuple[str, str]
"""Session and name."""


class FileSpace:
    """A :class:`~.space.Space` of files.

    Args:
        system: a file system of fsspec, without a cache of listings.
        root: path of the folder in it.
        timeout_s: time limit for one operation; its thread may go on.
    """

    name = "files"

    def __init__(self, system: Any, root: str, *, timeout_s: float) -> None:
        self._system = system
        self._root = root.rstrip("/")
        self._timeout_s = timeout_s
        protocol = system.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._appears_whole = not protocols.isdisjoint(_WHOLE)
        self._threads = ThreadPoolExecutor(_THREADS, "recall-store")
        self._sizes: OrderedDict[str, tuple[float, dict[_Entry, int]]] = OrderedDict()
        self.problem: str | None = None

    @property
    def usage(self) -> PartUsage:
        return PartUsage()

    async def check(self) -> None:
        with suppress(SpaceError):
            await self._do(partial(self._system.makedirs, self._root, exist_ok=True))

    async def names(self, shelf: Shelf) -> Sequence[str]:
        return [*await self._do(partial(self._listed, self._folder(shelf)))]

    async def read(
        self, shelf: Shelf, names: Collection[str], most: int | None = None
    ) -> Mapping[str, bytes]:
        return await self._do(partial(self._read, self._folder(shelf), names, most))

    async def write(self, shelf: Shelf, entries: Mapping[str, bytes], ttl_s: float) -> None:
        await self._do(partial(self._write, self._folder(shelf), entries))
        known = self._sizes.get(shelf[0])
        if known is not None:
            known[1].update({(shelf[1], name): len(entry) for name, entry in entries.items()})

    async def remove(self, shelf: Shelf, names: Collection[str]) -> None:
        if names:
            await self._do(partial(self._remove, self._folder(shelf), names))
        known = self._sizes.get(shelf[0])
        if known is not None:
            for name in names:
                known[1].pop((shelf[1], name), None)

    async def trim(self, tenant: str, kind: str, *, most: int, before: int) -> int:
        sizes = await self._tenant(tenant)
        held = sorted(
            (each for each in sizes.items() if kind_of(each[0][1]) == kind),
            key=lambda each: millis_of(each[0][1]),
        )
        left = sum(size for _, size in held)
        doomed: dict[str, list[str]] = {}
        for (session, name), size in held:
            if millis_of(name) >= before and left <= most:
                break
            doomed.setdefault(session, []).append(name)
            left -= size
        for session, names in doomed.items():
            await self.remove((tenant, session), names)
        return left

    async def count(self, tenant: str, since: int) -> int:
        sizes = await self._tenant(tenant, fresh=True)
        return sum(kind_of(name) == TEXT and millis_of(name) >= since for _, name in sizes)

    async def tidy(self, before: Mapping[str, int]) -> None:
        tenants = await self._do(partial(self._folders, self._root))
        for tenant in tenants:
            await self._do(partial(self._tidy, f"{self._root}/{tenant}", before))

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _tenant(self, tenant: str, *, fresh: bool = False) -> dict[_Entry, int]:
        """Return sizes of a tenant's entries."""
        at, sizes = self._sizes.get(tenant, (0.0, {}))
        if fresh or not at or time.monotonic() - at > _REFRESH_S:
            sizes = await self._do(partial(self._found, f"{self._root}/{tenant}"))
            self._sizes[tenant] = time.monotonic(), sizes
        self._sizes.move_to_end(tenant)
        while len(self._sizes) > _TENANTS:
            self._sizes.popitem(last=False)
        return sizes

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await asyncio.wrap_future(self._threads.submit(work))
        except Exception as error:  # a file system raises what its own library does
            slow = isinstance(error, TimeoutError) and not isinstance(error, OSError)
            kind = "no answer in time" if slow or not str(error) else type(error).__name__
            self.problem = f"the file system failed ({kind})"
            raise SpaceError(self.problem) from None
        self.problem = None
        return answer

    # The rest blocks, and runs in the threads.

    def _folder(self, shelf: Shelf) -> str:
        return "/".join((self._root, *shelf))

    def _listed(self, folder: str) -> dict[str, int]:
        """Return sizes of the entries in a session's folder."""
        found = {}
        for each in self._ls(folder):
            name = each["name"].rstrip("/").rpartition("/")[2]
            if each["type"] == "file" and NAME.fullmatch(name):
                found[name] = int(each["size"] or 0)
        return found

    def _folders(self, folder: str) -> list[str]:
        names = (each["name"].rstrip("/").rpartition("/")[2] for each in self._ls(folder))
        return [name for name in names if re.fullmatch("[0-9a-f]{32}", name)]

    def _ls(self, folder: str) -> Sequence[Mapping[str, Any]]:
        try:
            return list(self._system.ls(folder, detail=True))
        except FileNotFoundError:
            return ()

    def _found(self, folder: str) -> dict[_Entry, int]:
        return {
            (session, name): size
            for session in self._folders(folder)
            for name, size in self._listed(f"{folder}/{session}").items()
        }

    def _read(self, folder: str, names: Collection[str], most: int | None) -> dict[str, bytes]:
        found = {}
        part = {} if most is None else {"start": 0, "end": most}
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = bytes(self._system.cat_file(f"{folder}/{name}", **part))
        return found

    def _write(self, folder: str, entries: Mapping[str, bytes]) -> None:
        if not self._appears_whole and any(kind_of(name) == MARK for name in entries):
            self._remove_drafts(folder)
        for name, entry in entries.items():
            path = f"{folder}/{name}"
            if self._appears_whole:
                self._system.pipe_file(path, entry)
                continue
            try:
                self._write_draft(path, entry)
            except FileNotFoundError:  # another proxy has just removed the empty folder
                self._write_draft(path, entry)

    def _write_draft(self, path: str, entry: bytes) -> None:
        draft = f"{path}-{token_hex(8)}{_DRAFT}"
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._system.pipe_file(draft, entry)
            self._system.mv(draft, path)
        except BaseException:
            with suppress(Exception):
                self._system.rm_file(draft)
            raise

    def _remove_drafts(self, folder: str) -> None:
        """Remove drafts of texts, as a proxy that was killed leaves them.

        Of a write that is under way, the second try comes after the mark, and sees it.
        """
        for each in self._ls(folder):
            name = each["name"].rpartition("/")[2]
            if _DRAFTED.fullmatch(name) and kind_of(name) == TEXT:
                with suppress(FileNotFoundError):
                    self._system.rm_file(f"{folder}/{name}")

    def _remove(self, folder: str, names: Collection[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._system.rm_file(f"{folder}/{name}")
        self._remove_empty(folder)

    def _remove_empty(self, folder: str) -> None:
        if not self._appears_whole:
            with suppress(Exception):  # it isn't empty, or has been removed
                self._system.rmdir(folder)

    def _tidy(self, tenant: str, before: Mapping[str, int]) -> None:
        for session in self._folders(tenant):
            folder = f"{tenant}/{session}"
            names = [each["name"].rpartition("/")[2] for each in self._ls(folder)]
            for name in names:
                drafted = _DRAFTED.fullmatch(name)
                old = NAME.fullmatch(name) and millis_of(name) < before[kind_of(name)]
                if old or (drafted and millis_of(drafted[1]) < before[TEXT]):
                    with suppress(FileNotFoundError):
                        self._system.rm_file(f"{folder}/{name}")
            self._remove_empty(folder)
        self._remove_empty(tenant)
