"""A probe of a loaded model: the KV rows that its own forward writes at chosen positions.

The model runs sequences of one token, each in a block of its own, through the metadata builders and
layers that every prefill uses; only the positions are set from outside. Nothing of the runner's
batch is touched, no graph is captured or replayed, and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leyline_engine.rotary.explained_keys import ProbedLayer
from leyline_engine.vllm.facts.layouts import LayerLayout, flat_storage

_Rows = tuple[torch.Tensor, ...]
"""Keys, and values unless a key's row holds everything (MLA)."""
_AT_ONCE = 4
"""Sequences per forward, and blocks that the cache must have beside block 0, vLLM's own."""


class ProbeError(Exception):
    """The probe can't run on this server; nothing is known of its keys."""


def probe_layers(
    runner: Any,
    layouts: Mapping[str, LayerLayout],
    tokens: Sequence[int],
    positions: Sequence[int],
) -> list[ProbedLayer]:
    """Return the cached rows of each token alone at each position, in every layer.

    All ranks of a server do this at the same time, before its first request. The cache holds zeros
    afterwards, as before.

    Args:
        runner: vLLM's model runner, V1 or V2, with an initialised KV cache.
        layouts: the measured layers by name, in the model's order.
        tokens: ids.
        positions: below the model's maximum length.

    Raises:
        ProbeError: the server has no room for the probe.
    """
    page = int(runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    if int(runner.kv_cache_config.num_blocks) <= _AT_ONCE:
        raise ProbeError("a KV cache with no room to probe the model")
    at_once = min(_AT_ONCE, int(runner.max_num_reqs), int(runner.max_num_tokens))
    sequences = [(token, position) for token in tokens for position in positions]
    slots = torch.arange(1, at_once + 1) * page
    layers = [_opened(runner, name, layout, slots) for name, layout in layouts.items()]
    if any(bool(view[layer.blocks].any()) for layer in layers for view in layer.views):
        raise ProbeError("a KV cache that isn't empty")
    read: list[list[_Rows]] = []
    for start in range(0, len(sequences), at_once):
        batch = sequences[start : start + at_once]
        # Batches of one size: a kernel may choose by it.
        batch += [batch[-1]] * (at_once - len(batch))
        try:
            _forward(runner, batch, slots, page)
            read.append([layer.first_rows() for layer in layers])
        finally:
            for layer in layers:
                layer.clear()
    shape = (len(tokens), len(positions))
    return [ProbedLayer(*_joined(parts, shape)) for parts in zip(*read, strict=True)]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The rows of one layer, in the blocks that the probe uses."""

    views: tuple[torch.Tensor, ...]
    """Keys and values, or keys alone if a key's row holds everything (MLA)."""
    blocks: torch.Tensor

    def first_rows(self) -> _Rows:
        """Return the first token's rows of each block, fp32 ``[n, heads, dim]`` on the CPU."""
        return tuple(view[self.blocks, 0].to("cpu", torch.float32) for view in self.views)

    def clear(self) -> None:
        """Leave zeros."""
        for view in self.views:
            view[self.blocks] = 0


def _opened(runner: Any, name: str, layout: LayerLayout, slots: torch.Tensor) -> _Layer:
    """Return the rows of a layer in the blocks of some slots."""
    layer = runner.vllm_config.compilation_config.static_forward_context[name]
    keys, values = layout.rows(flat_storage(layer.kv_cache))
    views = (keys,) if values is None else (keys, values)
    return _Layer(views, (slots // layout.block_tokens).to(keys.device))


def _joined(
    parts: Sequence[_Rows], shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one layer's rows of all batches as ``[tokens, positions, heads, dim]``."""
    whole = [torch.cat(each)[: shape[0] * shape[1]] for each in zip(*parts, strict=True)]
    keys, *values = [each.view(*shape, *each.shape[1:]) for each in whole]
    return keys, values[0] if values else None


def _forward(
    runner: Any, sequences: Sequence[tuple[int, int]], slots: torch.Tensor, page: int
) -> None:
    """Run tokens at positions, the n-th of them alone in the block of the n-th slot."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    device, count = runner.device, len(sequences)
    slot_mapping = slots.to(device, torch.int64)
    ids = torch.tensor([token for token, _ in sequences], dtype=torch.int32, device=device)
    positions = torch.tensor([position for _, position in sequences], device=device)
    common = _common_metadata(runner, slots, positions, page)
    groups = [group for groups in runner.attn_groups for group in groups]
    metadata = {
        name: built
        for group in groups
        for built in [group.build_metadata(common)]
        for name in group.layer_names
    }
    if runner.lora_config is not None:
        runner._set_active_loras((0,) * count, (0,) * count, set())
    with set_forward_context(
        metadata,
        runner.vllm_config,
        num_tokens=count,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        slot_mapping=dict.fromkeys(metadata, slot_mapping),
        # The compiled model may not be there yet, and must not be compiled for this batch.
        skip_compiled=True,
    ):
        _run(runner, ids, positions)


def _common_metadata(runner: Any, slots: torch.Tensor, positions: torch.Tensor, page: int) -> Any:
    """Return vLLM's metadata of sequences of one token without a past."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device, count = runner.device, len(slots)
    starts = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.ones(count, dtype=torch.int32)
    # As wide as for the longest sequence; groups of layers with smaller blocks map it themselves.
    table = torch.zeros(count, -(-int(runner.max_model_len) // page), dtype=torch.int32)
    table[:, 0] = slots // page
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=1,
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device, torch.int64),
        causal=True,
        positions=positions,
        is_prefilling=torch.ones(count, dtype=torch.bool),
    )


def _run(runner: Any, ids: torch.Tensor, positions: torch.Tensor) -> None:
    """Run the model on its inputs as the runner prepares them for a text."""
    model, config = runner.model, runner.vllm_config.model_config
    if config.uses_mrope:
        # A text has the same position in all three sections.
        positions = positions.expand(3, -1).contiguous()
    inputs: dict[str, Any] = {"input_ids": ids, "inputs_embeds": None}
    if runner.supports_mm_inputs:
        inputs["inputs_embeds"] = model.embed_input_ids(ids)
        if not getattr(model, "requires_raw_input_tokens", False):
            inputs["input_ids"] = None
    model(positions=positions, intermediate_tensors=None, **inputs)
