"""Stores of owed forgets, all by the same rules: in memory, hub, folder and a real Redis."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from support.hubs import hub, link
from support.redis_server import RedisServer, redis_server
from support.waiting import until

from leyline_proxy.debts import (
    Debt,
    DebtBook,
    Debts,
    DebtStore,
    DebtStoreGoneError,
    Inherited,
    MemoryDebtStore,
)
from leyline_proxy.debts.book import Owner
from leyline_proxy.debts.folder import FolderDebtStore
from leyline_proxy.debts.redis import RedisDebtStore
from leyline_proxy.hub.debts import HubDebts, SharedDebtStore
from leyline_proxy.sessions.redis import RedisOptions

KINDS = ("memory", "hub", "redis", "folder")
LEASE_S = 0.5

Answer = TypeVar("Answer")

A, B = (Debt("red", "s", run, "gpu1", 5.0) for run in ("f@1", "f@2"))
OTHER = Debt("blue", "s", "f@1", "gpu1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for the tests that don't harm it."""
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


class Carriers:
    """Processes that share debts."""

    def __init__(self, kind: str, server: RedisServer, folder: Path, stack: AsyncExitStack) -> None:
        self._kind, self._server, self._folder, self._stack = kind, server, folder, stack
        self._book = DebtBook()
        self._links: dict[DebtStore, AsyncExitStack] = {}

    async def store(self) -> DebtStore:
        """A new process's store."""
        if self._kind == "memory":
            return MemoryDebtStore(self._book)
        if self._kind == "redis":
            options = RedisOptions(self._server.url, timeout_s=5)
            store = RedisDebtStore(options, self._folder.name, lease_s=LEASE_S)
            self._stack.push_async_callback(store._link.aclose)
            return store
        if self._kind == "folder":
            return FolderDebtStore(self._folder / "debts")
        stack = await self._stack.enter_async_context(AsyncExitStack())
        shared = SharedDebtStore(await stack.enter_async_context(link(self._folder / "hub")))
        self._links[shared] = stack
        return shared

    async def kill(self, store: DebtStore) -> None:
        """End a process without a word."""
        if isinstance(store, MemoryDebtStore):
            self._book.leave(store)
        elif isinstance(store, SharedDebtStore):
            await self._links[store].aclose()
        elif isinstance(store, FolderDebtStore):
            store._release()


@pytest.fixture(params=KINDS)
async def carriers(
    request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path
) -> AsyncIterator[Carriers]:
    """Processes that share debts, by kind of store."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(tmp_path / "hub", HubDebts()))
        yield Carriers(request.param, server, tmp_path, stack)


async def inherited(store: DebtStore, count: int) -> list[Debt]:
    """The debts that a process inherits, once they are that many."""
    found: list[Debt] = []

    async def enough() -> bool:
        found.extend((await store.inherit()).debts)
        return len(found) >= count

    await until(enough)
    return sorted(found, key=lambda each: each.key)


async def test_debts_of_a_killed_process_go_to_one_other(carriers: Carriers) -> None:
    """They are inherited whole, once, and again from an heir that is killed in turn; what was paid
    is not."""
    first, second, third = [await carriers.store() for _ in range(3)]
    await first.write([A, B, OTHER], [])
    await first.write([], [B.key])
    for each in (second, third):
        assert (await each.inherit()).debts == (), "its carrier lives"
    await carriers.kill(first)
    assert await inherited(second, 2) == [OTHER, A]
    assert (await third.inherit()).debts == ()
    await second.write([], [OTHER.key])
    await carriers.kill(second)
    assert await inherited(third, 1) == [A]


async def test_a_process_that_stops_leaves_its_debts_at_once(carriers: Carriers) -> None:
    """Nobody waits for a lease then, and a process without debts leaves nothing."""
    first, idle, second = [await carriers.store() for _ in range(3)]
    await first.write([A], [])
    await idle.inherit()
    for each in (first, idle):
        await each.aclose()
        await carriers.kill(each)
    await asyncio.sleep(0.01)
    assert await inherited(second, 1) == [A]


async def test_two_processes_may_owe_the_same(carriers: Carriers) -> None:
    """One's payment leaves the other's debt: its demand may have come later."""
    first, second, third = [await carriers.store() for _ in range(3)]
    await first.write([A], [])
    await second.write([A], [])
    await first.write([], [A.key])
    await carriers.kill(first)
    await carriers.kill(second)
    assert await inherited(third, 1) == [A]


async def test_debts_survive_a_redis_that_was_killed(tmp_path: Path) -> None:
    """A process writes its debts again to a Redis that lost them, and those that it could not write
    meanwhile; it reports until then."""
    with redis_server(tmp_path) as fragile:
        options = RedisOptions(fragile.url, connect_timeout_s=2, timeout_s=2)
        own: dict[Owner, list[Debt]] = {A.owner: [A]}
        debts = Debts(RedisDebtStore(options, "d", lease_s=LEASE_S), lambda o: own.get(o, []))
        debts.changed(A.owner)
        await debts.save()
        assert (debts.problem, debts.unsaved) == (None, 0)
        fragile.kill()
        own[OTHER.owner] = [OTHER]
        debts.changed(OTHER.owner)
        await debts.save()
        assert debts.problem == "redis is out of reach" and debts.unsaved == 1
        fragile.start()

        async def back() -> bool:
            await debts.inherit()
            return debts.problem is None and not debts.unsaved

        await until(back)
        await debts.aclose()
        heir = RedisDebtStore(options, "d")
        assert await inherited(heir, 2) == [OTHER, A]
        await heir.aclose()


class Lossy(MemoryDebtStore):
    """A store whose next answer is lost, after it has done what it was asked."""

    lost = True

    async def write(self, debts: Iterable[Debt], paid: Iterable[tuple[str, str, str]]) -> bool:
        await super().write([*debts], [*paid])
        return self._answer(True)

    async def inherit(self, *, whole: bool = False) -> Inherited:
        found = await super().inherit()
        own = tuple(self._book._carried[self].values())
        return self._answer(Inherited(own) if whole else found)

    def _answer(self, answer: Answer) -> Answer:
        lost, self.lost = self.lost, False
        if lost:
            raise DebtStoreGoneError
        return answer


async def test_a_lost_answer_loses_no_debt() -> None:
    """Debts that were given to a process that didn't hear of it are named to it again."""
    book = DebtBook()
    dead = MemoryDebtStore(book)
    await dead.write([A], [])
    book.leave(dead)
    debts = Debts(Lossy(book), lambda _: [])
    assert await debts.inherit() == []
    assert debts.problem is not None
    assert await debts.inherit() == [A]


async def test_what_a_lost_write_left_is_paid_in_the_end() -> None:
    """A debt that is paid before its write was confirmed doesn't stay in the store."""
    book, own = DebtBook(), [A]
    debts = Debts(Lossy(book), lambda _: own)
    debts.changed(A.owner)
    await debts.save()
    assert len(book) == 1
    own.clear()
    debts.changed(A.owner)
    await debts.save()
    assert len(book) == 0


async def test_a_full_disk_loses_no_debt_and_leaves_no_half_one(tmp_path: Path) -> None:
    """A folder that can't be written reports it, and gets everything once it can be; only this user
    may read it."""
    (tmp_path / "debts").write_text("in the way")
    own = [A, B]
    debts = Debts(FolderDebtStore(tmp_path / "debts"), lambda _: own)
    debts.changed(A.owner)
    await debts.save()
    assert debts.problem == "folder is out of reach" and debts.unsaved == 1
    (tmp_path / "debts").unlink()
    assert await debts.inherit() == []
    await debts.save()
    assert (debts.problem, debts.unsaved) == (None, 0)
    modes = {each.stat().st_mode & 0o077 for each in (tmp_path / "debts").rglob("*")}
    assert modes == {0}
    await debts.aclose()
    assert await inherited(FolderDebtStore(tmp_path / "debts"), 2) == [A, B]


async def test_a_folder_without_locks_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse locks: debts stay with the process, and nothing is left."""
    own = [A]
    debts = Debts(FolderDebtStore(tmp_path), lambda _: own)
    debts.changed(A.owner)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refused)
        await asyncio.wait_for(debts.save(), 5)
    assert debts.problem == "folder is out of reach" and debts.unsaved == 1
    assert not any(entries(tmp_path))
    await debts.save()
    assert debts.unsaved == 0


def entries(folder: Path) -> Iterator[Path]:
    """Return the entries of a folder."""
    return folder.iterdir()


def refused(file: int, operation: int) -> None:
    """Fail as a file system without locks."""
    raise OSError(errno.ENOLCK, "No locks available")


async def test_folders_of_others_hide_no_debts(tmp_path: Path) -> None:
    """The root of a volume has folders that aren't any carrier's, and may not be readable."""
    dead, heir = (FolderDebtStore(tmp_path) for _ in range(2))
    await dead.write([A], [])
    dead._release()
    (tmp_path / "lost+found").mkdir(mode=0)  # an administrator may read it, too
    (tmp_path / "other" / ".lock").mkdir(parents=True)
    assert (await heir.inherit()).debts == (A,)


class Noted(FolderDebtStore):
    """A folder that notes what it ends, and takes debts over only once it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.ended: list[str] = []

    def _take(self, folder: Path) -> list[Debt]:
        self.begun.set()
        self.may_go_on.wait(10)
        found = super()._take(folder)
        self.ended.append("inherited")
        return found

    def _close(self) -> None:
        super()._close()
        self.ended.append("closed")


async def test_a_folder_ends_after_what_it_is_doing(tmp_path: Path) -> None:
    """A stop cancels the wait for a thread, not the thread: its folder isn't removed meanwhile."""
    dead, heir = FolderDebtStore(tmp_path), Noted(tmp_path)
    await dead.write([A], [])
    dead._release()
    inheriting = asyncio.create_task(heir.inherit())
    await asyncio.to_thread(heir.begun.wait, 10)
    inheriting.cancel()
    closing = asyncio.create_task(heir.aclose())
    await asyncio.sleep(0.1)
    heir.may_go_on.set()
    await closing
    assert heir.ended == ["inherited", "closed"]
    assert await inherited(FolderDebtStore(tmp_path), 1) == [A]
