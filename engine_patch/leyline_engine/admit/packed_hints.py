"""An envelope as one JSON string, on its way from an engine's HTTP process to its scheduler.

Engines refuse nested values in a request's parameters, and a string's size is known at once. Some
also have a native envelope: a typed record of the same members, without a signature. An engine that
has a secret acts on the packed one only.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import msgspec

from leyline_engine.admit.edits import carries_edit
from leyline_engine.admit.hints import (
    Hints,
    decode_hints,
    is_ours,
    message_id_of,
)
from leyline_engine.contract import EditPayload, Reason

SECRET_VARIABLE = "LEYLINE_HINTS_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable with the secret that proxy and engine share; the proxy's own name for it."""
MAX_ENVELOPE_BYTES = 4 << 20
"""Maximum size of an envelope's JSON; a proxy's largest for a 100K-token prompt is far below."""

_REFUSALS = {
    "too_large": f"kv_hints: more than {MAX_ENVELOPE_BYTES} bytes",
    "unreadable": "kv_hints: can't be written as JSON",
}

Packed = str | dict[str, str | None]
"""JSON text of an envelope, or a flat record that says why there is none."""


def hints_secret() -> str | None:
    """Return the secret that signs envelopes; None takes them unsigned."""
    return os.environ.get(SECRET_VARIABLE) or None


def packed_envelope(raw: object) -> Packed:
    """Return an envelope as text, or why it can't be; what is packed already stays as it is."""
    refusal = "too_large"
    try:
        match raw:
            case {"refused": str(code)}:
                return _refusal(raw, code)
            case str():
                text = raw
            case _:
                text = msgspec.json.encode(raw).decode()
        # A character is at least a byte.
        if len(text) <= MAX_ENVELOPE_BYTES and len(text.encode()) <= MAX_ENVELOPE_BYTES:
            return text
    except (TypeError, ValueError, OverflowError, RecursionError):
        refusal = "unreadable"
    return _refusal(raw, refusal)


def decode_packed(packed: Packed, secret: str | None) -> Hints:
    """Decode the result of :func:`packed_envelope`; errors go into the result."""
    if isinstance(packed, str):
        try:
            return decode_hints(msgspec.json.decode(packed), secret)
        except (msgspec.DecodeError, RecursionError):
            packed = _refusal(None, "unreadable")
    detail = _REFUSALS.get(packed["refused"] or "", _REFUSALS["unreadable"])
    return Hints(packed["message_id"], invalid=Reason.INVALID_EDIT, detail=detail)


def without_splices(hints: Hints, payload: EditPayload, why: str) -> Hints:
    """Return the hints of a request that is neither edited nor a source, and reuses nothing.

    The prompt's owner and what it forgets stay.
    """
    hints = replace(hints, payload=msgspec.structs.replace(payload, turn=""), reuse=None)
    if hints.invalid is not None or not carries_edit(payload):
        return hints
    return replace(
        hints,
        invalid=Reason.UNSUPPORTED_RUNTIME,
        detail=f"kv_hints: {why}",
    )


def decode_native(native: Any, secret: str | None) -> Hints:
    """Decode an engine's native envelope; None has no hints.

    Args:
        secret: the result of :func:`hints_secret`.
    """
    if native is None:
        return Hints()
    if secret is None:
        return decode_packed(packed_envelope(msgspec.to_builtins(native)), secret)
    if not holds_ours(native):
        return Hints()
    return Hints(
        native.message_id,
        invalid=Reason.INVALID_EDIT,
        detail="kv_hints: the native field carries no signature; use custom_params.kv_hints",
    )


def holds_ours(native: Any) -> bool:
    """Return True if one of a native envelope's actions is Leyline's."""
    return any(is_ours(action.action_type) for action in native.actions)


def _refusal(raw: object, code: str) -> dict[str, str | None]:
    return {"message_id": message_id_of(raw), "refused": code}
