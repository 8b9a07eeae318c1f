"""The facts that one worker measured, in a form that travels to the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from leyline_engine.contract import KVFacts, RotaryFacts
from leyline_engine.rotary.explained_keys import UnsupportedRotaryError
from leyline_engine.rotary.fingerprint import model_fingerprint
from leyline_engine.rotary.measured_keys import Measured, measure_model
from leyline_engine.rotary.rotation import (
    LayeredRotary,
    ModelRotary,
    Pairing,
    Rotary,
)
from leyline_engine.vllm.facts.layouts import (
    LayerLayout,
    UnsupportedLayoutError,
    measure_layer,
    row_shape,
)
from leyline_engine.vllm.facts.probe import ProbeError, probe_layers


def measure_layouts(runner: Any) -> dict[str, LayerLayout]:
    """Measure the KV layout of each layer, by name in the model's order.

    Args:
        runner: vLLM's model runner, V1 or V2, with an initialised and empty KV cache.

    Raises:
        UnsupportedLayoutError: a layer's rows can't be described, or aren't in the one group.
    """
    config = runner.kv_cache_config
    (group,) = config.kv_cache_groups
    page, blocks = int(group.kv_cache_spec.block_size), int(config.num_blocks)
    layers = runner.vllm_config.compilation_config.static_forward_context
    kernels = {
        name: _kernel_block(each, page)
        for groups in runner.attn_groups
        for each in groups
        for name in each.layer_names
    }
    layouts = {}
    for name, layer in layers.items():
        if not hasattr(layer, "kv_cache") or not hasattr(layer, "impl"):
            continue  # what else vLLM registers: mixtures of experts
        if name not in kernels:
            raise UnsupportedLayoutError("attention layers without KV of their own")
        kernel = kernels[name]
        layouts[name] = measure_layer(layer, row_shape(layer, blocks * (page // kernel), kernel))
    if not layouts:
        raise UnsupportedLayoutError("a model without a KV cache")
    return layouts


def measure_keys(runner: Any, layouts: Mapping[str, LayerLayout]) -> Measured:
    """Probe the model and find the one rotation that explains the keys in its KV cache.

    Args:
        runner: see :func:`measure_layouts`.
        layouts: what that found.

    Raises:
        UnsupportedRotaryError: the keys turn otherwise, or can't be measured.
        ProbeError: the server has no room for the probe.
    """
    config = runner.vllm_config.model_config
    layers = runner.vllm_config.compilation_config.static_forward_context
    dtypes = {layers[name].kv_cache.dtype for name in layouts}
    return measure_model(
        runner.get_model(),
        partial(probe_layers, runner, layouts),
        longest=int(config.max_model_len),
        vocabulary=int(config.get_vocab_size()),
        dtypes=(config.dtype, *dtypes),
        full_table=unrounded_table,
    )


def unrounded_table(module: Any) -> torch.Tensor | None:
    """Return a rotary module's table in fp32: vLLM rounds the one that it keeps to its dtype.

    None unless the module's own formula gives the rounded table again.
    """
    held: torch.Tensor = module.cos_sin_cache
    if held.dtype is torch.float32 or not hasattr(module, "_compute_cos_sin_cache"):
        return None
    with torch.inference_mode(), torch.device("cpu"):
        table: torch.Tensor = module._compute_cos_sin_cache().to("cpu", torch.float32)
    if table.shape != held.shape:
        return None
    # The device's cosines may differ in their last bit, and so may a rounding.
    step = torch.finfo(held.dtype).eps
    off = (table - held.to("cpu", torch.float32)).abs()
    return table if bool((off <= step * table.abs().clamp_min(step)).all()) else None


def _kernel_block(group: Any, page: int) -> int:
    """Return the tokens of a block as the kernels of a group of layers count them."""
    if getattr(group, "kernel_block_stride", 0):
        raise UnsupportedLayoutError("layers that are packed between each other's blocks")
    return int(getattr(group, "kernel_block_size", None) or page)


_UNSUPPORTED = (UnsupportedRotaryError, UnsupportedLayoutError, ProbeError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PlainRotary:
    """A model's rotations as plain values."""

    pairing: str
    frequencies: tuple[torch.Tensor, ...]
    """Distinct ones, fp32 ``[d/2]`` on the CPU."""
    of_layer: tuple[int, ...]
    """Place in ``frequencies`` of each layer's; empty if all layers turn alike."""

    @classmethod
    def of(cls, rotary: ModelRotary) -> PlainRotary:
        """Return the plain values of a rotation."""
        of_layer = rotary.of_layer if isinstance(rotary, LayeredRotary) else ()
        frequencies = tuple(each.inv_freq.clone() for each in rotary.distinct)
        return cls(str(rotary.pairing), frequencies, tuple(of_layer))

    def whole(self) -> ModelRotary:
        """Return the rotation again."""
        rotaries = tuple(Rotary(each, Pairing(self.pairing)) for each in self.frequencies)
        return LayeredRotary(rotaries, self.of_layer) if self.of_layer else rotaries[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerFacts:
    """Facts that a worker knows of its model and KV cache; they pickle without vLLM."""

    rank: int
    """Of tensor parallelism."""
    architecture: str = ""
    """Class of the loaded model."""
    fingerprint: str = ""
    refusal: str = ""
    """Why nothing can be spliced here; empty if it can, and only then the rest is set."""
    layouts: Mapping[str, LayerLayout] | None = None
    """Of each layer, in the model's order."""
    blocks: int = 0
    """Blocks of the scheduler, block 0 included, which it never uses."""
    block_size: int = 0
    """Tokens of each."""
    dtype: torch.dtype | None = None
    rotary: PlainRotary | None = None
    start: int = 0
    """First of a key's dimensions that turn."""
    rotary_facts: RotaryFacts | None = None
    kv_facts: KVFacts | None = None
    """Of this rank's part of the cache."""

    @property
    def splices(self) -> bool:
        """True if all of the worker's rows and rotations are known."""
        return not self.refusal


def read_worker_facts(runner: Any, kv_caches: Mapping[str, torch.Tensor]) -> WorkerFacts:
    """Measure a worker's KV cache and model; call it once the KV cache is there, and empty.

    All tensor-parallel ranks call it at the same time: the model's forward has collectives. A
    model's or worker's properties never raise: a worker that can't splice is the result.

    Args:
        runner: the worker's model runner, V1 or V2.
        kv_caches: the KV cache of each layer by name; the layers that have one.
    """
    rank, ranks = _place()
    known = _identified(runner, rank)
    refusal, layouts, measured = "", None, None
    try:
        refusal = _setup_refusal(runner, kv_caches)
        with torch.inference_mode():
            layouts = None if refusal else measure_layouts(runner)
    except Exception as error:
        refusal = _in_words(error)
    # No rank begins a forward with collectives that another one doesn't join.
    refusal = _agreed(refusal, ranks)
    if not refusal and layouts is not None:
        try:
            with torch.inference_mode():
                measured = measure_keys(runner, layouts)
        except Exception as error:
            refusal = _in_words(error)
        refusal = _agreed(refusal, ranks)
    if refusal or measured is None or layouts is None:
        return replace(known, refusal=refusal)
    try:
        return _whole(known, runner, layouts, measured)
    except Exception as error:
        return replace(known, refusal=_in_words(error))


def _whole(
    known: WorkerFacts, runner: Any, layouts: Mapping[str, LayerLayout], measured: Measured
) -> WorkerFacts:
    """Return the facts of a worker that can splice."""
    config = runner.kv_cache_config
    layers = runner.vllm_config.compilation_config.static_forward_context
    (dtype,) = {layers[name].kv_cache.dtype for name in layouts}
    page, blocks = int(config.kv_cache_groups[0].kv_cache_spec.block_size), int(config.num_blocks)
    latent = any(each.values is None for each in layouts.values())
    elements = sum(each.heads * (each.key_dim + each.value_dim) for each in layouts.values())
    return replace(
        known,
        layouts=dict(layouts),
        blocks=blocks,
        block_size=page,
        dtype=dtype,
        rotary=PlainRotary.of(measured.rotary),
        start=measured.start,
        rotary_facts=measured.facts,
        kv_facts=KVFacts(
            pool_class="mla_latent" if latent else "gqa",
            dtype=str(dtype).removeprefix("torch."),
            layers=len(layouts),
            bytes_per_token=elements * dtype.itemsize,
            capacity_tokens=(blocks - 1) * page,
            page_tokens=page,
        ),
    )


def _setup_refusal(runner: Any, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """Return why a worker's own setup can't be measured; empty if it can."""
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"{len(groups)} groups of KV caches"
    missing = set(groups[0].layer_names) - set(kv_caches)
    return "layers without a KV cache" if missing else ""


def _identified(runner: Any, rank: int) -> WorkerFacts:
    """Return the facts of a worker of which only the model's class and fingerprint are known."""
    try:
        model, config = runner.get_model(), runner.vllm_config.model_config
        load = runner.vllm_config.load_config
        settings = (config.revision, str(load.load_format), config.quantization, config.dtype)
        configuration = config.hf_config.to_dict()
        return WorkerFacts(
            rank=rank,
            architecture=type(model).__name__,
            fingerprint=model_fingerprint(model, configuration, str(config.model), settings),
        )
    except Exception:  # an engine that can't be told from others serves without splicing
        log.exception("Leyline can't identify this model")
        return WorkerFacts(rank=rank)


def _in_words(error: Exception) -> str:
    if isinstance(error, _UNSUPPORTED):
        return str(error)
    log.error("Leyline can't measure this model", exc_info=error)
    return f"the model can't be measured ({type(error).__name__})"


def _place() -> tuple[int, int]:
    """Return this process's tensor-parallel rank, and the number of them."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def _agreed(refusal: str, ranks: int) -> str:
    """Return a refusal of any rank's, this one's first; empty if there is none."""
    if ranks == 1:
        return refusal
    from vllm.distributed.parallel_state import get_tp_group

    refused = torch.tensor([bool(refusal)], dtype=torch.int32)
    torch.distributed.all_reduce(
        refused, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().cpu_group
    )
    return refusal or ("another tensor-parallel rank can't splice" if int(refused) else "")
