"""Files that are there whole or not at all, and one command at a time per output folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import PlanError


def write_all(files: Mapping[Path, bytes]) -> None:
    """Write files whole: none of them is there before the bytes of all are on the disk.

    Raises:
        OSError: one can't be written. No part of it stays.
    """
    drafts = {path: path.with_name(f".{path.name}.part") for path in files}
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with drafts[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, draft in drafts.items():
            draft.replace(path)
    finally:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write one file; see :func:`write_all`."""
    write_all({path: text.encode()})


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes of this command.

    Raises:
        PlanError: another one has it.
        OSError: the folder can't be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PlanError(f"another command is writing into {folder}") from error
        yield
