"""Rotary facts, KV layout and forms of state of a model, read from the model itself.

A probe token is run at several positions and its cached tensors compared: only the rotary part may
differ, and one rotation must explain each layer's. So pairing, rotary width, place and frequencies
are measured on the loaded code, not assumed from a configuration key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from leyline_engine.contract import RotaryFacts
from leyline_engine.rotary.explained_keys import (
    TOLERANCE,
    Frequencies,
    ProbedLayer,
    UnsupportedRotaryError,
    explain,
)
from leyline_engine.rotary.rotation import ModelRotary, Pairing, Rotary
from leyline_replay.cache.pool import KVLayout
from leyline_replay.cache.states import StateKind, StatePool, StateTensor

SUPPORTED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
SUPPORTED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_PLAIN_KINDS = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "conv", "mlp", "moe"}
)
"""Kinds of layers that read the tokens in front of a row alone, whatever their positions."""
_TOKEN = 1
_POSITIONS = (0, 1, 17, 977)
_INV_FREQ = "inv_freq"


class UnsupportedModelError(Exception):
    """The pool can't hold a cache of the model's form; it can't be served."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that the engine needs to hold and move a model's keys, and its state."""

    layout: KVLayout
    rotary: ModelRotary
    facts: RotaryFacts | None
    """None if the keys can't be moved."""
    forms: tuple[StateTensor, ...] = ()
    """Forms of what recurrent layers and convolutions keep of a sequence."""
    layers: int | None = None
    """Number of layers, those that cache nothing included."""
    unsupported: str = ""
    """Reason why splicing is off; empty if it is proven."""

    def state_pool(self, slots: int, device: torch.device) -> StatePool | None:
        """Return an empty pool of states; None if the model has none."""
        readers = [form.place for form in self.forms if form.kind is StateKind.RECURRENT]
        first = min([*readers, *self.layout.places])
        return StatePool(self.forms, slots, device, reader=first) if self.forms else None


Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""The two cached tensors of every layer that caches rows, fp32 ``[positions, heads, dim]`` on the
CPU."""


def read_model_facts(model: PreTrainedModel) -> ModelFacts:
    """Probe a loaded causal LM.

    Raises:
        UnsupportedModelError: no rotary key could be located in the model's cache.
    """
    candidates = list(_frequencies(model))
    caches = [_run(model, position) for position in _POSITIONS]
    places, rows = _rows(caches)
    tensor = _turning_tensor(rows, model.dtype, rotary=bool(candidates))
    forms, unsupported = _forms(caches), _refusal(model)
    if forms and not _continues(model):
        raise UnsupportedModelError("a forward of several tokens ignores the state in front of it")
    windows = tuple(_window(caches[0].layers[place]) for place in places)

    def facts(start: int, rotary: ModelRotary, found: RotaryFacts | None) -> ModelFacts:
        shapes = tuple(((a.shape[1], a.shape[2]), (b.shape[1], b.shape[2])) for a, b in rows)
        layout = KVLayout(
            pool_class="mla_latent" if tensor == 1 else "gqa",
            shapes=shapes,
            rotary_tensor=tensor,
            rotary_start=start,
            rotary_dim=rotary.dim,
            dtype=model.dtype,
            places=places,
            windows=windows,
        )
        return ModelFacts(layout, rotary, found, forms, len(caches[0].layers), unsupported)

    if not unsupported:
        unsupported = _moving_state(caches, forms, model.dtype)
    if not unsupported:
        try:
            probed = [ProbedLayer(pair[tensor][None], pair[1 - tensor][None]) for pair in rows]
            positions = torch.tensor(_POSITIONS)
            found = explain(probed, positions, candidates, model.dtype, unturned=True)
        except UnsupportedRotaryError as error:
            unsupported = str(error)
        else:
            return facts(found.start, found.rotary, found.facts)
    width = min(int(pair[tensor].shape[-1]) for pair in rows)
    return facts(0, Rotary.still(width, Pairing.HALF_SPLIT), None)


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
    # Of text alone, all sections have the same position.
    sections = hasattr(config, "vision_config") and any("mrope_section" in each for each in ropes)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_KINDS)
    refusals = (
        (types, f"rotary type {', '.join(map(repr, sorted(types)))}"),
        (sections, "multimodal rotary (M-RoPE)"),
        (getattr(config, "index_topk", None), "sparse attention with an index key"),
        (others, f"layers that are not plain attention: {', '.join(others)}"),
        (model.dtype not in SUPPORTED_DTYPES, f"KV dtype {model.dtype}"),
    )
    return next((reason for applies, reason in refusals if applies), "")


def _run(model: PreTrainedModel, position: int) -> DynamicCache:
    """Return the cache of a token alone at a position.

    One token attends to itself only, so a layer's computation doesn't depend on the position.
    """
    cache = DynamicCache(config=model.config)
    device = model.device
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([[_TOKEN]], device=device),
            position_ids=torch.tensor([[position]], device=device),
            past_key_values=cache,
            use_cache=True,
        )
    return cache


def _continues(model: PreTrainedModel) -> bool:
    """Return True if two forwards give what one does; some recurrent models can only decode."""
    tokens = torch.arange(_TOKEN, _TOKEN + 8, device=model.device)[None]
    one, two = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.inference_mode():
        whole = model(input_ids=tokens, past_key_values=one, use_cache=True).logits[0, -1]
        for part in tokens.chunk(2, dim=1):
            halves = model(input_ids=part, past_key_values=two, use_cache=True).logits[0, -1]
    return not _moves(torch.stack((whole, halves)).to("cpu", torch.float32), model.dtype)


def _rows(caches: Sequence[DynamicCache]) -> tuple[tuple[int, ...], Rows]:
    """Return the numbers of the layers that cache rows, and their rows."""
    layers = caches[0].layers
    places = tuple(
        at for at, layer in enumerate(layers) if getattr(layer, "keys", None) is not None
    )
    if not places:
        raise UnsupportedModelError("no layer caches keys and values")

    def read(place: int, name: str) -> torch.Tensor:
        rows = [getattr(cache.layers[place], name)[:, :, 0] for cache in caches]
        return torch.cat(rows).to("cpu", torch.float32)

    return places, [(read(place, "keys"), read(place, "values")) for place in places]


def _window(layer: Any) -> int:
    """Return the rows in front of a token that a layer reads; 0 for all. Its own is one more."""
    return int(layer.sliding_window) - 1 if layer.is_sliding else 0


def _forms(caches: Sequence[DynamicCache]) -> tuple[StateTensor, ...]:
    """Return the forms of all that a model keeps per sequence."""
    return tuple(
        StateTensor(place, kind, number, tuple(tensor.shape[1:]), tensor.dtype)
        for place, layer in enumerate(caches[0].layers)
        for kind in StateKind
        for number, tensor in getattr(layer, kind, {}).items()
        if tensor is not None
    )


def _moving_state(
    caches: Sequence[DynamicCache], forms: Sequence[StateTensor], dtype: torch.dtype
) -> str:
    """Return why states can't be moved; empty if they don't depend on the position."""
    for form in forms:
        states = [getattr(cache.layers[form.place], form.kind)[form.number] for cache in caches]
        if _moves(torch.cat(states).to("cpu", torch.float32), dtype):
            return "recurrent states that depend on the position"
    return ""


def _moves(probed: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if what is cached ``[positions, ...]`` depends on the position.

    Attention sinks let every number depend on it a little, by rounding.
    """
    off = (probed - probed[:1]).abs().max()
    return bool(off > TOLERANCE.get(dtype, 1e-4) * probed.abs().max())


def _turning_tensor(rows: Rows, dtype: torch.dtype, *, rotary: bool) -> int:
    """Return which of the two cached tensors turns with the position: 0 or 1.

    Args:
        rotary: True if the model has a rotary embedding.
    """
    turning = {
        number for pair in rows for number, tensor in enumerate(pair) if _moves(tensor, dtype)
    }
    if turning and not rotary:
        raise UnsupportedModelError("the model has no rotary embedding, but positions in its rows")
    if len(turning) > 1:
        raise UnsupportedModelError("both of the cached tensors turn with position")
    return turning.pop() if turning else 0
