"""The construction of the engine application from plain options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from leyline_engine.admit.plan import PAGE_SIZES
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import Recompute, own_profile
from leyline_engine.energy import cuda_uuids, open_account
from leyline_engine.metrics import PrometheusMetrics
from leyline_engine.reuse.fingerprints import MatcherKind, read_matcher
from leyline_engine.rows.packing import KV_DTYPES
from leyline_replay.cache.anchors import Anchoring
from leyline_replay.claim_desk import ClaimDesk
from leyline_replay.engine import ReplayEngine
from leyline_replay.engine_claims import EngineClaims
from leyline_replay.http.app import ServingOptions, build_app
from leyline_replay.models.loader import LoadedModel, ModelLoadError, load_model
from leyline_replay.models.rotary_probe import UnsupportedModelError
from leyline_replay.service import EngineService, ServiceLimits
from leyline_replay.text.chat import PromptEncoder


def create_engine_app(
    *,
    model: str | None = None,
    served_name: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    pool_tokens: int = 131_072,
    page_tokens: int = 1,
    kv_dtype: str = "auto",
    chunk_tokens: int = 512,
    state_grid: int = 64,
    state_slots: int = 128,
    window_tokens: int = 0,
    splicing: bool = True,
    matcher: str = "winnow",
    max_running: int = 8,
    max_waiting: int = 64,
    default_max_tokens: int = 1024,
    api_secret: str | None = None,
    hints_secret: str | None = None,
    claim_limits: Mapping[str, Any] | None = None,
    fidelity_profile: str | None = None,
) -> Starlette:
    """Load a model and return the application that serves it; the engine runs from here on.

    Args:
        model: as ``dtype`` and ``device``, for :func:`~.replay.models.loader.load_model`.
        served_name: name for clients; by default the model's.
        pool_tokens: KV slots, in tokens.
        chunk_tokens: prompt tokens per prefill step.
        page_tokens: tokens per page: prefixes are found, and spliced, in whole pages, as in SGLang.
        kv_dtype: ``auto``, or ``fp8_e4m3`` to keep and read KV in eight bits, as in SGLang.
        state_grid: a chunk leaves a recurrent state after the last multiple of so many tokens.
        state_slots: recurrent states that are kept at most.
        window_tokens: cached tokens whose rows layers with a sliding window keep; 0 for all.
        splicing: False serves every edit as an ordinary prefill.
        matcher: value of :class:`~leyline_engine.reuse.fingerprints.MatcherKind`.
        max_running: requests that share the engine; ``max_waiting`` may wait, more get 503.
        default_max_tokens: limit of chat answers that name none.
        api_secret: bearer token to ask for, if any.
        hints_secret: secret of signed envelopes and claim commands; None takes them bare.
        claim_limits: fields of :class:`~leyline_engine.claims.limits.Limits`.
        fidelity_profile: file with the model's profile, such as a report of ``leyline eval``.

    Raises:
        ModelLoadError: the model can't be loaded.
        ValueError: an option can't have this value, or the file has no profile for the model.
    """
    kind, claimable = read_matcher(matcher), read_limits(claim_limits or {})
    loaded = load_model(model, dtype=dtype, device=device)
    loaded = replace(loaded, name=served_name or loaded.name)
    return serve_model(
        loaded,
        pool_tokens=pool_tokens,
        page_tokens=read_page(page_tokens),
        kv_dtype=read_kv_dtype(kv_dtype),
        chunk_tokens=chunk_tokens,
        anchoring=Anchoring(_above_zero("state_grid", state_grid), state_slots, window_tokens),
        splicing=splicing,
        matcher=kind,
        recompute=_recompute_of(fidelity_profile, loaded),
        limits=ServiceLimits(max_running=max_running, max_waiting=max_waiting),
        options=ServingOptions(
            default_max_tokens, api_secret=api_secret, hints_secret=hints_secret
        ),
        claim_limits=claimable,
    )


def _recompute_of(path: str | None, loaded: LoadedModel) -> Recompute:
    """Return the tokens after edits to compute again, by the profile in a file.

    Raises:
        ProfileError: the file has no profile for the model.
    """
    if path is None:
        return Recompute()
    return own_profile(Path(path).expanduser(), loaded.name, loaded.fingerprint).recompute


def read_page(tokens: int) -> int:
    """Return the tokens per page that an operator set.

    Raises:
        ValueError: pages can't have this size.
    """
    if tokens not in PAGE_SIZES:
        sizes = ", ".join(map(str, sorted(PAGE_SIZES)))
        raise ValueError(f"page_tokens can't be {tokens}; choose one of {sizes}")
    return tokens


def read_kv_dtype(name: str) -> torch.dtype | None:
    """Return the dtype in which KV is kept, as an operator named it; None for the model's own.

    Raises:
        ValueError: KV can't be kept in it.
    """
    if name not in KV_DTYPES:
        raise ValueError(f"kv_dtype can't be {name}; choose one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def _above_zero(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} can't be {value}")
    return value


def read_limits(given: Mapping[str, Any]) -> Limits:
    """Return the limits of claims that an operator set; others have their defaults.

    Raises:
        ValueError: there is no such limit, or it can't have this value.
    """
    known = Limits.__dataclass_fields__
    for name in given:
        if name not in known:
            raise ValueError(
                f"claim_limits: no limit is called {name}; there are {', '.join(known)}"
            )
    try:
        limits = msgspec.convert(dict(given), Limits)
    except msgspec.ValidationError as error:
        raise ValueError(f"claim_limits: {error}") from error
    for name in known:
        value = getattr(limits, name)
        if value < 0 or (isinstance(known[name].default, float) and value > 1):
            raise ValueError(f"claim_limits: {name} can't be {value}")
    return limits


def serve_model(
    loaded: LoadedModel,
    *,
    pool_tokens: int,
    page_tokens: int = 1,
    kv_dtype: torch.dtype | None = None,
    chunk_tokens: int = 512,
    anchoring: Anchoring = Anchoring(),  # noqa: B008 - immutable
    splicing: bool = True,
    matcher: MatcherKind = MatcherKind.WINNOW,
    recompute: Recompute = Recompute(),  # noqa: B008 - immutable
    limits: ServiceLimits | None = None,
    options: ServingOptions | None = None,
    claim_limits: Limits | None = None,
) -> Starlette:
    """Return the application over a model that is loaded already.

    Raises:
        ModelLoadError: its KV can't be held in a pool.
    """
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    try:
        engine = ReplayEngine(
            loaded,
            pool_tokens=pool_tokens,
            page_tokens=page_tokens,
            kv_dtype=kv_dtype,
            chunk_tokens=chunk_tokens,
            anchoring=anchoring,
            splicing=splicing,
            matcher=matcher,
            recompute=recompute,
            secret=options.hints_secret if options else None,
            open_claims=partial(EngineClaims, limits=claim_limits),
            metrics=metrics,
            energy=open_account(metrics, lambda: _gpus(loaded.model.device)),
        )
    except UnsupportedModelError as error:
        raise ModelLoadError(f"{loaded.name} can't be served: {error}") from error
    encoder = PromptEncoder(loaded.tokenizer)
    service = EngineService(engine, encoder.decode, limits=limits, desk=ClaimDesk(engine))
    stops = stop_tokens(loaded.model, loaded.tokenizer)
    return build_app(service, encoder, stops, registry, options)


def _gpus(device: torch.device) -> list[str]:
    return cuda_uuids([device.index or 0]) if device.type == "cuda" else []


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return tokens that end an answer, by generation and model configuration and tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        match value:
            case int():
                found.add(value)
            case list() | tuple():
                found.update(value)
            case _:
                pass
    return frozenset(found)
