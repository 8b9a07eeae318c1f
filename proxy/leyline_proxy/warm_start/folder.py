"""The folder of manifests. All methods block, and one thread alone may call them."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .runs import FileResult, ManifestError, Outcome
from .sealing import NAME

_MODE = 0o600
_FOLDER_MODE = 0o700
_DRAFT = ".draft"
_LOCK = ".lock"

MAX_FILES = 1024
"""Number of manifests that are read."""


class FolderLockedError(OSError):
    """Another process keeps its manifests in the folder."""


class ManifestFolder:
    """Manifests by name.

    Args:
        max_bytes: largest size of one.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lock: int | None = None

    @property
    def taken(self) -> bool:
        """True if a process has locked the folder. Changes nothing.

        Raises:
            OSError: the lock can't be examined.
        """
        try:
            descriptor = os.open(self._path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def claim(self) -> None:
        """Create the folder if it is missing, and lock it for this process.

        Raises:
            FolderLockedError: another process has it.
            OSError: it can't be written to.
        """
        self._path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path / _LOCK, flags, _MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise FolderLockedError(f"{self._path} is another proxy's") from error
        self._lock = descriptor
        for draft in self._path.glob(f"*{_DRAFT}"):
            draft.unlink(missing_ok=True)

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def names(self) -> list[str]:
        """Return the manifests' names, the newest first.

        Raises:
            OSError: the folder can't be read.
        """
        found: list[tuple[float, str]] = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        found.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
        return [name for _, name in sorted(found, reverse=True)]

    def read(self, name: str) -> bytes:
        """Return a manifest as it is on the disk.

        Raises:
            ManifestError: unreadable, or too large; then nothing of it was read.
        """
        try:
            # Without waiting for the writer of a named pipe.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(self._path / name, flags), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise ManifestError(Outcome.UNREADABLE)
                if found.st_size > self._max_bytes:
                    raise ManifestError(Outcome.TOO_LARGE)
                data = file.read(self._max_bytes + 1)
        except OSError as error:
            raise ManifestError(Outcome.UNREADABLE) from error
        if len(data) > self._max_bytes:
            raise ManifestError(Outcome.TOO_LARGE)
        return data

    def write(self, name: str, data: bytes) -> FileResult:
        """Replace a manifest as a whole."""
        draft = self._path / f"{name}{_DRAFT}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(draft, flags, _MODE), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path / name)
            self._sync()
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            return FileResult.FAILED
        return FileResult.WRITTEN

    def remove(self, name: str) -> FileResult:
        """Delete a manifest, or at least its content."""
        path = self._path / name
        try:
            path.unlink(missing_ok=True)
            self._sync()
            return FileResult.REMOVED
        except OSError:
            pass
        # A file may be writable in a folder that isn't.
        try:
            flags = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags), "wb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            return FileResult.REMOVED
        except OSError:
            return FileResult.LEFT
        return FileResult.REMOVED

    def replace_or_remove(self, name: str, data: bytes | None) -> FileResult:
        """Replace a manifest whose old content must go, or delete it.

        Args:
            data: the new manifest; None for none.
        """
        if data is not None and self.write(name, data) is FileResult.WRITTEN:
            return FileResult.WRITTEN
        return self.remove(name)

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_within(folder: ManifestFolder, seconds: float) -> Iterator[tuple[str, bytes | Outcome]]:
    """Yield each manifest's name with its bytes, or the reason that there are none.

    Args:
        seconds: time after which no further manifest is read.

    Raises:
        OSError: the folder can't be read.
    """
    end = time.monotonic() + seconds
    for number, name in enumerate(folder.names()):
        if time.monotonic() > end:
            yield name, Outcome.OVER_TIME
            continue
        if number >= MAX_FILES:
            yield name, Outcome.TOO_LARGE
            continue
        try:
            yield name, folder.read(name)
        except ManifestError as error:
            yield name, error.outcome
