"""Errors in the choice of policies, split by whose fault they are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 80


class PolicyError(Exception):
    """Base of every error this package raises on purpose."""


class SpecError(PolicyError, ValueError):
    """The text that chooses policies is wrong: its writer can fix it."""


class UnknownPolicyError(SpecError):
    """No built-in or installed policy has the requested name."""


class PluginError(PolicyError):
    """An installed policy plugin is broken: its author or installer can fix it."""


class NameClashError(PluginError):
    """Two policies claim one name: one of the packages has to be removed or renamed."""


def shown(text: str) -> str:
    """Return ``text`` quoted for an error message, without its middle if it is long."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 4 :]}"
    return repr(text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x' or 'y'?"``, or nothing if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
