"""Splices of a loaded model's own rows, compared with the rows that it computes at the new place.

A token alone in its sequence has the same key everywhere, but for its turn: its row at one
position, spliced to another, must be the row that the model's forward writes there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from leyline_engine.rotary.rotation import (
    LayeredRotary,
    ModelRotary,
    Pairing,
    Rotary,
)
from leyline_engine.rotary.tables import rotary_modules
from leyline_engine.rows.mover import PoolTensors
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.facts.probe import computed

MOVES = ((5, 700), (1500, 17), (977, 976))
"""From and to: both directions, far and near."""
_TOKEN = 7
Case = tuple[PoolTensors, ModelRotary, int]
"""Tensors, their rotations, and an error of the place."""
Wrong = Callable[[PoolTensors, ModelRotary], Case]


def splice_errors(context: Any, tree: Any, facts: Any) -> dict[str, float]:
    """Return the largest error of a right splice, and the least one of each wrong splice.

    Errors are roots of mean squares over a layer's keys, as shares of the keys'.
    """
    right = [_error(context, tree, facts, move, _right) for move in MOVES]
    errors = {"spliced": max(right)}
    for name, wrong in WRONG.items():
        errors[name] = min(_error(context, tree, facts, move, wrong) for move in MOVES)
    if isinstance(facts.rotary, LayeredRotary):
        # YaRN's slow frequencies show at long distances only.
        modules = rotary_modules(context.tp_worker.model_runner.model)
        lengths = (int(module.cos_sin_cache.shape[0]) for module in modules)
        last = min(facts.capability.max_context, *lengths) - 1
        errors["one for all"] = _error(context, tree, facts, (last, 17), _one_for_all)
    return errors


def _error(context: Any, tree: Any, facts: Any, move: tuple[int, int], how: Wrong) -> float:
    tensors, rotary, shift = how(facts.pool.tensors, facts.rotary)
    allocator = context.params.token_to_kv_pool_allocator
    target = allocator.alloc(int(context.params.page_size))
    try:
        with computed(context, tree, [(_TOKEN, move[0]), (_TOKEN, move[1])]) as slots:
            SplicePool(tensors, rotary).splice(slots[:1], target[:1], move[0], move[1] + shift)
            return max(_apart(keys[target[:1]], keys[slots[1:]]) for keys in tensors.keys)
    finally:
        allocator.free(target)


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    off = (found.float() - wanted.float()).square().mean()
    return float((off / wanted.float().square().mean()).sqrt())


def _right(tensors: PoolTensors, rotary: ModelRotary) -> Case:
    return tensors, rotary, 0


def _each(rotary: ModelRotary, change: Callable[[Rotary], Rotary]) -> ModelRotary:
    """Change the rotation of every layer."""
    if isinstance(rotary, LayeredRotary):
        return replace(rotary, distinct=tuple(change(each) for each in rotary.distinct))
    return change(rotary)


def _unturned(tensors: PoolTensors, rotary: ModelRotary) -> Case:
    return tensors, Rotary.still(rotary.dim, rotary.pairing), 0


def _other_pairing(tensors: PoolTensors, rotary: ModelRotary) -> Case:
    (other,) = set(Pairing) - {rotary.pairing}
    return tensors, _each(rotary, lambda each: replace(each, pairing=other)), 0


def _off_by_one(tensors: PoolTensors, rotary: ModelRotary) -> Case:
    return tensors, rotary, 1


def _narrower(tensors: PoolTensors, rotary: ModelRotary) -> Case:
    """Return a band of half the width, with the frequencies of its own width."""
    narrow = _each(rotary, lambda each: replace(each, inv_freq=each.inv_freq[::2].contiguous()))
    return tensors.turning(tensors.rotary_start, narrow.dim), narrow, 0


def _one_for_all(tensors: PoolTensors, rotary: ModelRotary) -> Case:
    """Return the first layer's rotation in all layers: wrong where layers differ."""
    return tensors, rotary.at(0), 0


WRONG: dict[str, Wrong] = {
    "unturned": _unturned,
    "other pairing": _other_pairing,
    "off by one": _off_by_one,
    "narrower band": _narrower,
}
