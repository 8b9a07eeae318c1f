"""Checks of the warm start's folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..settings import Settings
from ..warm_start.folder import ManifestFolder
from .findings import Finding, fail, ok, skip, warn

_NAME = "warm-start"


def examine_warm_start(settings: Settings) -> list[Finding]:
    """Check that the proxy, and nobody else, can keep prompts in the folder. A missing key is a
    fault of the settings."""
    path = settings.warm_start_path
    if path is None:
        return [skip(_NAME, "the warm start is off (warm_start_path)")]
    if not path.exists():
        return [_missing(path)]
    return [_unusable(path) or _open(path) or ok(_NAME, f"encrypted prompts go to {path}")]


def _unusable(path: Path) -> Finding | None:
    """Return the reason that the proxy can't use a folder; None if it can."""
    fix = f"Make {path} a folder of the proxy's user: chown it, and chmod 700."
    cold = f"prompts can't be kept in {path}, so new engines start cold"
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return fail(_NAME, cold, fix)
    try:
        taken = ManifestFolder(path, 0).taken
    except OSError as error:
        return fail(_NAME, f"{cold} ({error.strerror})", fix)
    if taken:
        return warn(
            _NAME,
            f"a proxy already keeps its prompts in {path}",
            "This is fine if it is your proxy; a second proxy needs its own warm_start_path.",
        )
    return None


def _open(path: Path) -> Finding | None:
    """Return a warning about a folder that others can use; None if they can't."""
    if not stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        return None
    return warn(
        _NAME,
        f"other users can look into {path}, or change it",
        f"chmod 700 {path}. The prompts in it are encrypted.",
    )


def _missing(path: Path) -> Finding:
    parent = next(each for each in path.absolute().parents if each.exists())
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return ok(_NAME, f"{path} will be created")
    return fail(
        _NAME,
        f"{path} is missing and can't be created, so new engines start cold",
        f"mkdir -m 700 -p {path}, and chown it to the proxy's user.",
    )
