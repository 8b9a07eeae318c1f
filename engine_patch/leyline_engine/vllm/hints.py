"""The envelope on a vLLM request, read in the engine core.

The HTTP process packs it into the request's extra arguments. The native ``kv_hints`` of requests
made in Python is a typed record without a signature; see :mod:`leyline_engine.admit.packed_hints`.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from leyline_engine.admit.hints import Hints
from leyline_engine.admit.packed_hints import (
    decode_native,
    decode_packed,
    packed_envelope,
    without_splices,
)
from leyline_engine.contract import Reason

log = logging.getLogger(__name__)

HINTS_ARGUMENT = "leyline"
"""Name of the packed envelope among the extra arguments of vLLM's ``SamplingParams``."""
UNSPLICED_ARGUMENT = "leyline_unspliced"
"""Name of the reason why the request may not be spliced; empty if it may."""


def take_hints(request: Any, secret: str | None) -> Hints:
    """Read a request's envelope, and remove it from the parameters that workers get.

    Errors of an envelope go into the result; nothing is raised.

    Args:
        request: vLLM's ``Request``, when it comes to the scheduler.
        secret: the result of :func:`~.packed_hints.hints_secret`.
    """
    try:
        hints, why = _read_and_remove(request, secret)
    except Exception:
        log.exception("an envelope could not be read")
        return Hints(invalid=Reason.INVALID_EDIT, detail="kv_hints: can't be read")
    why = why or unspliceable(request)
    if hints.payload is None or not why:
        return hints
    return without_splices(hints, hints.payload, why)


def unspliceable(request: Any) -> str:
    """Return why a request's prompt can be neither spliced nor a source; empty if it can.

    Args:
        request: vLLM's ``Request``.
    """
    params = request.sampling_params
    if params is None:
        return "a request that generates nothing isn't spliced"
    if params.prompt_logprobs is not None or request.skip_reading_prefix_cache:
        return "a prompt that is computed again as a whole isn't spliced"
    held = {
        "images, audio or video": bool(request.mm_features),
        "embeddings": request.prompt_embeds is not None or request.prompt_is_token_ids is not None,
        "more to come": request.resumable,
    }
    return next((f"a prompt with {name} isn't spliced" for name, has in held.items() if has), "")


def clean_params(params: Any) -> Any:
    """Return vLLM's parameters of a request without an envelope; the same if they have none."""
    extra = getattr(params, "extra_args", None) or {}
    ours = {HINTS_ARGUMENT, UNSPLICED_ARGUMENT}
    if ours.isdisjoint(extra):
        return params
    clean = copy.copy(params)
    clean.extra_args = {key: value for key, value in extra.items() if key not in ours} or None
    return clean


def _read_and_remove(request: Any, secret: str | None) -> tuple[Hints, str]:
    """Return the hints, and why the HTTP process lets nothing be spliced."""
    params = request.sampling_params
    extra = getattr(params, "extra_args", None) or {}
    if HINTS_ARGUMENT not in extra:
        return decode_native(request.kv_hints, secret), ""
    request.sampling_params = clean_params(params)
    packed = packed_envelope(extra[HINTS_ARGUMENT])
    return decode_packed(packed, secret), str(extra.get(UNSPLICED_ARGUMENT, ""))
