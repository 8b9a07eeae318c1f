"""Bodies of Leyline's own routes, checked against their types: proofs, quarantine, recall."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ..errors import BadRequestError
from ..model.fields import field_error
from ..model.verdicts import MAX_VERDICTS

MAX_SPANS = 1024
MAX_WAIT_S = 60.0
MAX_ADDRESSES = 256
_ADDRESS = re.compile(r"(?:leyline://sha256/|sha256:)([0-9a-f]{12,64})")

Why = Literal["injection", "malware", "secret", "personal_data", "policy", "other"]
"""Reasons for a quarantine, for the audit log. Words from a list hold no text of a prompt."""

B = TypeVar("B", bound=msgspec.Struct)
_Index = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=160)]
_Address = Annotated[str, msgspec.Meta(max_length=128)]


class ProofBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A demand for a forget with a proof."""

    spans: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    """Names from the session's ledger; without any, everything of the session."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 10.0
    """Longest time to wait for requests that still hold some of it."""
    responses: bool = False
    """True to delete the session's stored responses, too."""


class QuarantineBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages to put into quarantine."""

    messages: Annotated[tuple[_Index, ...], msgspec.Meta(max_length=MAX_VERDICTS)] = ()
    """Indices into the list that the client sent with the session's newest turn."""
    spans: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_VERDICTS)] = ()
    """Names from the session's ledger."""
    reason: Why = "other"
    responses: bool = False
    """True to delete the stored responses that hold the messages or were made after them."""


class RecallBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The texts that a caller wants back."""

    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    """Addresses as in stubs, or as references; each may lack its last digits."""
    budget_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most tokens to return; None for no limit."""


def checked_body(body: Mapping[str, Any], kind: type[B]) -> B:
    """Return a body as a value of its type.

    Raises:
        BadRequestError: names the field.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        found = field_error("", str(error), kind.__struct_fields__, body)
        param = found.param.removeprefix(".")
        text = str(found).removeprefix(".")
        raise BadRequestError(text if param else f"The body{text}", param=param or None) from error


def quarantine_body(body: Mapping[str, Any]) -> QuarantineBody:
    """Return a demand for a quarantine, as :func:`checked_body`; it names some messages."""
    wanted = checked_body(body, QuarantineBody)
    if not wanted.messages and not wanted.spans:
        raise BadRequestError(
            "Name what goes into quarantine: messages, as indices into the newest list, or spans, "
            "as the session's ledger names them.",
            param="messages",
        )
    return wanted


def recall_body(document: Mapping[str, Any]) -> RecallBody:
    """Return a demand for texts, as :func:`checked_body`, each address in its form with a colon."""
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
