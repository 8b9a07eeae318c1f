"""The gate for models on vLLM: its context, for :mod:`leyline_engine.rotary.measured_keys`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from leyline_engine.rotary.measured_keys import Measured, measure_model
from leyline_engine.vllm.facts.layouts import (
    LayerLayout,
    UnsupportedLayoutError,
    measure_layer,
    row_shape,
)
from leyline_engine.vllm.facts.probe import probe_layers


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
