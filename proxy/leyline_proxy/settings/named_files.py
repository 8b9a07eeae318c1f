"""Files that settings name: their versions, and their content within a bound. Both block."""

from __future__ import annotations

from pathlib import Path


class NamedFileError(ValueError):
    """A file that can't serve. The message begins with the setting that names it."""


FileVersion = tuple[int, int, int, int]


def file_version(path: Path) -> FileVersion:
    """Return the identity of a file's version; zeros if there is none.

    A file that is replaced, or a link that is turned to another one, changes the inode.
    """
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    # Includes the time of the status change, because a file may become readable.
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


def read_within(path: Path, setting: str, most: int) -> bytes:
    """Return the content of a file.

    Args:
        setting: names it in messages.
        most: bytes.

    Raises:
        NamedFileError: it can't be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise NamedFileError(f"{setting} {path} can't be read: {error.strerror}") from error
    if len(found) > most:
        raise NamedFileError(f"{setting} {path} has more than {most} bytes")
    return found
