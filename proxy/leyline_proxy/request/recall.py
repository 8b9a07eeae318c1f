"""The body of a request for evicted texts of a session."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..errors import BadRequestError
from .checked import checked_body

MAX_ADDRESSES = 256
_ADDRESS = re.compile(r"(?:leyline://sha256/|sha256:)([0-9a-f]{12,64})")

_Text = Annotated[str, msgspec.Meta(max_length=128)]


class RecallBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The texts that a caller wants back."""

    addresses: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    """Addresses as in stubs, or as references; each may lack its last digits."""
    budget_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most tokens to return; None for no limit."""


def recall_body(document: Mapping[str, Any]) -> RecallBody:
    """Return a body, each address in its form with a colon.

    Raises:
        BadRequestError: names the field.
    """
    body = checked_body(document, RecallBody)
    found = [_ADDRESS.fullmatch(each.strip()) for each in body.addresses]
    for number, match in enumerate(found):
        if match is None:
            param = f"addresses[{number}]"
            raise BadRequestError(
                f"{param} is no address: it is sha256: and 12 to 64 of the digits 0 to f, as in a "
                "stub.",
                param=param,
            )
    addresses = tuple(f"sha256:{match[1]}" for match in found if match is not None)
    return msgspec.structs.replace(body, addresses=addresses)
