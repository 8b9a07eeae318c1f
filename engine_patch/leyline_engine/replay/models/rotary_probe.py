"""Rotary facts and KV layout of a model, read from the model itself.

A probe token is run at two positions and its cached tensors compared: only the rotary part may
differ, and exactly one pairing must explain the difference. So pairing, rotary width and placement
are measured on the loaded code, not assumed from a configuration key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from leyline_engine.contract import RotaryFacts
from leyline_engine.replay.cache.pool import KVLayout
from leyline_engine.rotation import Pairing, Rotary

SUPPORTED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
SUPPORTED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_PROBE_POSITION = 977
_RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class UnsupportedModelError(Exception):
    """The pool can't hold a cache of the model's form; it can't be served."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that the engine needs to hold and move a model's keys."""

    layout: KVLayout
    rotary: Rotary
    facts: RotaryFacts
    unsupported: str = ""
    """Reason why splicing is off; empty if it is proven."""


def _probe(
    model: PreTrainedModel, token: int, position: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = DynamicCache(config=model.config)
    device = model.device
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([[token]], device=device),
            position_ids=torch.tensor([[position]], device=device),
            past_key_values=cache,
            use_cache=True,
        )
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            kind = type(layer).__name__
            raise UnsupportedModelError(f"hybrid model: a layer ({kind}) caches no keys and values")
    # [1, heads, 1, dim] -> [heads, dim]
    return [(layer.keys[0, :, 0], layer.values[0, :, 0]) for layer in cache.layers]


def _refusal(config: Any, module: Any, dtype: torch.dtype) -> str:
    """Return why this model may not be spliced, by its configuration; empty if it may."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    kinds = getattr(config, "layer_types", None)
    windowed = kinds is None and getattr(config, "sliding_window", None) is not None
    others = sorted(set(kinds or ()) - {"full_attention"})
    refusals = (
        (rope_type not in SUPPORTED_ROPE_TYPES, f"rotary type {rope_type!r}"),
        ("mrope_section" in rope or hasattr(module, "mrope_section"), "multimodal rotary (M-RoPE)"),
        (getattr(config, "index_topk", None), "sparse attention with an index key"),
        (windowed or "sliding_attention" in others, "layers with a sliding window"),
        (others, f"layers that are not full attention: {', '.join(others)}"),
        (dtype not in SUPPORTED_DTYPES, f"KV dtype {dtype}"),
    )
    return next((reason for applies, reason in refusals if applies), "")


def read_model_facts(model: PreTrainedModel) -> ModelFacts:
    """Probe a loaded causal LM.

    Raises:
        UnsupportedModelError: no rotary key could be located in the model's cache.
    """
    module = getattr(model.base_model, "rotary_emb", None)
    if module is None:
        raise UnsupportedModelError("the model has no rotary embedding module")
    if not isinstance(getattr(module, "inv_freq", None), torch.Tensor):
        raise UnsupportedModelError("the layers don't share one rotary embedding")
    inv_freq = module.inv_freq.detach().to(torch.float32)
    at_zero = _probe(model, 1, 0)
    at_p = _probe(model, 1, _PROBE_POSITION)
    layout = _layout(at_zero, at_p, 2 * int(inv_freq.numel()), model.dtype)
    unsupported = _refusal(model.config, module, model.dtype)
    proven: list[Pairing] = []
    if not unsupported:
        proven = [p for p in Pairing if _explains(layout, Rotary(inv_freq, p), at_zero, at_p)]
        if len(proven) != 1:
            unsupported = "no one rotation explains how the keys of every layer turn"
    rotary = Rotary(inv_freq, proven[0] if proven else Pairing.HALF_SPLIT)
    rope = getattr(model.config, "rope_parameters", None) or {}
    digest = blake2b(inv_freq.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    return ModelFacts(
        layout,
        rotary,
        RotaryFacts(
            rope_type=str(rope.get("rope_type", "default")),
            pairing=str(rotary.pairing),
            rotary_dim=rotary.dim,
            inv_freq_digest=digest,
            attention_scaling=float(getattr(module, "attention_scaling", 1.0)),
        ),
        unsupported,
    )


def _layout(
    at_zero: list[tuple[torch.Tensor, torch.Tensor]],
    at_p: list[tuple[torch.Tensor, torch.Tensor]],
    rotary_dim: int,
    dtype: torch.dtype,
) -> KVLayout:
    """Find the cached tensor of layer 0, and its dimensions, that turn with position."""
    moved = [(a != b).any(dim=0) for a, b in zip(at_zero[0], at_p[0], strict=True)]
    turning = [index for index, dims in enumerate(moved) if bool(dims.any())]
    if len(turning) != 1:
        raise UnsupportedModelError("not exactly one of the cached tensors turns with position")
    if any([t.shape for t in pair] != [t.shape for t in at_zero[0]] for pair in at_zero):
        raise UnsupportedModelError("the layers cache tensors of different shapes")
    tensor = turning[0]
    width = at_zero[0][tensor].shape[-1]
    dims = torch.nonzero(moved[tensor]).flatten()
    start = 0 if int(dims[-1]) < rotary_dim else width - rotary_dim
    if start < 0 or int(dims[0]) < start:
        raise UnsupportedModelError("the turning dimensions don't form one rotary band")
    shapes = tuple((t.shape[0], t.shape[1]) for t in at_zero[0])
    return KVLayout(
        pool_class="mla_latent" if tensor == 1 else "gqa",
        layers=len(at_zero),
        shapes=(shapes[0], shapes[1]),
        rotary_tensor=tensor,
        rotary_start=start,
        rotary_dim=rotary_dim,
        dtype=dtype,
    )


def _explains(
    layout: KVLayout,
    rotary: Rotary,
    at_zero: Sequence[tuple[torch.Tensor, torch.Tensor]],
    at_p: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> bool:
    """Return True if rotating the keys of position 0 gives the probe position's in all layers.

    One token attends to itself only, so a layer's computation doesn't depend on the position.
    """
    band = slice(layout.rotary_start, layout.rotary_start + layout.rotary_dim)
    for before, after in zip(at_zero, at_p, strict=True):
        key, wanted = (pair[layout.rotary_tensor][:, band] for pair in (before, after))
        rotated = rotary.rotate(
            key[None],
            torch.tensor([0], device=key.device),
            torch.tensor([_PROBE_POSITION], device=key.device),
        )[0]
        error = (rotated.float() - wanted.float()).abs().max()
        if error > _RELATIVE_TOLERANCE[layout.dtype] * wanted.float().abs().max():
            return False
    return True
