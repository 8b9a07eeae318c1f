"""Splices of a loaded model's own rows, compared with the rows that it computes at the new place.

A token alone in its sequence has the same key everywhere, but for its turn: its row at one
position, spliced to another, must be the row that the model's forward writes there. The recurrent
state after it is the same everywhere, and a copy of it must be that state.
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
_TOKEN, _OTHER = 7, 11
Case = tuple[PoolTensors, ModelRotary, int]
"""Tensors, their rotations, and an error of the place."""
Wrong = Callable[[PoolTensors, ModelRotary], Case]


def splice_errors(context: Any, tree: Any, facts: Any) -> dict[str, float]:
    """Return the largest error of a right splice, and the least one of each wrong splice.

    Errors are roots of mean squares over a layer's keys, or over a tensor of recurrent states, as
    shares of theirs. Layers with a window count with the others; keys that stand still have the
    row of another token as their wrong splice.
    """
    found = dict[str, float]()
    for windowed in (False, True):
        pool = facts.pool.window if windowed else facts.pool
        if pool is not None:
            for name, error in _pool_errors(context, tree, facts, pool, windowed=windowed).items():
                worst = max if name == "spliced" else min
                found[name] = worst(error, found.get(name, error))
    if facts.pool.states is not None:
        found |= _state_errors(context, tree, facts.pool)
    return found


def _pool_errors(
    context: Any, tree: Any, facts: Any, pool: SplicePool, *, windowed: bool
) -> dict[str, float]:
    def error(move: tuple[int, int], how: Wrong = _right, token: int = _TOKEN) -> float:
        case = how(pool.tensors, pool.rotary)
        return _error(context, tree, move, case, token=token, windowed=windowed)

    errors = {"spliced": max(error(move) for move in MOVES)}
    if not any(bool(each.inv_freq.any()) for each in pool.rotary.distinct):
        return errors | {"another row": min(error(move, token=_OTHER) for move in MOVES)}
    errors |= {name: min(error(move, wrong) for move in MOVES) for name, wrong in WRONG.items()}
    if isinstance(pool.rotary, LayeredRotary):
        # YaRN's slow frequencies show at long distances only.
        modules = rotary_modules(context.tp_worker.model_runner.model)
        lengths = (int(module.cos_sin_cache.shape[0]) for module in modules)
        last = min(facts.capability.max_context, *lengths) - 1
        errors["one for all"] = error((last, 17), _one_for_all)
    return errors


def _state_errors(context: Any, tree: Any, pool: SplicePool) -> dict[str, float]:
    """Return the error of a copied state, and the least one of another token's."""
    states, found = pool.states, dict[str, list[float]](state=[], another_state=[])
    assert states is not None
    for source, dest in MOVES:
        with computed(context, tree, [(_TOKEN, source), (_TOKEN, dest), (_OTHER, dest)]) as cached:
            copied, wanted, target = cached.states.chunk(3)
            for name in ("another_state", "state"):
                apart = (_apart(each[:, target], each[:, wanted]) for each in states.tensors)
                found[name].append(max(apart))
                pool.copy_state(copied, target)
            assert all(torch.equal(each[:, target], each[:, copied]) for each in states.tensors)
    return {"state": max(found["state"]), "another state": min(found["another_state"])}


def _error(
    context: Any,
    tree: Any,
    move: tuple[int, int],
    case: Case,
    *,
    token: int,
    windowed: bool,
) -> float:
    tensors, rotary, shift = case
    allocator = context.params.token_to_kv_pool_allocator
    target = allocator.alloc(int(context.params.page_size))
    place = allocator.get_kvcache().full_to_swa_index_mapping if windowed else None
    try:
        with computed(context, tree, [(token, move[0]), (_TOKEN, move[1])]) as cached:
            slots, to = (at if place is None else place[at] for at in (cached.rows, target[:1]))
            SplicePool(tensors, rotary).splice(slots[:1], to, move[0], move[1] + shift)
            return max(_apart(keys[to], keys[slots[1:]]) for keys in tensors.keys)
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
