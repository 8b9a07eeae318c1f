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
from typing import Any, Protocol

import msgspec

from leyline_engine.admit.hints import Hints
from leyline_engine.admit.packed_hints import (
    Packed,
    decode_native,
    decode_packed,
    holds_ours,
    packed_envelope,
    without_splices,
)
from leyline_engine.contract import Reason

log = logging.getLogger(__name__)

_MEMBER = "kv_hints"
_REQUEST_MEMBER = "__req__"


class CarriesHints(Protocol):
    """The common fields of SGLang's request records, before and inside the scheduler."""

    sampling_params: Any
    kv_hints: Any


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
            packed = packed_envelope(raw)
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
        secret: the result of :func:`~.packed_hints.hints_secret`.
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
        return without_splices(hints, hints.payload, f"a prompt with {beside} isn't spliced")
    if request.sampling_params.n > 1:
        # SGLang runs one request for each answer, and one before them: all are turns of one name.
        return without_splices(hints, hints.payload, "a turn has one answer, and n is greater")
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


def _read_and_remove(request: CarriesHints, secret: str | None) -> Hints:
    custom = request.sampling_params.custom_params
    if not (isinstance(custom, dict) and _MEMBER in custom):
        return decode_native(request.kv_hints, secret)
    request.sampling_params = _without_member(request.sampling_params)
    raw = custom[_MEMBER]
    return Hints() if raw is None else decode_packed(packed_envelope(raw), secret)


def _without_member(params: Any) -> Any:
    rest = {key: value for key, value in params.custom_params.items() if key != _MEMBER}
    if rest.keys() <= {_REQUEST_MEMBER}:
        # SGLang adds this one only beside the client's own parameters.
        rest = {}
    clean = copy.copy(params)
    clean.custom_params = rest or None
    return clean


def _refused_native(native: Any) -> Packed | None:
    """Return why a native envelope of ours must not pass; None if it may, or isn't ours."""
    if native is None or not holds_ours(native):
        return None
    packed = packed_envelope(msgspec.to_builtins(native))
    return None if isinstance(packed, str) else packed
