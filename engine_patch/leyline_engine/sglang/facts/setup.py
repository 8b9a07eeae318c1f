"""A scheduler's model, pool and server, and the decision that Leyline may splice there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from leyline_engine.contract import (
    ATTENTION_SINK,
    Capability,
    KVFacts,
    RecurrentEdits,
    Refusal,
    StateFacts,
    engine_actions,
    this_plugin,
)
from leyline_engine.rotary.explained_keys import (
    Frequencies,
    ProbedLayer,
    UnsupportedRotaryError,
    explain,
)
from leyline_engine.rotary.fingerprint import model_fingerprint
from leyline_engine.rotary.measured_keys import Measured, measure_parts
from leyline_engine.rotary.rotation import ModelRotary
from leyline_engine.rotary.tables import read_frequencies, rotary_modules
from leyline_engine.rows.mover import PoolTensors
from leyline_engine.rows.origins import OriginsError, origin_rows
from leyline_engine.rows.pool import SplicePool
from leyline_engine.rows.states import StatePool
from leyline_engine.sglang.facts.allow_list import KV_DTYPES, Setup, refusals
from leyline_engine.sglang.facts.drafts import UnsupportedDraftError, read_drafts
from leyline_engine.sglang.facts.probe import ProbeError, position_in_states, probe_layers
from leyline_engine.sglang.rows.host import open_host_rows
from leyline_engine.sglang.rows.layouts import (
    UnsupportedPoolError,
    layers_of,
    read_pool,
    read_states,
    whole_pool,
    window_pool,
)

_POSITIONS = (0, 1, 17, 977, 4093)


def measure_modules(model: torch.nn.Module, longest: int, dtype: torch.dtype) -> ModelRotary:
    """Return the one rotation that a model's rotary modules apply, on the CPU.

    Args:
        model: a draft.
        longest: number of positions that are used.
        dtype: dtype in which the model passes keys to them.

    Raises:
        UnsupportedRotaryError: there is none, they differ, or one doesn't do what its table says.
    """
    modules = rotary_modules(model)
    if not modules:
        raise UnsupportedRotaryError("layers without a rotary embedding")
    read = {each.key: each for each in (read_frequencies(m, longest) for m in modules)}
    if len(read) > 1:
        raise UnsupportedRotaryError("the layers' rotary embeddings differ")
    (frequencies,) = read.values()
    last = min(longest, *(int(module.cos_sin_cache.shape[0]) for module in modules)) - 1
    positions = torch.tensor(sorted({min(position, last) for position in _POSITIONS}))
    turned = [_turned(module, positions, frequencies, dtype) for module in modules]
    explained = explain(turned, positions, [frequencies], dtype)
    if explained.start:
        raise UnsupportedRotaryError("a band that isn't at the key's beginning")
    return explained.rotary


def _turned(
    module: Any, positions: torch.Tensor, frequencies: Frequencies, dtype: torch.dtype
) -> ProbedLayer:
    """Return a random key as a module turns it to every position."""
    table = module.cos_sin_cache
    width = int(getattr(module, "head_size", 2 * frequencies.inv_freq.numel()))
    key = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1))
    keys = key.to(table.device, dtype).repeat(len(positions), 1, 1)
    with torch.inference_mode():
        _, turned = module(positions.to(table.device), keys.clone(), keys.clone())
    return ProbedLayer(turned.reshape(keys.shape)[None].to("cpu", torch.float32), None)


def measure_keys(
    context: Any, tree: Any, dtype: torch.dtype, parts: Sequence[slice]
) -> Sequence[Measured]:
    """Probe the model and find the rotations that explain the keys in its pool.

    Args:
        context: SGLang's ``TreeCacheBuildContext``.
        tree: its tree cache, which is empty.
        dtype: of the pool.
        parts: groups of layers, each of one form; see :func:`.probe.probe_layers` for their order.

    Raises:
        UnsupportedRotaryError: the keys turn otherwise, or can't be measured.
        ProbeError: the server has no room for the probe.
    """
    return measure_parts(
        context.tp_worker.model_runner.model,
        partial(probe_layers, context, tree),
        parts,
        longest=int(context.model_config.context_len),
        vocabulary=int(context.model_config.vocab_size),
        dtypes=(dtype, context.model_config.dtype),
    )


_STILL_STATES = 0.01
"""Largest difference of states between positions, as a share: rounding alone."""
_NO_OTHER = "serve another model, or one with its original configuration"
"""Remedy where the loaded model itself isn't understood: no flag changes it."""

_UNSUPPORTED = (
    UnsupportedRotaryError,
    UnsupportedPoolError,
    UnsupportedDraftError,
    ProbeError,
    OriginsError,
)
Measure = Callable[[Any, Any, torch.dtype, Sequence[slice]], Sequence[Measured]]
"""Finds the rotations of a model's keys; takes what :func:`measure_keys` takes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts that the scheduler needs of its model and pool."""

    capability: Capability
    """Capability for the handshake; ``unsupported_reason`` is why nothing is spliced."""
    rotary: ModelRotary | None = None
    """The rotations of the model's keys; None, like ``pool``, if nothing is spliced."""
    pool: SplicePool | None = None

    def agreed(self, agree: Callable[[bool], bool]) -> EngineFacts:
        """Return the same facts, or those of an engine that doesn't splice if a rank can't.

        Args:
            agree: returns True if all tensor-parallel ranks succeeded; takes this rank's success.
        """
        if agree(self.pool is not None) or self.pool is None:
            return self
        refused = Refusal("another tensor-parallel rank can't splice", _NO_OTHER)
        return EngineFacts(
            msgspec.structs.replace(
                self.capability,
                splices=False,
                reuse_within=False,
                unsupported_reason=refused.what,
                refusals=(refused,),
                actions=engine_actions(splices=False),
                rotary=None,
                kv=None,
            )
        )


def read_facts(
    context: Any,
    tree: Any,
    *,
    origin_bytes: int | None = None,
    common: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    measure: Measure = measure_keys,
) -> EngineFacts:
    """Read all facts from SGLang's context for its tree cache, and measure the model's keys.

    A model's or server's properties never raise: an engine that can't splice is the result.

    Args:
        context: a ``TreeCacheBuildContext``.
        tree: the tree cache that was made from it, still empty.
        origin_bytes: see :func:`~leyline_engine.rows.origins.origin_rows`.
        common: see :class:`~leyline_engine.rows.pool.SplicePool`.
        measure: finds the rotation of the model's keys.
    """
    setup = read_setup(context)
    refused = refusals(setup)
    if refused:
        return EngineFacts(_capability(context, *refused))
    try:
        measured, pool = _open_pool(context, tree, origin_bytes, common, measure)
        pool.drafts = read_drafts(
            context.tp_worker,
            setup.speculative,
            pool.tensors.slots,
            partial(_open_draft, context, origin_bytes),
        )
    except _UNSUPPORTED as error:
        return EngineFacts(_capability(context, Refusal(str(error), _NO_OTHER)))
    except Exception as error:  # an engine that can't be measured serves without splicing
        log.exception("Leyline can't measure this model")
        what = f"the model can't be measured ({type(error).__name__})"
        return EngineFacts(_capability(context, Refusal(what, _NO_OTHER)))
    capability = msgspec.structs.replace(
        _capability(context),
        rotary=measured.facts,
        kv=_kv_facts(pool, int(context.params.page_size)),
        state=_state_facts(context, tree, pool),
        reuse_within=pool.states is None,
        actions=engine_actions(splices=True, recurrent=pool.states is not None),
        speculative=setup.speculative,
        draft_layers=sum(len(draft.tensors.keys) for draft in pool.drafts),
    )
    return EngineFacts(capability, measured.rotary, pool)


def _open_pool(
    context: Any,
    tree: Any,
    origin_bytes: int | None,
    common: Callable[[torch.Tensor], torch.Tensor],
    measure: Measure,
) -> tuple[Measured, SplicePool]:
    """Return the measured rotation of the model's keys, and the pool that is turned by it."""
    runner = context.tp_worker.model_runner
    kv_pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    pools = [read_pool(whole_pool(kv_pool), _key_scales(runner.model))]
    whole, windowed = _checked_layers(runner.model, kv_pool)
    parts = [slice(0, len(whole))]
    if windowed:
        pools.append(read_pool(window_pool(kv_pool), _key_scales(runner.model)))
        parts.append(slice(len(whole), None))
    measured = measure(context, tree, pools[0].dtype, parts)
    opened = [
        _turned_pool(runner, tensors, each, origin_bytes, common)
        for tensors, each in zip(pools, measured, strict=True)
    ]
    pool = opened[0]
    pool.window = opened[1] if windowed else None
    if context.is_hybrid_ssm:
        states = read_states(context.params.req_to_token_pool.mamba_pool)
        token = int(context.model_config.vocab_size) // 2
        if position_in_states(context, tree, states, token) > _STILL_STATES:
            raise UnsupportedRotaryError("recurrent states with keys that turn by their position")
        pool.states = StatePool(states, behind_forwards=_behind_forwards(runner))
    if context.enable_hierarchical_cache:
        pool.host = open_host_rows(tree, pool.tensors)
    return measured[0], pool


def _turned_pool(
    runner: Any,
    tensors: PoolTensors,
    measured: Measured,
    origin_bytes: int | None,
    common: Callable[[torch.Tensor], torch.Tensor],
) -> SplicePool:
    """Return rows that are turned as measured."""
    turned = tensors.turning(measured.start, measured.rotary.dim)
    return SplicePool(
        turned,
        measured.rotary,
        origins=origin_rows(turned, origin_bytes),
        behind_forwards=_behind_forwards(runner),
        common=common,
    )


def _open_draft(
    context: Any, origin_bytes: int | None, model: torch.nn.Module, kv_pool: Any
) -> SplicePool:
    """Return the pool of a draft model."""
    kinds = {kind for attention in _attentions(model) for kind in _special_kinds(attention)}
    dtype = str(kv_pool.dtype).removeprefix("torch.")
    if kinds or dtype not in KV_DTYPES:
        raise UnsupportedPoolError(", ".join(sorted(kinds)) or f"KV dtype {dtype}")
    config = context.model_config
    rotary = measure_modules(model, int(config.context_len), config.dtype)
    tensors = read_pool(kv_pool, _key_scales(model))
    width = int(tensors.keys[0].shape[-1])
    start = width - rotary.dim if tensors.pool_class == "mla_latent" else 0
    tensors = tensors.turning(start, rotary.dim)
    return SplicePool(
        tensors,
        rotary,
        origins=origin_rows(tensors, origin_bytes),
        behind_forwards=_behind_forwards(context.tp_worker.model_runner),
    )


def read_setup(context: Any) -> Setup:
    """Return the server's resolved settings and the model's kind, for the allow-list."""
    from sglang.srt.runtime_context import (
        get_disagg,
        get_exec,
        get_memory,
        get_parallel,
        get_serving,
        get_spec,
    )
    from sglang.version import __version__ as version

    memory, parallel, serving, spec = get_memory(), get_parallel(), get_serving(), get_spec()
    params = context.params
    model = context.tp_worker.model_runner.model
    kv_pool = params.token_to_kv_pool_allocator.get_kvcache()
    hosted = bool(context.enable_hierarchical_cache)
    return Setup(
        version=str(version).partition("+")[0],
        kv_dtype=str(getattr(kv_pool, "dtype", "unknown")).removeprefix("torch."),
        page_size=int(params.page_size),
        radix_cache=not (context.disable_radix_cache or params.disable),
        generates=bool(context.model_config.is_generation),
        hybrid_window=bool(context.is_hybrid_swa),
        recurrent=bool(context.is_hybrid_ssm),
        packed_states=bool(context.is_hybrid_ssm)
        and params.req_to_token_pool.mamba_ckpt_pool is not None,
        sparse_attention=bool(context.is_dsa or memory.enable_hisparse),
        attention_kinds=frozenset(
            kind for attention in _attentions(model) for kind in _special_kinds(attention)
        ),
        host_layout=str(memory.hicache_mem_layout) if hosted else "",
        host_storage=hosted and memory.hicache_storage_backend is not None,
        host_drafts=hosted and bool(spec.speculative_algorithm),
        host_attention_dp=hosted and int(parallel.attn_dp_size) > 1,
        external_cache=bool(
            memory.enable_unified_cache_external_linker
            or memory.enable_lmcache
            or memory.enable_flexkv
        ),
        unified_memory=bool(memory.enable_unified_memory),
        kv_sharding=bool(parallel.enable_kv_cache_sharding),
        speculative=str(spec.speculative_algorithm or ""),
        draft_layers=bool(spec.enable_multi_layer_eagle),
        paged_trees=bool(spec.speculative_algorithm)
        and int(spec.speculative_eagle_topk or 1) > 1
        and int(params.page_size) > 1,
        relaxed_acceptance=bool(spec.speculative_algorithm)
        and min(spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc)
        < 1.0,
        disaggregation=str(get_disagg().disaggregation_mode),
        sessions=bool(serving.enable_streaming_session or params.enable_session_radix_cache),
        diffusion=get_exec().dllm.dllm_algorithm is not None,
        pipeline_parallel=int(parallel.pp_size),
        context_parallel=int(max(parallel.attn_cp_size, parallel.dcp_size)),
    )


def _attentions(model: torch.nn.Module) -> Iterator[Any]:
    """Yield every attention that reads the KV pool."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return (module for module in model.modules() if isinstance(module, RadixAttention))


def _key_scales(model: torch.nn.Module) -> Iterator[object]:
    """Yield the scale of keys of every attention; None for none."""
    return (getattr(attention, "k_scale", None) for attention in _attentions(model))


def _special_kinds(attention: Any) -> Iterator[str]:
    if attention.is_cross_attention:
        yield "cross attention"
    if attention.use_irope:
        yield "interleaved NoPE layers"
    if attention.pos_encoding_mode != "NONE":
        yield f"position encoding {attention.pos_encoding_mode}"
    if attention.attn_type.value != "decoder":
        yield str(attention.attn_type.value)


def _checked_layers(model: torch.nn.Module, kv_pool: Any) -> tuple[list[int], list[int]]:
    """Return :func:`.layouts.layers_of` a pool; each has an attention that writes to it.

    Raises:
        UnsupportedPoolError: layers share rows, or are computed by something else.
    """
    whole, windowed = layers_of(kv_pool)
    owned = {attention.layer_id for attention in _attentions(model)}
    if owned != {*whole, *windowed}:
        raise UnsupportedPoolError("layers of the KV pool without an attention of their own")
    return whole, windowed


def _kv_facts(pool: SplicePool, page: int) -> KVFacts:
    tensors = pool.tensors
    return KVFacts(
        pool_class=tensors.pool_class,
        dtype=str(tensors.dtype).removeprefix("torch."),
        layers=len(tensors.keys),
        bytes_per_token=tensors.bytes_per_token,
        capacity_tokens=tensors.capacity,
        page_tokens=page,
        origin_tokens=pool.origins,
        origin_bytes=pool.bytes_beside,
    )


def _state_facts(context: Any, tree: Any, pool: SplicePool) -> StateFacts | None:
    """Return the state that the model keeps per sequence; None if it keeps none."""
    if pool.window is None and pool.states is None:
        return None
    facts = StateFacts(
        window=int(tree.sliding_window_size or 0) if pool.window is not None else 0,
        window_tokens=pool.window.tensors.capacity if pool.window is not None else 0,
    )
    if pool.states is None:
        return facts
    from sglang.srt.runtime_context import mamba_checkpoint_grid

    buffered = bool(context.params.enable_mamba_extra_buffer)
    return msgspec.structs.replace(
        facts,
        recurrent_layers=pool.states.layers,
        edits=RecurrentEdits.KEPT,
        bytes_per_state=pool.states.bytes_per_state,
        slots=int(context.params.req_to_token_pool.mamba_allocator.size),
        anchor_tokens=mamba_checkpoint_grid(int(context.params.page_size)) if buffered else 1,
    )


def _capability(context: Any, *refused: Refusal) -> Capability:
    from sglang.srt.runtime_context import get_model, get_parallel, get_serving
    from sglang.version import __version__ as version

    config = context.model_config
    model = context.tp_worker.model_runner.model
    return Capability(
        engine="sglang",
        engine_version=f"sglang {version}",
        model=str(get_serving().served_model_name or get_model().model_path),
        model_fingerprint=model_fingerprint(
            model,
            config.hf_config.to_dict(),
            str(config.model_path),
            (get_model().revision, get_model().load_format, get_model().quantization, config.dtype),
        ),
        architecture=type(model).__name__,
        vocab_size=int(config.vocab_size),
        max_context=int(config.context_len),
        splices=not refused,
        isolates=True,
        reuse_within=not refused,
        unsupported_reason="; ".join(refusal.what for refusal in refused),
        refusals=refused,
        actions=engine_actions(splices=not refused),
        sink=ATTENTION_SINK,
        plugin=this_plugin(),
        data_parallel=int(get_parallel().num_dp_ranks),
    )


def _behind_forwards(runner: Any) -> Callable[[], None]:
    """Return a function that orders the scheduler's own stream after the stream of forwards."""
    if runner.device == "cpu":
        return lambda: None
    device = torch.get_device_module(runner.device)
    return lambda: device.current_stream().wait_stream(runner.forward_stream)
