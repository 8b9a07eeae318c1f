"""A vLLM server's settings and its workers' facts, and the decision that Leyline may splice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from leyline_engine.contract import (
    ACTION_VERSION,
    ATTENTION_SINK,
    CLAIM_ACTION,
    EDIT_ACTION,
    Capability,
    Refusal,
    this_plugin,
)
from leyline_engine.vllm.facts.allow_list import Setup, refusals
from leyline_engine.vllm.facts.worker_facts import WorkerFacts

_NO_OTHER = "serve another model, or one with its original configuration"
"""Remedy where the loaded model itself isn't understood: no flag changes it."""
_PLAIN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_OWN_SCHEDULERS = ("vllm.v1.core.sched.", "leyline_engine.")


def read_setup(vllm_config: Any, kv_cache_config: Any) -> Setup:
    """Return a server's resolved settings and the model's kind, for the allow-list.

    Args:
        vllm_config: vLLM's ``VllmConfig``, after its engine resolved it.
        kv_cache_config: its ``KVCacheConfig``.
    """
    from vllm.platforms import current_platform
    from vllm.version import __version__ as version

    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = list(kv_cache_config.kv_cache_groups)
    specs = [each for group in groups for each in _specs(group.kv_cache_spec)]
    block_size = int(groups[0].kv_cache_spec.block_size) if groups else int(cache.block_size)
    hashes = int(kv_cache_config.hash_block_size or cache.hash_block_size or block_size)
    dtype = str(cache.cache_dtype if cache.cache_dtype != "auto" else model.dtype)
    images = model.multimodal_config
    return Setup(
        version=str(version).partition("+")[0],
        kv_dtype=dtype.removeprefix("torch."),
        block_size=block_size,
        hash_block_size=0 if hashes == block_size else hashes,
        prefix_caching=bool(cache.enable_prefix_caching),
        mla_on_cpu=bool(model.use_mla and current_platform.is_cpu()),
        chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
        groups=len(groups),
        attention_kinds=frozenset(kind for spec in specs for kind in _special_kinds(spec))
        | frozenset(
            ["non-causal attention"] if vllm_config.attention_config.use_non_causal else []
        ),
        sparse_attention=any(_indexed(spec) for spec in specs)
        or vllm_config.attention_config.hisparse_config is not None
        or hasattr(model.hf_text_config, "index_topk"),
        fast_prefill=bool(cache.kv_sharing_fast_prefill),
        generates=model.runner_type == "generate" and not model.is_encoder_decoder,
        encodes_only=bool(images is not None and images.mm_encoder_only),
        prefix_lm=bool(model.is_mm_prefix_lm and model.supports_multimodal_inputs),
        prompt_embeddings=bool(model.enable_prompt_embeds),
        diffusion=bool(model.is_diffusion or vllm_config.diffusion_config is not None),
        lookback=vllm_config.engram_config is not None,
        **_server(vllm_config),
    )


def _server(vllm_config: Any) -> dict[str, Any]:
    """Return the settings that no model decides on."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    speculative = vllm_config.speculative_config
    return {
        "speculative": str(speculative.method or "a draft") if speculative is not None else "",
        "pipeline_parallel": int(parallel.pipeline_parallel_size),
        "context_parallel": max(
            int(parallel.prefill_context_parallel_size), int(parallel.decode_context_parallel_size)
        ),
        "data_parallel": int(parallel.data_parallel_size),
        "elastic": bool(parallel.enable_elastic_ep),
        "micro_batches": bool(parallel.use_ubatching),
        "connector": str(transfer.kv_connector or "") if transfer is not None else "",
        "connector_role": str(transfer.kv_role) if transfer is not None else "kv_both",
        "kv_offloading": vllm_config.cache_config.kv_offloading_size is not None,
        "sleep_mode": bool(vllm_config.model_config.enable_sleep_mode),
        "replaced_weights": vllm_config.weight_transfer_config is not None,
        "routed_experts": bool(vllm_config.aux_output_config.enabled),
        "scheduler_class": _foreign_scheduler(vllm_config.scheduler_config.scheduler_cls),
    }


def _specs(spec: Any) -> Iterator[Any]:
    """Yield the kinds of KV of a group's layers."""
    layers = getattr(spec, "kv_cache_specs", None)
    yield from (spec,) if layers is None else layers.values()


def _indexed(spec: Any) -> bool:
    """Return True for KV that sparse attention has beside its keys."""
    role = getattr(spec, "cache_role", None)
    return getattr(role, "value", role) == "indexer" or bool(
        getattr(spec, "is_index_group_leader", False)
    )


def _special_kinds(spec: Any) -> Iterator[str]:
    """Yield what a kind of KV has that plain causal attention hasn't, in words."""
    name = type(spec).__name__
    if name not in _PLAIN_SPECS:
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in name.removesuffix("Spec"))
        yield words.strip().replace("m l a", "MLA")
        return
    if spec.attention_chunk_size is not None:
        yield "chunked local attention"
    if spec.non_causal:
        yield "non-causal attention"
    if spec.tokens_per_state != 1:
        yield "KV of several tokens in one"
    if getattr(spec, "model_version", None) is not None:
        yield f"compressed MLA ({spec.model_version})"


def _foreign_scheduler(scheduler: Any) -> str:
    """Return a scheduler's module and name if it is neither vLLM's nor Leyline's, else nothing."""
    if scheduler is None:
        return ""
    name = scheduler
    if not isinstance(scheduler, str):
        name = f"{scheduler.__module__}.{scheduler.__qualname__}"
    return "" if str(name).startswith(_OWN_SCHEDULERS) else str(name)


def capability(
    vllm_config: Any, kv_cache_config: Any, workers: Sequence[WorkerFacts]
) -> Capability:
    """Return the capability document of an engine.

    Args:
        vllm_config: see :func:`read_setup`.
        kv_cache_config: see :func:`read_setup`.
        workers: the facts of every tensor-parallel rank; empty if none could be asked.
    """
    from vllm.version import __version__ as version

    refused = refusals(read_setup(vllm_config, kv_cache_config)) or _of_workers(workers)
    model = vllm_config.model_config
    served = model.served_model_name
    first = workers[0] if workers else WorkerFacts(rank=0)
    return Capability(
        engine="vllm",
        engine_version=f"vllm {version}",
        model=str((served[0] if isinstance(served, list) else served) or model.model),
        model_fingerprint=first.fingerprint,
        architecture=first.architecture or str(model.architecture),
        vocab_size=int(model.get_vocab_size()),
        max_context=int(model.max_model_len),
        splices=not refused,
        isolates=True,
        unsupported_reason="; ".join(refusal.what for refusal in refused),
        refusals=refused,
        actions=tuple(f"{kind}@{ACTION_VERSION}" for kind in (EDIT_ACTION, CLAIM_ACTION)),
        rotary=None if refused else first.rotary_facts,
        kv=None if refused else first.kv_facts,
        sink=ATTENTION_SINK,
        plugin=this_plugin(),
        data_parallel=int(vllm_config.parallel_config.data_parallel_size),
    )


def _of_workers(workers: Sequence[WorkerFacts]) -> tuple[Refusal, ...]:
    """Return refusals because of what the workers measured, each once."""
    if not workers:
        return (Refusal("workers that measured nothing", _NO_OTHER),)
    found = dict.fromkeys(worker.refusal for worker in workers if worker.refusal)
    same = {(worker.fingerprint, worker.rotary_facts, worker.kv_facts) for worker in workers}
    if not found and (len(same) > 1 or not workers[0].fingerprint):
        found = {"tensor-parallel ranks that differ in what they measured": None}
    return tuple(Refusal(what, _NO_OTHER) for what in found)
