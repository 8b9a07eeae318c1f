"""The envelope on an SGLang request: bounded in the tokenizer process, read in the scheduler.

SGLang carries an envelope in two ways. ``custom_params.kv_hints`` is there on every route that
generates (on ``/generate`` inside ``sampling_params``) and comes through whole. The native
``kv_hints`` of ``/generate`` is a typed record without a signature: SGLang drops that field, and
refuses a malformed record with a 400 of its own. An engine that has a secret therefore acts on
``custom_params.kv_hints`` only.

The tokenizer process packs an envelope into one JSON string. SGLang's msgpack transport refuses
nested ``custom_params`` in the scheduler's receive loop, and a string's size is known at once.
"""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from leyline_engine.contract import EditPayload, Reason
from leyline_engine.edits import carries_edit
from leyline_engine.hints import Hints, decode_hints, is_ours, message_id_of

log = logging.getLogger(__name__)

SECRET_VARIABLE = "LEYLINE_HINTS_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable with the secret that proxy and engine share; the proxy's own name for it."""
MAX_ENVELOPE_BYTES = 4 << 20
"""Maximum size of an envelope's JSON; a proxy's largest for a 100K-token prompt is far below."""

_MEMBER = "kv_hints"
_REQUEST_MEMBER = "__req__"
_REFUSALS = {
    "too_large": f"kv_hints: more than {MAX_ENVELOPE_BYTES} bytes",
    "unreadable": "kv_hints: can't be written as JSON",
}


Packed = str | dict[str, str | None]
"""JSON text of an envelope, or a flat record that says why there is none."""


class CarriesHints(Protocol):
    """The common fields of SGLang's request records, before and inside the scheduler."""

    sampling_params: Any
    kv_hints: Any


def hints_secret() -> str | None:
    """Return the secret that signs envelopes; None takes them unsigned."""
    return os.environ.get(SECRET_VARIABLE) or None


def pack_hints(request: CarriesHints) -> None:
    """Bound and pack a request's envelope in the tokenizer process.

    ``sampling_params`` is the client's dictionary there; it is replaced, never changed.
    """
    params = request.sampling_params
    if not isinstance(params, dict):
        return
    custom = params.get("custom_params")
    packed: Packed | None
    match custom:
        case {"kv_hints": raw} if raw is not None:
            packed = _packed(raw)
        case _:
            packed = _refused_native(request.kv_hints)
            if packed is None:
                return
            request.kv_hints = None
    request.sampling_params = {**params, "custom_params": {**(custom or {}), _MEMBER: packed}}


def take_hints(request: CarriesHints, secret: str | None, *, beside: str = "") -> Hints:
    """Read a request's envelope in the scheduler, and remove it from ``custom_params``.

    Afterwards the request's sampling parameters are those of one without an envelope. Errors of an
    envelope go into the result; nothing is raised.

    Args:
        request: a ``Req``, right after it was made.
        secret: the result of :func:`hints_secret`.
        beside: what the prompt holds beside tokens, in words; empty for a text.
    """
    try:
        hints = _read_and_remove(request, secret)
    except Exception:
        log.exception("an envelope could not be read")
        return Hints(invalid=Reason.INVALID_EDIT, detail="kv_hints: can't be read")
    if hints.payload is None:
        return hints
    if beside:
        return _without_splices(hints, hints.payload, f"a prompt with {beside} isn't spliced")
    if request.sampling_params.n > 1:
        # SGLang runs one request for each answer, and one before them: all are turns of one name.
        return _without_splices(hints, hints.payload, "a turn has one answer, and n is greater")
    return hints


def beside_tokens(received: Any) -> str:
    """Return what a request's prompt holds beside its tokens, in words; empty for a text.

    The KV of such a prompt depends on more than its tokens say.

    Args:
        received: SGLang's record of a request, as it reached the scheduler.
    """
    held = {
        "images, audio or video": received.mm_inputs,
        "embeddings in place of tokens": received.input_embeds,
        "embeddings for some positions": received.positional_embed_overrides,
        "token types": received.token_type_ids,
        "shared tokens between items": received.multi_item_delimiter_indices,
        "slots of its own": received.token_indices_to_pool,
    }
    return next((name for name, value in held.items() if value is not None), "")


def _without_splices(hints: Hints, payload: EditPayload, why: str) -> Hints:
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


def _read_and_remove(request: CarriesHints, secret: str | None) -> Hints:
    custom = request.sampling_params.custom_params
    if not (isinstance(custom, dict) and _MEMBER in custom):
        return _decode_native(request.kv_hints, secret)
    request.sampling_params = _without_member(request.sampling_params)
    raw = custom[_MEMBER]
    return Hints() if raw is None else _decode(_packed(raw), secret)


def _without_member(params: Any) -> Any:
    rest = {key: value for key, value in params.custom_params.items() if key != _MEMBER}
    if rest.keys() <= {_REQUEST_MEMBER}:
        # SGLang adds this one only beside the client's own parameters.
        rest = {}
    clean = copy.copy(params)
    clean.custom_params = rest or None
    return clean


def _packed(raw: object) -> Packed:
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


def _refusal(raw: object, code: str) -> dict[str, str | None]:
    return {"message_id": message_id_of(raw), "refused": code}


def _decode(packed: Packed, secret: str | None) -> Hints:
    if isinstance(packed, str):
        try:
            return decode_hints(msgspec.json.decode(packed), secret)
        except (msgspec.DecodeError, RecursionError):
            packed = _refusal(None, "unreadable")
    detail = _REFUSALS.get(packed["refused"] or "", _REFUSALS["unreadable"])
    return Hints(packed["message_id"], invalid=Reason.INVALID_EDIT, detail=detail)


def _decode_native(native: Any, secret: str | None) -> Hints:
    if native is None:
        return Hints()
    if secret is None:
        return _decode(_packed(msgspec.to_builtins(native)), secret)
    if not _is_ours(native):
        return Hints()
    return Hints(
        native.message_id,
        invalid=Reason.INVALID_EDIT,
        detail="kv_hints: the native field carries no signature; use custom_params.kv_hints",
    )


def _refused_native(native: Any) -> Packed | None:
    """Return why a native envelope of ours must not pass; None if it may, or isn't ours."""
    if native is None or not _is_ours(native):
        return None
    packed = _packed(msgspec.to_builtins(native))
    return None if isinstance(packed, str) else packed


def _is_ours(native: Any) -> bool:
    return any(is_ours(action.action_type) for action in native.actions)
