"""Rotary facts and KV layout of a model, read from the model itself.

A probe token is run at several positions and its cached tensors compared: only the rotary part may
differ, and one rotation must explain each layer's. So pairing, rotary width, place and frequencies
are measured on the loaded code, not assumed from a configuration key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from leyline_engine.contract import RotaryFacts
from leyline_engine.rotary.explained_keys import (
    Frequencies,
    ProbedLayer,
    UnsupportedRotaryError,
    explain,
)
from leyline_engine.rotary.rotation import ModelRotary, Pairing, Rotary
from leyline_replay.cache.pool import KVLayout

SUPPORTED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
SUPPORTED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_PLAIN_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose every row depends on the tokens in front of it alone, by attention."""
_TOKEN = 1
_POSITIONS = (0, 1, 17, 977)
_INV_FREQ = "inv_freq"


class UnsupportedModelError(Exception):
    """The pool can't hold a cache of the model's form; it can't be served."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that the engine needs to hold and move a model's keys."""

    layout: KVLayout
    rotary: ModelRotary
    facts: RotaryFacts | None
    """None if the keys can't be moved."""
    unsupported: str = ""
    """Reason why splicing is off; empty if it is proven."""


Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""The two cached tensors of every layer, fp32 ``[positions, heads, dim]`` on the CPU."""


def read_model_facts(model: PreTrainedModel) -> ModelFacts:
    """Probe a loaded causal LM.

    Raises:
        UnsupportedModelError: no rotary key could be located in the model's cache.
    """
    candidates = list(_frequencies(model))
    if not candidates:
        raise UnsupportedModelError("the model has no rotary embedding")
    rows = _probe(model)
    tensor = _turning_tensor(rows)
    unsupported = _refusal(model)
    if not unsupported:
        try:
            probed = [ProbedLayer(pair[tensor][None], pair[1 - tensor][None]) for pair in rows]
            found = explain(probed, torch.tensor(_POSITIONS), candidates, model.dtype)
        except UnsupportedRotaryError as error:
            unsupported = str(error)
        else:
            layout = _layout(rows, tensor, found.start, found.rotary.dim, model.dtype)
            return ModelFacts(layout, found.rotary, found.facts)
    width = int(rows[0][tensor].shape[-1])
    still = Rotary.still(width, Pairing.HALF_SPLIT)
    return ModelFacts(_layout(rows, tensor, 0, still.dim, model.dtype), still, None, unsupported)


def _frequencies(model: PreTrainedModel) -> Iterator[Frequencies]:
    """Yield the frequencies of all rotary embeddings, of which a module may have one per kind."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith(_INV_FREQ) or "original" in name:
                continue
            kind = name.removesuffix(_INV_FREQ)
            types = getattr(module, "rope_type", "default")
            scaling = float(getattr(module, f"{kind}attention_scaling", 1.0))
            rope_type = types[kind.rstrip("_")] if isinstance(types, dict) else types
            inv_freq = buffer.detach().to("cpu", torch.float32)
            yield Frequencies(inv_freq, scaling, str(rope_type))


def _refusal(model: PreTrainedModel) -> str:
    """Return why this model may not be spliced, by its configuration; empty if it may."""
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    types = {each.get("rope_type", "default") for each in ropes} - SUPPORTED_ROPE_TYPES
    sections = any("mrope_section" in each for each in ropes) or any(
        hasattr(module, "mrope_section") for module in model.modules()
    )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_KINDS)
    refusals = (
        (types, f"rotary type {', '.join(map(repr, sorted(types)))}"),
        (sections, "multimodal rotary (M-RoPE)"),
        (getattr(config, "index_topk", None), "sparse attention with an index key"),
        (others, f"layers that are not plain attention: {', '.join(others)}"),
        (model.dtype not in SUPPORTED_DTYPES, f"KV dtype {model.dtype}"),
    )
    return next((reason for applies, reason in refusals if applies), "")


def _probe(model: PreTrainedModel) -> Rows:
    """Return what each layer caches of a token alone at each position.

    One token attends to itself only, so a layer's computation doesn't depend on the position.
    """
    runs = [_run(model, position) for position in _POSITIONS]
    rows = [
        (torch.cat([first for first, _ in layer]), torch.cat([second for _, second in layer]))
        for layer in zip(*runs, strict=True)
    ]
    if any([t.shape for t in pair] != [t.shape for t in rows[0]] for pair in rows):
        raise UnsupportedModelError("the layers cache tensors of different shapes")
    return rows


def _run(model: PreTrainedModel, position: int) -> Rows:
    cache = DynamicCache(config=model.config)
    device = model.device
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([[_TOKEN]], device=device),
            position_ids=torch.tensor([[position]], device=device),
            past_key_values=cache,
            use_cache=True,
        )
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            kind = type(layer).__name__
            raise UnsupportedModelError(f"hybrid model: a layer ({kind}) caches no keys and values")

    def read(cached: torch.Tensor) -> torch.Tensor:
        return cached[:, :, 0].to("cpu", torch.float32)

    return [(read(layer.keys), read(layer.values)) for layer in cache.layers]


def _turning_tensor(rows: Rows) -> int:
    """Return which of the two cached tensors turns with the position: 0 or 1."""
    turning = {
        number
        for pair in rows
        for number, tensor in enumerate(pair)
        if bool((tensor != tensor[:1]).any())
    }
    if len(turning) != 1:
        raise UnsupportedModelError("not exactly one of the cached tensors turns with position")
    return turning.pop()


def _layout(rows: Rows, tensor: int, start: int, rotary_dim: int, dtype: torch.dtype) -> KVLayout:
    first, second = rows[0]
    return KVLayout(
        pool_class="mla_latent" if tensor == 1 else "gqa",
        layers=len(rows),
        shapes=((first.shape[1], first.shape[2]), (second.shape[1], second.shape[2])),
        rotary_tensor=tensor,
        rotary_start=start,
        rotary_dim=rotary_dim,
        dtype=dtype,
    )
