"""The operator's keys, from files."""

from __future__ import annotations

import os
from pathlib import Path

from ..settings.named_files import NamedFileError
from .chain import AuditKey


def read_keys(path: Path, setting: str = "the key file") -> list[str]:
    """Return the keys in a file, one per line; ``#`` starts a comment.

    Args:
        setting: names it in messages.

    Raises:
        NamedFileError: it can't be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise NamedFileError(f"{setting} {path} can't be read: {error.strerror}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise NamedFileError(f"{setting} {path} holds no key")
    return keys


def audit_keys(path: Path | None) -> list[AuditKey]:
    """Return the keys in a file, or that in ``LEYLINE_AUDIT_KEY`` if no file is named.

    Raises:
        ValueError: the file can't be read, or has no key.
    """
    if path is not None:
        return [AuditKey.derive(secret) for secret in read_keys(path)]
    secret = os.environ.get("LEYLINE_AUDIT_KEY")
    return [AuditKey.derive(secret)] if secret else []
