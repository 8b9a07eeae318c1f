"""Building the engine application from plain options."""

from __future__ import annotations

from dataclasses import replace

from starlette.applications import Starlette
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from leyline_engine.replay.engine import ReplayEngine
from leyline_engine.replay.http.app import ServingOptions, build_app
from leyline_engine.replay.models.loader import LoadedModel, ModelLoadError, load_model
from leyline_engine.replay.models.rotary_probe import UnsupportedModelError
from leyline_engine.replay.service import EngineService, ServiceLimits
from leyline_engine.replay.text.chat import PromptEncoder


def create_engine_app(
    *,
    model: str | None = None,
    served_name: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    pool_tokens: int = 131_072,
    chunk_tokens: int = 512,
    splicing: bool = True,
    max_running: int = 8,
    max_waiting: int = 64,
    default_max_tokens: int = 1024,
    api_secret: str | None = None,
    hints_secret: str | None = None,
) -> Starlette:
    """Load a model and return the application that serves it; the engine runs from here on.

    Args:
        model: see :func:`~leyline_engine.replay.models.loader.load_model`, as for ``dtype`` and
            ``device``.
        served_name: name for clients; by default the shipped model's, the folder's, or the hub id.
        pool_tokens: KV slots, in tokens.
        chunk_tokens: prompt tokens per prefill step.
        splicing: False serves every edit as an ordinary prefill.
        max_running: requests that share the engine at once.
        max_waiting: requests that may wait; more are refused with 503.
        default_max_tokens: limit of chat answers that name none.
        api_secret: bearer token to ask for; None asks for nothing.
        hints_secret: what the proxy signs envelopes and seals digests with; None takes both bare.

    Raises:
        ModelLoadError: the model can't be loaded.
    """
    loaded = load_model(model, dtype=dtype, device=device)
    if served_name is not None:
        loaded = replace(loaded, name=served_name)
    return serve_model(
        loaded,
        pool_tokens=pool_tokens,
        chunk_tokens=chunk_tokens,
        splicing=splicing,
        limits=ServiceLimits(max_running=max_running, max_waiting=max_waiting),
        options=ServingOptions(
            default_max_tokens=default_max_tokens,
            api_secret=api_secret,
            hints_secret=hints_secret,
        ),
    )


def serve_model(
    loaded: LoadedModel,
    *,
    pool_tokens: int,
    chunk_tokens: int = 512,
    splicing: bool = True,
    limits: ServiceLimits | None = None,
    options: ServingOptions | None = None,
) -> Starlette:
    """The application over a model that is loaded already.

    Raises:
        ModelLoadError: its KV can't be held in a pool.
    """
    try:
        engine = ReplayEngine(
            loaded,
            pool_tokens=pool_tokens,
            chunk_tokens=chunk_tokens,
            splicing=splicing,
            secret=options.hints_secret if options else None,
        )
    except UnsupportedModelError as error:
        raise ModelLoadError(f"{loaded.name} can't be served: {error}") from error
    encoder = PromptEncoder(loaded.tokenizer)
    service = EngineService(engine, encoder.decode, limits=limits)
    stops = stop_tokens(loaded.model, loaded.tokenizer)
    return build_app(service, encoder, stops, options)


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Tokens that end an answer, by generation configuration, configuration and tokenizer."""
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
