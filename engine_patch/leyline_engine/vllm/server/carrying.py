"""Envelopes on vLLM's requests, from the body to the engine's parameters.

Proxies put them into ``custom_params.kv_hints``, a member that vLLM doesn't know and keeps, and
routers of disaggregated engines into ``kv_transfer_params.kv_hints``. Both come to the engine core
packed, among the request's extra arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from leyline_engine.admit.hints import envelope_of
from leyline_engine.admit.packed_hints import packed_envelope
from leyline_engine.server.answering import note_envelope
from leyline_engine.vllm.hints import HINTS_ARGUMENT, UNSPLICED_ARGUMENT, clean_params

log = logging.getLogger(__name__)


def carry_envelopes() -> None:
    """Hook into vLLM's chat requests and completions, and its log of requests."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.utils.request_logger import RequestLogger

    for request in (ChatCompletionRequest, CompletionRequest):
        request.to_sampling_params = _carrying(request.to_sampling_params)
    RequestLogger.log_inputs = _without_envelopes(RequestLogger.log_inputs)


def _carrying(to_sampling_params: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(to_sampling_params)
    def with_envelope(request: Any, *args: Any, **kwargs: Any) -> Any:
        raw = None
        try:
            raw = _take(request)
            note_envelope(raw)
        except Exception:
            log.exception("an envelope could not be read")
        # A client may give extra arguments of any name.
        params = clean_params(to_sampling_params(request, *args, **kwargs))
        if raw is not None:
            params.extra_args = {
                **(params.extra_args or {}),
                HINTS_ARGUMENT: packed_envelope(raw),
                UNSPLICED_ARGUMENT: _unspliced(request),
            }
        return params

    return with_envelope


def _without_envelopes(log_inputs: Callable[..., None]) -> Callable[..., None]:
    @wraps(log_inputs)
    def logged(*args: Any, params: Any = None, **kwargs: Any) -> None:
        log_inputs(*args, params=clean_params(params), **kwargs)

    return logged


def _take(request: Any) -> object:
    """Return a request's envelope, and remove it from what vLLM passes on by itself."""
    transfer = request.kv_transfer_params
    beside = envelope_of(transfer)
    if beside is not None:
        rest = {key: value for key, value in transfer.items() if key != "kv_hints"}
        request.kv_transfer_params = rest or None
    raw = envelope_of((request.model_extra or {}).get("custom_params"))
    return beside if raw is None else raw


def _unspliced(request: Any) -> str:
    """Return why no prompt of a request may be spliced; the engine core can't see it."""
    if (request.n or 1) > 1:
        return "a turn has one answer, and n is greater"
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "a turn has one prompt, and the request has several"
    return ""
