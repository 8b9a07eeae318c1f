"""The body of ``POST /v1/leyline/sessions/{id}/proof``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from .checked import checked_body

MAX_SPANS = 1024
MAX_WAIT_S = 60.0

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=160)]


class ProofBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A demand for a forget with a proof."""

    spans: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    """Names from the session's ledger; without any, everything of the session."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 10.0
    """Longest time to wait for requests that still hold some of it."""
    responses: bool = False
    """True to delete the session's stored responses, too."""


def proof_body(body: Mapping[str, Any]) -> ProofBody:
    """Return the checked body.

    Raises:
        BadRequestError: names the field.
    """
    return checked_body(body, ProofBody)
