"""The key file, read again when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from leyline_policies import PolicyError

from ..settings.api_keys import ApiKey, parse_keys
from ..settings.named_files import FileVersion, NamedFileError, file_version, read_within
from ..telemetry.metrics import Metrics

log = structlog.get_logger("leyline.keys")

_MAX_BYTES = 4 * 1024 * 1024


class KeyFile:
    """The valid keys, from a file that may change.

    A key removed from the file is invalid from the next look on. A file that can't be read, is
    wrong, or holds no key changes nothing, since it may be half written: the last good one remains
    in force.

    Args:
        replace: takes the keys of a new file; may raise ValueError or PolicyError to refuse them.
    """

    def __init__(
        self,
        path: Path,
        replace: Callable[[Iterable[ApiKey]], None],
        metrics: Metrics,
        *,
        interval_s: float = 1.0,
    ) -> None:
        self._path = path
        self._replace = replace
        self._metrics = metrics
        self._interval_s = interval_s
        # The file may have changed since the start: the first look reads again.
        self._signature: FileVersion | None = None
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """The reason that the current file isn't in force; None if it is."""
        return self._problem

    async def run(self) -> None:
        """Check the file at intervals, forever."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval_s)

    async def refresh(self) -> bool:
        """Read the file if it has changed; return True if its keys are now in force."""
        signature = await asyncio.to_thread(file_version, self._path)
        if signature == self._signature:
            return False
        first = self._signature is None
        self._signature = signature
        try:
            keys = await asyncio.to_thread(read_keys, self._path)
            self._replace(keys)
        except (ValueError, PolicyError) as error:
            self._problem = str(error)
            self._metrics.key_reloads.labels("refused").inc()
            log.error("api_keys_refused", path=str(self._path), problem=self._problem)
            return False
        self._problem = None
        if not first:
            self._metrics.key_reloads.labels("loaded").inc()
            log.info("api_keys_loaded", path=str(self._path), keys=len(keys))
        return True


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file.

    Raises:
        NamedFileError: it can't be read, a line is wrong (not quoted), or it has no key.
    """
    raw = read_within(path, "api_keys_file", _MAX_BYTES)
    try:
        # Some editors write a byte order mark, which would become part of a tenant's name.
        keys = parse_keys(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise NamedFileError(f"api_keys_file {path} is no UTF-8 text") from error
    except ValueError as error:
        raise NamedFileError(f"api_keys_file {path}, {error}") from error
    if not keys:
        raise NamedFileError(f"api_keys_file {path} holds no key")
    return keys
