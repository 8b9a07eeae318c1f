"""The envelope in a request body; a malformed one never fails the request."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_engine.contract import (
    EditPayload,
    EnvelopeError,
    Reason,
    SkippedAction,
    is_signed,
    parse_envelope,
    split_actions,
)


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request's ``kv_hints`` amount to."""

    message_id: str | None = None
    payload: EditPayload | None = None
    skipped: tuple[SkippedAction, ...] = ()
    invalid: Reason | None = None
    detail: str = ""


def read_hints(custom_params: object, secret: str | None = None) -> Hints:
    """Decode ``custom_params.kv_hints``; what is wrong with it goes into the result.

    Args:
        secret: what the proxy signs envelopes with; None takes them unsigned.
    """
    raw = envelope_of(custom_params)
    return Hints() if raw is None else decode_hints(raw, secret)


def envelope_of(custom_params: object) -> object:
    """The envelope among a request's parameters as it came; None where there is none."""
    match custom_params:
        case {"kv_hints": raw}:
            return raw
        case _:
            return None


def decode_hints(raw: object, secret: str | None = None) -> Hints:
    """Decode an envelope, given as JSON-shaped data; see :func:`read_hints`."""
    try:
        envelope = parse_envelope(raw)
        if secret is not None and not is_signed(envelope, secret):
            raise EnvelopeError("kv_hints: the signature is not the proxy's")
        payload, skipped = split_actions(envelope)
    except EnvelopeError as error:
        detail = str(error)
        directive = "`$.directives" in detail
        reason = Reason.INVALID_DIRECTIVE if directive else Reason.INVALID_EDIT
        return Hints(message_id=message_id_of(raw), invalid=reason, detail=detail)
    return Hints(envelope.message_id, payload, skipped)


def message_id_of(raw: object) -> str | None:
    """The message id of an envelope that may be malformed otherwise."""
    match raw:
        case {"message_id": str(found)} if 0 < len(found) <= 256:
            return found
        case _:
            return None
