"""The operator's keys, from files."""

from __future__ import annotations

from pathlib import Path


def read_keys(path: Path) -> list[str]:
    """Return the keys in a file, one per line; ``#`` starts a comment.

    Raises:
        ValueError: it can't be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"the key file {path} can't be read: {error.strerror}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ValueError(f"the key file {path} holds no key")
    return keys
