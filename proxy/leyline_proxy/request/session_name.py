"""The caller's name of a session: as an id, and as people read it."""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

MAX_SHOWN = 128
"""Largest number of characters of a name that are shown."""

_PLAIN_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@-]{1,128}")
_TAIL = 32
"""Number of characters shown of the end of a long name: names often differ there."""


class SessionName(NamedTuple):
    """A name that a caller gave its session."""

    id: str
    """See :func:`public_id`."""
    shown: str
    """The name for people, if the id is another text; else empty."""


def session_name(name: str, secret: str | None = None) -> SessionName:
    """Return the id and the shown form of a caller's name.

    The shown form is bounded, and characters that don't print are escaped: a terminal or a reader
    could take them for something else.

    Args:
        secret: see :func:`public_id`.
    """
    found = public_id(name, secret)
    return SessionName(found, "" if found == name else _shown(name))


def _shown(name: str) -> str:
    # Bounded before it is escaped, and after: an escape is longer than what it stands for.
    return _cut("".join(map(_printable, _cut(name))))


def _cut(text: str) -> str:
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN - _TAIL - 1]}…{text[-_TAIL:]}"


def _printable(character: str) -> str:
    return character if character.isprintable() else f"\\u{{{ord(character):x}}}"


def public_id(name: str, secret: str | None = None) -> str:
    """Return a session id fit for a URL and a header: the caller's own name if it is plain.

    Args:
        secret: keys the hash of any other name. Without it the hash has no key, because an id must
            be the same after a restart.
    """
    if _PLAIN_ID.fullmatch(name):
        return name
    digest = hmac.new((secret or "").encode(), name.encode("utf-8", "surrogatepass"), "sha256")
    return f"h-{digest.hexdigest()[:32]}"
