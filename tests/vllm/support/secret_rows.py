"""Tokens whose rows lie in an engine's pool: a value of the first layer depends on its token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import torch
from oracle_models import OracleModel
from splice_kit import SplicingEngine

from leyline_engine.rows.paging import by_slot

ORDINARY, SECRETS = range(64, 2000), range(2000, 4096)
"""Tokens that may be anywhere, and those that are drawn only once each."""


def draw_ordinary(rng: Random, length: int) -> tuple[int, ...]:
    """Random tokens, none of them a secret's."""
    return tuple(rng.choices(ORDINARY, k=length))


def first_values(subject: OracleModel, tokens: Sequence[int]) -> torch.Tensor:
    """The first layer's values of tokens: ``[n, heads * dim]``."""
    layer = subject.model.model.layers[0]
    with torch.no_grad():
        embedded = subject.model.model.embed_tokens(torch.tensor(tokens))
        values: torch.Tensor = layer.self_attn.v_proj(layer.input_layernorm(embedded))
    return values


class SecretRows:
    """Finds the rows of chosen tokens in a pool, free blocks included.

    Args:
        subject: the engine's model in transformers.
    """

    def __init__(self, engine: SplicingEngine, subject: OracleModel) -> None:
        self._engine = engine
        self._subject = subject

    def held(self, tokens: Iterable[int]) -> set[int]:
        """The tokens among these that have a row."""
        wanted = sorted(set(tokens))
        if not wanted:
            return set()
        values = first_values(self._subject, wanted)
        tensors = self._engine.rows.pool.tensors
        cache = self._engine.leyline.cache
        every = torch.arange(cache.block, cache.block + cache.capacity)
        rows = by_slot(tensors.values[0], tensors.value_paging)[every].flatten(1)
        nearest = torch.cdist(values, rows).min(dim=1).values / values.norm(dim=1)
        return {token for token, error in zip(wanted, nearest, strict=True) if error < 1e-3}
