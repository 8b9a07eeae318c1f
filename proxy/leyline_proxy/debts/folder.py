"""Debts in a folder, for processes of one machine without Redis.

Each carrier has a folder of its own, with one file per debt and a file that it keeps locked while
it lives: the system releases the lock when the process ends, however it ends. Files hold names, no
text, and only this user may read them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import TypeVar

import msgspec

from .book import Debt, DebtKey, DebtStoreGoneError, Inherited

_LOCK = ".lock"
_DEBT = msgspec.json.Decoder(Debt)

T = TypeVar("T")


class FolderDebtStore:
    """A :class:`~.store.DebtStore` for processes that share a folder."""

    name = "folder"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._own = root
        self._lock: int | None = None
        self._one = Lock()

    async def write(self, debts: Sequence[Debt], paid: Sequence[DebtKey]) -> bool:
        return await self._in_turn(lambda: self._write(debts, paid))

    async def inherit(self, *, whole: bool = False) -> Inherited:
        return await self._in_turn(lambda: self._inherit(whole))

    async def aclose(self) -> None:
        with suppress(DebtStoreGoneError):  # the system releases the lock
            await self._in_turn(self._close)

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Return the result of ``work`` in a thread, after work whose caller waits no more: an old
        write must not undo a new one."""

        def alone() -> T:
            with self._one:
                return work()

        try:
            return await asyncio.to_thread(alone)
        except OSError as error:
            raise DebtStoreGoneError from error

    def _write(self, debts: Sequence[Debt], paid: Sequence[DebtKey]) -> bool:
        known = self._open()
        for each in debts:
            _replace(self._own / _name(each.key), msgspec.json.encode(each))
        for key in paid:
            (self._own / _name(key)).unlink(missing_ok=True)
        _sync(self._own)
        return known

    def _inherit(self, whole: bool) -> Inherited:
        known = self._open()
        found = list(_debts_in(self._own)) if whole else []
        for each in self._root.iterdir():
            if each == self._own or not each.is_dir():
                continue
            try:
                lock = _locked(each / _LOCK)
            except (PermissionError, IsADirectoryError):
                continue  # no carrier's, such as a file system's lost+found
            if lock is None:
                continue  # its carrier lives
            try:
                with suppress(FileNotFoundError):  # another heir was faster
                    found += self._take(each)
            finally:
                os.close(lock)
        return Inherited(tuple(found), known)

    def _take(self, folder: Path) -> list[Debt]:
        """Move the debts of a carrier that has gone into this one's folder."""
        found = list(_debts_in(folder))
        for each in folder.iterdir():
            if not each.name.startswith("."):
                each.replace(self._own / each.name)
        _sync(self._own)
        _remove(folder)
        return found

    def _open(self) -> bool:
        """Have a folder of one's own; return False if it is a new one."""
        if self._lock is not None and (self._own / _LOCK).exists():
            return True
        self._release()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        while self._lock is None:  # an heir may have been faster
            self._own = self._root / token_hex(8)
            self._own.mkdir(mode=0o700)
            (self._own / _LOCK).touch(mode=0o600)
            try:
                self._lock = _locked(self._own / _LOCK)
            except OSError:
                _remove(self._own)
                raise
        _sync(self._root)
        return False

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _close(self) -> None:
        if self._lock is not None and not any(_debts_in(self._own)):
            _remove(self._own)
        self._release()


def _name(key: DebtKey) -> str:
    digest = blake2b(digest_size=16)
    for part in key:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.hexdigest()


def _debts_in(folder: Path) -> Iterator[Debt]:
    for each in sorted(folder.iterdir()):
        if not each.name.startswith("."):
            with suppress(msgspec.MsgspecError):  # another version wrote it in another way
                yield _DEBT.decode(each.read_bytes())


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    beside = path.with_name(f".{path.name}")
    beside.touch(mode=0o600)
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _locked(path: Path) -> int | None:
    """Return the descriptor of a file that is locked from now on; None if another has it.

    Raises:
        OSError: files can't be locked there.
    """
    try:
        found = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(found)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return found


def _sync(folder: Path) -> None:
    found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(found)
    finally:
        os.close(found)


def _remove(folder: Path) -> None:
    with suppress(OSError):  # what is left is taken over once more, which does no harm
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()
