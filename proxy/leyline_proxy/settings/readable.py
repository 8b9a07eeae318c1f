"""The settings that can be read although others have errors, for a report that continues."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsError

from .faults import settings_named, unreadable_setting
from .proxy import Settings

_MOST = 32
"""Largest number of settings that are left out."""
_STAND_IN = "session_secret"
"""A secret that may be missing while all that needs it is examined with another one."""

Read = Callable[[Collection[str], Mapping[str, Any]], Settings]
"""Reads the settings: without some, by name, and with others given."""


@dataclass(frozen=True, slots=True)
class ReadablePart:
    """Settings without those that have errors."""

    settings: Settings
    missing: frozenset[str] = frozenset()
    """Names of settings that were left out: they have their defaults."""
    invented: frozenset[str] = frozenset()
    """Names of secrets that were missing, and have values made up for this reading."""
    later: tuple[Exception, ...] = ()
    """Errors that only showed once those of the first reading were out of the way."""


def readable_part(read: Read, error: Exception) -> ReadablePart | None:
    """Return the settings that can be read; None if the sources themselves can't.

    Args:
        error: the one of the first reading.
    """
    missing: set[str] = set()
    invented: dict[str, Any] = {}
    later: list[Exception] = []
    while isinstance(error, ValidationError | SettingsError) and len(missing) < _MOST:
        found = len(missing) + len(invented)
        unreadable = unreadable_setting(error) if isinstance(error, SettingsError) else None
        if unreadable is not None:
            missing.add(unreadable)
        for item in _items(error):
            named = [str(item["loc"][0])] if item["loc"] else settings_named(str(item["msg"]))
            if _STAND_IN in named and not item["loc"] and _STAND_IN not in invented:
                missing.add(_STAND_IN)
                invented[_STAND_IN] = [secrets.token_hex(32)]
            else:
                missing.update(name for name in named[:1] if name not in missing)
        if len(missing) + len(invented) == found:
            return None
        try:
            settings = read(missing, invented)
        except (OSError, ValueError) as again:
            error = again
            if unreadable is not None or isinstance(again, SettingsError):
                later.append(again)
        else:
            names = frozenset(missing - invented.keys())
            return ReadablePart(settings, names, frozenset(invented), tuple(later))
    return None


def _items(error: ValidationError | SettingsError) -> Sequence[ErrorDetails]:
    """Return what a reading found wrong, but for variables that can't be decoded."""
    if isinstance(error, SettingsError):
        return ()
    return error.errors(include_input=False, include_url=False)
