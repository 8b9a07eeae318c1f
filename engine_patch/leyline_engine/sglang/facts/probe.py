"""A probe of a loaded model: the KV rows that its own forward writes at chosen positions.

SGLang runs sequences of one token, as it runs every prefill: the same layers, kernels, collectives
and writes to the pool as for a user's prompt. Only the positions are set from outside.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from leyline_engine.rotary.explained_keys import ProbedLayer
from leyline_engine.sglang.rows.layouts import layers_of

_APART = (0, 61)
"""Positions that turn a key far enough to see it in a state."""
_AT_ONCE = 4
"""Sequences per forward: a server that runs few requests has few places for them."""


class ProbeError(Exception):
    """The probe can't run on this server; nothing is known of its keys."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The cache of sequences of one token, in their order."""

    rows: torch.Tensor
    """int64 ``[n]`` slots in the KV pool."""
    states: torch.Tensor
    """int64 ``[n]`` slots of recurrent states; ``[0]`` for a model without them."""


def probe_layers(
    context: Any, tree: Any, tokens: Sequence[int], positions: Sequence[int]
) -> list[ProbedLayer]:
    """Return the cached rows of each token alone at each position, in every layer of the pool.

    All ranks of a server do this at the same time, before its first request.

    Args:
        context: SGLang's ``TreeCacheBuildContext``.
        tree: its tree cache, which is empty.
        tokens: ids.
        positions: below the model's maximum length.

    Raises:
        ProbeError: the server has no room for the probe.
    """
    pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    sequences = [(token, position) for token in tokens for position in positions]
    at_once = min(_AT_ONCE, context.params.req_to_token_pool.available_size())
    if at_once < 1:
        raise ProbeError("no room to run a probe of the model")
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for start in range(0, len(sequences), at_once):
        with computed(context, tree, sequences[start : start + at_once]) as found:
            parts.append(_rows(pool, found.rows))
    shape = (len(tokens), len(positions))
    return [
        ProbedLayer(
            torch.cat([keys for keys, _ in layer]).view(*shape, *layer[0][0].shape[1:]),
            torch.cat([values for _, values in layer]).view(*shape, *layer[0][1].shape[1:]),
        )
        for layer in zip(*parts, strict=True)
    ]


def _rows(pool: Any, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of slots in every layer, fp32 ``[n, heads, dim]`` on the CPU.

    In an MLA pool a key is a whole row, and a value the part that doesn't turn. Layers with a
    window come last, in a pool that has them.
    """

    def read(layer: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = (pool.get_key_buffer(layer), pool.get_value_buffer(layer))
        keys, values = (buffer[at].to("cpu", torch.float32) for buffer in buffers)
        return keys, values

    whole, windowed = layers_of(pool)
    found = [read(layer, slots) for layer in whole]
    if windowed:
        inside = pool.full_to_swa_index_mapping[slots]
        found += [read(layer, inside) for layer in windowed]
    return found


def position_in_states(
    context: Any, tree: Any, states: Sequence[torch.Tensor], token: int
) -> float:
    """Return how far the states after one token differ between two positions.

    Args:
        context: SGLang's ``TreeCacheBuildContext``.
        tree: its tree cache, which is empty.
        states: ``[layers, slots, ...]`` each.
        token: id.

    Returns:
        root of the mean square, as a share of the states'; the largest of all tensors.

    Raises:
        ProbeError: the server has no room for the probe.
    """
    found = list[list[torch.Tensor]]()
    for position in _APART:
        with computed(context, tree, [(token, position)]) as cached:
            found.append([each[:, cached.states].float() for each in states])
    return max(_difference(*pair) for pair in zip(*found, strict=True))


def _difference(here: torch.Tensor, there: torch.Tensor) -> float:
    size = float(there.square().mean())
    return (float((here - there).square().mean()) / size) ** 0.5 if size else 0.0


@contextmanager
def computed(context: Any, tree: Any, sequences: Sequence[tuple[int, int]]) -> Iterator[Computed]:
    """Run tokens at positions, each in a sequence of its own; yields their slots, then frees them.

    The rows stay until other tokens take the slots: they are of no prompt.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    rows, slots = context.params.req_to_token_pool, context.params.token_to_kv_pool_allocator
    if slots.available_size() < len(sequences) * int(context.params.page_size):
        raise ProbeError("a KV pool with no room to probe the model")
    batch = ScheduleBatch.init_new(
        reqs=[_request(token) for token, _ in sequences],
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=slots,
        tree_cache=tree,
        model_config=context.tp_worker.model_runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    try:
        _forward(context, batch, [position for _, position in sequences])
        held = [req.kv.mamba_pool_idx for req in batch.reqs if req.kv.holds_mamba]
        states = torch.stack(held).to(torch.int64) if held else batch.out_cache_loc[:0]
        yield Computed(batch.out_cache_loc, states)
    finally:
        slots.free(batch.out_cache_loc)
        for req in batch.reqs:
            if req.kv.holds_mamba:
                rows.free_mamba_cache(req)
            rows.free(req)


def _request(token: int) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    prompt = array("q", [token])
    req = Req(
        rid="leyline-probe",
        origin_input_text="",
        origin_input_ids=prompt,
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    req.full_untruncated_fill_ids = prompt
    req.logprob_start_len = -1
    req.extend_end = 1
    return req


def _forward(context: Any, batch: Any, positions: Sequence[int]) -> None:
    """Run a prepared batch as the scheduler does, but at other positions."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    runner = context.tp_worker.model_runner
    _join_ranks(batch, runner)
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    forward.positions = torch.tensor(
        positions, dtype=forward.positions.dtype, device=forward.positions.device
    )
    if forward.mrope_positions is not None:
        # A text has the same position in all three sections.
        forward.mrope_positions = forward.positions.expand(3, -1).contiguous()
    with torch.inference_mode():
        runner.forward(forward)


def _join_ranks(batch: Any, runner: Any) -> None:
    """Agree with other data-parallel ranks on sizes, where attention alone is data-parallel."""
    from sglang.srt.managers.scheduler_components.dp_attn import prepare_mlp_sync_batch_raw
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.utils import require_mlp_sync, require_mlp_tp_gather

    if require_mlp_sync():
        prepare_mlp_sync_batch_raw(
            batch,
            model_runner=runner,
            get_idle_batch=None,
            disable_cuda_graph=cuda_graph_fully_disabled(),
            require_mlp_tp_gather=require_mlp_tp_gather(),
            disable_overlap_schedule=get_schedule().disable_overlap_schedule,
            offload_tags=set(),
        )
