"""The envelope in a request body; a malformed one never fails the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from leyline_engine.contract import (
    ACTION_VERSION,
    EDIT_ACTION,
    EditPayload,
    Envelope,
    EnvelopeError,
    Mode,
    ProvePayload,
    Reason,
    ReusePayload,
    SkippedAction,
    is_signed,
    parse_envelope,
    split_actions,
)

_OUR_ACTIONS = "leyline."
_ANYTHING = "*"
"""The name of no span, so that forgetting it reaches all that a session published."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The decoded ``kv_hints`` of a request."""

    message_id: str | None = None
    payload: EditPayload | None = None
    """The payload; if ``invalid`` is set, its reliable part, which holds no edit."""
    reuse: ReusePayload | None = None
    """None if the request didn't ask for reuse, or if it can't be relied on."""
    skipped: tuple[SkippedAction, ...] = ()
    invalid: Reason | None = None
    detail: str = ""
    prove: ProvePayload | None = None

    @property
    def forgets(self) -> bool:
        """True if anything is to be forgotten."""
        payload = self.payload
        return payload is not None and (
            bool(payload.forget) or any(d.mode is Mode.FORGET for d in payload.directives)
        )

    @property
    def nameless(self) -> bool:
        """True if there is an edit that doesn't say whose the prompt is.

        No forget would find its KV, so none of it may be kept.
        """
        unread = any(action.action_type == EDIT_ACTION for action in self.skipped)
        return self.payload is None and (self.invalid is not None or unread)


def read_hints(custom_params: object, secret: str | None = None) -> Hints:
    """Decode ``custom_params.kv_hints``; errors go into the result.

    Args:
        secret: the secret with which the proxy signs envelopes; None takes them unsigned.
    """
    raw = envelope_of(custom_params)
    return Hints() if raw is None else decode_hints(raw, secret)


def envelope_of(custom_params: object) -> object:
    """Return the envelope among a request's parameters as it came; None if there is none."""
    match custom_params:
        case {"kv_hints": raw}:
            return raw
        case _:
            return None


def decode_hints(raw: object, secret: str | None = None) -> Hints:
    """Decode an envelope, given as JSON-shaped data; see :func:`read_hints`."""
    try:
        envelope = parse_envelope(raw)
    except EnvelopeError as error:
        return _refused(message_id_of(raw), str(error))
    if secret is not None and not is_signed(envelope, secret):
        return _refused(envelope.message_id, "kv_hints: the signature is not the proxy's")
    try:
        edit, reuse, skipped, prove = split_actions(envelope)
    except EnvelopeError as error:
        return _refused(envelope.message_id, str(error), _rest_of_edit(envelope))
    return Hints(envelope.message_id, edit, reuse, skipped, prove=prove)


def _refused(message_id: str | None, detail: str, rest: EditPayload | None = None) -> Hints:
    directive = "`$.directives" in detail
    reason = Reason.INVALID_DIRECTIVE if directive else Reason.INVALID_EDIT
    return Hints(message_id, rest, invalid=reason, detail=detail)


def _rest_of_edit(envelope: Envelope) -> EditPayload | None:
    """Return the readable rest of a malformed edit, without the edit itself; or None.

    The rest says whose the prompt is, which spans it has, and what to forget. It is None if it
    doesn't say whose.
    """
    ours = (EDIT_ACTION, ACTION_VERSION)
    edits = [a.payload for a in envelope.actions if (a.action_type, a.action_version) == ours]
    if len(edits) != 1:
        return None
    (raw,) = edits
    kept = {name: raw.get(name) for name in ("session", "scope")} | {"turn": "-"}
    if not _is_payload(kept):
        return None
    for name in ("turn", "lineage", "spans", "forget"):
        if name in raw and _is_payload(kept | {name: raw[name]}):
            kept[name] = raw[name]
    payload = msgspec.convert(kept, EditPayload)
    if payload.turn != raw.get("turn"):
        payload = msgspec.structs.replace(payload, turn="")
    unread = bool(raw.get("forget")) and not payload.forget
    if unread or _may_forget(raw.get("directives")):
        # A directive names what it forgets by its source, and nothing says what a bad name means.
        payload = msgspec.structs.replace(payload, forget=(*payload.forget, _ANYTHING))
    return payload


def _is_payload(fields: dict[str, Any]) -> bool:
    try:
        msgspec.convert(fields, EditPayload)
    except msgspec.ValidationError:
        return False
    return True


def _may_forget(directives: object) -> bool:
    """Return True if one of the directives as they came may be of mode ``forget``."""
    if not isinstance(directives, list | tuple):
        return directives is not None
    return any(
        not isinstance(each, dict) or each.get("mode", Mode.AMORTIZE) != Mode.AMORTIZE
        for each in directives
    )


def is_ours(action_type: str) -> bool:
    """Return True if an action is Leyline's, of any version."""
    return action_type.startswith(_OUR_ACTIONS)


def message_id_of(raw: object) -> str | None:
    """Return the message id of an envelope that may be malformed elsewhere."""
    match raw:
        case {"message_id": str(found)} if 0 < len(found) <= 256:
            return found
        case _:
            return None
