"""Files that are there whole or not at all, and one command at a time per output folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import PlanError


def write_whole(path: Path, text: str) -> None:
    """Write a file; after a crash, it has either its old content or all of the new.

    Raises:
        OSError: it can't be written. No part of it stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


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
