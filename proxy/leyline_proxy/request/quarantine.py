"""The body of ``POST /v1/leyline/sessions/{id}/quarantine``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ..errors import BadRequestError
from ..model.verdicts import MAX_VERDICTS
from .checked import checked_body

Why = Literal["injection", "malware", "secret", "personal_data", "policy", "other"]
"""Reasons for a quarantine, for the audit log. Words from a list hold no text of a prompt."""

_Index = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=160)]


class QuarantineBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages to put into quarantine."""

    messages: Annotated[tuple[_Index, ...], msgspec.Meta(max_length=MAX_VERDICTS)] = ()
    """Indices into the list that the client sent with the session's newest turn."""
    spans: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_VERDICTS)] = ()
    """Names from the session's ledger."""
    reason: Why = "other"
    responses: bool = False
    """True to delete the stored responses that hold the messages or were made after them."""


def quarantine_body(body: Mapping[str, Any]) -> QuarantineBody:
    """Return the checked body.

    Raises:
        BadRequestError: names the field.
    """
    wanted = checked_body(body, QuarantineBody)
    if not wanted.messages and not wanted.spans:
        raise BadRequestError(
            "Name what goes into quarantine: messages, as indices into the newest list, or spans, "
            "as the session's ledger names them.",
            param="messages",
        )
    return wanted
