"""Fields of a client's request in another API: their errors, and their places in a chat request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLACE = re.compile(r"messages\[(\d+)\]")


class FieldError(ValueError):
    """A request that can't be mapped.

    Args:
        param: the field.
        code: the error's own code in the API, if any: clients act on it.
        missing: True if the field names something that doesn't exist.
    """

    def __init__(
        self, param: str, message: str, *, code: str | None = None, missing: bool = False
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.missing = missing


class UnreadableError(FieldError):
    """A part that only another provider can read. In a history it is no error."""


def string(place: str, part: Mapping[str, Any], name: str) -> str:
    """Return a member that is a string.

    Args:
        place: the part's.

    Raises:
        FieldError: it isn't a string.
    """
    value = part.get(name)
    if isinstance(value, str):
        return value
    raise FieldError(f"{place}.{name}", f"{place}.{name} must be a string.")


def in_request(text: str, origins: Sequence[str]) -> str:
    """Return a text with the client's own fields in place of a chat request's ``messages[i]``.

    Args:
        origins: field of each chat message.
    """

    def origin(match: re.Match[str]) -> str:
        index = int(match[1])
        return origins[index] if index < len(origins) else match[0]

    return _PLACE.sub(origin, text)
