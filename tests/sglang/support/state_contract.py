"""The contracts of windows and of kept states, computed by transformers alone, piece by piece.

Rows are those of a model that keeps all of them, turned in float64 by its configuration's own
frequencies; recurrent layers start from the state that the source had, computed again from its
first token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

TAMPERINGS = ("keys not turned", "state of the cut's start", "no state", "convolution elsewhere")
"""Wrong splices, which must be far from what a server answers."""


class StateModel:
    """A model in fp32, and the frequencies of its layers."""

    def __init__(self, folder: Path) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model: Any = loaded.eval().requires_grad_(requires_grad=False)
        self.kinds: list[str] = list(self.model.config.layer_types)

    def fresh(self) -> DynamicCache:
        """An empty cache that keeps all rows; windows are the mask's."""
        cache = DynamicCache(config=self.model.config)
        if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
            return DynamicCache()
        return cache

    def run(self, tokens: Sequence[int], cache: DynamicCache, start: int) -> torch.Tensor:
        """Logits ``[n, vocab]`` of tokens at ``start`` and after."""
        positions = torch.arange(start, start + len(tokens))[None]
        out = self.model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def turned(self, layer: int, keys: torch.Tensor, start: int, dest: int) -> torch.Tensor:
        """Keys ``[1, heads, n, dim]`` of positions from ``start`` on, turned to ``dest``."""
        embedding = getattr(self.model.model, "rotary_emb", None)
        if embedding is None or start == dest:
            return keys
        own = getattr(embedding, f"{self.kinds[layer]}_inv_freq", None)
        inv_freq = embedding.inv_freq if own is None else own
        width = 2 * inv_freq.numel()
        angle = (dest - start) * inv_freq.double()
        cos, sin = (f(angle).repeat(2) for f in (torch.cos, torch.sin))
        band = keys[..., :width].double()
        half = torch.cat((-band[..., width // 2 :], band[..., : width // 2]), -1)
        return torch.cat(((band * cos + half * sin).float(), keys[..., width:]), -1)


@dataclass(frozen=True)
class Kept:
    """Positions ``[start, end)`` of an earlier turn."""

    turn: StateTurn
    start: int
    end: int


Piece = Kept | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StateTurn:
    """A turn by its pieces: kept ones, and tokens that are computed."""

    model: StateModel
    pieces: tuple[Piece, ...]
    tampering: str = ""
    """One of :data:`TAMPERINGS`, done to the last kept piece; empty for the contract."""

    @cached_property
    def cache(self) -> DynamicCache:
        """The cache after all pieces."""
        return self.until(sum(_length(piece) for piece in self.pieces))

    def until(self, end: int) -> DynamicCache:
        """The cache in front of a position."""
        cache, at = self.model.fresh(), 0
        last = max((n for n, p in enumerate(self.pieces) if isinstance(p, Kept)), default=-1)
        for number, piece in enumerate(self.pieces):
            length = min(_length(piece), end - at)
            if length <= 0:
                break
            if isinstance(piece, Kept):
                tampering = self.tampering if number == last else ""
                self._keep(cache, piece, at, length, tampering)
            else:
                self.model.run(piece[:length], cache, at)
            at += length
        return cache

    def _keep(self, cache: DynamicCache, piece: Kept, at: int, length: int, tampering: str) -> None:
        source = piece.turn.until(piece.start + length)
        elsewhere = piece.turn.until(piece.start) if tampering else None
        for number, layer in enumerate(source.layers):
            if getattr(layer, "keys", None) is not None and layer.keys.numel():
                keys = layer.keys[:, :, piece.start : piece.start + length]
                if tampering != TAMPERINGS[0]:
                    keys = self.model.turned(number, keys, piece.start, at)
                values = layer.values[:, :, piece.start : piece.start + length]
                cache.update(keys.clone(), values.clone(), number)
            elif getattr(layer, "conv_states", [None])[0] is not None:
                states = self._states(layer, elsewhere and elsewhere.layers[number], tampering)
                conv, recurrent = states
                cache.update_conv_state(conv.clone(), number)
                if recurrent is not None:
                    cache.update_recurrent_state(recurrent.clone(), number)
                cache.layers[number].has_previous_state[0] = True

    def _states(
        self, layer: Any, elsewhere: Any, tampering: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's inputs of convolutions and its recurrent state, which some layers lack."""
        own, other = (
            (each.conv_states[0], each.recurrent_states[0]) if each is not None else (None, None)
            for each in (layer, elsewhere)
        )
        if tampering == TAMPERINGS[1]:
            return other
        if tampering == TAMPERINGS[2]:
            conv, recurrent = own
            return torch.zeros_like(conv), None if recurrent is None else torch.zeros_like(
                recurrent
            )
        return (other[0], own[1]) if tampering == TAMPERINGS[3] else own

    def scores(self, tail: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities, fp32 ``[len(answer)]``, of an answer after a tail."""
        cache = copy.deepcopy(self.cache)
        start = sum(_length(piece) for piece in self.pieces)
        logits = self.model.run([*tail, *answer[:-1]], cache, start)[len(tail) - 1 :]
        return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def _length(piece: Piece) -> int:
    return piece.end - piece.start if isinstance(piece, Kept) else len(piece)
